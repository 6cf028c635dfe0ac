"""Extras: the core works without their packages, and what needs one says which in one line."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from fasterqk.errors import EXTRAS, InputError, MissingExtra, needs_extra

ROOT = Path(__file__).parents[1]

# An interpreter without the packages of all extras, as `pip install fasterqk` makes it.
WITHOUT_EXTRAS = f"""
import sys
from importlib.machinery import PathFinder

class WithoutExtras(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        missing = name.partition(".")[0] in {sorted({name for names in EXTRAS.values() for name in names})!r}
        return None if missing else PathFinder.find_spec(name, path, target)

sys.meta_path = [WithoutExtras if finder is PathFinder else finder for finder in sys.meta_path]
"""
CORE = """
import torch
import fasterqk

torch.manual_seed(0)
model = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
circuits = fasterqk.find_circuits(model)
optimizer = fasterqk.make_optimizer(model, torch.optim.AdamW, lr=1e-3, qk_ratio=10)
(model(torch.randn(2, 5, 16)) * torch.randn(2, 5, 16)).sum().backward()
before = model.self_attn.in_proj_weight.detach().clone()
optimizer.step()
moved = (model.self_attn.in_proj_weight.detach() - before).abs().mean(1).split(16)
print([round(float(part.mean() / moved[2].mean())) for part in moved])
"""
# Command lines, one after the other, each with its exit code and what it printed on standard error.
COMMANDS = """
import contextlib, io, json
from fasterqk.cli.main import main

outcomes = []
for words in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as told:
        try:
            code = main(words.split())
        except SystemExit as stop:
            code = stop.code
    outcomes.append([code, told.getvalue()])
print(json.dumps(outcomes))
"""
HELP = ["--help", "circuits --help", "theory solve --help"]
NEEDS = {
    "theory solve --qk-ratio 10 --loss 1e-4 --optimizer sign": "theory",
    "circuits gpt2": "hf",
    "measure --model model --data data.jsonl": "hf",
}


def run_without_extras(code: str, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", WITHOUT_EXTRAS + code, *words], capture_output=True, text=True
    )


@pytest.mark.slow
def test_the_core_needs_torch_and_numpy_only() -> None:
    done = run_without_extras(CORE)
    assert (done.stdout, done.stderr, done.returncode) == ("[10, 10, 1]\n", "", 0)


@pytest.mark.slow
def test_commands_name_the_extra_they_need_and_help_needs_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data.jsonl").write_text('{"text": "a", "label": 0, "spans": []}\n')
    done = run_without_extras(COMMANDS, json.dumps([*HELP, *NEEDS]))
    assert done.returncode == 0, done.stderr
    outcomes = dict(zip([*HELP, *NEEDS], json.loads(done.stdout), strict=True))
    assert [outcomes[words] for words in HELP] == [[0, ""]] * len(HELP)
    for words, extra in NEEDS.items():
        code, told = outcomes[words]
        advice = rf"\w+ is not installed; `pip install 'fasterqk\[{extra}\]'` installs it"
        assert re.fullmatch(rf"fasterqk {words.split()[0]}: {advice}\n", told), told
        assert code == 2


def test_a_function_names_the_extra_it_needs() -> None:
    call = "fasterqk.theory.solve(fasterqk.theory.Setting(), 10, loss=1e-4, optimizer='sign')"
    code = f"import fasterqk\ntry: {call}\nexcept fasterqk.InputError as error: print(error)"
    done = run_without_extras(code)
    assert done.stdout == "scipy is not installed; `pip install 'fasterqk[theory]'` installs it\n"


def test_the_extra_that_has_the_package_is_named() -> None:
    with pytest.raises(InputError, match=r"peft .*fasterqk\[hf\]"), needs_extra("hf"), needs_extra("theory"):
        raise ModuleNotFoundError("No module named 'peft'", name="peft")


def test_other_packages_name_their_own_extras() -> None:
    needs = needs_extra("cluster", ("ray",), of="fasterqk-lab")
    with pytest.raises(MissingExtra, match=r"ray .*fasterqk-lab\[cluster\]"), needs:
        raise ModuleNotFoundError("No module named 'ray.util'", name="ray.util")


def test_a_module_of_no_extra_is_a_bug() -> None:
    with pytest.raises(ModuleNotFoundError) as caught, needs_extra("hf"):
        import fasterqk.no_such_module  # noqa: F401
    assert not isinstance(caught.value, MissingExtra)


# Extras of packages that the library does not import: for tests and for the site.
FOR_TESTS = ("dev", "docs", "lens", "peers", "vision")


def test_extras_are_those_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

    def names(requirements: list[str]) -> set[str]:
        return {re.split("[<>=\\[]", text)[0] for text in requirements}

    extras = {name: names(wanted) for name, wanted in project["optional-dependencies"].items()}
    assert names(project["dependencies"]) == {"torch", "numpy"}
    assert {name: set(packages) for name, packages in EXTRAS.items()} == {
        name: packages for name, packages in extras.items() if name not in FOR_TESTS
    }
