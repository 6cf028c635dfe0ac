"""A survey: every model of a library, labelled or refused, with a second opinion by perturbation.

``survey`` runs over the names of transformers, timm, torchvision or diffusers. Each model is built and
labelled in a process of its own group, with limits of time and memory, so that a crash loses one model. One
dictionary per name says how it ended:

``verified``         labelled, and the probe saw every kind of attention block
``partly verified``  labelled, and the probe saw some of the blocks
``by name``          labelled by registry and names alone; a note says so
``refused``          refused in one line
``no attention``     there is none in it
``not built``        no model of this name can be built here
``too large``        it needs more memory than the survey gives it
``too slow``, ``died``, ``error``  the survey itself ended; a fault to look at

Names whose models have the same modules, classes, layouts and first labels are one architecture: the smallest
is probed, and the others refer to it (``as``).
"""

import collections
import json
import multiprocessing
import re
import time
import warnings
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from fasterqk.capture._modules import stack_of
from fasterqk.circuits._find import find_circuits
from fasterqk.circuits._from_config import can_be_rebuilt, small_copies
from fasterqk.circuits._guess import find_scopes
from fasterqk.circuits._inputs import accepted
from fasterqk.circuits._libraries import LIBRARIES, Library
from fasterqk.circuits._perturbation import contradictions
from fasterqk.circuits._probe import add_noise
from fasterqk.circuits._slices import NO_SOFTMAX, Circuits
from fasterqk.errors import InputError
from fasterqk.files import append_line, write_text

OUTCOMES = {
    "verified": "labelled, and the probe saw every kind of attention block",
    "partly verified": "labelled, the probe saw some of the blocks",
    "by name": "labelled by registry and names; the probe did not see it, and a note says so",
    "refused": "refused in one line",
    "no attention": "no attention in it; refused",
    "not built": "no model of this name can be built without files from elsewhere",
    "too large": "needs more memory than the survey gives a model",
    "too slow": "did not end in time",
    "died": "ended without an answer",
    "error": "ended in something else than a label or a refusal",
}
LABELLED = ("verified", "partly verified", "by name")
Found = dict[str, Any]


# --- One model ---


def architecture(library: Library, name: str) -> Found:
    """A text that is equal for models of one architecture, and the number of parameters."""
    try:
        with torch.device("meta"), _WithoutValues():
            model = library.build(name)
    except Exception:
        # Some constructors compute with numbers, which the meta device does not have.
        model = library.build(name)
    attention = find_scopes(model)
    parts = set()
    for path, module in model.named_modules():
        held = sorted((own, value.dim()) for own, value in module.named_parameters(recurse=False))
        inside = any(path == outer or path.startswith(outer + ".") for outer in attention)
        settings = sorted((k, v) for k, v in vars(module).items() if inside and isinstance(v, bool | str))
        parts.add(repr((stack_of(path), type(module).__name__, held, settings)))
    labels = ""
    try:
        if attention:
            labels = repr(sorted(_labels(find_circuits(model, verify=False)).items()))
    except InputError as error:
        labels = re.sub(r"\d+", "*", str(error)).partition(":")[0]
    size = sum(parameter.numel() for parameter in model.parameters())
    signature = "\n".join([*sorted(parts), labels])
    return {"signature": signature, "parameters": size, "attention": bool(attention)}


