"""Figure 2: panels, summaries over seeds, and the comparison at matched loss."""

import csv
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import fasterqk_lab.experiments._fig2_dependence as dependence
from fasterqk.errors import InputError
from fasterqk_lab.experiments import find_experiment
from fasterqk_lab.experiments._fig2_dependence import (
    EQUAL,
    FASTER,
    MAX_STEPS,
    READINGS,
    Reading,
    compute_dependence,
    write_dependence,
)
from fasterqk_lab.experiments._registry import CellRunner
from fasterqk_lab.experiments._synthetic import (
    OLD_NAMES,
    PROTOCOLS,
    RAMP_STEPS,
    levels_for,
    panels,
    summarize_seeds,
)
from fasterqk_lab.experiments.fig2 import (
    RELEASED_TOP_ROWS,
    Fig2,
    compute,
    differences_from_saved,
    write_fig2,
)

RESULTS = Path(__file__).parents[3] / "docs" / "results"


def read_csv(path):
    with Path(path).open(encoding="utf-8", newline="") as stream:
        return list(csv.DictReader(stream))


def test_the_published_panels_have_the_paper_multipliers():
    for protocol in ("literal", "scaled-scores", "four-tokens"):
        found = {panel.name: panel.cell for panel in panels(protocol)}
        assert [found[name].parameterization for name in "abcd"] == ["FAFO", "FACO", "CAFO", "CACO"]
        assert [found[name].qk_ratio for name in "abcdefgh"] == [1, 1, 1, 1, 10, 20, 5, 10]
        assert [found[name].ramp_steps for name in "efgh"] == [0, RAMP_STEPS, 0, RAMP_STEPS]
        assert {cell.lr for cell in found.values()} == {0.2}
        assert {cell.ov_init for cell in found.values()} == {found["a"].qk_init}


def test_the_released_panels_are_the_notebooks_settings():
    found = {panel.name: panel.for_seed(1) for panel in panels("published")}
    assert [found[name].qk_ratio for name in "abcdefgh"] == [1, 1, 1, 1, 20, 40, 5, 10]
    caps = [625_000, 625_000, 1_000_000, 500_000, 100_000, 200_000, 200_000, 200_000]
    assert [found[name].max_steps for name in "abcdefgh"] == caps
    assert [found[name].language.context for name in "aeg"] == [62, 62, 126]
    assert all(cell.scaled_scores and cell.fresh and cell.language.attend_query for cell in found.values())
    assert [found[name].init_seed for name in "abdg"] == [1234, 1234, 1235, 1235]
    assert [found[name].qk_init.kind for name in "aeg"] == ["linear", "identity", "linear"]


def test_faster_qk_in_both_kinds_of_softmax(tmp_path):
    opened = compute(CellRunner(tmp_path, workers=0), "literal", seeds=1, names=["a", "e"])
    closed = compute(CellRunner(tmp_path, workers=0), "four-tokens", seeds=2, names=["a", "e"])
    assert opened.summaries["e"]["mrta"] < 0.1 < opened.summaries["a"]["mrta"]
    assert closed.summaries["a"]["mrta"] < closed.summaries["e"]["mrta"]
    assert all(summary["accuracy"] > 0.99 for summary in closed.summaries.values())
    lowest = closed.matched[0]
    assert lowest["loss"] < 0.003
    assert lowest["difference"]["e"]["mrta"].mean > 0.05
    files = write_fig2(closed, tmp_path)
    assert (tmp_path / "figures" / "fig2-four-tokens.png").exists()
    assert files["table"]["csv"].endswith("fig2-four-tokens-panels.csv")


def test_stored_cells_are_not_trained_again(tmp_path, monkeypatch):
    first = compute(CellRunner(tmp_path, workers=0), "four-tokens", seeds=1, names=["a"])
    monkeypatch.setattr("fasterqk_lab.synthetic._train.train", lambda *_, **__: pytest.fail("trained again"))
    again = compute(CellRunner(tmp_path, workers=0), "four-tokens", seeds=1, names=["a"])
    assert again.results == first.results


