"""Claims of the paper that need no data: the toy language, fixed attention, propositions and the theorem."""

from fasterqk.theory import Identity, Setting, solve
from fasterqk_lab.experiments._evidence import Effect, Results, above, measured, read
from fasterqk_lab.page import Claim

# --- Section 4 and figure 2 ---


def toy_language_claims(results: Results) -> list[Claim]:
    names = {"a": "FAFO", "b": "FACO", "c": "CAFO", "d": "CACO"}
    faster = {"e": "a", "i": "b", "j": "c", "g": "d"}
    link = "synthetic.md#figure-2-as-published"
    ends = ", ".join(
        f"{name} {results.panel('published', panel)[0].mean:.3f}" for panel, name in names.items()
    )
    uniform = float(results.panel("published", "a")[1]["null"])
    capped = [row["panel"] for row in results.rows("fig2-published-panels") if row["capped"]]

    def every(protocol: str) -> list[Effect]:
        return [
            results.panels(f"{protocol}, {names[base]}", protocol, panel, base, "more")
            for panel, base in faster.items()
        ]

    return [
        measured(
            "The four parameterizations attend differently although all predict confidently and correctly",
            "Abstract; Section 4; Figure 2 a-d",
            [
                results.panels("published, FACO minus FAFO", "published", "b", "a", "more"),
                results.panels("four-tokens, FACO minus FAFO", "four-tokens", "b", "a", "more"),
                results.panels("literal, FACO minus FAFO", "literal", "b", "a", "more"),
            ],
            "fig2",
            link,
            f"Published settings: attention on class tokens {ends} (uniform {uniform:.3f}), accuracy 1 in "
            f"all.",
        ),
        measured(
            "Collapsed output-value circuits (FACO, CACO) concentrate attention on class tokens",
            "Section 4; Figure 2 b, d",
            [
                results.panels(f"{protocol}, {names[one]} minus FAFO", protocol, one, "a", "more")
                for protocol in ("published", "scaled-scores", "four-tokens", "literal")
                for one in "bd"
            ],
            "fig2",
            link,
            "Published, CACO has 10% of sequences above .6; read literally it attends to common tokens.",
        ),
        measured(
            "FAFO predicts correctly with weak attention on class tokens (less than one half)",
            "Section 4; Figure 2 a",
            [
                Effect(
                    f"{protocol}, minus 0.5",
                    above(results.panel(protocol, "a")[0], 0.5),
                    "less",
                    "at the end",
                )
                for protocol in ("published", "scaled-scores", "four-tokens", "literal")
            ],
            "fig2-init",
            "synthetic.md#what-figure-2-owes-to-its-init",
            "How weak depends on the size of the start: from .60 to .91 between 1e-6 and .01 (four-tokens).",
        ),
        measured(
            "A faster query-key circuit shifts attention to class tokens across all parameterizations",
            "Section 4; Figure 2 e-h",
            [
                results.panels("published, FAFO 20x", "published", "e", "a", "more"),
                results.panels("published, CACO 5x", "published", "g", "d", "more"),
                *every("scaled-scores"),
                *every("four-tokens"),
                *every("literal"),
            ],
            "fig2",
            "synthetic.md#what-the-result-depends-on",
            "FACO and CAFO were run by nobody; here at 10x. Read literally, attention turns to common "
            "tokens: the query names the class, a covert channel; three seeds of FACO at 10x do not reach "
            "the loss there.",
        ),
        measured(
            "With faster query-key learning FAFO and CACO resemble FACO",
            "Section 4; Figure 2 e-h",
            [
                results.panels("published, FAFO 20x minus FACO", "published", "e", "b", "equal"),
                results.panels("published, CACO 5x minus FACO", "published", "g", "b", "equal"),
                results.panels("four-tokens, FAFO 10x minus FACO", "four-tokens", "e", "b", "equal"),
                results.panels("four-tokens, CACO 5x minus FACO", "four-tokens", "g", "b", "equal"),
            ],
            "fig2",
            link,
            "Published, 21% of sequences of CACO 5x are in the last bin, of FACO 94%.",
        ),
        measured(
            "This happens at fixed and at gradually increasing query-key rates",
            "Section 4; Figure 2 f, h",
            [
                results.panels("published, FAFO 1-40x", "published", "f", "a", "more"),
                results.panels("published, CACO 1-10x", "published", "h", "d", "more"),
                results.panels("four-tokens, FAFO 1-20x", "four-tokens", "f", "a", "more"),
                results.panels("four-tokens, CACO 1-10x", "four-tokens", "h", "d", "more"),
                results.panels("literal, FAFO 1-20x", "literal", "f", "a", "more"),
                results.panels("literal, CACO 1-10x", "literal", "h", "d", "more"),
            ],
            "fig2",
            link,
        ),
        read(
            "All models of Figure 2 are trained under identical settings until the loss is at most 0.001, "
            "over 5 seeds",
            "Section 4; caption of Figure 2",
            "does not hold",
            f"In the notebooks panels {' and '.join(capped)} stop at a cap of steps before their rule is "
            f"met; f, g and "
            "h have no rule (g and h end at .006 to .008); a and b have one seed, d three; starts, lengths "
            "and numbers "
            "of steps differ between panels; the captions of e and f say 10x and 1-20x, the notebooks 20x "
            "and 1-40x.",
            "fig2",
            link,
        ),
    ]