class _WithoutValues(TorchFunctionMode):
    """Skips what only fills or changes tensors without values, as initialisation does."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        in_place = name.endswith("_") and not name.startswith("_") and name not in _KEPT
        kwargs = kwargs or {}
        filled = args[0] if args else kwargs.get("tensor")  # torch.nn.init passes it by name
        if in_place and isinstance(filled, torch.Tensor) and filled.is_meta:
            return filled
        return func(*args, **kwargs)


# In place, but not of values.
_KEPT = {"requires_grad_", "resize_", "squeeze_", "unsqueeze_", "transpose_", "t_", "detach_", "set_"}


def surveyed(library: Library, name: str) -> Found:
    """What happens with one model: outcome, notes, and what a perturbation contradicts."""
    started = time.monotonic()
    try:
        model = library.build(name)
    except Exception as error:
        if _lacks_memory(error):
            raise
        return {"outcome": "not built", "why": _line(error)}
    found: Found = {"class": type(model).__name__}
    try:
        circuits = find_circuits(model)
    except InputError as error:
        word = "no attention" if str(error).startswith("no attention was found") else "refused"
        return found | {"outcome": word, "why": str(error), "seconds": _since(started)}
    found["labels"] = _labels(circuits)
    found["split"] = sorted({stack_of(piece.parameter) for piece in circuits if piece.axis is not None})
    found["notes"] = list(circuits.notes)
    unseen = any(note.startswith("not seen") for note in circuits.notes)
    seen = any("probe" in piece.decided_by for piece in circuits)
    found["outcome"] = "verified" if not unseen else "partly verified" if seen else "by name"
    found["hybrid"] = any(piece.decided_by == NO_SOFTMAX for piece in circuits)
    found |= _second_opinion(model, circuits)
    return found | {"seconds": _since(started)}


def _second_opinion(model: nn.Module, circuits: Circuits) -> Found:
    """The labels against perturbations, on a copy with noise; a large model's on its small copies."""
    candidates: Iterable[tuple[nn.Module, Circuits]] = [(model, circuits)]
    if can_be_rebuilt(model) and any(parameter.is_meta for parameter in model.parameters()):
        candidates = _labelled_small(model)
    for one, labels in candidates:
        copy = add_noise(one.eval())  # the last that is done with it
        run = accepted(copy)
        if run is None:
            continue
        try:
            judged, lines = contradictions(copy, list(labels), run)
        except Exception as error:
            return {"judged": 0, "contradictions": [], "second opinion": _line(error)}
        if judged:
            differing = _differing(_labels(circuits), _labels(labels)) if one is not model else []
            return {"judged": judged, "contradictions": lines, "differing": differing}
    return {"judged": 0, "contradictions": []}


def _labelled_small(model: Any) -> Iterator[tuple[nn.Module, Circuits]]:
    for small in small_copies(type(model), model.config):
        try:
            yield small, find_circuits(small)
        except InputError:
            continue


def _differing(large: dict[str, str], small: dict[str, str]) -> list[str]:
    return sorted(name for name, roles in small.items() if name in large and large[name] != roles)


def _labels(circuits: Circuits) -> dict[str, str]:
    """By stack of parameters the roles in order, repeated heads once; several where layers differ."""
    roles: dict[str, list[str]] = collections.defaultdict(list)
    for piece in circuits:
        roles[piece.parameter].append(piece.role)
    found: dict[str, set[str]] = collections.defaultdict(set)
    for name, parts in roles.items():
        found[stack_of(name)].add("+".join(dict.fromkeys(parts)))
    return {name: " or ".join(sorted(own)) for name, own in found.items() if own != {"rest"}}


def _line(error: BaseException) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0][:200]}" if text else type(error).__name__


def _since(started: float) -> float:
    return round(time.monotonic() - started, 2)


# --- All models, in processes that may crash ---


def _work(task: Any, library: str, names: list[str], gigabytes: float, connection: Any) -> None:
    """Send what ``task`` finds of each name; runs in a process of its own."""
    _limit_memory(gigabytes)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    if library == "transformers":
        import transformers

        transformers.logging.set_verbosity_error()
    for name in names:
        try:
            found = task(LIBRARIES[library], name)
        except Exception as error:
            found = {"outcome": "too large" if _lacks_memory(error) else "error", "why": _line(error)}
        connection.send(found)


def _lacks_memory(error: BaseException) -> bool:
    """Whether memory ran out: torch says so with a ``RuntimeError``, or with Python's own error."""
    texts = ("can't allocate memory", "not enough memory", "bad_alloc", "out of memory")
    return isinstance(error, MemoryError) or any(text in str(error) for text in texts)


def _limit_memory(gigabytes: float) -> None:
    try:
        import resource
    except ImportError:
        return  # not on Windows
    limit = int(gigabytes * 2**30)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _each(task: Any, library: str, names: list[str], seconds: float, gigabytes: float) -> Iterator[Found]:
    """What ``task`` finds of each name; one that takes too long or dies costs only itself."""
    context = multiprocessing.get_context("spawn")
    done = 0
    while done < len(names):
        here, there = context.Pipe()
        arguments = (task, library, names[done:], gigabytes, there)
        process = context.Process(target=_work, args=arguments, daemon=True)
        process.start()
        there.close()
        try:
            while done < len(names):
                try:
                    # A new process first imports everything.
                    found = here.recv() if here.poll(seconds) else {"outcome": "too slow"}
                except EOFError:
                    process.join()
                    found = {"outcome": "died", "why": f"its process ended with code {process.exitcode}"}
                done += 1
                yield found
                if found.get("outcome") in ("too slow", "died"):
                    break
        finally:
            process.kill()
            process.join()


