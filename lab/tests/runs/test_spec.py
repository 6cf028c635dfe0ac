"""Specs: the product of what is written, and one line about what cannot be meant."""

import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fasterqk.errors import InputError
from fasterqk_lab.cli.main import main
from fasterqk_lab.configs import content_hash
from fasterqk_lab.runs import Spec, read_spec
from fasterqk_lab.training import TrainConfig

HEAD = 'config = "cells_of_tests:Cell"\nfunction = "cells_of_tests:double"\n'


@pytest.fixture
def spec(tmp_path: Path, cells: object) -> Callable[[str], Spec]:
    def read(text: str) -> Spec:
        path = tmp_path / "spec.toml"
        path.write_text(text)
        return read_spec(path)

    return read


def test_arms_times_grid_times_seeds_seed_by_seed(spec: Callable[[str], Spec]) -> None:
    found = spec(
        HEAD
        + """
        seeds = [4, 5]
        [base]
        word = "all"
        [arms.baseline]
        [arms.other]
        word = "other"
        [grid]
        scale = [1, 2.5]
        """
    )
    assert found.function == "cells_of_tests:double"
    assert [(cell.arm, *dataclasses.astuple(cell.config)) for cell in found.cells] == [
        ("baseline", 4, 1.0, "all"),
        ("other", 4, 1.0, "other"),
        ("baseline", 4, 2.5, "all"),
        ("other", 4, 2.5, "other"),
        ("baseline", 5, 1.0, "all"),
        ("other", 5, 1.0, "other"),
        ("baseline", 5, 2.5, "all"),
        ("other", 5, 2.5, "other"),
    ]


@settings(max_examples=20, deadline=None)
@given(
    seeds=st.lists(st.integers(0, 99), min_size=1, max_size=4, unique=True),
    scales=st.lists(st.integers(-5, 5), min_size=1, max_size=4, unique=True),
    arms=st.integers(0, 3),
)
def test_the_number_of_cells(
    tmp_path_factory: pytest.TempPathFactory, seeds: list[int], scales: list[int], arms: int
) -> None:
    tables = "".join(f"[arms.arm{number}]\nlr = 0.{number + 1}\n" for number in range(arms))
    path = tmp_path_factory.mktemp("spec") / "spec.toml"
    path.write_text(
        'config = "lab.tests.crash.cells:Learn"\n'
        f"seeds = {seeds}\n{tables}[grid]\nsteps = {scales}\nevery = [5, 10]\n"
    )
    cells = read_spec(path).cells
    assert len(cells) == len(seeds) * len(scales) * max(1, arms) * 2
    assert len({content_hash(cell.config) for cell in cells}) == len(cells)


def test_training_is_the_default(spec: Callable[[str], Spec]) -> None:
    found = spec('[base]\ntask = "agreement"\nqk_ratio = 30\nrationale_k = [5, 10]\nclip = 2\n')
    assert found.function == "fasterqk_lab.training:train"
    assert [cell.config for cell in found.cells] == [
        TrainConfig("agreement", qk_ratio=30.0, rationale_k=(5, 10), clip=2.0)
    ]


def test_whole_numbers_for_real_fields_are_the_same_cell(spec: Callable[[str], Spec]) -> None:
    one, other = (spec(f"{HEAD}[base]\nscale = {value}\n").cells[0].config for value in ("3", "3.0"))
    assert content_hash(one) == content_hash(other)


