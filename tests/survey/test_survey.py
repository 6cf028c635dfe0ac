"""The survey: outcomes, groups of one architecture, files that are continued, and models that crash."""

import json
import os
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from fasterqk.errors import InputError
from tools.survey import survey as survey_module
from tools.survey.__main__ import main
from tools.survey.inputs import accepted_inputs
from tools.survey.libraries import LIBRARIES, Library
from tools.survey.page import summary, write_section
from tools.survey.survey import survey


class Kernel(nn.Module):
    """Attention without a softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.o(self.q(x) @ (self.k(x).mT @ self.v(x)))


def encoder(layers: int) -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), layers)


def toy(name: str) -> nn.Module:
    if name == "broken":
        raise RuntimeError("no file\nand more")
    return {
        "small": lambda: encoder(1),
        "large": lambda: encoder(3),
        "kernel": Kernel,
        "plain": lambda: nn.Sequential(nn.Linear(8, 8)),
    }[name]()


TOYS = Library(lambda: ["broken", "kernel", "large", "plain", "small"], toy, ())


@pytest.fixture
def toys(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library of toys, in this process: a spawned one would not know it."""
    monkeypatch.setitem(LIBRARIES, "toys", TOYS)
    monkeypatch.setattr(
        survey_module, "_in_processes", lambda task, library, names, *_: (task(TOYS, name) for name in names)
    )


def outcomes(lines: list[dict[str, Any]]) -> dict[str, str]:
    return {line["name"]: line["outcome"] for line in lines}


def test_every_name_has_an_outcome(toys: None, tmp_path: Path) -> None:
    good = [name for name in TOYS.names() if name != "broken"]
    lines = [survey_module.survey_model(TOYS, name) | {"name": name} for name in TOYS.names()]
    assert outcomes(lines) == {
        "broken": "not built",
        "kernel": "refused",
        "large": "verified",
        "plain": "no attention",
        "small": "verified",
    }
    assert lines[0]["why"] == "RuntimeError: no file"
    judged = {line["name"]: line.get("judged", 0) for line in lines}
    assert judged["small"] >= 4 and judged["large"] >= 6 and not any(x.get("contradictions") for x in lines)
    signatures = {name: survey_module.architecture(TOYS, name)["signature"] for name in good}
    assert signatures["small"] == signatures["large"] != signatures["kernel"]


