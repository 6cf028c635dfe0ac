"""`fasterqk-lab reproduce`: help and errors of each experiment, its tables, cells exported and read back."""

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from fasterqk_lab import reproduce
from fasterqk_lab.cli.main import main
from fasterqk_lab.cli.reproduce import experiment_parser, show_comparison, show_summary
from fasterqk_lab.compare import read_values
from fasterqk_lab.experiments import (
    EXPERIMENTS,
    fig4,
    find_experiment,
    table_generated,
    table_main,
)
from fasterqk_lab.experiments import all as everything
from fasterqk_lab.experiments._comparison import two_arms
from fasterqk_lab.experiments._registry import read_cells
from fasterqk_lab.experiments.all import Part
from fasterqk_lab.runs import sweep
from fasterqk_lab.training import TrainConfig

TWO_LAYERS = {"width": 8, "heads": 2, "head_width": 4, "mlp_width": 8, "context": 48, "layers": 2}
FEW = {"train_limit": 96, "train_subset": 16, "along_subset": 8, "test_subset": 10, "epochs": 1}


@pytest.fixture
def little(tmp_path):
    """A file with two words to tell apart."""
    path = tmp_path / "little.jsonl"
    lines = [
        {"id": str(i), "tokens": ["it", "is", "x" if i % 2 else "y"], "relevance": [0, 0, 1], "label": i % 2}
        for i in range(60)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


@pytest.fixture
def small(monkeypatch, little):
    """The arms of table-agreement on the little task, with models of a second."""

    def config(task, **fields):
        return TrainConfig("jsonl", file=little, rationale_k=(50,), width=8, head_width=4, **fields)

    monkeypatch.setattr(table_generated, "TrainConfig", config)


@pytest.fixture
def small_answers(monkeypatch):
    """The arms of table-squad and table-kvqa with models of a second on generated questions."""

    def config(task, **fields):
        kept = {key: fields[key] for key in ("evaluate_at_fall",) if key in fields}
        return TrainConfig("kvqa", batch_size=32, answer_tokens=5, **TWO_LAYERS, **FEW, **kept)

    monkeypatch.setattr(table_main, "TrainConfig", config)
    monkeypatch.setattr(table_generated, "TrainConfig", config)


@pytest.fixture
def comparison(little):
    base = TrainConfig("jsonl", file=little, epochs=1, rationale_k=(5,), width=8, head_width=4)
    printed = {"paper": {arm: {"test_accuracy": 0.5} for arm in ("baseline", "faster_qk")}}
    return two_arms("table-little", "Little", base, 9, (0,), printed)


def run(capsys, *words):
    code = main(["reproduce", *words])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_shows_help_with_examples(name, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["reproduce", name, "--help"])
    assert stop.value.code == 0
    assert "examples:\n  fasterqk-lab " in capsys.readouterr().out


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_a_wrong_option_of_an_experiment_ends_in_one_line(name, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["reproduce", name, "--no-such-option"])
    printed = capsys.readouterr()
    assert stop.value.code == 2
    assert printed.out == ""
    assert len(printed.err.splitlines()) == 1


def test_an_unknown_experiment_is_one_line_with_the_choices(capsys):
    code, out, err = run(capsys, "fig5")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "unknown experiment 'fig5'; did you mean 'fig4' or 'fig3' or 'fig2'?" in err


def test_a_file_as_results_folder_is_refused_before_the_work(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(fig4, "compute", lambda M: pytest.fail("the work began"))
    taken = tmp_path / "taken"
    taken.write_text("mine")
    assert main(["reproduce", "fig4", "--out", str(taken)]) == 2
    assert (
        capsys.readouterr().err == f"fasterqk-lab reproduce: --out {str(taken)!r} is a file; name a folder\n"
    )


@pytest.mark.usefixtures("small", "in_process")
def test_table_agreement_prints_both_arms(capsys, tmp_path):
    words = ["reproduce", "table-agreement", "--seeds", "1", "--epochs", "1"]
    words += ["--out", str(tmp_path / "out")]
    assert main([*words, "--json"]) == 0
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert captured.err == ""
    assert set(document["arms"]) == {"baseline", "faster_qk"}
    names = {row["name"] for row in document["rows"] if row["at"] == "end"}
    assert {"train_accuracy", "validation_accuracy", "test_accuracy", "ac", "acmc", "mrta"} <= names
    assert {"sufficiency_50", "comprehensiveness_50", "auprc", "permuted_mrta"} <= names
    assert [effect["score"] for effect in document["effects"]] == ["mrta"]
    assert all("dtap" in arm for arm in document["arms"].values())
    show_comparison(document)
    text = capsys.readouterr().out
    assert "at the end" in text
    assert "faster QK" in text
    # The same function stands under both.
    assert reproduce("table-agreement", tmp_path / "out", seeds=1, epochs=1) == document


@pytest.mark.slow
@pytest.mark.usefixtures("small")
def test_tables_are_rebuilt_from_exported_cells_without_training(capsys, tmp_path, little):
    words = ["table-agreement", "--seeds", "2", "--epochs", "1", "--workers", "1"]
    file = tmp_path / "cells.jsonl.xz"
    code, out, _ = run(capsys, *words, "--out", str(tmp_path / "out"), "--export", str(file), "--json")
    assert (code, json.loads(out)["exported"]) == (0, str(file))
    # The options are kept with the cells, for whoever rebuilds the tables.
    options = [line["value"] for line in read_cells(file) if line.get("fact") == "options"]
    assert options == [{"seeds": 2, "epochs": 1}]
    Path(little).unlink()  # neither data nor a store is needed
    again = tmp_path / "again"
    code, out, err = run(capsys, *words, "--out", str(again), "--cells", str(file))
    assert (code, err) == (0, "")
    assert f"rebuilt from {file} without training" in out
    assert not (again / "runs").exists()
    assert not (again / "examples").exists()
    tables = sorted(path.name for path in (tmp_path / "out" / "tables").iterdir())
    assert tables == sorted(path.name for path in (again / "tables").iterdir())
    for table in (name for name in tables if name.endswith(".json")):
        before, after = (
            json.loads((folder / "tables" / table).read_text()) for folder in (tmp_path / "out", again)
        )
        assert_equal(before, after)
    # Without options it takes those of the file; others are refused.
    code, out, _ = run(capsys, "table-agreement", "--cells", str(file), "--out", str(again), "--json")
    assert (code, json.loads(out)["seeds"]) == (0, [0, 1])
    code, _, err = run(capsys, "table-agreement", "--seeds", "3", "--cells", str(file), "--out", str(again))
    assert code == 2
    assert "has no cell of arm 'baseline' with seed 2 and these settings" in err


def assert_equal(before, after):
    """Equal to the digits that are kept; the half width of two seeds is 12.7 standard errors."""
    if isinstance(before, dict):
        assert before.keys() == after.keys()
        for key in before:
            assert_equal(before[key], after[key])
    elif isinstance(before, list):
        assert len(before) == len(after)
        for left, right in zip(before, after, strict=True):
            assert_equal(left, right)
    elif isinstance(before, float):
        assert after == pytest.approx(before, rel=2e-5, abs=2e-5)
    else:
        assert before == after


def test_missing_data_is_one_line_before_any_work(capsys, tmp_path):
    out = tmp_path / "out"
    expected = {
        "table-hatexplain": "dataset.json",
        "table-sva": "agr_50_mostcommon_10K.tsv",
        "table-sva --protocol released": "agr_50_mostcommon_10K.tsv",
        "table-main": "agr_50_mostcommon_10K.tsv",
    }
    for words, file in expected.items():
        code, _, error = run(capsys, *words.split(), "--data-dir", str(tmp_path), "--out", str(out))
        assert code == 2
        assert file in error
        assert error.count("\n") == 1
    assert not out.exists()


@pytest.mark.usefixtures("in_process")
def test_table_main_joins_its_parts_and_trains_nothing_twice(monkeypatch, capsys, tmp_path, comparison):
    parts = dict.fromkeys(("One", "Two"), comparison)
    monkeypatch.setattr(table_main, "comparisons", lambda *_: parts)
    words = ["reproduce", "table-main", "--workers", "1", "--out", str(tmp_path / "out")]
    assert main([*words, "--json"]) == 0
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert captured.err == ""
    assert {row["data set"] for row in document["rows"]} == {"One", "Two"}
    assert len(list((tmp_path / "out" / "runs").iterdir())) == 2  # one cell per arm, for both parts
    show_summary(find_experiment("table-main").shown(document))
    text = capsys.readouterr().out
    assert "paper, faster QK" in text
    assert "table-main-paper.png" in text


@pytest.mark.usefixtures("in_process")
def test_squad_joins_when_asked_in_a_size_that_has_the_protocol(monkeypatch, capsys, tmp_path, comparison):
    monkeypatch.setattr(table_main, "choose_arms", lambda *_: (comparison, None))
    monkeypatch.setattr(table_main, "table_hatexplain", lambda *_: comparison)
    asked = []

    def squad(size, seeds, epochs):
        asked.append((size, seeds, epochs))
        return {"paper": replace(comparison, printed={})}

    monkeypatch.setattr(table_main, "table_squad", squad)
    words = ["reproduce", "table-main", "--workers", "1", "--out", str(tmp_path / "out"), "--json"]
    assert main([*words, "--squad", "small", "--squad-seeds", "2"]) == 0
    document = json.loads(capsys.readouterr().out)
    datasets = [row["data set"] for row in document["rows"]]
    masked = ["SVA, tokens masked", "HateXplain, tokens masked"]
    assert list(dict.fromkeys(datasets)) == ["SVA", "HateXplain", *masked, "SQuAD, small"]
    removed = {row["score"] for row in document["rows"] if row["data set"] in masked}
    assert removed == {"sufficiency, top 5%", "comprehensiveness, top 5%"}
    rows = [row for row in document["rows"] if row["data set"] == "SQuAD, small"]
    assert {row["paper, faster QK"] for row in rows if "paper, faster QK" in row} >= {42.95, 0.1}
    assert asked == [("small", 2, None)]
    assert main([*words, "--squad", "small", "--protocol", "released"]) == 2
    assert "--squad small has no protocol 'released'" in capsys.readouterr().err


def test_a_form_the_protocol_does_not_have_is_one_line(capsys, tmp_path):
    words = ["reproduce", "table-sva", "--protocol", "released", "--form", "prefix", "--out", str(tmp_path)]
    assert main(words) == 2
    assert "protocol 'released' has no form 'prefix'" in capsys.readouterr().err


def test_a_summary_of_any_form_is_shown(capsys):
    chosen = {"lr": 1e-3, "validation_accuracy": {"0.001": 0.9123, "0.01": None}}
    rows = [{"arm": "plain", "loss": 0.25, "history": [1, 2]}]
    files = {"table": {"json": "a.json", "csv": "a.csv"}, "forest": {"png": "a.png", "svg": "a.svg"}}
    show_summary({"by_rate": rows, "chosen_rate": chosen, "form": None, "files": files})
    text = capsys.readouterr().out
    assert "by rate:" in text and "plain  0.25" in text and "history" not in text
    assert "lr: 0.001" in text and "validation accuracy: 0.001 0.9123, 0.01 –" in text
    assert "figure: a.png" in text and "a.json" not in text


@pytest.mark.usefixtures("small_answers", "in_process")
def test_arms_run_apart_are_joined_from_the_store(capsys, tmp_path):
    words = ["table-squad", "--size", "tiny", "--workers", "1", "--out", str(tmp_path), "--json"]
    code, out, err = run(capsys, *words, "--arms", "faster_qk")
    alone = json.loads(out)
    assert (code, err) == (0, "")
    assert list(alone["tables"]["table-squad-tiny-paper"]["arms"]) == ["faster_qk"]
    assert alone["tables"]["table-squad-tiny-paper"]["effects"] == []
    together = json.loads(run(capsys, *words)[1])["tables"]["table-squad-tiny-paper"]
    assert len(list((tmp_path / "runs").iterdir())) == 2
    ends = [
        {
            row["name"]: row["value"]
            for row in table["rows"]
            if (row["at"], row["arm"]) == ("end", "faster_qk")
        }
        for table in (alone["tables"]["table-squad-tiny-paper"], together)
    ]
    assert ends[0] == ends[1]
    assert {"test_f1", "test_accuracy", "mrta", "ac", "sufficiency_5", "layer_2_mrta"} <= set(ends[0])
    show_summary(find_experiment("table-squad").shown({"tables": {"paper": together}}))
    text = capsys.readouterr().out
    assert "test F1" in text
    assert "layer average: MRTA" in text
    assert (tmp_path / "figures" / "table-squad-tiny-paper-by-layer.png").exists()


@pytest.mark.usefixtures("small_answers", "in_process")
def test_table_kvqa_says_when_the_task_was_learnt(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(table_generated, "steps_until_learnt", lambda history: float(history[-1]["step"]))
    code, out, _ = run(capsys, "table-kvqa", "--workers", "1", "--out", str(tmp_path), "--json")
    summary = json.loads(out)
    steps = [row for row in summary["rows"] if row["name"] == "steps until learnt"]
    assert code == 0
    assert [(row["arm"], row["at"]) for row in steps] == [
        (arm, "exact match 0.95") for arm in ("baseline", "faster_qk")
    ]
    values = read_values(tmp_path / "results" / "table-kvqa.csv")
    assert steps[0]["value"]["mean"] in [value.value for value in values if value.at == "exact match 0.95"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--size", "huge"], "unknown size 'huge'; choose from paper, paper-short, small, tiny"),
        (["--arms", "slow"], "size 'small' has no arm 'slow'; choose from same, faster_qk"),
        (["--seeds", "0"], "'0' is not a whole number from 1 to"),
    ],
)
def test_bad_input_is_one_line(capsys, tmp_path, words, message):
    try:
        code = main(["reproduce", "table-squad", *words, "--out", str(tmp_path)])
    except SystemExit as stopped:
        code = stopped.code
    error = capsys.readouterr().err
    assert code == 2
    assert message in error
    assert error.count("\n") == 1


SMALL_PARTS = (
    Part("fig2", {"protocol": "four-tokens", "panels": ["a"], "seeds": 1}),
    Part("fig3", {"epochs": 1}),
    Part("fig4"),
)


@pytest.mark.slow
def test_all_runs_its_parts_and_ends_in_a_page(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(everything, "QUICK", SMALL_PARTS)
    swept, drawn = [], []

    def in_process(configs, functions, out, **options):
        swept.append(functions)
        finish = options.pop("observe")

        def observe(event):
            if event.kind == "started":
                drawn.append(any(tmp_path.glob("figures/fig2*")))
            finish(event)

        options["observe"] = observe
        return sweep(configs, functions, out, **options | {"workers": 0})

    monkeypatch.setattr("fasterqk_lab.experiments._registry.sweep", in_process)
    assert main(["reproduce", "all", "--out", str(tmp_path), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    # Each is finished with its own last cell: figure 3, whose cells come later, sees that figure 2 is there.
    assert [part["experiment"] for part in result["parts"]] == ["fig4", "fig2", "fig3"]
    assert drawn == [False, True, True]
    # The cells of all parts in one sweep: one of figure 2, two of figure 3.
    assert [len(functions) for functions in swept] == [3]
    page = Path(result["report"]).read_text(encoding="utf-8")
    assert all(f"Figure {number}" in page for number in (2, 3, 4))
    # Again: nothing is left to do.
    assert main(["reproduce", "all", "--parts", "fig3", "--out", str(tmp_path)]) == 0
    assert f"report: {tmp_path / 'report.html'}" in capsys.readouterr().out
    assert len(swept) == 1


def test_make_reproduce_is_the_paper():
    chosen = {part.name: part.options for part in everything.QUICK}
    assert set(chosen) == {"fig2", "fig3", "fig4", "table-hatexplain", "table-sva", "table-agreement"}
    assert chosen["table-hatexplain"]["seeds"] >= 2
    assert chosen["fig2"] == {"seeds": 2}  # the default protocol, as published
    assert chosen["table-sva"] == {"form": "whole", "seeds": 1, "lr": 1e-3}
    for part in (*everything.QUICK, *everything.full_parts()):
        options = find_experiment(part.name).check_options(part.options)
        words = part.command.split()
        assert experiment_parser(find_experiment(words[0])).parse_args(words[1:])
        assert options.get("protocol") in (None, "published", "paper", "both") or "protocol" in part.options


def test_full_has_every_experiment_that_trains():
    named = {part.name for part in everything.full_parts()}
    assert named >= {name for name in EXPERIMENTS if find_experiment(name).trains}


@pytest.mark.usefixtures("in_process")
def test_the_plan_counts_what_is_done_and_leaves_no_trace(tmp_path, capsys, monkeypatch):
    parts = (*SMALL_PARTS, Part("fig3", {"epochs": 1}), Part("table-hatexplain", {"seeds": 1}, seconds=72))
    monkeypatch.setattr(everything, "full_parts", lambda: parts)
    out = tmp_path / "out"
    words = ["reproduce", "all", "--full", "--plan", "--out", str(out)]
    assert main(words) == 0
    assert "5 cells, 0 done" in capsys.readouterr().err
    assert not out.exists()
    reproduce("fig3", out, epochs=1, workers=1)
    before = sorted(out.rglob("*"))
    assert main([*words, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)["plan"]
    # A cell that two parts share is counted once.
    assert [(row["cells"], row["done"]) for row in plan] == [(1, 0), (2, 2), (0, 0), (0, 0), (2, 0)]
    assert plan[-1]["hours"] == pytest.approx(2 * 72 / 3600)
    assert sorted(out.rglob("*")) == before
    assert main([*words, "--data-dir", str(tmp_path)]) == 0
    assert "cannot run: " in capsys.readouterr().err


def test_a_part_that_is_not_there_is_one_line(capsys, tmp_path):
    code, out, err = run(capsys, "all", "--parts", "fig9", "--out", str(tmp_path))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "no part 'fig9'; choose from " in err


KILLED = """
import sys
from fasterqk_lab.cli.main import main
from fasterqk_lab.experiments import all as everything, table_generated
from fasterqk_lab.figures._documents import STYLE
from fasterqk_lab.training import TrainConfig
nothing, out, little = sys.argv[1:]
STYLE |= {"savefig.dpi": 40, "figure.constrained_layout.use": False}
table_generated.TrainConfig = lambda task, **fields: TrainConfig(
    "jsonl", file=little, rationale_k=(50,), width=8, head_width=4, **fields
)
everything.WORKERS = 1
everything.full_parts = lambda: (
    everything.Part("fig3", {"epochs": 1, "protocol": "both"}),
    everything.Part("table-agreement", {"epochs": 1, "seeds": 1}),
    everything.Part("table-hatexplain", {"epochs": 1, "seeds": 1}),
)
sys.exit(main(["reproduce", "all", "--full", "--data-dir", nothing, "--out", out, "--json"]))
"""


@pytest.mark.slow
def test_full_is_killed_and_continued_without_doing_anything_twice(tmp_path, little):
    out, nothing = tmp_path / "out", tmp_path / "nothing"
    nothing.mkdir()
    command = [sys.executable, "-c", KILLED, str(nothing), str(out), little]
    saved = lambda: {path.parent.name for path in out.glob("runs/*/result.json")}  # noqa: E731
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        while not saved() and process.poll() is None:
            time.sleep(0.05)
        process.kill()  # SIGKILL: no handler runs
    first = saved()
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert f"6 cells, {len(first)} done" in done.stderr
    summary = json.loads(done.stdout)
    # A part that cannot run stops no other, and says why.
    assert [("error" in row) for row in summary["parts"]] == [False, False, True]
    assert "dataset.json" in summary["parts"][2]["error"]
    assert len(saved()) == 6
    for cell in saved():
        journal = [json.loads(line)["event"] for line in (out / "runs" / cell / "journal.jsonl").open()]
        # The kill may fall between a result and its line in the journal.
        assert journal.count("saved") in ((0, 1) if cell in first else (1,))
        if cell in first:
            assert journal.count("started") == 1
    assert Path(summary["report"]).exists()
