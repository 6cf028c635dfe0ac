"""Claims and questions are data: every selector finds its effect, and verdicts follow the rule."""

import tomllib
from pathlib import Path

import pytest

from fasterqk.errors import InputError
from fasterqk_lab.compare import END, LEVEL, VERDICTS, Value, write_values
from fasterqk_lab.experiments import EXPERIMENTS
from fasterqk_lab.paper import FOLDER, Published, read_claims, read_lines, read_questions

NAME = "table-demo-paper"
PLANNED = {"tuned-squad-paper": 2, "future-work-hatexplain-sgd-paper": 3}


def values(baseline: float, faster: float, at: str = END, spread: float = 0.01) -> list[Value]:
    """Three seeds of both arms around these means."""
    return [
        Value(NAME, arm, seed, at, None, "mrta", mean + spread * (seed - 1) * (seed + arm.count("_")))
        for arm, mean in (("baseline", baseline), ("faster_qk", faster))
        for seed in range(3)
    ]


def published(folder: Path, rows: list[Value]) -> Published:
    write_values(folder / "results" / "table-demo.csv", rows)
    return Published(folder)


def claims_file(folder: Path, text: str) -> Path:
    path = folder / "claims.toml"
    path.write_text(text, encoding="utf-8")
    return path


CLAIM = """
[[claim]]
text = "More attention"
where = "Table 1"
group = "real data"
says = "{says}"
effects = [{{ label = "demo", experiment = "table-demo-paper", at = "end" }}]
"""


@pytest.mark.parametrize(
    ("faster", "says", "verdict"),
    [
        (0.5, "more", "confirmed"),
        (0.5, "less", "contradicted"),
        (0.5, "equal", "contradicted"),
        (0.5, "not less", "confirmed"),
    ],
)
def test_a_verdict_follows_from_the_values_and_the_direction(tmp_path, faster, says, verdict):
    results = published(tmp_path, values(0.2, faster))
    [claim] = read_claims(results, claims_file(tmp_path, CLAIM.format(says=says)))
    assert claim.verdict == verdict and claim.computed
    assert claim.effects[0].value.n == 3


def test_a_selector_that_finds_nothing_is_an_error_that_names_it(tmp_path):
    results = published(tmp_path, values(0.2, 0.5))
    text = CLAIM.format(says="more").replace("table-demo-paper", "table-other-paper")
    with pytest.raises(InputError, match="no results of 'table-other-paper'"):
        read_claims(results, claims_file(tmp_path, text))


def test_a_verdict_that_was_read_must_be_one_of_the_six(tmp_path):
    results = published(tmp_path, values(0.2, 0.5))
    text = '[[claim]]\ntext = "t"\nwhere = "w"\ngroup = "g"\nverdict = "holds"\n'
    with pytest.raises(InputError, match="'holds' is not one of confirmed"):
        read_claims(results, claims_file(tmp_path, text))


def test_without_results_one_line_says_what_to_name(tmp_path):
    with pytest.raises(InputError, match="name the folder lab/paper of a checkout"):
        Published(tmp_path)


@pytest.fixture(scope="module")
def results():
    return Published()


def test_every_claim_of_the_paper_has_a_verdict_and_a_command_that_exists(results):
    claims = read_claims(results)
    assert {claim.verdict for claim in claims} <= set(VERDICTS)
    assert {claim.command for claim in claims} - {""} <= set(EXPERIMENTS)
    assert len({claim.text for claim in claims}) == len(claims)
    for claim in claims:
        assert claim.effects or not claim.computed


def test_every_question_says_what_is_left_of_it(results):
    for question in read_questions(results):
        assert question.becomes, f"{question.title}: no sentence for {question.verdict!r}"
        assert question.run.split()[0] in EXPERIMENTS


def test_lines_of_the_picture_are_effects_at_equal_loss(results):
    for line in read_lines(results):
        assert line.effect.at in (LEVEL, "loss") and line.effect.loss is not None
        assert line.command.split()[0] in EXPERIMENTS


def test_weights_in_random_order_score_as_uniform_ones_in_one_layer_and_otherwise_in_rollout(results):
    effects = {
        line.effect.label: line.effect for line in read_lines(results) if line.effect.permuted is not None
    }
    assert len(effects) > 10
    for label, effect in effects.items():
        assert (abs(effect.permuted - effect.null) > effect.margin) == ("layers" in label), label


def test_seeds_that_were_added_after_looking_decide_nothing():
    for file in ("claims.toml", "questions.toml"):
        document = tomllib.loads((FOLDER / file).read_text(encoding="utf-8"))
        entries = [e for part in document.values() for entry in part for e in entry.get("effects", ())]
        entries += document.get("line", [])
        for entry in entries:
            planned = {"tuned-squad-paper": 2, "future-work-hatexplain-sgd-paper": 3}.get(
                entry.get("experiment")
            )
            assert planned is None or entry.get("seeds") == planned, entry