# --- Section 5 and figure 3 ---


def fixed_attention_claims(results: Results) -> list[Claim]:
    curves = {
        (row["circuit"], row["bias"] == "True", float(row["alpha"])): row
        for row in results.rows("synthetic-fig3")
    }

    def faded(circuit: str, alpha: float, bias: bool = True) -> str:
        return curves[circuit, bias, alpha]["below_0.2_from"] or "never"

    slow = ", ".join(faded("collapsed", alpha) for alpha in (0.2, 0.4, 0.6, 0.8))
    quick = ", ".join(faded("factorized", alpha) for alpha in (0.2, 0.4, 0.6, 0.8))
    final = float(curves["factorized", True, 0.2]["final_loss"])
    lowest = float(curves["factorized", False, 0.2]["lowest_incentive"])
    fafo = results.panel("published", "a")[0].mean
    starts = [
        float(row["attention"])
        for row in results.rows("fig2-init-four-tokens")
        if (row["parameterization"], row["qk_ratio"]) == ("FAFO", "1.0") and float(row["init_scale"]) < 0.1
    ]
    longer = all(faded("collapsed", alpha) == "never" for alpha in (0.2, 0.4, 0.6))
    link = "synthetic.md#figure-3"
    return [
        Claim(
            "Factorized: the loss comes near zero already at an attention of 0.2",
            "Section 5; Figure 3a",
            "holds in part" if final < 0.01 else "does not hold",
            f"Final loss {final:.4f} after 500 epochs (one seed, as published; at epoch 100 it is .08).",
            experiment="fig3",
            link=link,
        ),
        read(
            "Factorized: the incentive to attend more is positive for up to 100 epochs, then fades quickly "
            "from 0.4 on",
            "Section 5; Figure 3c",
            "holds in part",
            f"The incentive falls below .2 at epochs {quick} (attention .2, .4, .6, .8): at .4 it does fade "
            f"by epoch 100, "
            f"at .2 it lasts three times as long. Without biases, as in the paper's model, it first turns "
            f"negative "
            f"({lowest:.2f} at .2). One seed.",
            experiment="fig3",
            link=link,
        ),
        Claim(
            "As a consequence attention stabilises at values such as 0.4 (factorized)",
            "Section 5",
            "holds in part" if abs(fafo - 0.4) < 0.05 and max(starts) > 0.5 else "does not hold",
            f"FAFO ends at {fafo:.3f} in the published settings, where uniform attention is .349; in the "
            f"theory's "
            f"setting it ends anywhere from {min(starts):.2f} to {max(starts):.2f}, depending on the start: "
            f"no fixed value.",
            experiment="fig2-init",
            link="synthetic.md#what-figure-2-owes-to-its-init",
        ),
        Claim(
            "Collapsed: the loss falls more slowly and the incentive stays high for longer",
            "Section 5; Figure 3b, d",
            "holds in part" if longer else "does not hold",
            f"The incentive falls below .2 at epochs {slow} of 500 (factorized: {quick}); the same without "
            f"biases. One "
            "seed; the curves are means over thousands of sequences.",
            experiment="fig3",
            link=link,
        ),
    ]


