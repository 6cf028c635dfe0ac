"""``FirstPass``: the labels of an optimizer against the first training pass of its model.

``make_optimizer`` puts hooks on the attention blocks. In the first training pass, one block per stack runs
again, alone, with the same inputs and weights (``probe_call``: unsharded, whatever wraps the model). The rows
that make queries, keys and values are compared with the labels, heads included. A contradiction raises
``InputError`` at the end of that pass, before the first step; then the hooks are removed. A step without this
check warns once if labels rest on names alone.
"""

import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fasterqk.errors import InputError
from fasterqk.labels._signals import CONTEXT, KEY, QUERY, finding_from_gradients, matrices_behind
from fasterqk.labels._verdicts import slices_by_evidence
from fasterqk.labels.find import labels_text, likely_labels, resting_on_names, stack_names
from fasterqk.labels.names import Scope, nearest, scopes_of, stacks
from fasterqk.labels.probe import float_tensors, probe_call
from fasterqk.labels.slices import NO_SOFTMAX, Circuits, Slice, as_label, joined, whole_slice
from fasterqk.trace.calls import (
    AttentionCall,
    AttentionTrace,
    Frame,
    Operation,
    Running,
    innermost_with_weights,
    probing,
)
from fasterqk.trace.modules import nothing_compiled, parameters_by_module, stack_of

_BY_HEAD = "circuits=find_circuits(model, inputs=batch, heads=True)"
_VERIFY = "find_circuits(model, inputs=batch, verify=True) verifies them, labels= names them"


