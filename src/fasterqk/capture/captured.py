"""What a capture returns: one tensor a layer, with the names and kinds of the layers beside it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, overload

from torch import Tensor

from fasterqk.errors import InputError

Kind = Literal["self", "encoder", "decoder", "cross"]
KINDS: tuple[Kind, ...] = ("self", "encoder", "decoder", "cross")


@dataclass(frozen=True)
class Captured(Sequence[Tensor]):
    """Attention probabilities in the order the model formed them, each ``(batch, head, query, key)``.

    ``names[i]`` is the module that formed ``captured[i]``. ``kinds[i]`` is ``"self"`` in a model with one
    stack; where there is cross-attention it is ``"encoder"``, ``"decoder"`` (their self-attention) or
    ``"cross"``. ``outputs`` is what the model returned.
    """

    probabilities: tuple[Tensor, ...]
    names: tuple[str, ...]
    kinds: tuple[Kind, ...]
    outputs: Any = field(default=None, repr=False)

    def select(self, kind: Kind) -> "Captured":
        """The layers of one kind; ``"self"`` means all that are not cross-attention."""
        if kind not in KINDS:
            raise InputError(f"unknown kind of attention {kind!r}; choose from {', '.join(KINDS)}")
        chosen = [i for i, own in enumerate(self.kinds) if own == kind or (kind == "self" and own != "cross")]
        return Captured(
            tuple(self.probabilities[i] for i in chosen),
            tuple(self.names[i] for i in chosen),
            tuple(self.kinds[i] for i in chosen),
            self.outputs,
        )

    @overload
    def __getitem__(self, index: int) -> Tensor: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Tensor]: ...
    def __getitem__(self, index: int | slice) -> Tensor | Sequence[Tensor]:
        return self.probabilities[index]

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.probabilities)

    def __len__(self) -> int:
        return len(self.probabilities)

    def __repr__(self) -> str:
        layers = ", ".join(
            f"{name} ({kind}) {tuple(tensor.shape)}"
            for name, kind, tensor in zip(self.names, self.kinds, self.probabilities, strict=True)
        )
        return f"Captured({len(self)} layers: {layers})"
