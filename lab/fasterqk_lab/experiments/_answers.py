"""What the published results say to the open questions: the effects that decide, and exploratory ones.

The questions themselves, with their texts and the page, are in `questions`.
"""

from collections.abc import Callable, Mapping, Sequence
from math import nan
from typing import Any

from fasterqk.attention import Interval
from fasterqk_lab.experiments._arms import BASELINE, FASTER
from fasterqk_lab.experiments._evidence import PLANNED, Claimed, Effect, Results, read_interval, stands_alone
from fasterqk_lab.experiments._per_seed import BEST, END
from fasterqk_lab.experiments._what_holds import LINES
from fasterqk_lab.experiments.ablation_hatexplain import EQUAL, qk_arm
from fasterqk_lab.experiments.faithfulness import ABOVE, ARM_NAMES
from fasterqk_lab.experiments.future_work import RATIO, SGD_RATIO, TOY_RATIO, favour_qk
from fasterqk_lab.experiments.product_law import R_HATEXPLAIN
from fasterqk_lab.experiments.ratio_or_rate import (
    MAP,
    RATES,
    RATIOS,
    SLOWED,
    SLOWED_ARM,
    arm_name,
    per_decade_at,
)
from fasterqk_lab.experiments.table_kvqa import STEPS
from fasterqk_lab.experiments.temperature_hatexplain import AT as EQUAL_ENTROPY
from fasterqk_lab.experiments.temperature_hatexplain import FAITHFUL, READINGS

# --- Reading them ---


def paired(results: Results, name: str, *arms: tuple[Any, ...], **options: Any) -> list[Effect]:
    """Effects ``(label, arms, claimed)`` of the table ``name``; none where it is not published."""
    if not results.has(name):
        return []
    return [results.paired(label, name, pair, claimed, **options) for label, pair, claimed in arms]


def decided(
    results: Results,
    name: str,
    claimed: Claimed,
    label: str = "",
    where: Callable[[Mapping[str, str]], bool] = lambda row: True,
) -> list[Effect]:
    """The differences to the first arm of the scores that decide, from a table with a column `kind`.

    ``where`` chooses among its rows.
    """
    if not (results.folder / f"{name}.csv").is_file():
        return []
    rows = [row for row in results.rows(name) if row.get("kind") == "decides" and where(row)]
    found = []
    for score in dict.fromkeys(row["score"] for row in rows):
        own = [row for row in rows if row["score"] == score]
        lowest = min((float(row["loss"]) for row in own if row["loss"]), default=None)
        # The first arm is what the others are compared with.
        for row in own[1:]:
            if row["arm"] == own[0]["arm"] or (row["loss"] and float(row["loss"]) != lowest):
                continue
            at = [f"at training loss {lowest:.3g}"] if row["loss"] else []
            at += [f"cells missing: {row['missing']}"] if row.get("missing") not in (None, "", "0") else []
            null = float(row["null"]) if row.get("null") else None
            text = ", ".join(part for part in (label, row["score"], row["arm"]) if part)
            value = read_interval(row, "difference") if row["difference"] else Interval(nan, nan, 0)
            found.append(Effect(text, value, claimed, ", ".join(at), () if null is None else (null,)))
    return found


def _stand(effects: Sequence[Effect]) -> dict[str, list[str]]:
    """Labels of the effects by how they stand after correction for their number.

    Where all support the hypothesis none needs a correction.
    """
    every = all(effect.standing == "supports" for effect in effects)
    found: dict[str, list[str]] = {"supports": [], "against": [], "open": []}
    for effect, alone in zip(effects, stands_alone(effects), strict=True):
        weak = (alone and not every) or effect.standing == "points"
        found["open" if weak else effect.standing].append(effect.label)
    return found


def says(yes: str, no: str, part: str, unclear: str) -> Callable[[Sequence[Effect]], str]:
    """A sentence by how the effects stand: all support the hypothesis, none does, some do, all are open."""

    def becomes(effects: Sequence[Effect]) -> str:
        stand = _stand(effects)
        if not stand["open"] and not stand["against"]:
            return yes
        if stand["supports"]:
            return f"{part} Supported: {'; '.join(stand['supports'])}. " + "".join(
                f"{title}: {'; '.join(stand[key])}. "
                for key, title in (("against", "Against"), ("open", "Open"))
                if stand[key]
            )
        return no if stand["against"] else unclear

    return becomes


# --- What came out, question by question ---

_SLOW, _FAST = RATES[0], RATES[-1]
MAP_BASE, MAP_FASTER = arm_name(_SLOW, 1), arm_name(_SLOW, 30)
MAP_NAME = "ratio-or-rate-paper"


