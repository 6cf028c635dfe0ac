"""Processors that announce AMX, Intel's matrix instructions, but cannot run them.

Some virtual machines have such processors. PyTorch's oneDNN then picks AMX for products in half precision,
and the process dies ("Illegal instruction") or the product raises "could not create a primitive". Without AMX
the same products work. A dead process cannot recover, so a child process tries first; its answer is cached.
"""

import hashlib
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from fasterqk.errors import InputError
from fasterqk.files import user_cache, write_text

# Set to 1 by tests: AMX counts as announced, and the child process dies as it would on a faulty processor.
SIMULATE_FAULT = "FASTERQK_TEST_NO_BF16"

# Today's name and that of before oneDNN 2.0; both work, and users may have set either.
_LIMIT, _OLD_LIMIT = "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"
_WITHOUT_AMX = "AVX512_CORE_BF16"
_CPUINFO = Path(
    "/proc/cpuinfo"
)  # on Linux; elsewhere oneDNN does not use AMX, or it is unknown whether it does
_IDENTITY = ("vendor_id", "cpu family", "model", "model name", "stepping", "microcode", "flags")

# Linear layers and batched products take different paths through oneDNN. No core file is left behind.
_TRIAL = f"""
import os, resource, signal
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
if os.environ.get({SIMULATE_FAULT!r}) == "1":
    os.kill(os.getpid(), signal.SIGILL)
import torch
rows = torch.ones(64, 256, dtype=torch.bfloat16, requires_grad=True)
torch.nn.Linear(256, 256, dtype=torch.bfloat16)(rows).sum().backward()
heads = rows.detach().view(4, 16, 256)
heads @ heads.transpose(1, 2)
"""


def avoid_faulty_amx() -> bool:
    """Keep oneDNN from using AMX if the processor announces it but cannot run it; returns whether it did.

    Sets ``ONEDNN_MAX_CPU_ISA`` for this process and the ones it starts, unless the user has set it. Where the
    processor does not announce AMX, nothing is tried. Call it before the first product of the process:
    importing torch does not read the variable, but any product does, once and for all, float32 included.
    """
    if os.environ.get(_LIMIT) or os.environ.get(_OLD_LIMIT):
        return False
    processor = _processor_with_amx()
    if processor is None or _amx_works(processor):
        return False
    os.environ[_LIMIT] = _WITHOUT_AMX
    return True


def _processor_with_amx() -> str | None:
    """Model and flags of a processor that announces AMX, else None."""
    text = ""
    with suppress(OSError):
        text = _CPUINFO.read_text(errors="replace").partition("\n\n")[0]  # the first; all are alike
    pairs = (line.partition(":") for line in text.splitlines())
    facts = {name.strip(): value.strip() for name, _, value in pairs}
    simulated = os.environ.get(SIMULATE_FAULT) == "1"
    if not simulated and not {"amx_tile", "amx_bf16"} <= set(facts.get("flags", "").split()):
        return None
    return "\n".join([*(facts.get(name, "") for name in _IDENTITY), "simulated" if simulated else ""])


def _amx_works(processor: str) -> bool:
    from importlib.metadata import PackageNotFoundError, version

    try:
        key = f"{processor}\n{version('torch')}"
    except PackageNotFoundError:
        return True  # without torch nothing can fail
    cache: Path | None = None
    with suppress(OSError, RuntimeError):  # no home folder, or one that cannot be read
        cache = user_cache() / f"amx-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
        answer = cache.read_text(errors="replace").strip()
        if answer in ("works", "fails"):
            return answer == "works"
    # -P: a file torch.py in the working folder is not PyTorch.
    command = [sys.executable, "-P", "-c", _TRIAL]
    code = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True).returncode
    # A child that was killed says nothing about the next time.
    if cache is not None and code in (0, 1, -signal.SIGILL):
        with suppress(OSError, InputError):  # a full or read-only disk: the next process tries again
            write_text(cache, "fails\n" if code else "works\n")
    return code == 0
