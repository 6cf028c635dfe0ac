"""Documents on disk: what comes back, what is refused, and that errors quote the input."""

import copy
import csv
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from fasterqk.errors import InputError
from fasterqk_lab.figures._documents import (
    load_documents,
    save_document,
    save_examples,
    save_table,
)

EXAMPLE = {
    "tokens": ["a", "cat"],
    "relevance": [0, 1],
    "label": "animal",
    "arms": {"r = 1": {"prediction": "animal", "probability": 0.9, "layers": {"layer 1": [0.25, 0.75]}}},
}


def save_demo_example(out, example):
    return save_examples(out, "demo", title="T", arms=["r = 1"], examples=[example], sensitive=True)


def test_examples_come_back_with_four_decimals(tmp_path):
    example = copy.deepcopy(EXAMPLE)
    example["arms"]["r = 1"]["layers"]["rollout"] = np.array([1 / 3, 2 / 3], dtype=np.float32)
    save_demo_example(tmp_path, example)
    [found] = load_documents(tmp_path, "examples")
    assert found["sensitive"] is True
    assert found["examples"][0]["tokens"] == ["a", "cat"]
    assert found["examples"][0]["arms"]["r = 1"]["layers"] == {
        "layer 1": [0.25, 0.75],
        "rollout": [0.3333, 0.6667],
    }


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda e: e["relevance"].append(1), "2 tokens but 3 relevance marks"),
        (lambda e: e["arms"]["r = 1"]["layers"]["layer 1"].pop(), "2 tokens but 1 weights"),
        (lambda e: e["arms"].update({"r = 2": e["arms"]["r = 1"]}), "'r = 2' is not one of the arms"),
    ],
)
def test_a_wrong_example_is_refused(tmp_path, change, said):
    example = copy.deepcopy(EXAMPLE)
    change(example)
    with pytest.raises(InputError, match=said):
        save_demo_example(tmp_path, example)
    assert not list(tmp_path.iterdir())


EFFECT = {"arm": "faster QK", "score": "mrta", "at": "end", "stands": "more"}
EFFECT |= {key: {"mean": 0.4, "half_width": 0.01, "n": 5} for key in ("before", "after", "difference")}


def test_effects_come_back(tmp_path):
    save_document(tmp_path, "effects", "demo", {"title": "T", "setting": "S", "effects": [EFFECT]})
    [document] = load_documents(tmp_path, "effects")
    assert document["effects"] == [EFFECT]


@pytest.mark.parametrize(
    ("change", "said"),
    [({"stands": "sharper"}, "'sharper' is not one of more, less"), ({"difference": 0.3}, "is no interval")],
)
def test_a_wrong_effect_is_refused(tmp_path, change, said):
    with pytest.raises(InputError, match=said):
        save_document(
            tmp_path, "effects", "demo", {"title": "T", "setting": "S", "effects": [{**EFFECT, **change}]}
        )


CLAIM = {"claim": "sharper", "where": "Table 1", "verdict": "confirmed"}


def test_claims_come_back(tmp_path):
    claims = [CLAIM | {"effect": "+0.26 ± 0.05", "group": "depth"}, CLAIM | {"verdict": "not run"}]
    save_document(tmp_path, "claims", "paper", {"title": "Claims", "claims": claims})
    [document] = load_documents(tmp_path, "claims")
    assert document["claims"] == claims


@pytest.mark.parametrize(
    ("claim", "said"),
    [
        (CLAIM | {"verdict": "holds"}, "'holds' is not one of confirmed, depends on the setting"),
        ({"claim": "sharper"}, "has no 'claim' and 'where' and 'verdict'"),
    ],
)
def test_a_wrong_claim_is_refused(tmp_path, claim, said):
    with pytest.raises(InputError, match=said):
        save_document(tmp_path, "claims", "paper", {"title": "Claims", "claims": [claim]})


COLUMNS = [{"key": "arm", "label": "arm"}, {"key": "ac", "label": "AC", "source": "paper"}]


@dataclass(frozen=True)
class Interval:
    mean: float
    half_width: float
    n: int


def save(out, rows, name="table1", columns=COLUMNS):
    return save_table(out, name, title="T", caption="C", columns=columns, rows=rows)


def test_a_table_comes_back_as_it_was_saved(tmp_path):
    rows = [{"arm": "r = 1", "ac": Interval(0.1 + 0.2, 0.5, 3)}, {"arm": "r = 10", "ac": np.float64(7.0)}]
    paths = save(tmp_path, rows)
    [table] = load_documents(tmp_path, "tables")
    assert table["columns"] == COLUMNS
    assert table["rows"] == [
        {"arm": "r = 1", "ac": {"mean": 0.1 + 0.2, "half_width": 0.5, "n": 3}},
        {"arm": "r = 10", "ac": 7.0},
    ]
    with open(paths["csv"], newline="") as stream:
        first, second = csv.DictReader(stream)
    assert first == {"arm": "r = 1", "ac": repr(0.1 + 0.2), "ac_half_width": "0.5", "ac_n": "3"}
    assert second == {"arm": "r = 10", "ac": "7.0", "ac_half_width": "", "ac_n": ""}


@pytest.mark.parametrize(
    ("rows", "columns", "name", "quoted"),
    [
        ([{"acc": 1}], COLUMNS, "t", "'acc'"),
        ([], [{"key": "a"}], "t", "'label'"),
        ([], [{"key": "a", "label": "a", "source": "guess"}], "t", "'guess'"),
        ([], COLUMNS, "../t", "'../t'"),
        ([], COLUMNS, "", "''"),
    ],
)
def test_a_wrong_table_is_refused_and_quoted(tmp_path, rows, columns, name, quoted):
    with pytest.raises(InputError) as error:
        save(tmp_path, rows, name, columns)
    assert quoted in str(error.value)
    assert not list(tmp_path.rglob("*.*"))


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"columns": [], "rows": [1]}'])
def test_a_damaged_file_is_named(tmp_path, text):
    path = tmp_path / "tables" / "broken.json"
    path.parent.mkdir()
    path.write_text(text)
    with pytest.raises(InputError) as error:
        load_documents(tmp_path, "tables")
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_no_number_is_written_as_null(tmp_path):
    paths = save(tmp_path, [{"arm": "r = 1", "ac": Interval(float("nan"), float("nan"), 1)}])
    [row] = json.loads(Path(paths["json"]).read_text())["rows"]
    assert row["ac"] == {"mean": None, "half_width": None, "n": 1}