def ratio_or_rate(results: Results) -> list[Effect]:
    slopes = [
        paired(results, MAP_NAME, (label, MAP, claimed), score=score)
        for label, score, claimed in (
            ("growth per decade of the ratio", "per_decade_of_ratio", "more"),
            ("growth per decade of the base rate", "per_decade_of_base_rate", "equal"),
        )
    ]
    return [effect for found in slopes for effect in found] + paired(
        results,
        MAP_NAME,
        ("QK rate 1.5e-3: ratio 30 minus ratio 1", (MAP_FASTER, arm_name(_FAST, 1)), "more"),
        (f"QK rate 5e-5: ratio {SLOWED} (all else slowed) minus ratio 1", (SLOWED_ARM, MAP_BASE), "more"),
        ("ratio 1: base rate 1.5e-3 minus 5e-5", (arm_name(_FAST, 1), MAP_BASE), "equal"),
        ("ratio 30: QK fast minus all else slow", (MAP_FASTER, SLOWED_ARM), "equal"),
    )


def by_ratio(results: Results) -> list[Effect]:
    """How the map grows with the base rate at each ratio, and rates of single roles."""
    slopes = [
        paired(
            results,
            MAP_NAME,
            (f"growth per decade of the base rate at ratio {ratio:g}", MAP, "equal"),
            score=per_decade_at(ratio),
        )
        for ratio in RATIOS
    ]
    roles = ("Q", "K", "Q and K", "1/V", "1/O", "1/V and 1/O")
    return [effect for found in slopes for effect in found] + paired(
        results,
        "product-law-hatexplain-paper",
        *((f"R = {R_HATEXPLAIN:g} by {arm}, minus equal rates", (arm, EQUAL), "more") for arm in roles),
    )


def ratio_or_rate_becomes(effects: Sequence[Effect]) -> str:
    ratio, rate = (effect.standing for effect in effects[:2])
    if ratio == "supports" and rate == "supports":
        return "The ratio decides: at one ratio the base rate makes no difference."
    if ratio == "supports" and rate == "against":
        way = "more" if effects[1].value.mean > 0 else "less"
        return (
            "Not the ratio alone. Attention on relevant tokens grows with the ratio, but at one ratio a "
            f"higher base rate gives {way} of it: the ratio is one of two knobs."
        )
    if ratio == "supports":
        return (
            "Attention grows with the ratio; whether the base rate matters at one ratio stays open. Ratio by "
            "ratio it was looked at afterwards: the exploratory lines."
        )
    return "The growth with the ratio is not beyond the noise of these seeds."


NULLS = {"sharp": "one random token", "permuted": "its own rows permuted"}
TUNED = {
    "hatexplain": "HateXplain",
    "sva-whole": "SVA, whole sentences",
    "sva-prefix": "SVA up to the verb",
    "squad": "SQuAD, small",
}


def tuned(results: Results) -> list[Effect]:
    found = []
    for name, label in TUNED.items():
        pair = (f"{label}, MRTA", (FASTER, BASELINE), "more")
        found += paired(results, f"tuned-{name}-paper", pair, at=BEST)
    return found


def tuned_every_seed(results: Results) -> list[Effect]:
    pair = (FASTER, BASELINE)
    label = "SQuAD, small, every seed"
    return [
        effect
        for score, title, claimed, at in (("mrta", "MRTA", "more", BEST), ("test_f1", "F1", "not less", END))
        for effect in paired(
            results,
            "tuned-squad-paper",
            (f"{label}, {title}", pair, claimed),
            score=score,
            at=at,
            every_seed=True,
        )
    ]


def above_nulls(results: Results, arm: str = MAP_FASTER) -> list[Effect]:
    """AC and ACMC on one-layer HateXplain minus both nulls."""
    if not results.has(MAP_NAME):
        return []
    title = "faster QK" if arm == MAP_FASTER else "equal rates"
    return [
        results.above_null(
            f"HateXplain, {score.upper()}, %, {title}, minus {of}",
            MAP_NAME,
            arm,
            score,
            null,
            "more",
            digits=1,
        )
        for score in ("ac", "acmc")
        for null, of in NULLS.items()
    ]


def above_nulls_elsewhere(results: Results) -> list[Effect]:
    """AC of the faster arm minus both nulls, in the comparisons of the picture; of MiniLM over all tokens."""
    return [
        results.above_null(
            f"{line.label.replace('among words', 'all tokens')}, AC, %, minus {of}",
            line.table,
            line.arms[0],
            "ac",
            null,
            "more",
            digits=1,
        )
        for line in LINES
        if results.has(line.table) and any(score == "sharp_ac" for _, score in results.per_seed(line.table))
        for null, of in NULLS.items()
    ]