def test_resources_are_what_a_cell_takes_and_not_what_it_is(spec: Callable[[str], Spec]) -> None:
    plain, rich = spec(HEAD), spec(HEAD + "[resources]\ncpus = 4\ngpus = 0.5\n")
    assert (plain.resources.cpus, plain.resources.gpus) == (1, 0)
    assert (rich.resources.cpus, rich.resources.gpus) == (4, 0.5)
    assert rich.cells == plain.cells


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[base]\nscal = 2\n", "Cell has no field 'scal' (in [base]); did you mean 'scale'?"),
        ("[base]\nxyzzy = 2\n", "no field 'xyzzy' (in [base]); choose from seed, scale, word"),
        ("[arms.a]\nsede = 2\n", "no field 'sede' (in [arms.a]); did you mean 'seed'"),
        ("[grid]\nworld = [1]\n", "no field 'world' (in [grid]); did you mean 'word'"),
        ("[gird]\n", "unknown key 'gird'; did you mean 'grid'"),
        ("[base]\nscale = 'fast'\n", "scale = 'fast' is not of type float"),
        ("[base]\nseed = true\n", "seed = True is not of type int"),
        ("[base]\nseed = 1.5\n", "seed = 1.5 is not of type int"),
        ("seeds = 3\n", "seeds = 3 is not a list of values"),
        ("seeds = []\n", "seeds = [] is not a list of values"),
        ("seeds = [1, 2, 1]\n", "seeds has 1 more than once"),
        (
            "[arms.a]\n[arms.b]\nseed = 1\n[arms.c]\n",
            "the arms 'a' and 'c' are equal; change or remove one of them",
        ),
        ("[grid]\nscale = []\n", "scale = [] in [grid] is not a list of values"),
        ("[grid]\nscale = 2\n", "scale = 2 in [grid] is not a list of values"),
        ("base = 3\n", "base = 3 is not a table; write it as [base]"),
        ("[arms]\na = 3\n", "arms.a = 3 is not a table; write it as [arms.a]"),
        ("seeds = [1]\n[grid]\nseed = [1]\n", "'seed' is in [grid] and in seeds"),
        ("seeds = [1]\n[arms.a]\nseed = 1\n", "'seed' is in [arms.a] and in seeds"),
        ("[grid]\nscale = [1]\n[arms.a]\nscale = 1\n", "'scale' is in [arms.a] and in [grid]"),
        ("[resources]\ncpu = 1\n", "no field 'cpu' (in [resources]); did you mean 'cpus'?"),
        ("[resources]\ncpus = 0\n", "cpus = 0 in [resources] is not a number of cpus"),
        ("[resources]\ngpus = -1\n", "gpus = -1 in [resources] is not a number of gpus"),
        ("[resources]\ngpus = 'one'\n", "gpus = 'one' in [resources] is not a number of gpus"),
        ("[resources]\ngpus = true\n", "gpus = True in [resources] is not a number of gpus"),
        ("[resources]\ncpus = inf\n", "cpus = inf in [resources] is not a number of cpus"),
        ("[resources]\ngpus = 1.5\n", "gpus = 1.5 in [resources]: give a fraction below 1 or a whole number"),
    ],
)
def test_what_cannot_be_meant(spec: Callable[[str], Spec], tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(InputError) as caught:
        spec(HEAD + text)
    message = str(caught.value)
    assert words in message
    assert message.startswith(str(tmp_path / "spec.toml"))
    assert "\n" not in message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "[base] must set 'task'"),
        ("[arms.a]\nseed = 3\n", "[base] or [arms.a] must set 'task'"),
        ("[base]\ntask = 'agreement'\n[arms.a]\nlr = -1\n", "arm 'a': lr -1.0 is not above 0"),
        (
            "config = 'fasterqk_lab.runs._sweep:SpecCell'\nseeds = [1]\n",
            "SpecCell has no field 'seed' (in [seeds])",
        ),
        ("config = 'nowhere:Config'\n", "no class 'nowhere:Config' (ModuleNotFoundError"),
        ("config = 'fasterqk_lab.training:train'\n", "is not a dataclass"),
        ("config = 3\n", "no class 3"),
        ("function = 'train'\n", "no function 'train'"),
        (
            "function = 'os:system'\n",
            "'os:system' does not take a configuration",
        ),
        ("function = 'builtins:dict'\n", "'builtins:dict' does not take a configuration"),
        ("seeds = [1\n", "is not TOML"),
        ("seeds = " + "[" * 100_000 + "\n", "is nested too deeply"),
        ("function = 'fasterqk_lab.training:trian'\n", "has no attribute 'trian'"),
        ("function = 'fasterqk_lab.trainig:train'\n", "No module named 'fasterqk_lab.trainig'"),
        ("function = 'no-module:f'\n", "No module named 'no-module'"),
        ("function = 'subprocess:run'\n", "'subprocess:run' does not take a configuration"),
        ("function = 'builtins:dict'\n", "'builtins:dict' does not take a configuration"),
        ("function = 'math:pi'\n", "'math:pi' is a float, not a function"),
        (
            "[base]\ntask = 'nope'\n",
            "'nope'; choose from hatexplain, sva, agreement, jsonl, squad, kvqa",
        ),
        ("[base]\ntask = 'sva'\nform = 'odd'\n", "task 'sva' has no form 'odd'; its forms are"),
        ("[base]\ntask = 'jsonl'\n", "needs the file with your data; write file = 'FILE.jsonl' in [base]"),
        ("[base]\ntask = 'sva'\nlayers = 3000\n", "layers 3000: at most 2000 can be built"),
        (
            "[base]\ntask = 'sva'\nepochs = 1_000_000_000\n",
            "epochs 1000000000 is too large; the largest allowed value is 1000000",
        ),
        ("[base]\ntask = 'sva'\nwidth = 100_000\nmlp_width = 100_000\n", "weights is too large"),
        ("[base]\ntask = 'sva'\nlr = nan\n", "lr nan is not a finite number"),
        ("[base]\ntask = 'sva'\nfile = 'mine.jsonl'\n", "'mine.jsonl' belongs to task 'jsonl'"),
        (
            "[base]\ntask = 'sva'\n[grid]\n"
            + "".join(f"{n} = {list(range(1, 200))}\n" for n in ("width", "epochs", "context")),
            "the spec has 7880599 cells; a sweep has at most 1000000",
        ),
    ],
)
def test_what_is_missing_or_wrong(spec: Callable[[str], Spec], text: str, words: str) -> None:
    with pytest.raises(InputError) as caught:
        spec(text)
    assert words in str(caught.value)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot read the spec .*nothing\.toml.*No such file"):
        read_spec(tmp_path / "nothing.toml")


