"""Any store as a page: conditions, what differs, comparison at equal loss, and cells that are not done."""

import csv
import re
from dataclasses import dataclass

import pytest

from fasterqk_lab.figures import save_table
from fasterqk_lab.figures._documents import load_documents
from fasterqk_lab.page import write_page
from fasterqk_lab.page._cells import ARMS_DRAWN, read_cells, save_cells
from fasterqk_lab.runs import Store
from fasterqk_lab.runs._execute import save_error


@dataclass(frozen=True)
class Training:
    task: str = "mine"
    qk_ratio: float = 1.0
    lr: float = 1e-3
    seed: int = 0
    width: int = 8


@dataclass(frozen=True)
class Other:
    size: int = 1


def result(config, mass=None, steps=6):
    """Faster arms attend more at every loss; each seed differs a little."""
    mass = (0.2 if config.qk_ratio == 1 else 0.6) + 0.01 * config.seed if mass is None else mass
    history = [
        {"epoch": k, "loss": 2.0**-k, "mrta": 0.1 + (mass - 0.1) * k / (steps - 1), "test_accuracy": 0.9}
        for k in range(steps)
    ]
    test = {"accuracy": 0.9, "mrta": mass, "ac": 50.0, "acmc": 40.0, "null": {"mrta": 0.1}}
    return {"loss": history[-1]["loss"], "diverged": False, "test": test, "history": history}


def fill(out, configs):
    store = Store(out)
    for config in configs:
        store.save(config, result(config))
    return store


@pytest.fixture
def documents(tmp_path):
    """What the page shows of the cells in a folder, by folder and name."""

    def load(out):
        save_cells(read_cells(out), tmp_path / "drawn")
        return {
            folder: {document["name"]: document for document in load_documents(tmp_path / "drawn", folder)}
            for folder in ("effects", "figures", "tables")
        }

    return load


def panels_of(out):
    """The panels of the figure along training, with the lines of each."""
    path = next((out / "drawn" / "figures").glob("*-along.csv"), None)
    panels = {}
    for row in [] if path is None else csv.DictReader(path.open()):
        panels.setdefault(row["panel"], set()).add(row["line"])
    return panels


def test_a_sweep_becomes_effects_curves_and_tables(tmp_path, documents):
    configs = [Training(qk_ratio=r, lr=lr, seed=s) for r in (30, 1) for lr in (1e-3, 1e-2) for s in range(3)]
    fill(tmp_path, configs)
    shown = documents(tmp_path)
    document = shown["effects"]["mine-cells"]
    effects = [effect for effect in document["effects"] if effect["score"] == "mrta"]
    assert [effect["arm"] for effect in effects] == ["qk_ratio 30, lr 0.001", "qk_ratio 30, lr 0.01"]
    for effect in effects:
        assert (effect["stands"], effect["ratio"], effect["null"]) == ("more", 30, pytest.approx(0.1))
        assert (effect["difference"]["mean"], effect["difference"]["n"]) == (pytest.approx(0.4), 3)
    assert {effect["score"] for effect in document["effects"]} == {"mrta", "test_accuracy"}
    assert set(shown["figures"]) == {"mine-cells", "mine-cells-along"}
    panels = panels_of(tmp_path)
    assert list(panels) == ["training loss", "attention on relevant tokens (MRTA)", "test accuracy"]
    assert len(panels["training loss"] - {""}) == 4
    tables = shown["tables"]
    differs = {row["setting"]: row["values"] for row in tables["mine-cells-differences"]["rows"]}
    assert sorted(differs) == ["lr", "qk_ratio", "seed"]
    assert sorted(differs["lr"].split(", ")) == ["0.001", "0.01"]
    conditions = tables["mine-cells-conditions"]["rows"]
    assert [(row["qk_ratio"], row["seeds"]) for row in conditions] == [("1", 3)] * 2 + [("30", 3)] * 2
    assert conditions[0]["mass"]["mean"] == pytest.approx(0.21)
    assert conditions[0]["null"]["mean"] == pytest.approx(0.1)
    text = write_page(tmp_path).read_text()
    assert "faster query-key learning puts more attention on the relevant words in Mine." in text
    assert 'href="figures/' not in text  # there is no such file


