"""AMX that is announced but does not work, simulated on any machine."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fasterqk import processor
from fasterqk.processor import SIMULATE_FAULT, avoid_faulty_amx

LIMIT = "ONEDNN_MAX_CPU_ISA"
CPUINFO = """\
processor\t: 0
model name\t: Some Processor
cpu MHz\t\t: {megahertz}
flags\t\t: fpu avx512f {flags}

processor\t: 1
model name\t: Some Processor
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, and no limit in the environment; both end with the test."""
    for name in (LIMIT, "DNNL_MAX_CPU_ISA", SIMULATE_FAULT):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "fasterqk"


@pytest.fixture
def announce(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path):
    """A function that makes a processor with these flags."""

    def write(flags: str, megahertz: float = 2000.0) -> None:
        path = tmp_path / "cpuinfo"
        path.write_text(CPUINFO.format(flags=flags, megahertz=megahertz))
        monkeypatch.setattr(processor, "_CPUINFO", path)

    return write


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Children that end with these codes instead of real ones; the ones left have not been started."""
    codes: list[int] = []

    def run(command: list[str], **options: object) -> subprocess.CompletedProcess[bytes]:
        return subprocess.CompletedProcess(command, codes.pop(0))

    monkeypatch.setattr(processor.subprocess, "run", run)
    return codes


def test_a_fault_is_worked_around_and_cached(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The child of a simulated fault is real: it dies of SIGILL."""
    monkeypatch.setenv(SIMULATE_FAULT, "1")
    assert avoid_faulty_amx()
    assert os.environ[LIMIT] == "AVX512_CORE_BF16"
    (answer,) = cache.iterdir()
    assert answer.read_text() == "fails\n"

    monkeypatch.setenv(LIMIT, "")
    monkeypatch.setattr(processor.subprocess, "run", None)  # another child would be an error
    assert avoid_faulty_amx()
    assert os.environ[LIMIT] == "AVX512_CORE_BF16"


def test_without_amx_the_products_of_the_trial_work() -> None:
    """On every machine, the faulty ones included."""
    environment = os.environ | {LIMIT: "AVX512_CORE_BF16", SIMULATE_FAULT: ""}
    subprocess.run([sys.executable, "-P", "-c", processor._TRIAL], env=environment, check=True)


@pytest.mark.parametrize("name", [LIMIT, "DNNL_MAX_CPU_ISA"])
def test_a_setting_of_the_user_stays(cache: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(SIMULATE_FAULT, "1")
    monkeypatch.setenv(name, "AVX2")
    assert not avoid_faulty_amx()
    assert os.environ[name] == "AVX2"
    assert os.environ[LIMIT] in ("AVX2", "")
    assert not cache.exists()


@pytest.mark.parametrize("flags", ["", "avx512_bf16", "amx_tile amx_int8"])
def test_without_announced_amx_no_child_is_started(announce, children: list[int], cache: Path, flags) -> None:
    announce(flags)
    assert not avoid_faulty_amx()
    assert not cache.exists()


def test_where_there_is_no_list_of_flags_no_child_is_started(
    children: list[int], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processor, "_CPUINFO", cache / "missing")
    assert not avoid_faulty_amx()


def test_an_answer_holds_for_its_processor_and_its_torch(
    announce, children: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    announce("amx_bf16 amx_tile")
    children += [0]
    assert not avoid_faulty_amx()
    announce("amx_bf16 amx_tile", megahertz=3000.0)  # the clock is not part of the processor
    assert not avoid_faulty_amx()

    announce("amx_bf16 amx_tile amx_int8")
    children += [1]
    assert avoid_faulty_amx()
    assert not children

    monkeypatch.setenv(LIMIT, "")
    monkeypatch.setattr("importlib.metadata.version", lambda package: f"another {package}")
    children += [0]
    assert not avoid_faulty_amx()
    assert not children


def test_a_child_that_was_killed_is_no_lasting_answer(announce, children: list[int], cache: Path) -> None:
    announce("amx_bf16 amx_tile")
    children += [-9]
    assert avoid_faulty_amx()
    assert not cache.exists()


@pytest.mark.parametrize("content", ["", "perhaps", "works\n"])
def test_a_damaged_answer_is_asked_for_again(
    announce, children: list[int], cache: Path, monkeypatch: pytest.MonkeyPatch, content: str
) -> None:
    announce("amx_bf16 amx_tile")
    children += [1, 1]
    assert avoid_faulty_amx()
    (answer,) = cache.iterdir()
    answer.write_text(content)
    monkeypatch.setenv(LIMIT, "")
    assert avoid_faulty_amx() == (content != "works\n")


def test_a_cache_that_cannot_be_written_breaks_nothing(
    announce, children: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    announce("amx_bf16 amx_tile")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    children += [1]
    assert avoid_faulty_amx()