def temperature(results: Results) -> list[Effect]:
    name, faster = "temperature-hatexplain-paper", READINGS["faster_qk"]
    found = paired(
        results,
        name,
        ("MRTA, minus the baseline sharpened as read", (faster, READINGS["as_read"]), "more"),
        at=EQUAL_ENTROPY,
    )
    return found + paired(
        results,
        name,
        (
            "comprehensiveness above random, minus the baseline sharpened in the model",
            (faster, READINGS["in_the_model"]),
            "more",
        ),
        score=FAITHFUL,
        at=EQUAL_ENTROPY,
    )


def temperature_accuracy(results: Results) -> list[Effect]:
    pair = (READINGS["faster_qk"], READINGS["in_the_model"])
    arms = ("test accuracy, minus the baseline sharpened in the model", pair, "more")
    return paired(results, "temperature-hatexplain-paper", arms, score="test_accuracy", at=EQUAL_ENTROPY)


def depth_above_permuted(results: Results) -> list[Effect]:
    """Rollout falls on the first words, and so does its uniform null: against the rolled-out row permuted."""
    return [
        results.above_null(
            f"{depth} layers, rollout, no residual, {qk_arm(3)}, minus its own rows permuted",
            name,
            qk_arm(3),
            "mrta",
            "permuted",
            "more",
        )
        for depth in (2, 4)
        if results.has(name := f"depth-hatexplain-{depth}-paper")
    ]


def faithful_at_higher_losses(results: Results) -> list[Effect]:
    """At the two higher losses at which the arms are compared."""
    pair = (ARM_NAMES[FASTER], ARM_NAMES[BASELINE])
    return [
        effect
        for name, label in (("hatexplain", "HateXplain"), ("sva-whole", "SVA, whole sentences"))
        for level in (1, 2)
        for effect in paired(
            results,
            f"faithfulness-{name}-paper",
            (f"{label}, comprehensiveness (AOPC) − random, {pair[0]}", pair, "more"),
            score=f"aopc_comprehensiveness{ABOVE}",
            level=level,
        )
    ]


def carried(results: Results) -> list[Effect]:
    name = "carried-kvqa"
    return decided(results, name, "more", where=lambda row: row["score"] != STEPS) + decided(
        results, name, "less", where=lambda row: row["score"] == STEPS
    )


def carried_becomes(effects: Sequence[Effect]) -> str:
    stand = _stand(effects)

    def says(begins: str, supports: str, against: str, unclear: str) -> str:
        own = {way: [label for label in stand[way] if label.startswith(begins)] for way in stand}
        told = [
            f"{text} ({', '.join(label.rpartition(', ')[2] for label in own[way])})"
            for way, text in (("supports", supports), ("against", against))
            if own[way]
        ]
        return "; ".join(told) or unclear

    pair = says("rollout, QK", "rises", "falls", "does not change beyond the noise")
    carried = says("rollout, carried, QK", "rises", "falls", "does not change beyond the noise")
    steps = says(f"{STEPS}, QK", "is learnt sooner", "is learnt later", "is not shown to be learnt sooner")
    return (
        f"Attention on the pairs alone {pair}; with the position that a pair was carried to, it {carried}. "
        f"The task {steps}."
    )


# Tables of the future work with what they are about, and the arms that favour QK.
FUTURE_WORK = {
    "future-work-toy-sgd-four-tokens": "toy language, SGD",
    "future-work-toy-adam-four-tokens": "toy language, Adam",
    "future-work-hatexplain-adamw": "HateXplain, AdamW",
    "future-work-hatexplain-sgd": "HateXplain, SGD",
}
FAVOUR_QK = favour_qk()
FASTER_QK = (qk_arm(TOY_RATIO), qk_arm(RATIO), qk_arm(SGD_RATIO))


def future_work_effects(
    results: Results, arms: Sequence[str] = FAVOUR_QK, claimed: Claimed = "more"
) -> list[Effect]:
    """What ``arms`` of the future work do to attention, on all data and with all optimizers."""
    found = []
    for name, label in FUTURE_WORK.items():
        if f"{name}-paper" in PLANNED:  # the planned seeds are in no table
            known = results.per_seed(f"{name}-paper") if results.has(f"{name}-paper") else {}
            own = [arm for arm in dict.fromkeys(arms) if any(arm in each for each in known.values())]
            pairs = [(f"{label}, MRTA, {arm}", (arm, EQUAL), claimed) for arm in own]
            found += paired(results, f"{name}-paper", *pairs)
        else:
            found += decided(results, name, claimed, label, lambda row: row["arm"] in (EQUAL, *arms))
    return found


def future_work_explored(results: Results) -> list[Effect]:
    """A faster QK circuit beside them, and every seed where some were added."""
    every = decided(
        results,
        "future-work-hatexplain-sgd",
        "more",
        "HateXplain, SGD, every seed",
        lambda row: row["arm"] in (EQUAL, *FAVOUR_QK, *FASTER_QK),
    )
    return future_work_effects(results, FASTER_QK) + every
