"""Label or refuse every model of a library, and check the labels by perturbation.

``survey`` runs over the names of transformers, timm, torchvision or diffusers. Models are built and labelled
in a child process with limits of time and memory, so that a crash costs one model. The result is one entry
per name, a dictionary whose ``outcome`` is a key of ``OUTCOMES``. ``too slow``, ``died`` and ``error`` are
faults to look at.

Names whose models have the same modules, classes, layouts and first labels are one architecture: the smallest
is probed, and the entries of the others name it (``as``).
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

from fasterqk.errors import InputError
from fasterqk.files import append_line, write_text
from fasterqk.labels._from_config import can_be_rebuilt, small_copies
from fasterqk.labels.find import find_circuits
from fasterqk.labels.names import find_scopes
from fasterqk.labels.probe import add_noise
from fasterqk.labels.slices import NO_SOFTMAX, Circuits
from fasterqk.trace.modules import stack_of
from tools.survey.inputs import accepted, accepted_inputs, is_of_diffusers
from tools.survey.libraries import LIBRARIES, Library
from tools.survey.perturbation import contradictions

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
Entry = dict[str, Any]


# --- One model ---


def architecture(library: Library, name: str) -> Entry:
    """A signature that is equal for models of one architecture, and the number of parameters."""
    try:
        with torch.device("meta"), _WithoutValues():
            model = library.build(name)
    except Exception:
        # Some constructors compute with numbers, which the meta device does not have.
        model = library.build(name)
    attention = find_scopes(model)
    parts = set()
    for path, module in model.named_modules():
        dimensions = sorted((key, value.dim()) for key, value in module.named_parameters(recurse=False))
        inside = any(path == outer or path.startswith(outer + ".") for outer in attention)
        settings = sorted((k, v) for k, v in vars(module).items() if inside and isinstance(v, bool | str))
        parts.add(repr((stack_of(path), type(module).__name__, dimensions, settings)))
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
    """Skips in-place operations on meta tensors, such as initialisation: there are no values to change."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        in_place = name.endswith("_") and not name.startswith("_") and name not in _KEPT
        kwargs = kwargs or {}
        filled = args[0] if args else kwargs.get("tensor")  # torch.nn.init passes it by name
        if in_place and isinstance(filled, torch.Tensor) and filled.is_meta:
            return filled
        return func(*args, **kwargs)


# These work in place, but change no values.
_KEPT = {"requires_grad_", "resize_", "squeeze_", "unsqueeze_", "transpose_", "t_", "detach_", "set_"}


def survey_model(library: Library, name: str) -> Entry:
    """The entry of one model: outcome, labels, notes, and what the perturbation contradicts."""
    started = time.monotonic()
    try:
        model = library.build(name)
    except Exception as error:
        if _lacks_memory(error):
            raise
        return {"outcome": "not built", "why": _line(error)}
    entry: Entry = {"class": type(model).__name__}
    try:
        inputs = accepted_inputs(model.eval()) if is_of_diffusers(model) else None
        circuits = find_circuits(model, inputs=inputs)
    except InputError as error:
        outcome = "no attention" if str(error).startswith("no attention was found") else "refused"
        return entry | {"outcome": outcome, "why": str(error), "seconds": _since(started)}
    entry["labels"] = _labels(circuits)
    entry["split"] = sorted({stack_of(piece.parameter) for piece in circuits if piece.axis is not None})
    entry["notes"] = list(circuits.notes)
    some_unseen = any(note.startswith("not seen") for note in circuits.notes)
    some_probed = any("probe" in piece.decided_by for piece in circuits)
    entry["outcome"] = "verified" if not some_unseen else "partly verified" if some_probed else "by name"
    entry["hybrid"] = any(piece.decided_by == NO_SOFTMAX for piece in circuits)
    entry |= _second_opinion(model, circuits)
    return entry | {"seconds": _since(started)}


def _second_opinion(model: nn.Module, circuits: Circuits) -> Entry:
    """Check the labels by perturbation: of the model, or of small copies where it has no weights."""
    candidates: Iterable[tuple[nn.Module, Circuits]] = [(model, circuits)]
    if can_be_rebuilt(model) and any(parameter.is_meta for parameter in model.parameters()):
        candidates = _labelled_small(model)
    for candidate, labels in candidates:
        noisy = add_noise(candidate.eval())  # nothing uses the candidate after this
        run = accepted(noisy)
        if run is None:
            continue
        try:
            judged, lines = contradictions(noisy, list(labels), run)
        except Exception as error:
            return {"judged": 0, "contradictions": [], "second opinion": _line(error)}
        if judged:
            differing = _differing(_labels(circuits), _labels(labels)) if candidate is not model else []
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
    """The roles per stack of parameters, in order and each once; joined by "or" where layers differ."""
    roles: dict[str, list[str]] = collections.defaultdict(list)
    for piece in circuits:
        roles[piece.parameter].append(piece.role)
    by_stack: dict[str, set[str]] = collections.defaultdict(set)
    for name, parts in roles.items():
        by_stack[stack_of(name)].add("+".join(dict.fromkeys(parts)))
    return {stack: " or ".join(sorted(layers)) for stack, layers in by_stack.items() if layers != {"rest"}}


def _line(error: BaseException) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0][:200]}" if text else type(error).__name__


def _since(started: float) -> float:
    return round(time.monotonic() - started, 2)


# --- All models, in processes that may crash ---