def fake(mrta, reached=True, diverged=False):
    nothing = None if diverged else 0.5
    table = None if diverged else [[0.0, 0.0], [100 * (1 - mrta), 100 * mrta]]
    return {
        **dict.fromkeys(("loss", "accuracy", "query_mass", "ac", "acmc", "train_loss"), nothing),
        "mrta": None if diverged else mrta,
        "steps": 10,
        "dtap": table,
        "dtap_edges": [0.0, 0.5, 1.0],
        "null": dict.fromkeys(("mrta", "ac", "acmc"), nothing),
        "reached": reached,
        "diverged": diverged,
        "history": [{"step": 0, "loss": 1.0, "mrta": 0.1}, {"step": 10, "loss": 0.1, "mrta": mrta}],
    }


def test_summaries_mark_caps_and_divergence_and_take_means_of_the_rest():
    summary = summarize_seeds({0: fake(0.2), 1: fake(0.4, reached=False), 2: fake(0.0, diverged=True)})
    assert summary["mrta"] == pytest.approx(0.3)
    assert summary["capped"] == [1]
    assert summary["diverged"]
    assert summary["diverged_seeds"] == [2]
    assert summary["dtap_deviation"][1][1] == pytest.approx(np.std([20, 40], ddof=1))
    lost = summarize_seeds({0: fake(0.0, diverged=True)})
    assert lost["mrta"] is None
    assert lost["dtap"] is None


def test_cells_that_hit_the_cap_do_not_decide_the_level():
    stuck = fake(0.2, reached=False)
    stuck["history"] = [{"loss": 1.0, "mrta": 0.1}, {"loss": 0.9, "mrta": 0.1}]
    assert levels_for({("a", 0): fake(0.3), ("b", 0): stuck}, 1) == [pytest.approx(0.1)]
    assert levels_for({("b", 0): stuck}, 1) == [pytest.approx(0.9)]


def test_differences_from_the_saved_panels():
    summary = {"dtap": [[0] * 5] * 4 + [list(RELEASED_TOP_ROWS["g"])], "seeds": [0, 1]}
    results = {("g", 0): {"window_losses": [3.3, 2.2]}, ("g", 1): {"window_losses": [3.0, 2.0]}}
    found = differences_from_saved(Fig2("published", [], results, {"g": summary}, []))
    assert found["g"]["top_row"] == [0] * 5
    assert found["g"]["losses"] == {"100": [3.3, 3.284], "200": [2.2, 2.212]}
    assert found["g"]["final_losses"] == [[2.2, 0.006], [2.0, 0.006]]


def test_a_diverged_panel_is_drawn_as_such(tmp_path):
    data = compute(CellRunner(tmp_path, workers=0), "four-tokens", seeds=1, names=["a"])
    lost = {**data.summaries["a"], **summarize_seeds({0: fake(0.0, diverged=True)})}
    write_fig2(replace(data, summaries={"a": lost}), tmp_path)
    assert (tmp_path / "figures" / "fig2-four-tokens.svg").read_text().count("diverged")


def test_unknown_names_are_quoted():
    with pytest.raises(InputError, match="'z'"):
        panels("literal", ["a", "z"])
    with pytest.raises(InputError, match="'notebook'"):
        panels("notebook")
    assert PROTOCOLS[0] == "published"


def test_figure_2_as_published_is_the_default_and_old_names_are_understood():
    experiment = find_experiment("fig2")
    assert experiment.check_options({})["protocol"] == "published"
    assert set(OLD_NAMES.values()) == set(PROTOCOLS)
    for old, new in OLD_NAMES.items():
        assert experiment.check_options({"protocol": old})["protocol"] == new
        assert panels(old) == panels(new)


