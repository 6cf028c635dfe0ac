"""Figure 2: panels, summaries over seeds, the comparison at equal loss, and what the result depends on."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fasterqk.errors import InputError
from fasterqk_lab.compare import END, LEVEL, LOSS, measured
from fasterqk_lab.experiments import fig2, find_experiment
from fasterqk_lab.experiments._registry import CellRunner
from fasterqk_lab.experiments._synthetic import RAMP_STEPS, panels
from fasterqk_lab.experiments.fig2 import (
    EQUAL,
    FASTER,
    MAX_STEPS,
    READINGS,
    Fig2,
    Reading,
    compute,
    compute_dependence,
    differences_from_saved,
    save,
    save_dependence,
)

CELLS = Path(__file__).parents[3] / "lab" / "paper" / "cells"


@pytest.fixture(scope="module")
def rebuilt(tmp_path_factory):
    """The published panels and what they depend on, from the published cells."""
    runner = CellRunner(tmp_path_factory.mktemp("out"), files=[str(CELLS / "fig2-published.jsonl.xz")])
    return compute(runner, "published"), compute_dependence(runner)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Panels a and e with four outputs, two seeds, and the folder of their cells."""
    out = tmp_path_factory.mktemp("out")
    return compute(CellRunner(out, workers=0), "four-tokens", seeds=2, names=["a", "e"]), out


def test_the_panels_have_the_paper_multipliers():
    for protocol in ("literal", "scaled-scores", "four-tokens"):
        cells = {panel.name: panel.cell for panel in panels(protocol)}
        assert [cells[name].parameterization for name in "abcd"] == ["FAFO", "FACO", "CAFO", "CACO"]
        assert [cells[name].qk_ratio for name in "abcdefgh"] == [1, 1, 1, 1, 10, 20, 5, 10]
        assert [cells[name].ramp_steps for name in "efgh"] == [0, RAMP_STEPS, 0, RAMP_STEPS]
        assert {cell.lr for cell in cells.values()} == {0.2}
        assert {cell.ov_init for cell in cells.values()} == {cells["a"].qk_init}


def test_the_published_panels_are_the_notebooks_settings():
    cells = {panel.name: panel.for_seed(1) for panel in panels("published")}
    assert [cells[name].qk_ratio for name in "abcdefgh"] == [1, 1, 1, 1, 20, 40, 5, 10]
    caps = [625_000, 625_000, 1_000_000, 500_000, 100_000, 200_000, 200_000, 200_000]
    assert [cells[name].max_steps for name in "abcdefgh"] == caps
    assert [cells[name].language.context for name in "aeg"] == [62, 62, 126]
    assert all(cell.scaled_scores and cell.fresh and cell.language.attend_query for cell in cells.values())
    assert [cells[name].init_seed for name in "abdg"] == [1234, 1234, 1235, 1235]
    assert [cells[name].qk_init.kind for name in "aeg"] == ["linear", "identity", "linear"]


def test_a_faster_qk_attends_more_at_equal_loss(trained):
    data, out = trained
    assert all(record["accuracy"].mean > 0.99 for record in data.records.values())
    assert data.level < 0.003
    assert data.records["e"]["matched"].mean > data.records["a"]["matched"].mean + 0.05
    assert {value.at for value in data.measured.values if value.arm == "e"} >= {END, LOSS}
    assert data.measured.of("a", "reached", END) == {0: 1.0, 1: 1.0}
    assert sum(data.measured.of("a", f"top_row_{n}", END)[0] for n in range(1, 6)) == pytest.approx(100)
    assert save(data, out)["table"]["csv"].endswith("fig2-four-tokens-panels.csv")
    assert (out / "figures" / "fig2-four-tokens.png").exists()


def test_stored_cells_are_not_trained_again(trained, monkeypatch):
    data, out = trained
    monkeypatch.setattr("fasterqk_lab.synthetic._train.train", lambda *_, **__: pytest.fail("trained again"))
    again = compute(CellRunner(out, workers=0), "four-tokens", seeds=2, names=["a", "e"])
    assert again.measured.values == data.measured.values


def made_up(mrta, reached=True, diverged=False):
    nothing = None if diverged else 0.5
    row = [0.0, 0.0, 0.0, 100 * (1 - mrta), 100 * mrta]
    return {
        **dict.fromkeys(("loss", "accuracy", "query_mass", "ac", "acmc", "train_loss"), nothing),
        "mrta": None if diverged else mrta,
        "steps": 10,
        "dtap": None if diverged else [[0.0] * 5] * 4 + [row],
        "null": dict.fromkeys(("mrta", "ac", "acmc"), nothing),
        "reached": reached,
        "diverged": diverged,
        "history": [{"step": 0, "loss": 1.0, "mrta": 0.1}, {"step": 10, "loss": 0.1, "mrta": mrta}],
        "window_losses": [3.3, 2.2],
    }


def figure(*results, name="a", protocol="literal"):
    cells = {(name, seed): result for seed, result in enumerate(results)}
    return Fig2(protocol, panels(protocol, [name]), cells, measured("fig2", cells))