def test_what_is_not_done_is_said_and_left_out(tmp_path, documents):
    store = fill(tmp_path, [Training(qk_ratio=r, seed=s) for r in (1, 30) for s in range(3)])
    save_error(store.begin(Training(qk_ratio=100)), 1, "ValueError: <b>too fast</b>", "Traceback ...")
    store.begin(Training(qk_ratio=200))
    damaged = store.begin(Training(qk_ratio=300))
    (damaged / "result.json").write_text("{}")
    store.save(
        Training(qk_ratio=400), {"diverged": True, "loss": None, "history": [{"epoch": 0, "loss": None}]}
    )
    shown = documents(tmp_path)
    states = {row["state"]: row for row in shown["tables"]["mine-cells-every"]["rows"]}
    assert set(states) == {"done", "failed", "stopped"}
    assert states["failed"]["error"] == "ValueError: <b>too fast</b>"
    conditions = shown["tables"]["mine-cells-conditions"]["rows"]
    assert [row["qk_ratio"] for row in conditions] == ["1", "30", "400"]
    assert conditions[2]["diverged"] == 1
    assert "mass" not in conditions[2]
    assert {effect["arm"] for effect in shown["effects"]["mine-cells"]["effects"]} == {"qk_ratio 30"}
    text = write_page(tmp_path).read_text()
    assert "10 cells: 7 done, 1 failed, 1 stopped, 1 damaged. This page shows only finished cells." in text
    assert "ValueError: &lt;b&gt;too fast&lt;/b&gt;" in text


def test_one_training_is_a_page(tmp_path, documents):
    fill(tmp_path, [Training(qk_ratio=30)])
    assert documents(tmp_path)["effects"] == {}
    text = write_page(tmp_path, title="One <i>training</i>").read_text()
    assert "<h1>One &lt;i&gt;training&lt;/i&gt;</h1>" in text
    answer = re.search('class="answer">([^<]*)', text)[1]
    assert answer == "Attention on the relevant words is 0.600 (uniform attention: 0.100) after training."


def test_one_seed_gets_no_strong_word(tmp_path):
    fill(tmp_path, [Training(qk_ratio=r) for r in (1, 30)])
    said = re.search('class="answer">([^<]*)', write_page(tmp_path).read_text())[1]
    assert "leaves open whether attention on the relevant words changes" in said


def test_slower_arms_are_no_answer_to_the_question(tmp_path):
    fill(tmp_path, [Training(qk_ratio=r, seed=s) for r in (1, 0.1) for s in range(3)])
    text = write_page(tmp_path).read_text()
    assert "At equal training loss, faster query-key learning" not in text
    assert "qk_ratio 0.1" in text


def test_a_sweep_over_something_else_is_compared_with_its_first_condition(tmp_path, documents):
    fill(tmp_path, [Training(lr=lr, seed=s) for lr in (1e-2, 1e-3) for s in range(2)])
    [document] = documents(tmp_path)["effects"].values()
    assert {effect["arm"] for effect in document["effects"]} == {"lr 0.01"}
    assert "At equal training loss, faster query-key learning" not in write_page(tmp_path).read_text()


@pytest.mark.parametrize(
    "content",
    [
        {"size": 3},
        {"score": 0.5},
        {"history": [1, 2]},
        {"history": [{"step": 1, "height": 2.5}]},
        {"test": {"mrta": 0.5}, "loss": None, "history": []},
        {"test": [1], "history": [{"loss": 1.0}]},
        {"test": {"mrta": 0.5, "groups": 3}, "train": 0.5, "history": [{"loss": 1.0}]},
        {"test": {"mrta": 0.5}, "history": [{"loss": -1.0}, {"loss": -2.0}]},
    ],
)
def test_results_of_any_function_are_shown(tmp_path, documents, content):
    Store(tmp_path).save(Other(2), content)
    Store(tmp_path).save(Other(3), content)
    shown = documents(tmp_path)
    assert shown["tables"]["other-cells-differences"]["rows"][0]["values"] == "2, 3"
    assert list(panels_of(tmp_path)) == (["height"] if "height" in str(content) else [])
    assert "Other" in write_page(tmp_path).read_text()


def test_very_many_conditions_stay_readable(tmp_path, documents):
    fill(tmp_path, [Training(lr=0.001 * k, qk_ratio=1 + k % 2) for k in range(1, 61)])
    curves = documents(tmp_path)["figures"]["mine-cells-along"]
    assert len(panels_of(tmp_path)["training loss"]) == ARMS_DRAWN
    assert f"Only the first {ARMS_DRAWN} of 60 conditions" in curves["caption"]
    assert len(write_page(tmp_path).read_text()) < 500_000


def test_cells_of_another_task_stand_beside_the_documents_of_an_experiment(tmp_path):
    fill(tmp_path, [Training(task="agreement"), Training(task="jsonl"), Training(task="jsonl", seed=1)])
    Store(tmp_path).save(Other(1), {"score": 0.5})
    columns = [{"key": "a", "label": "a"}]
    save_table(tmp_path, "table-agreement-paper-end", title="T", caption="", columns=columns, rows=[{"a": 1}])
    text = write_page(tmp_path).read_text()
    assert re.findall(r'<section id="([^"]*)"><h2>', text)[:2] == ["jsonl", "agreement"]
    assert "agreement: all cells" not in text
    assert "Other: all cells" not in text