class FirstPass:
    """Compares ``circuits`` with the first training pass of ``model``.

    ``by_role``: compare roles instead of circuits. ``unseen``: why a stack was not compared yet, by its first
    block. ``by_name``: the first blocks of the stacks whose labels rest on names.
    """

    def __init__(self, model: nn.Module, circuits: Circuits, by_role: bool) -> None:
        self._model = weakref.ref(model)
        self._by_role = by_role
        self._scopes = scopes_of(model, circuits)
        self._every = _by_parameter(model, circuits)
        self._labels: dict[str, dict[str, list[Slice]]] = {path: {} for path in self._scopes}
        for name, parts in self._every.items():
            scope = nearest(name, self._scopes)
            if scope is not None:
                self._labels[scope.path][name] = parts
        self._heads = any(part.head is not None for part in circuits)
        scopes = {path: scope for path, scope in self._scopes.items() if self._is_open(path)}
        self._stacks = stacks(model, scopes)
        self._first = {path: first for first, paths in self._stacks.items() for path in paths}
        self.unseen = dict.fromkeys(self._stacks, "no training pass was seen")
        self.by_name = self._stacks.keys() & set(resting_on_names(circuits))
        self.refusal = ""
        self._wrong: list[str] = []
        self._right: dict[str, Any] = {}
        self._outermost: nn.Module | None = None
        self._session, self._watching = ExitStack(), ExitStack()
        self._looking: _Looking | None = None
        self._running: Running | None = None
        self._handles: list[Any] = []
        self._warned = self._rehearsing = False

    def _is_open(self, path: str) -> bool:
        """Whether a label in the block is not the user's; user's labels are not questioned."""
        parts = [part for parts in self._labels[path].values() for part in parts]
        ours = [part for part in parts if part.decided_by != "label"]
        return bool(ours) and not any(part.decided_by == NO_SOFTMAX for part in ours)

    # --- Hooks ---

    def attach(self) -> None:
        """Put hooks on the attention blocks and the modules around them."""
        model = self._model()
        if model is None or not self._stacks:
            return
        around = {path[:i] for path in self._first for i, letter in enumerate(path) if letter == "."}
        for path in dict.fromkeys(["", *around, *self._first]):
            module = model.get_submodule(path)
            enter, leave = _Hook(self, path, leaves=False), _Hook(self, path, leaves=True)
            self._handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
            self._handles.append(module.register_forward_hook(leave, always_call=True, prepend=True))
        weakref.finalize(self, _remove, self._handles)

    def detach(self) -> None:
        """Remove the hooks."""
        self._session.close()
        self._watching.close()
        self._outermost = None
        _remove(self._handles)

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        """Compare in a pass on copies of the model, and keep hooks and state for the first real pass."""
        unseen, by_name, self._rehearsing = dict(self.unseen), set(self.by_name), True
        try:
            yield
        finally:
            self.unseen, self.by_name, self._rehearsing = unseen, by_name, False

    def entered(self, path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A module begins to run."""
        model = self._model()
        if model is None or not self._handles or probing():
            return
        if self._outermost is None:
            if not torch.is_grad_enabled():
                return  # no training pass
            self._outermost = module
            self._session.enter_context(nothing_compiled())
            if self.by_name:
                # Attention may also be where no name shows it.
                if self._running is None:  # it remains from a pass that failed
                    self._running = Running()
                    self._watching.enter_context(self._running.watching(model))
                self._running.frames.clear()
                looking = _Looking(self._running.frames, self._scopes)
                self._looking = self._session.enter_context(looking)
        first = self._first.get(path)
        if first in self.unseen and self._outermost is not None:
            self._compare(model, path, first, args, kwargs)
            if not self.unseen and self._looking is None:
                self._session.close()  # what is compiled may run compiled again

    def left(self, module: nn.Module) -> None:
        """A module has run; the end of the pass raises a contradiction."""
        if module is not self._outermost or probing():
            return
        looking, model = self._looking, self._model()
        self._session.close()
        self._outermost = self._looking = None
        if sys.exc_info()[0] is not None:
            return  # the pass has failed, and torch is going through its hooks
        self._watching.close()
        self._running = None
        if looking is not None and looking.elsewhere and model is not None:
            self._refuse_elsewhere(model, looking.elsewhere)
        if not self.unseen and not self._rehearsing:
            self.detach()
        if self.refusal:
            raise InputError(self.refusal)

    # --- Comparison ---

    def _compare(
        self, model: nn.Module, path: str, first: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        scope = self._scopes[path]
        try:
            evidence = probe_call(model, path, args, kwargs, self._heads)
            verdicts = slices_by_evidence(model, scope, evidence, self._heads)
        except InputError as error:
            self.refusal = self.refusal or str(error)
            del self.unseen[first]
            return
        except Exception as error:
            # A pass must not fail because it cannot be observed.
            self.unseen[first] = f"{type(error).__name__}: {error}".splitlines()[0]
            return
        if verdicts is None:
            self.unseen[first] = (
                evidence.failure.partition("\n")[0] or "no softmax of queries and keys was seen"
            )
            return
        del self.unseen[first]
        self.by_name.discard(first)
        wrong = {
            name: parts
            for name, parts in verdicts.items()
            if self._contradicts(self._labels[path].get(name, []), parts)
        }
        if wrong:
            self._refuse(model, path, first, wrong)
        if path in evidence.foreign:
            self._compare_makers(model, evidence.inputs, float_tensors((args, kwargs)))

    def _compare_makers(self, model: nn.Module, codes: Sequence[int], tensors: Sequence[Tensor]) -> None:
        """Compare the parameters that make keys and values outside the block that they enter."""
        arguments = [(code, tensor) for code, tensor in zip(codes, tensors, strict=False) if not code & QUERY]
        keys = [tensor for code, tensor in arguments if code & KEY]
        values = [tensor for code, tensor in arguments if code & CONTEXT]
        names = {id(parameter): name for name, parameter in parameters_by_module(model)}
        sharded = any(hasattr(parameter, "placements") for parameter in model.parameters())
        for maker in {id(m): m for tensor in (*keys, *values) for m in matrices_behind(tensor)}.values():
            name = names.get(id(maker))
            labelled = self._every.get(name or "", [])
            if name is None or not labelled or any(part.decided_by == "label" for part in labelled):
                continue
            # A gradient would trigger the hooks of sharded modules.
            finding = None if sharded else finding_from_gradients(name, maker, keys, values)
            if finding is None and any(part.circuit in ("qk", "shared") for part in labelled):
                continue
            keys_alone = [replace(whole_slice(name, maker.numel()), role="k")]
            parts = keys_alone if finding is None else list(finding.slices)
            if _settings(labelled, self._by_role) != _settings(parts, self._by_role):
                self._labels.setdefault("", {})[name] = labelled
                self._refuse(model, "", "", {name: parts})

    def _contradicts(self, labelled: Sequence[Slice], verdict: Sequence[Slice]) -> bool:
        if not labelled or any(part.decided_by == "label" for part in labelled):
            return False
        return _settings(labelled, self._by_role) != _settings(verdict, self._by_role)

    def _refuse(self, model: nn.Module, path: str, first: str, wrong: dict[str, list[Slice]]) -> None:
        for name, parts in wrong.items():
            self._wrong.append(
                f"in {stack_of(name)} {_spoken(parts)}, labelled {_spoken(self._labels[path][name])}"
            )
            if as_label(parts) != as_label(self._labels[path][name]):
                for other in self._stacks.get(first, [path]):
                    self._right[other + name.removeprefix(path)] = as_label(parts)
        more = f" (and {len(self._wrong) - 1} more parameters)" if len(self._wrong) > 1 else ""
        right = labels_text(model, self._right) if self._right else _BY_HEAD
        self.refusal = (
            f"the first training pass contradicts the labels: {self._wrong[0]}{more}; no step was taken; "
            f"make the optimizer with {right}"
        )

    def _refuse_elsewhere(self, model: nn.Module, paths: Iterable[str]) -> None:
        path = next(iter(paths))
        kind = type(model.get_submodule(path)).__name__
        self.refusal = self.refusal or (
            f"{path or 'the model'} ({kind}) forms attention in the first training pass, but nothing in it "
            "is labelled; no step was taken; name what makes queries and keys, for example "
            + labels_text(model, likely_labels(model, [path]))
        )

    # --- Steps ---

    def before_step(self) -> None:
        """Refuse a step after a contradiction; warn once if labels rest on names alone."""
        if self.refusal:
            raise InputError(self.refusal)
        if self._handles:
            self.detach()
        if self.by_name and not self._warned:
            self._warned = True
            blocks, reason = stack_names(sorted(self.by_name)), self.unseen[min(self.by_name)]
            warnings.warn(
                f"the labels of {blocks} rest on names: {reason} before this step; {_VERIFY}", stacklevel=2
            )

    def note(self) -> str:
        """For ``describe``: the blocks whose labels rest on names so far."""
        blocks = stack_names(sorted(self.by_name))
        return f" (labels by name until the first training pass: {blocks})" if blocks else ""


def _by_parameter(model: nn.Module, circuits: Circuits) -> dict[str, list[Slice]]:
    """The labelled slices by parameter, under the path of its module."""
    inside = {id(parameter): name for name, parameter in parameters_by_module(model)}
    names = {name: inside[id(parameter)] for name, parameter in model.named_parameters()}
    slices: dict[str, list[Slice]] = {}
    for part in circuits:
        slices.setdefault(names.get(part.parameter, part.parameter), []).append(part)
    return slices


def _remove(handles: list[Any]) -> None:
    while handles:
        handles.pop().remove()


class _Hook:
    """A hook with a weak reference to its observer, which can be copied and pickled with a model.

    A compiled model breaks its graph to call it, except with ``fullgraph``.
    """

    def __init__(self, observer: FirstPass, path: str, leaves: bool) -> None:
        self.observer: Callable[[], FirstPass | None] = weakref.ref(observer)
        self.path, self.leaves = path, leaves
        self.call = torch.compiler.disable(self.observe)

    def __reduce__(self) -> Any:
        return _Nothing, ()

    def __deepcopy__(self, memo: Any) -> "_Hook":
        return self  # it observes copies in ``isolated``

    def observe(self, module: nn.Module, *call: Any) -> None:
        observer = self.observer()
        if observer is not None and self.leaves:
            observer.left(module)
        elif observer is not None:
            observer.entered(self.path, module, *call)

    def __call__(self, *call: Any) -> None:
        if not torch.compiler.is_compiling() or _may_break():
            self.call(*call)


class _Nothing:
    """The hook of a model that was pickled."""

    def __call__(self, *call: Any) -> None:
        return None


def _may_break() -> bool:
    """Whether the graph that is being traced may break."""
    try:
        from torch._dynamo.symbolic_convert import InstructionTranslator

        translator: Any = InstructionTranslator.current_tx()
        return not (translator.one_graph or translator.error_on_graph_break)
    except Exception:
        return False


_may_break._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _settings(parts: Sequence[Slice], by_role: bool) -> list[tuple[Any, ...]]:
    """The entries that get a common rate, neighbours of one kind joined."""

    def kind(part: Slice) -> tuple[Any, ...]:
        return (part.role if by_role else part.circuit, part.head)

    return [(kind(part), part.axis, part.start, part.stop) for part in joined(parts, kind)]


def _spoken(parts: Sequence[Slice]) -> str:
    """``0:64 q, 64:128 k (rows)``."""
    if parts[0].axis is None:
        return f"all is {parts[0].role}"
    heads = any(part.head is not None for part in parts)
    shown = [
        f"{part.start}:{part.stop} {part.role}" + (f" of head {part.head}" if heads else "") for part in parts
    ]
    axis = {0: "rows", 1: "columns"}.get(parts[0].axis, f"axis {parts[0].axis}")
    return f"{axis} " + ", ".join(shown[:6]) + (", ..." if len(shown) > 6 else "")


# --- Attention in modules with other names ---


class _Looking(AttentionTrace):
    """Collects in ``elsewhere`` the modules that form attention outside of the known blocks."""

    def __init__(self, frames: Sequence[Frame], known: dict[str, Scope]) -> None:
        super().__init__(frames)
        self.known = known
        self.elsewhere: dict[str, None] = {}

    def kernel(self, operation: Operation) -> Any:
        """Torch's kernels run as they are: this is a training pass."""
        self._attends()
        return operation.run()

    def weighed(self, call: AttentionCall) -> None:
        """A softmax of queries times keys has weighted values."""
        if call.products:
            self._attends()

    def _attends(self) -> None:
        path = innermost_with_weights(self.frames)
        if path is not None and not any(frame.name in self.known for frame in self.frames):
            self.elsewhere[path] = None
