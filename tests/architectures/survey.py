"""Every model type of the installed transformers, labelled or refused.

    python tests/architectures/survey.py --out survey.jsonl

For each type the default configuration is built without weights and labelled as ``fasterqk circuits TYPE``
does. A small copy with random weights is labelled too; both must agree, and where the model returns its own
attention, that must not contradict the labels (`second_opinion.py`). One JSON line a type goes to the file
given with ``--out``; ``--markdown FILE`` turns such lines into the table of docs/architectures.md.
"""

import argparse
import collections
import json
import multiprocessing
import re
import sys
import time
import warnings
from copy import deepcopy
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))


def surveyed(kind: str) -> dict[str, Any]:
    """What happens with one model type."""
    from fasterqk.circuits import find_circuits
    from fasterqk.circuits._from_config import model_without_weights
    from fasterqk.errors import InputError

    started = time.monotonic()
    found: dict[str, Any] = {"type": kind}
    try:
        model, _ = model_without_weights(kind)
    except InputError as error:
        return found | {"outcome": "not built", "why": str(error)}
    found["class"] = type(model).__name__
    try:
        circuits = find_circuits(model)
    except InputError as error:
        word = "no attention" if str(error).startswith("no attention was found") else "refused"
        return found | {"outcome": word, "why": str(error), "seconds": time.monotonic() - started}
    found["seconds"] = time.monotonic() - started
    found["labels"] = _labels(circuits)
    found["split"] = sorted(
        {re.sub(r"(?<![^.])\d+(?=\.)", "*", piece.parameter) for piece in circuits if piece.axis is not None}
    )
    unseen = any(note.startswith("not seen") for note in circuits.notes)
    seen = any("probe" in piece.decided_by for piece in circuits)
    found["outcome"] = "verified" if not unseen else "partly verified" if seen else "by name"
    found["notes"] = list(circuits.notes)
    return found | _on_a_small_copy(model, found["labels"])


def _on_a_small_copy(model: Any, labels: dict[str, list[str]]) -> dict[str, Any]:
    from bounded import Bounded
    from second_opinion import contradictions

    from fasterqk.capture._run import attention_implementation
    from fasterqk.circuits import find_circuits
    from fasterqk.circuits._from_config import small_copies
    from fasterqk.circuits._inputs import huggingface_inputs
    from fasterqk.circuits._probe import add_noise
    from fasterqk.errors import InputError

    for small in small_copies(type(model), model.config):
        try:
            circuits = find_circuits(small, heads=True)
        except InputError as error:
            return {"small copy": f"refused: {error}"}
        own = _labels(circuits)
        differing = {
            name: [roles, labels[name]]
            for name, roles in own.items()
            if name in labels and not set(roles) <= set(labels[name])
        }
        result: dict[str, Any] = {"differing": differing}
        copy = add_noise(deepcopy(small).eval())
        for inputs in huggingface_inputs(copy, copy.config):
            try:
                with attention_implementation(copy, "eager"), Bounded(seconds=20):
                    said = contradictions(copy, circuits, inputs)
            except Exception:
                continue
            if said is not None:
                return result | {"contradictions": said}
        return result | {"contradictions": None}
    return {"small copy": "none"}


def _labels(circuits: Any) -> dict[str, list[str]]:
    """By parameter pattern the roles in order, repeated heads once; several where layers differ."""
    roles: dict[str, list[str]] = collections.defaultdict(list)
    for piece in circuits:
        roles[piece.parameter].append(piece.role)
    found: dict[str, list[str]] = collections.defaultdict(list)
    for name, parts in roles.items():
        label, own = "+".join(dict.fromkeys(parts)), found[_pattern(name)]
        if label != "rest" and label not in own:
            own.append(label)
    return {name: own for name, own in found.items() if own}


def _pattern(name: str) -> str:
    return re.sub(r"(?<![^.])\d+(?=\.)", "*", name)


def _work(kinds: list[str], connection: Any) -> None:
    import torch
    import transformers

    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    for kind in kinds:
        try:
            found = surveyed(kind)
        except Exception as error:
            found = {"type": kind, "outcome": "error", "why": f"{type(error).__name__}: {error}"}
        connection.send(found)


def survey(kinds: list[str], seconds: float) -> Any:
    """The findings one by one; a type that takes longer than ``seconds`` is ended and said so."""
    context = multiprocessing.get_context("spawn")
    done = 0
    while done < len(kinds):
        here, there = context.Pipe()
        process = context.Process(target=_work, args=(kinds[done:], there), daemon=True)
        process.start()
        there.close()
        while done < len(kinds):
            try:
                found = here.recv() if here.poll(seconds) else {"type": kinds[done], "outcome": "too slow"}
            except EOFError:
                found = {"type": kinds[done], "outcome": "died"}
            done += 1
            yield found
            if found["outcome"] in ("too slow", "died"):
                break
        process.kill()
        process.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("types", nargs="*")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=240.0)
    arguments = parser.parse_args()
    from transformers import CONFIG_MAPPING

    kinds = arguments.types or list(CONFIG_MAPPING.keys())
    count: collections.Counter[str] = collections.Counter()
    lines = []
    for found in survey(kinds, arguments.seconds):
        count[found["outcome"]] += 1
        lines.append(json.dumps(found))
        told = {
            key: found[key] for key in ("why", "small copy", "differing", "contradictions") if found.get(key)
        }
        print(found["type"], found["outcome"], told or "", flush=True)
        if arguments.out:
            arguments.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(dict(count))


if __name__ == "__main__":
    main()
