"""Runs that end in time: a speech model fed noise may go on talking for hours."""

import time
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode


class Bounded(TorchFunctionMode):
    """Ends what runs inside after ``seconds``, or at a tensor of more than ``numbers``."""

    def __init__(self, seconds: float, numbers: int = 2**26) -> None:
        super().__init__()
        self.deadline, self.numbers = time.monotonic() + seconds, numbers

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if time.monotonic() > self.deadline:
            raise TimeoutError
        output = func(*args, **(kwargs or {}))
        if isinstance(output, Tensor) and output.numel() > self.numbers:
            raise MemoryError
        return output