# --- Section 6: propositions, lemmas, the theorem, figure 4 ---


def _identity(claim: str, where: str, checked: dict[str, Identity], name: str, note: str = "") -> Claim:
    one = checked[name]
    evidence = (
        f"{one.says}: "
        + (f"agrees to {one.tolerance:g}" if one.tolerance else "no violation")
        + " (`fasterqk theory check`)."
        + (f" {note}" if note else "")
    )
    return Claim(
        claim,
        where,
        "holds" if one.ok else "does not hold",
        evidence,
        experiment="fig4",
        link="theory.md#evidence",
    )


def theory_claims(checked: dict[str, Identity]) -> list[Claim]:
    slips = "Signs and a transposition in the appendix are slips that do not change it."
    low, equal, high = (
        float(solve(Setting(M=5, b=50, m=5, n=50), ratio, loss=1e-4).alpha) for ratio in (0.01, 1.0, 100.0)
    )
    return [
        _identity(
            "The chain rule links factorized and collapsed gradients",
            "Propositions 1 and 2",
            checked,
            "propositions_1_2",
            slips,
        ),
        _identity(
            "Balanced factors stay balanced under gradient flow", "Lemmas 1 and 4", checked, "balancedness"
        ),
        _identity(
            "A factorized circuit follows the collapsed flow preconditioned by Ω, homogeneous of degree one",
            "Lemmas 2 and 5",
            checked,
            "omega",
        ),
        _identity(
            "A factorized circuit resembles a collapsed one whose learning rate grows",
            "Section 6, after Lemma 2",
            checked,
            "collapsed_twin",
            "On the theorem's directions this is exact, with a rate of twice the spectral norm.",
        ),
        _identity(
            "Both circuits move along fixed directions, with two scalars that obey the stated equations",
            "Theorem 1",
            checked,
            "theorem_1",
            "Class tokens must also be orthonormal within a class, and the query must not be attended.",
        ),
        _identity(
            "Before saturation the output-value scale grows like log t, the query-key scale like r log² t",
            "Lemma 3",
            checked,
            "growth_rates",
            "The bounds are loose.",
        ),
        Claim(
            "The query-key scalar grows on the order of log² t",
            "Introduction",
            "holds in part" if checked["growth_rates"].ok and checked["saturation"].ok else "does not hold",
            "Only before saturation, as Lemma 3 says. Afterwards it grows like 2 log of the output-value "
            "scale, a "
            "logarithm of a logarithm of time (closed form, `fasterqk theory check`).",
            experiment="fig4",
            link="theory.md#the-growth-lemma",
        ),
        Claim(
            "The loss goes to zero for every ratio r",
            "Section 6; Figure 4a",
            "holds" if checked["time"].ok else "does not hold",
            "The closed form gives a finite time for every loss; the published curves stop at 1e-4. In the "
            "paper's "
            "normalised time small ratios look fast; in time itself they are the slowest.",
            experiment="fig4",
            link="theory.md#time",
        ),
        Claim(
            "At equal loss attention grows with r: close to one for r = 100, close to uniform for r = 0.01",
            "Section 6; Figure 4b-d",
            "holds" if high > 0.95 and low < 1.2 * 5 / 55 else "holds in part",
            f"Exactly, at loss 1e-4: {low:.3f} at r = .01, {equal:.3f} at 1, {high:.3f} at 100; uniform "
            f"attention is "
            f"{5 / 55:.3f}, so r = .01 is {low / (5 / 55):.1f} times uniform. The caption's M = 5 and the "
            f"notebook's M = 20 "
            "differ; both agree with the integration to all printed digits.",
            experiment="fig4",
            link="theory.md#matched-loss",
        ),
    ]
