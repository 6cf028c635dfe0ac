"""Control experiments that are arms and scores alone: what their arms change, and from cells to results."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from fasterqk.files import config_values
from fasterqk_lab.cli.reproduce import show_summary
from fasterqk_lab.compare import Value, measured, read_values
from fasterqk_lab.experiments import find_experiment
from fasterqk_lab.experiments._comparison import Comparison, Outcome
from fasterqk_lab.experiments.ablation_hatexplain import (
    OPTIMIZERS,
    PROTOCOLS,
    TOY_LEVEL,
    finetune_hatexplain,
    future_arms,
    toy_arms,
    toy_comparison,
)
from fasterqk_lab.experiments.faithfulness import DATA, faithfulness
from fasterqk_lab.experiments.product_law import hatexplain_arms as product_law_arms
from fasterqk_lab.experiments.table_generated import carried_kvqa, steps_until_learnt
from fasterqk_lab.experiments.table_hatexplain import depth_hatexplain


def changed(arms):
    """What each arm changes in the first."""
    first, *others = (dict(config_values(arm)) for arm in arms.values())
    return [{name for name in other if other[name] != first[name]} for other in others]


def test_arms_change_what_their_names_say():
    assert changed(carried_kvqa().arms) == changed(finetune_hatexplain().arms) == [{"qk_ratio"}] * 2
    for layers in (2, 4):
        assert changed(depth_hatexplain(layers).arms) == [{"qk_ratio"}]
        options = depth_hatexplain(layers).arms["QK ×3"].optimisation
        assert 5e-4 <= options.lr * options.qk_ratio <= 1e-3
    for data in DATA:
        assert changed(faithfulness(data).arms) == [{"qk_ratio"}]
    ways = [{"qk_ratio"}, {"circuit_imbalance"}, {"ov_decay"}, {"qk_decay"}, {"gradient_norm"}]
    for optimizer in OPTIMIZERS:
        assert changed(future_arms(optimizer).arms) == ways
    for protocol in PROTOCOLS:
        for optimizer in ("SGD", "Adam"):
            arms = list(toy_arms(protocol, optimizer).values())
            assert len({replace(arm, seed=1) for arm in arms}) == len(arms) == 8
            assert [arm.qk_init.scale * arm.ov_init.scale for arm in arms] == pytest.approx([1e-6] * 8)


def test_what_was_named_before_a_run():
    assert future_arms("SGD", seeds=5).planned == 3
    assert future_arms("AdamW").planned is None
    assert toy_comparison("four-tokens", "Adam").level == TOY_LEVEL
    assert toy_comparison("four-tokens", "Adam").decides and not toy_comparison("literal", "Adam").decides


def history(arm, config, seed):
    """Every score grows along training, sooner with a higher ratio; a random ranking scores less."""
    scores = ["mrta", "words_mrta", "carried_mrta", "residual_mrta", "test_accuracy", "validation_accuracy"]
    scores += ["aopc_comprehensiveness", "aopc_sufficiency", "special_share"]
    ratio = config.optimisation.qk_ratio ** (seed % 7 / 100)
    return [
        {"step": 100 * n, "loss": math.exp(-n)}
        | dict.fromkeys(scores, 0.1 * n * ratio)
        | {"null_mrta": 0.1, "null_aopc_comprehensiveness": 0.05 * n}
        for n in range(1, 11)
    ]


@pytest.mark.parametrize(
    ("name", "comparisons", "options"),
    [
        ("carried-kvqa", [carried_kvqa(2)], {}),
        ("faithfulness", [faithfulness(seeds=2)], {}),
        ("depth-hatexplain", [depth_hatexplain(2, 2)], {"layers": [2]}),
        ("finetune-hatexplain", [finetune_hatexplain(seeds=2)], {}),
        ("future-work", [future_arms(x, 2) for x in OPTIMIZERS], {"parts": ["hatexplain"]}),
        ("product-law", [product_law_arms(2)], {"parts": ["hatexplain"]}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_from_cells_to_results(name, comparisons, options, rebuilt, capsys):
    summary = rebuilt(name, comparisons, history, seeds=2, **options)
    values = list(read_values(Path(summary["results"])))
    for comparison in comparisons:
        arms = [arm for arm in comparison.arms if arm != comparison.baseline_of(arm)]
        for score in comparison.decides:
            read = {
                (value.arm, value.seed)
                for value in values
                if (value.experiment, value.score) == (comparison.key, score)
                and value.at == comparison.read_at.get(score, "level")
            }
            assert {(arm, seed) for arm in arms for seed in comparison.seeds} <= read
    show_summary(find_experiment(name).shown(summary))
    assert "at equal loss" in capsys.readouterr().out


def outcome_of(histories, more=(), **options):
    """The outcome of made-up cells ``{arm: histories}``, one per seed."""
    cells = {
        (arm, seed): {
            "history": records,
            "loss": records[-1]["loss"],
            "mrta": records[-1]["mrta"],
            "steps": 9,
        }
        for arm, seeds in histories.items()
        for seed, records in enumerate(seeds)
    }
    comparison = Comparison("made-up", "Made up", "", dict.fromkeys(histories), (0, 1), **options)
    levels = {"level": comparison.level, "losses": comparison.losses}
    return Outcome(comparison, cells, measured("made-up", cells, more=more, **levels))


def falling(end, last=5):
    return [{"loss": math.exp(-n), "mrta": end * n} for n in range(last)]


ARMS = {"equal": [falling(0.1), falling(0.1)], "QK": [falling(0.2), falling(0.22)]}


def test_a_level_that_was_named_before_decides_and_further_losses_are_read():
    outcome = outcome_of(ARMS, level=math.exp(-2), losses=(math.exp(-1),))
    [effect] = outcome.effects
    assert (effect.at, effect.loss) == ("level", pytest.approx(math.exp(-2), rel=1e-5))
    assert effect.value.mean == pytest.approx(2 * 0.11)
    assert outcome.shared_moment() == (effect.at, effect.loss)
    assert outcome.means("mrta") == pytest.approx({"equal": 0.2, "QK": 0.42})
    further = outcome.measured.of("QK", "mrta", "loss", math.exp(-1))
    assert further == pytest.approx({0: 0.2, 1: 0.22})


def test_a_loss_that_some_cells_never_reach_does_not_decide():
    late = ARMS | {"QK": [falling(0.2), falling(0.22, last=4)]}
    [effect] = outcome_of(late, losses=(math.exp(-4),)).effects
    assert effect.lowest and effect.missing == ("QK, seed 1",)
    assert (effect.value.n, effect.loss) == (2, pytest.approx(math.exp(-3), rel=1e-5))


def test_a_score_is_read_and_claimed_as_its_comparison_says():
    options = {"decides": ("mrta", "steps"), "scores": {"mrta": "MRTA", "steps": "steps"}}
    options |= {"claimed": {"steps": "less"}, "read_at": {"steps": "learnt"}}
    steps = {("equal", 0): 100.0, ("equal", 1): 110.0, ("QK", 0): 50.0, ("QK", 1): 60.5}
    values = [Value("made-up", *cell, "learnt", None, "steps", value) for cell, value in steps.items()]
    outcome = outcome_of(ARMS, values, **options)
    mass, fewer = outcome.effects
    assert (mass.score, mass.claimed, fewer.score, fewer.claimed) == ("mrta", "more", "steps", "less")
    assert fewer.value.mean == pytest.approx(-49.75)
    assert (fewer.standing, fewer.stands) == ("supports", "less")
    assert fewer.p == pytest.approx(2 * min(effect.p_value for effect in outcome.effects))
    [row] = [row for row in outcome.rows if (row["score"], row["arm"]) == ("steps", "QK")]
    assert (row["at"], row["value"]["mean"], row["stands"]) == ("learnt", 55.25, "less")


def test_steps_until_learnt():
    records = [{"step": 10 * n, "validation_accuracy": value} for n, value in enumerate((0, 0.9, 1.0, 0.9))]
    assert steps_until_learnt(records) == pytest.approx(15)
    assert steps_until_learnt(records[:2]) is None
    assert steps_until_learnt(records[2:]) == 20
