"""Slices of a fused weight as parameters of their own, in the same memory.

A leaf is a ``Parameter`` whose storage is a slice of the fused weight and whose gradient is a slice of the
fused gradient. The optimizer knows only the leaves, the module only the fused weight; nothing is copied
and no key changes. What would quietly pull the two apart is looked for at every step and refused.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import nn

from fasterqk.circuits.shadow import Shadow
from fasterqk.circuits.window import Window
from fasterqk.errors import InputError

COPYING = ("__deepcopy__", "__reduce_ex__")  # what copy and pickle ask for
_AGAIN = "make the optimizer after the model has its final weights, dtype and device"


class Fused:
    """A fused parameter and the leaves that stand for its slices in the optimizer.

    The ``windows`` cover it. ``copied`` says that leaves step on contiguous copies (:class:`Shadow`)
    where their slice is not one piece of memory, ``always`` that all of them do.
    """

    def __init__(
        self,
        name: str,
        parameter: nn.Parameter,
        windows: Sequence[Window],
        *,
        copied: bool = True,
        always: bool = False,
    ) -> None:
        self.name = name
        self.parameter = parameter
        self._windows = windows
        self._pointer = parameter.data_ptr()
        # detach() shares the version counter, so that autograd notices a step between a forward and its
        # backward pass, as it does without us.
        self.views = [window.view(parameter.detach()) for window in windows]
        self.leaves = [nn.Parameter(view) for view in self.views]
        for leaf in self.leaves:
            forbid_copies(leaf)
        self.shadows = {
            index: Shadow(leaf, view)
            for index, (leaf, view) in enumerate(zip(self.leaves, self.views, strict=True))
            if always or (copied and not view.is_contiguous())
        }
        self._gradient: torch.Tensor | None = None  # the fused gradient the leaves look at
        self._address = 0  # where it lies
        self._slices: list[torch.Tensor] = []  # and its slices, as given to the leaves
        self._watch()

    @property
    def strided(self) -> bool:
        """Whether some leaf steps on memory that is not in one piece."""
        return any(not view.is_contiguous() for i, view in enumerate(self.views) if i not in self.shadows)

    def _watch(self) -> None:
        """Point the leaves at every new gradient; the watch ends with this object."""
        seen = weakref.ref(self)

        def accumulated(_: torch.Tensor) -> None:
            fused = seen()
            if fused is not None:
                fused.accumulated()

        handle = self.parameter.register_post_accumulate_grad_hook(accumulated)
        weakref.finalize(self, handle.remove)

    def accumulated(self) -> None:
        """The backward pass has added to the fused gradient."""
        gradient = self.parameter.grad
        if gradient is not None and gradient is self._gradient:
            if all(leaf.grad is None for leaf in self.leaves):
                raise InputError(
                    f"the gradient of {self.name} was added to an old one, cleared on the optimizer's "
                    "side only; call optimizer.zero_grad() or model.zero_grad() before the backward pass"
                )
            return
        self._look_at(gradient)

    def collect(self) -> None:
        """Before a step: the leaves' gradients are slices of what the fused gradient is now.

        A gradient that somebody gave to a leaf itself is left alone while the fused one is as it was.
        """
        gradient = self.parameter.grad
        if gradient is self._gradient and (gradient is None or gradient.data_ptr() == self._address):
            return
        if gradient is None:
            for leaf, old in zip(self.leaves, self._slices, strict=True):
                if leaf.grad is old:
                    leaf.grad = None
            self._gradient, self._slices = None, []
            return
        self._look_at(gradient)

    def _look_at(self, gradient: torch.Tensor | None) -> None:
        if gradient is None:
            return
        if gradient.layout != torch.strided:
            raise InputError(
                f"{self.name} has a {gradient.layout} gradient, which cannot be sliced by circuit; "
                "make its layer with sparse=False"
            )
        detached = gradient.detach()
        self._gradient, self._address = gradient, gradient.data_ptr()
        self._slices = [window.view(detached) for window in self._windows]
        for leaf, part in zip(self.leaves, self._slices, strict=True):
            leaf.grad = part

    def clear(self, set_to_none: bool) -> None:
        """After the optimizer's own ``zero_grad`` cleared the leaves: clear the fused gradient too."""
        gradient = self.parameter.grad
        if set_to_none:
            self.parameter.grad = None
        elif gradient is not None:
            viewed = gradient is self._gradient and all(
                leaf.grad is part for leaf, part in zip(self.leaves, self._slices, strict=True)
            )
            if viewed:  # zeroed already, slice by slice
                return
            gradient.detach_().zero_()
        self._gradient, self._slices = None, []

    def check(self) -> None:
        """Raise unless the leaves still share the memory of the fused weight."""
        if self.parameter.data_ptr() != self._pointer:
            raise InputError(
                f"the memory of {self.name} was exchanged after the optimizer was made "
                f"(by .to(...), .half(), .data = ... or the like): {_AGAIN}"
            )
        for leaf, view in zip(self.leaves, self.views, strict=True):
            if leaf.data_ptr() != view.data_ptr():
                raise InputError(f"a slice of {self.name} was given other memory (.data = ...): {_AGAIN}")

    def enter(self) -> None:
        """Slices that are not in one piece step on copies."""
        for shadow in self.shadows.values():
            shadow.enter()

    def flush(self) -> None:
        """Write what the copies hold now into the fused weight, and stay on the copies."""
        for shadow in self.shadows.values():
            shadow.flush()

    def leave(self) -> None:
        """After a step: the fused weight holds the result, the leaves lie in its memory again."""
        for index, (leaf, view) in enumerate(zip(self.leaves, self.views, strict=True)):
            if index in self.shadows:
                self.shadows[index].leave()
            elif leaf.data_ptr() != view.data_ptr():  # an optimizer that assigns p.data = new
                view.copy_(leaf.detach())
                leaf.data = view


def forbid_copies(thing: nn.Parameter | torch.optim.Optimizer) -> None:
    """Make copying and pickling an error.

    A copied leaf would be part of no model, and a copied optimizer would lose its hooks, which torch does
    not copy, and with them ratios that change.
    """

    def refuse(*_: Any) -> NoReturn:
        raise InputError(
            "this optimizer is tied to its model and cannot be copied or pickled whole; "
            "call make_optimizer on the copied model and load_state_dict(optimizer.state_dict())"
        )

    for name in COPYING:
        setattr(thing, name, refuse)


def zero_grad_with(optimizer: torch.optim.Optimizer, fused: Sequence[Fused]) -> Callable[[bool], None]:
    """A ``zero_grad`` for ``optimizer`` that clears the fused gradients as well as the leaves'."""
    seen = weakref.ref(optimizer)

    def zero_grad(set_to_none: bool = True) -> None:
        found = seen()
        if found is not None:
            type(found).zero_grad(found, set_to_none)
        for each in fused:
            each.clear(set_to_none)

    return zero_grad