def test_the_published_panels_of_the_documents_are_within_one_point_of_those_saved():
    rows = read_csv(RESULTS / "fig2-published-panels.csv")
    found = {row["panel"]: row["top_row"].split() for row in rows}
    for name, saved in RELEASED_TOP_ROWS.items():
        assert [float(value) for value in found[name]] == pytest.approx(saved, abs=1)


def test_a_row_of_the_dependence_changes_what_it_says():
    cell = Reading(scaled=True, query_attended=True, four_tokens=True, start=0.1).cell("CAFO", 10.0)
    assert (cell.scaled_scores, cell.closed, cell.language.attend_query) == (True, True, True)
    assert (cell.qk_init.scale, cell.ov_init.scale, cell.qk_ratio) == (0.1, 0.1, 10.0)
    # The first row is the protocol `literal`, but for its steps.
    assert READINGS[0].cell("FAFO", 1.0) == replace(panels("literal", ["a"])[0].cell, max_steps=MAX_STEPS)


def test_both_cells_of_a_pair_are_read_at_one_loss(tmp_path, monkeypatch):
    readings = (Reading(four_tokens=True), Reading(query_attended=True))
    monkeypatch.setattr(dependence, "READINGS", readings)
    monkeypatch.setattr(dependence, "PARAMETERIZATIONS", ("FAFO",))
    runner = CellRunner(tmp_path, workers=0)
    sharper, covert = compute_dependence(runner)
    assert sharper.difference.mean > 0.05
    assert covert.difference.mean < -0.5
    assert covert.query_mass[FASTER] > 0.9 > covert.query_mass[EQUAL]
    assert max(sharper.loss, covert.loss) < 0.002
    files = write_dependence([sharper, covert], tmp_path)
    row = read_csv(files["table"]["csv"])[1]
    assert (row["query"], row["softmax"], row["difference_n"]) == ("attended", "50 tokens", "1")
    assert float(row["difference"]) == pytest.approx(covert.difference.mean)
    of_seeds = {
        (row["arm"], row["at"]): float(row["value"])
        for row in read_csv(runner.write_per_seed()[0])
        if row["score"] == "mrta"
    }
    for pair in (sharper, covert):
        for arm in (EQUAL, FASTER):
            name = ", ".join([*pair.reading.columns.values(), "FAFO", arm])
            found = of_seeds[name, f"training loss {pair.loss:.6g}"]
            assert found == pytest.approx(pair.attention[arm].mean, rel=1e-5)


def test_what_the_text_beside_the_figure_says_is_in_its_numbers():
    """The sentences of `TEXT`, one after the other."""
    rows = read_csv(RESULTS / "fig2-dependence.csv")
    assert len(rows) == len(READINGS) * 4

    def changes(names, **settings):
        chosen = [
            row
            for row in rows
            if row["parameterization"] in names and all(row[key] == value for key, value in settings.items())
        ]
        assert chosen
        return [(float(row[EQUAL]), float(row[FASTER])) for row in chosen]

    everything, factorized, collapsed = ("FAFO", "FACO", "CAFO", "CACO"), ("FAFO", "CAFO"), ("FACO", "CACO")
    assert all(
        after > before + 0.05 or after > 0.97
        for before, after in changes(everything, softmax="4 tokens", query="not")
    )
    assert all(after > before + 0.05 for before, after in changes(factorized, scores="÷ √d"))
    unscaled = changes(everything, scores="as they are", softmax="50 tokens")
    assert all(after < 0.03 for _, after in unscaled)
    scaled = {"scores": "÷ √d", "softmax": "50 tokens"}
    assert all(after < before - 0.3 for before, after in changes(collapsed, query="attended", **scaled))
    assert all(after < before - 0.3 for before, after in changes(collapsed, start="0.1", **scaled))
    usual = changes(("CACO",), query="not", start="0.001", **scaled)
    assert all(before - 0.2 < after < before for before, after in usual)
    panel = {row["panel"]: row for row in read_csv(RESULTS / "fig2-scaled-scores-panels.csv")}
    assert float(panel["g"]["matched"]) > float(panel["d"]["matched"])