def _work(task: Any, library: str, names: list[str], gigabytes: float, connection: Any) -> None:
    """In a child process: send the entry that ``task`` makes of every name."""
    _limit_memory(gigabytes)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    if library == "transformers":
        import transformers

        transformers.logging.set_verbosity_error()
    for name in names:
        try:
            entry = task(LIBRARIES[library], name)
        except Exception as error:
            entry = {"outcome": "too large" if _lacks_memory(error) else "error", "why": _line(error)}
        connection.send(entry)


def _lacks_memory(error: BaseException) -> bool:
    """Whether memory ran out: torch raises ``RuntimeError`` or ``MemoryError``."""
    texts = ("can't allocate memory", "not enough memory", "bad_alloc", "out of memory")
    return isinstance(error, MemoryError) or any(text in str(error) for text in texts)


def _limit_memory(gigabytes: float) -> None:
    try:
        import resource
    except ImportError:
        return  # not on Windows
    limit = int(gigabytes * 2**30)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _in_processes(
    task: Any, library: str, names: list[str], seconds: float, gigabytes: float
) -> Iterator[Entry]:
    """The entry that ``task`` makes of every name; a name that takes too long or dies costs only itself."""
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
                    # The time of the first name includes the imports of a new process.
                    entry = here.recv() if here.poll(seconds) else {"outcome": "too slow"}
                except EOFError:
                    process.join()
                    entry = {"outcome": "died", "why": f"its process ended with code {process.exitcode}"}
                done += 1
                yield entry
                if entry.get("outcome") in ("too slow", "died"):
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
) -> list[Entry]:
    """Label or refuse the models of a library.

    Arguments:
        library: a key of ``LIBRARIES``.
        only: a pattern of names, such as ``vit_*``.
        out: a file of JSON lines. Every entry is added as soon as it is there; names that the file has are
            not run again.
        seconds, gigabytes: the limits of one model.
        progress: called as ``progress(done, total, note)`` after every model.

    Returns:
        One entry per name, in the order of the names.

    Raises:
        InputError: no such library or name, or ``out`` is another file.
    """
    if library not in LIBRARIES:
        raise InputError(f"there is no survey of {library!r}; there is one of {', '.join(LIBRARIES)}")
    names = [name for name in LIBRARIES[library].names() if only is None or fnmatchcase(name, only)]
    if not names:
        raise InputError(f"no model of {library} is called {only!r}")
    done = {entry["name"]: entry for entry in read_survey(out, library)} if out is not None else {}
    record = _Recorder(library, out, len(names), sum(name in done for name in names), progress)
    left = [name for name in names if name not in done]
    groups = {name: [name] for name in left}
    if not LIBRARIES[library].by_configuration and len(left) > 1:
        groups = _by_architecture(library, left, seconds, gigabytes, progress)
    entries = _in_processes(survey_model, library, list(groups), seconds, gigabytes)
    for entry, (smallest, members) in zip(entries, groups.items(), strict=True):
        for name in members:
            done[name] = record(name, entry, None if name == smallest else smallest)
    return [done[name] for name in names]


def _by_architecture(
    library: str, names: list[str], seconds: float, gigabytes: float, progress: Any
) -> dict[str, list[str]]:
    """Names grouped by architecture; the key is the smallest model, the value all names that share it."""
    members: dict[str, list[tuple[int, str]]] = {}
    attend: set[str] = set()
    entries = _in_processes(architecture, library, names, seconds, gigabytes)
    for number, (name, entry) in enumerate(zip(names, entries, strict=True)):
        # A name that cannot be built is an architecture by itself, and tried again.
        key = entry.get("signature", name)
        members.setdefault(key, []).append((entry.get("parameters", 0), name))
        attend |= {key} if entry.get("attention") else set()
        if progress is not None:
            progress(number + 1, len(names), "architectures")
    # Those with attention first: a survey that is stopped early has the interesting ones.
    groups = sorted(members.items(), key=lambda group: (group[0] not in attend, min(group[1])))
    return {min(same)[1]: [name for _, name in sorted(same)] for _, same in groups}


class _Recorder:
    """Writes entries to the file and reports progress."""

    def __init__(self, library: str, out: Any, total: int, done: int, progress: Any) -> None:
        self.library, self.out, self.total, self.done, self.progress = library, out, total, done, progress

    def __call__(self, name: str, entry: Entry, probed: str | None) -> Entry:
        entry = {"library": self.library, "name": name, **entry}
        if probed is not None:
            entry["as"] = probed
        if self.out is not None:
            append_line(self.out, json.dumps(entry))
        self.done += 1
        if self.progress is not None:
            self.progress(self.done, self.total, f"{name}: {entry['outcome']}")
        return entry


def read_survey(path: str | Path, library: str) -> list[Entry]:
    """The entries of a file; a last line that a kill cut off is removed, and its model runs again."""
    file = Path(path)
    if not file.exists():
        return []
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
    if lines and not lines[-1].endswith("\n"):
        lines.pop()
        write_text(file, "".join(lines))
    entries = []
    for number, line in enumerate(lines, 1):
        try:
            entry = json.loads(line)
            valid = isinstance(entry["name"], str) and entry["outcome"] in OUTCOMES
            valid = valid and entry["library"] == library
        except (ValueError, KeyError, TypeError, RecursionError):
            valid = False
        if not valid:
            raise InputError(
                f"{str(path)!r} line {number} is not of a survey of {library}; name another file"
            )
        entries.append(entry)
    return entries