SPEC = 'config = "beside_a_spec:Own"\nfunction = "beside_a_spec:run"\nseeds = [0, 1]\n[base]\nscale = 3\n'
MODULE = """
import dataclasses

@dataclasses.dataclass(frozen=True)
class Own:
    scale: float
    seed: int = 0
    word: str = "x"

def run(config, *, folder, progress):
    return {"scaled": config.scale * config.seed}
"""


def installed_command(*words: str, where: Path) -> subprocess.CompletedProcess[str]:
    """The command as it is installed: the folder it is called in is not searched for modules."""
    code = "import sys; sys.path.remove(''); from fasterqk_lab.__main__ import main; sys.exit(main())"
    return subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, cwd=where, timeout=120
    )


def test_a_module_beside_the_spec_is_planned_and_swept(tmp_path: Path) -> None:
    (tmp_path / "specs").mkdir()
    spec = tmp_path / "specs" / "spec.toml"
    spec.write_text("\ufeff" + SPEC, encoding="utf-8")
    (tmp_path / "specs" / "beside_a_spec.py").write_text(MODULE)
    words = (str(spec), "--out", "out")
    planned = installed_command("plan", *words, "--json", where=tmp_path)
    assert (planned.returncode, planned.stderr) == (0, "")
    assert json.loads(planned.stdout)["left"] == 2
    swept = installed_command("sweep", *words, "--json", "--shard", "2/2", where=tmp_path)
    assert (swept.returncode, swept.stderr) == (0, "")
    assert json.loads(swept.stdout)["cells"][0]["result"] == {"scaled": 3.0}
    planned = installed_command("plan", *words, "--json", where=tmp_path)
    found = json.loads(planned.stdout)
    assert (found["cells"], found["left"], found["states"]["done"]) == (2, 1, 1)
    assert found["measured"] == 1


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("beside_a_spec:run", "beside_a_spec:rum", "has no attribute 'rum'"),
        ("beside_a_spec:run", "beside_a_spec:scale", "has no attribute 'scale'"),
        ("beside_a_spec:Own", "beside_a_spec:Other", "has no attribute 'Other'"),
        ("beside_a_spec:Own", "beside_the_spec:Own", "No module named 'beside_the_spec'"),
        ("scale = 3", "scal = 3", "Own has no field 'scal' (in [base]); did you mean 'scale'?"),
        ("scale = 3", "word = 'y'", "[base] must set 'scale'"),
    ],
)
def test_a_plan_refuses_what_cannot_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], old: str, new: str, told: str
) -> None:
    spec = tmp_path / "spec.toml"
    spec.write_text(SPEC.replace(old, new))
    (tmp_path / "beside_a_spec.py").write_text(MODULE)
    assert main(["plan", str(spec), "--out", str(tmp_path / "out")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert told in line