def survey(
    library: str,
    only: str | None = None,
    out: str | Path | None = None,
    seconds: float = 120.0,
    gigabytes: float = 12.0,
    progress: Any = None,
) -> list[Found]:
    """One dictionary per model name of ``library`` (see above), in the order of the names.

    ``only``: a pattern of names. ``out``: a file of JSON lines, to which each model is added as soon as it
    is done; names that are in it already are not run again. ``seconds`` and ``gigabytes`` limit each model.
    ``progress(done, total, note)`` is told of every model.
    """
    if library not in LIBRARIES:
        raise InputError(f"there is no survey of {library!r}; there is one of {', '.join(LIBRARIES)}")
    names = [name for name in LIBRARIES[library].names() if only is None or fnmatchcase(name, only)]
    if not names:
        raise InputError(f"no model of {library} is called {only!r}")
    done = {one["name"]: one for one in read_survey(out, library)} if out is not None else {}
    told = _Teller(library, out, len(names), sum(name in done for name in names), progress)
    left = [name for name in names if name not in done]
    groups = {name: [name] for name in left}
    if not LIBRARIES[library].by_configuration and len(left) > 1:
        groups = _by_architecture(library, left, seconds, gigabytes, progress)
    for found, (name, same) in zip(
        _each(surveyed, library, list(groups), seconds, gigabytes), groups.items(), strict=True
    ):
        for own in same:
            done[own] = told(own, found, None if own == name else name)
    return [done[name] for name in names]


def _by_architecture(
    library: str, names: list[str], seconds: float, gigabytes: float, progress: Any
) -> dict[str, list[str]]:
    """By the smallest model of each architecture the names of all that have it."""
    members: dict[str, list[tuple[int, str]]] = {}
    attend: set[str] = set()
    parts = _each(architecture, library, names, seconds, gigabytes)
    for number, (name, found) in enumerate(zip(names, parts, strict=True)):
        # What cannot be built is an architecture of its own, and tried again.
        key = found.get("signature", name)
        members.setdefault(key, []).append((found.get("parameters", 0), name))
        attend |= {key} if found.get("attention") else set()
        if progress is not None:
            progress(number + 1, len(names), "architectures")
    # Those with attention first: whoever stops early has the interesting ones.
    groups = sorted(members.items(), key=lambda group: (group[0] not in attend, min(group[1])))
    return {min(same)[1]: [name for _, name in sorted(same)] for _, same in groups}


class _Teller:
    """Writes and reports what was found, one name at a time."""

    def __init__(self, library: str, out: Any, total: int, done: int, progress: Any) -> None:
        self.library, self.out, self.total, self.done, self.progress = library, out, total, done, progress

    def __call__(self, name: str, found: Found, like: str | None) -> Found:
        own = {"library": self.library, "name": name, **found}
        if like is not None:
            own["as"] = like
        if self.out is not None:
            append_line(self.out, json.dumps(own))
        self.done += 1
        if self.progress is not None:
            self.progress(self.done, self.total, f"{name}: {found['outcome']}")
        return own


def read_survey(path: str | Path, library: str) -> list[Found]:
    """The lines of a survey; a last line that was cut off by a kill is left out and run again."""
    file = Path(path)
    if not file.exists():
        return []
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
    if lines and not lines[-1].endswith("\n"):
        lines.pop()
        write_text(file, "".join(lines))
    found = []
    for number, line in enumerate(lines, 1):
        try:
            one = json.loads(line)
            known = one["library"] == library and isinstance(one["name"], str) and one["outcome"] in OUTCOMES
        except (ValueError, KeyError, TypeError, RecursionError):
            known = False
        if not known:
            raise InputError(
                f"{str(path)!r} line {number} is not of a survey of {library}; name another file"
            )
        found.append(one)
    return found