def test_a_survey_is_continued_and_groups_one_architecture(
    toys: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(LIBRARIES, "toys", Library(lambda: ["kernel", "large", "plain", "small"], toy, ()))
    out, notes = tmp_path / "toys.jsonl", []
    order = ["kernel", "small", "large", "plain"]  # with attention first, the smallest first
    lines = survey("toys", out=out, progress=lambda done, total, note: notes.append(note))
    assert [line["name"] for line in lines] == ["kernel", "large", "plain", "small"]
    assert lines[1]["as"] == "small" and "as" not in lines[3]
    assert "small: verified" in notes
    assert [json.loads(line)["name"] for line in out.read_text().splitlines()] == order
    # A kill in the middle of a line: that model is run again, and only that.
    text = out.read_text()
    out.write_text(text[:-20])
    monkeypatch.setattr(survey_module, "architecture", None)
    again = survey("toys", out=out)
    assert outcomes(again) == outcomes(lines) and again[0] == lines[0]
    assert [json.loads(line)["name"] for line in out.read_text().splitlines()] == order
    assert "4 models of toys\n    2  labelled" in summary("toys", lines)
    assert "the labels of 0 models are contradicted." in summary("toys", lines)


def test_bad_input_is_refused(toys: None, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there is no survey of 'keras'"):
        survey("keras")
    with pytest.raises(InputError, match="no model of toys is called 'x\\*'"):
        survey("toys", only="x*")
    other = tmp_path / "mine.jsonl"
    other.write_text('{"text": "mine"}\n')
    with pytest.raises(InputError, match="line 1 is not of a survey of toys"):
        survey("toys", out=other)
    assert other.read_text() == '{"text": "mine"}\n'
    with pytest.raises(InputError, match="has no lines"):
        write_section(other, "toys", [])


def test_the_page_gets_its_section(toys: None, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- survey toys: begin -->\nold\n<!-- survey toys: end -->\nafter\n")
    lines = [
        {"library": "toys", **survey_module.survey_model(TOYS, name), "name": name}
        for name in ("small", "kernel")
    ]
    write_section(page, "toys", lines)
    text = page.read_text()
    assert text.startswith("before\n<!-- survey toys: begin -->\n`python -m tools.survey toys")
    assert "2 of 5 names" in text and "| 1 | refused in one line |" in text and "old" not in text
    assert "**Refused**: no softmax in Kernel (kernel)." in text
    assert text.endswith("<!-- survey toys: end -->\nafter\n")


def crashing(library: Library, name: str) -> dict[str, Any]:
    """Top level, so that a spawned process finds it."""
    if name == "dies":
        os._exit(3)
    if name == "hangs":
        time.sleep(600)
    if name == "eats":
        return {"outcome": "verified", "bytes": len(bytearray(2**36))}
    return {"outcome": "verified"}


@pytest.mark.slow
def test_a_crash_a_hang_and_a_lack_of_memory_cost_one_model(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["fine", "dies", "also", "eats", "hangs"]
    # A process takes seconds to start; the one that hangs is running already, so it needs no long wait.
    waits = {"hangs": 0.5}
    polled = iter(names)
    poll = Connection.poll
    monkeypatch.setattr(
        Connection, "poll", lambda self, seconds: poll(self, waits.get(next(polled), seconds))
    )
    lines = list(survey_module._in_processes(crashing, "timm", names, 60.0, 16.0))
    assert [line["outcome"] for line in lines] == ["verified", "died", "verified", "too large", "too slow"]
    assert (lines[1]["why"], lines[3]["why"]) == ("its process ended with code 3", "MemoryError")


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("a tensor of shape (1, 2)"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"),
        RuntimeError("std::bad_alloc"),
        InputError("X cannot be built small: [enforce fail] DefaultCPUAllocator: can't allocate memory"),
    ],
)
def test_a_model_that_exceeds_the_memory_is_too_large(error: Exception) -> None:
    def build(name: str) -> nn.Module:
        raise error

    assert survey_module._lacks_memory(error) and not survey_module._lacks_memory(RuntimeError("no file"))
    with pytest.raises(type(error)):  # the caller makes it "too large", not "not built"
        survey_module.survey_model(Library(lambda: ["one"], build, ()), "one")


def test_a_large_model_is_not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wide(nn.Module):
        def __init__(self, num_layers: int = 40, width: int = 40_000) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(num_layers))

    monkeypatch.setitem(sys.modules, "diffusers", SimpleNamespace(Wide=Wide))
    with pytest.raises(MemoryError, match="3,200,000,000 parameters"):  # two layers; it takes no memory
        survey_module.survey_model(LIBRARIES["diffusers"], "Wide")


# --- The command ---


@pytest.mark.slow
def test_a_survey_of_one_model_type(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, page = tmp_path / "survey.jsonl", tmp_path / "page.md"
    page.write_text("<!-- survey transformers: begin --><!-- survey transformers: end -->")
    words = ["transformers", "--only", "gpt2", "--out", str(out), "--page", str(page)]
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert "1 models of transformers\n    1  labelled, and the probe saw" in printed
    assert "the labels of 0 models are contradicted." in printed
    assert "1 of " in page.read_text() and "| 1 | labelled, and the probe saw" in page.read_text()
    (line,) = out.read_text().splitlines()
    assert json.loads(line)["judged"] >= 4
    assert main([*words, "--json"]) == 0  # from the file
    assert json.loads(capsys.readouterr().out) == [json.loads(line)]


def test_options_of_a_survey_are_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, message in (
        (["keras"], "there is no survey of 'keras'; there is one of transformers, timm"),
        ([], "LIBRARY"),
        (["transformers", "--only", "nonesuch"], "no model of transformers is called 'nonesuch'"),
        (["transformers", "--out", str(tmp_path)], "is a folder; name a file"),
        (["transformers", "--seconds", "0"], "--seconds"),
    ):
        try:
            code = main(words)
        except SystemExit as end:
            code = int(end.code or 0)
        printed = capsys.readouterr().err
        assert code == 2 and message in printed and printed.count("\n") == 1, printed


class Denoiser(nn.Module):
    """Takes what models of diffusers take, under their names."""

    config = {"in_channels": 8, "cross_attention_dim": 8}  # noqa: RUF012 (as in diffusers)

    def forward(self, hidden_states: Any, timestep: Any, encoder_hidden_states: Any) -> Any:
        assert timestep.shape == (1,) and hidden_states.dim() == 3
        return torch.cat([hidden_states, encoder_hidden_states], 1)


def test_a_model_of_diffusers_gets_latents_a_time_and_a_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Denoiser, "__module__", "diffusers.models.made_up")
    assert accepted_inputs(Denoiser()).keys() == {"hidden_states", "timestep", "encoder_hidden_states"}