def test_caps_and_divergence_are_marked_and_means_are_of_the_rest(tmp_path):
    data = figure(made_up(0.2), made_up(0.4, reached=False), made_up(0.0, diverged=True))
    record = data.records["a"]
    assert record["mrta"].mean == pytest.approx(0.3)
    assert (record["capped"], record["diverged"]) == ("1", [2])
    assert record["dtap_deviation"][-1][-1] == pytest.approx(np.std([20, 40], ddof=1))
    lost = figure(made_up(0.0, diverged=True), protocol="four-tokens")
    assert lost.records["a"]["mrta"] is None
    save(lost, tmp_path)
    assert "diverged" in (tmp_path / "figures" / "fig2-four-tokens.svg").read_text()


def test_cells_that_hit_the_cap_do_not_decide_the_level():
    stuck = made_up(0.2, reached=False)
    stuck["history"] = [{"loss": 1.0, "mrta": 0.1}, {"loss": 0.9, "mrta": 0.1}]
    assert figure(made_up(0.3), stuck).level == pytest.approx(0.1)
    assert figure(stuck).level == pytest.approx(0.9)


def test_differences_from_the_saved_panels():
    [row] = differences_from_saved(figure(*[made_up(0.2)] * 5, name="g", protocol="published"))
    assert row["top_row"] == pytest.approx([0, 0, -2.3, 80 - 76.8, 20 - 20.8])
    assert (row["panel"], row["most_points"]) == ("g", pytest.approx(80 - 76.8))
    assert row["losses"] == {"100": [3.3, 3.284], "200": [2.2, 2.212]}
    assert row["final_losses"][0] == [2.2, 0.006]


def test_the_published_cells_are_within_one_point_of_the_saved_panels(rebuilt):
    data, _ = rebuilt
    rows = differences_from_saved(data)
    assert [row["panel"] for row in rows] == ["a", "b", "g", "h"]
    assert all(row["most_points"] < 1 for row in rows)
    # Panels with a faster circuit are read where their baseline stands at its end.
    assert data.measured.losses(LEVEL, "e", "mrta") == data.measured.losses(LEVEL, "f", "mrta")
    assert data.measured.baseline_of("g") == "d"


def test_unknown_names_are_quoted():
    with pytest.raises(InputError, match="'z'"):
        panels("literal", ["a", "z"])
    with pytest.raises(InputError, match="'notebook'"):
        panels("notebook")


def test_figure_2_as_published_is_the_default():
    assert find_experiment("fig2").check_options({})["protocol"] == "published"


def test_a_row_of_the_dependence_changes_what_it_says():
    cell = Reading(scaled=True, query_attended=True, four_tokens=True, start=0.1).arm("CAFO", FASTER).cell
    assert (cell.scaled_scores, cell.closed, cell.language.attend_query) == (True, True, True)
    assert (cell.qk_init.scale, cell.ov_init.scale, cell.qk_ratio) == (0.1, 0.1, 10.0)
    # The first row is the protocol `literal`, but for its steps.
    assert READINGS[0].arm("FAFO", EQUAL).cell == replace(
        panels("literal", ["a"])[0].cell, max_steps=MAX_STEPS
    )


def test_both_cells_of_a_pair_are_read_at_one_loss(tmp_path, monkeypatch):
    readings = (Reading(four_tokens=True), Reading(query_attended=True))
    monkeypatch.setattr(fig2, "READINGS", readings)
    monkeypatch.setattr(fig2, "PARAMETERIZATIONS", ("FAFO",))
    (sharper, covert), rows = compute_dependence(CellRunner(tmp_path, workers=0))
    assert sharper.value.mean > 0.05
    assert covert.value.mean < -0.5
    assert rows[1][f"on the query token, {FASTER}"] > 0.9 > rows[1][f"on the query token, {EQUAL}"]
    assert max(sharper.loss, covert.loss) < 0.002
    table = Path(save_dependence([sharper, covert], rows, tmp_path)["table"]["csv"]).read_text()
    assert "as they are,attended,50 tokens,0.001,FAFO" in table


def test_what_the_page_says_of_the_dependence_is_in_the_published_cells(rebuilt):
    """The sentences of docs/synthetic.md, one after the other."""
    _, (effects, _) = rebuilt
    settings_of = {", ".join(reading.columns.values()): reading for reading in READINGS}
    assert len(effects) == len(READINGS) * 4

    def changes(*names, **settings):
        chosen = [
            (effect.second.mean, effect.first.mean)
            for effect in effects
            if effect.score in names
            and all(getattr(settings_of[effect.label], key) == value for key, value in settings.items())
        ]
        assert chosen
        return chosen

    everything = ("FAFO", "FACO", "CAFO", "CACO")
    assert all(
        after > before + 0.05 or after > 0.97
        for before, after in changes(*everything, four_tokens=True, query_attended=False)
    )
    assert all(after > before + 0.05 for before, after in changes("FAFO", "CAFO", scaled=True))
    assert all(after < 0.03 for _, after in changes(*everything, scaled=False, four_tokens=False))
    scaled = {"scaled": True, "four_tokens": False}
    for change in ({"query_attended": True}, {"start": 0.1}):
        assert all(after < before - 0.3 for before, after in changes("FACO", "CACO", **scaled, **change))
    [(before, after)] = changes("CACO", query_attended=False, start=1e-3, **scaled)
    assert before - 0.2 < after < before
