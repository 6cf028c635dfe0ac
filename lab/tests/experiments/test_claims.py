"""The claims of the paper: the rule of the verdicts, and the document that is computed from the results."""

import re
from math import nan
from pathlib import Path

import pytest

from fasterqk.attention import Interval
from fasterqk.errors import InputError
from fasterqk.theory import Identity
from fasterqk_lab.experiments import claims, reproduce
from fasterqk_lab.experiments._evidence import COMPARABLE, Effect, Results, measured, verdict

DOCS = Path(__file__).parents[3] / "docs"
NAMES = (
    "propositions_1_2",
    "balancedness",
    "omega",
    "collapsed_twin",
    "theorem_1",
    "growth_rates",
    "saturation",
    "time",
)


def effect(mean, half, n=5, claimed="more"):
    return Effect("x", Interval(mean, half, n), claimed)


@pytest.mark.parametrize(
    ("one", "standing"),
    [
        (effect(0.3, 0.1), "supports"),
        (effect(0.3, 0.4), "open"),
        (effect(-0.3, 0.1), "against"),
        (effect(-0.3, 0.1, claimed="less"), "supports"),
        (effect(0.3, nan, 1), "points"),
        (effect(-0.3, nan, 1), "open"),
        (effect(0.01, COMPARABLE / 4, claimed="equal"), "supports"),
        (effect(0.01, COMPARABLE, claimed="equal"), "open"),
        (effect(3 * COMPARABLE, COMPARABLE, claimed="equal"), "against"),
        (effect(-COMPARABLE / 2, COMPARABLE / 4, claimed="not less"), "supports"),
        (effect(-3 * COMPARABLE, COMPARABLE, claimed="not less"), "against"),
        (effect(nan, nan), "open"),
    ],
)
def test_an_effect_stands_to_its_claim_as_its_interval_does(one, standing):
    assert one.standing == standing
    assert one.text().endswith(f": {standing}")
    if one.value.n > 1 and one.value.mean == one.value.mean:
        assert (one.p_value < 0.05) == (standing == "supports")


def test_one_seed_never_makes_a_claim_hold():
    assert verdict([effect(0.3, nan, 1)]) == "holds in part"
    assert verdict([effect(0.3, nan, 1), effect(-0.3, 0.1)]) == "does not hold"
    assert verdict([effect(0.3, 0.1), effect(0.3, nan, 1)]) == "holds in part"
    assert verdict([effect(0.3, 0.4)]) == "does not hold"


def test_some_of_many_effects_count_after_correction_for_their_number():
    barely, open_, clear = effect(0.3, 0.29), effect(0.3, 0.4), effect(0.3, 0.1)
    assert barely.standing == "supports"
    assert verdict([barely, barely]) == "holds"  # all must support: nothing to correct
    assert verdict([barely, open_]) == "does not hold"
    assert verdict([clear, open_]) == "holds in part"
    assert "supports alone" in measured("c", "", [barely, open_], "x", "").evidence


def test_a_claim_turns_when_its_identity_breaks_or_its_numbers_do(tmp_path):
    whole = [Identity(name, "a = b", 0.0, 1e-8) for name in NAMES]
    broken = [Identity(name, "a = b", 1.0, 1e-8) for name in NAMES]
    verdicts = [
        [
            claim.verdict
            for claim in claims.all_claims(Results(DOCS / "results"), found)
            if "Theorem 1" in claim.where
        ]
        for found in (whole, broken)
    ]
    assert verdicts == [["holds"], ["does not hold"]]
    for table in (DOCS / "results").glob("*.csv"):
        (tmp_path / table.name).write_bytes(table.read_bytes())
    path = tmp_path / "table-hatexplain-paper-per-seed.csv"
    other = {"baseline": "faster_qk", "faster_qk": "baseline"}
    lines = path.read_text().splitlines()
    turned = [
        re.sub(r"^\w+", lambda arm: other[arm[0]], line) if ",mrta," in line else line for line in lines
    ]
    assert turned != lines
    path.write_text("\n".join(turned))
    names = "Sharper attention is not explained"
    before, after = (
        next(one.verdict for one in claims.all_claims(Results(folder), whole) if one.claim.startswith(names))
        for folder in (DOCS / "results", tmp_path)
    )
    assert (before, after) == ("holds", "holds in part")


@pytest.mark.slow
def test_the_document_is_what_the_command_prints(tmp_path, capsys):
    summary = reproduce("claims", tmp_path)
    claims.EXPERIMENT.show(summary)
    assert capsys.readouterr().out == (DOCS / "claims.md").read_text(encoding="utf-8"), (
        "run: fasterqk-lab reproduce claims > docs/claims.md"
    )
    assert (tmp_path / "claims" / "paper.json").exists()


def test_every_kind_of_claim_has_its_row():
    text = (DOCS / "claims.md").read_text(encoding="utf-8")
    where = " ".join(re.findall(r"^\| \d+ \| .*? \| (.*?) \| \*\*", text, re.MULTILINE))
    for place in (
        *(f"Figure {n}" for n in (2, 3, 4)),
        "Figures 5 to 7",
        *(f"Table {n}" for n in range(1, 7)),
        "Theorem 1",
        "Propositions 1 and 2",
        "Lemmas 1 and 4",
        "Lemmas 2 and 5",
        "Lemma 3",
        "Abstract",
        "Introduction",
        "Conclusion",
        "Limitations",
        "Impact Statement",
    ):
        assert place in where, place
    for claim in (
        "stabilises",
        "Adaptive optimization alone",
        "in all settings",
        "persist in deeper models",
        "Future work",
    ):
        assert claim in text
    anchors = re.findall(r"\]\(([\w.]+)#([\w-]+)\)", text)
    for page, anchor in anchors:
        headings = re.findall(r"^#+ (.*)$", (DOCS / page).read_text(encoding="utf-8"), re.MULTILINE)
        slugs = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
        assert anchor in slugs, f"{page}#{anchor}"


def test_a_folder_without_results_is_one_line(tmp_path):
    with pytest.raises(InputError, match="is no folder; name docs/results of a checkout"):
        reproduce("claims", tmp_path, results=str(tmp_path / "nothing"))
    with pytest.raises(InputError, match="is missing; name the folder docs/results"):
        reproduce("claims", tmp_path, results=str(tmp_path))
