"""Run ``main`` of a script in several processes joined by gloo, as torchrun does, but import torch once.

usage: python processes.py COUNT SCRIPT ARGUMENTS
"""

import importlib.util
import os
import sys
from collections.abc import Callable

from torch import multiprocessing
from torch.distributed import TCPStore


def start(rank: int, count: int, port: int, main: Callable[[], None]) -> None:
    """Run ``main`` as one process of the group; the variables are those that torchrun sets."""
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "GLOO_SOCKET_IFNAME": "lo",  # whatever the host is called
    }
    main()


if __name__ == "__main__":
    _, count, *sys.argv = sys.argv
    spec = importlib.util.spec_from_file_location("script", sys.argv[0])
    assert spec and spec.loader
    script = sys.modules["script"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    # This process keeps the port: whoever looks for a free one and hands on its number can lose it.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    multiprocessing.start_processes(
        start, (int(count), store.port, script.main), nprocs=int(count), start_method="fork"
    )
