"""Count the source files that three journeys through the package pass, and the sizes of both packages.

    python tools/journeys.py            # all three journeys, then the sizes
    python tools/journeys.py optimizer  # one of: optimizer, measure, reproduce

A file is passed when at least one of its functions is called; files that are only imported are counted
beside. Subprocesses are not followed, so journeys run in one process.
"""

import inspect
import io
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = {"wheel": ROOT / "src" / "fasterqk", "lab": ROOT / "lab" / "fasterqk_lab"}


def optimizer_journey(folder: Path) -> None:
    """`make_optimizer` on a small GPT-2, and one training step."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    import fasterqk

    config = AutoConfig.for_model("gpt2", n_layer=2, n_embd=64, n_head=4, vocab_size=100)
    model = AutoModelForCausalLM.from_config(config)
    optimizer = fasterqk.make_optimizer(model, torch.optim.AdamW, lr=5e-5, qk_ratio=10)
    tokens = torch.randint(100, (4, 16))
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def measure_journey(folder: Path) -> None:
    """`fasterqk measure` of a small BERT classifier on two sentences."""
    from transformers import BertConfig, BertForSequenceClassification, BertTokenizerFast

    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "very", "fine", "film", "bad"]
    (folder / "vocab.txt").write_text("\n".join(vocabulary))
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    model = BertForSequenceClassification(BertConfig(vocab_size=len(vocabulary), **sizes))
    model.save_pretrained(folder / "model")
    BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder / "model")
    lines = [
        '{"tokens": ["a", "very", "fine", "film"], "relevance": [0, 0, 1, 0], "label": 1}',
        '{"tokens": ["a", "bad", "film"], "relevance": [0, 1, 0], "label": 0}',
    ]
    (folder / "data.jsonl").write_text("\n".join(lines))
    run("measure", "--model", str(folder / "model"), "--data", str(folder / "data.jsonl"))


def reproduce_journey(folder: Path) -> None:
    """`fasterqk-lab reproduce table-hatexplain`, one seed and one epoch, to its figures."""
    from fasterqk_lab.runs import _sweep

    # Workers are other processes, which the count would not see.
    _sweep.LocalWorkers = lambda *_: _sweep.ThisProcess()  # type: ignore[assignment, misc]
    run("reproduce", "table-hatexplain", "--seeds", "1", "--epochs", "1", "--out", str(folder / "out"))


JOURNEYS: dict[str, Callable[[Path], None]] = {
    "optimizer": optimizer_journey,
    "measure": measure_journey,
    "reproduce": reproduce_journey,
}


def run(*words: str) -> None:
    """One command line in this process, its output dropped; workers run here too."""
    from fasterqk.cli.main import COMMANDS
    from fasterqk.cli.main import main as library
    from fasterqk_lab.cli.main import main as lab

    main = library if words[0] in COMMANDS else lab

    kept, sys.stdout = sys.stdout, io.StringIO()
    try:
        code = main(words)
    finally:
        sys.stdout = kept
    if code:
        raise SystemExit(f"fasterqk {' '.join(words)} ended with {code}")


def passed(journey: Callable[[Path], None]) -> tuple[set[str], set[str]]:
    """The files of the package in which a function was called, and those that were imported at all.

    Code that runs at import does not count: modules and class bodies lack ``CO_OPTIMIZED``, and generator
    expressions and lambdas (``<genexpr>``) belong to the function around them.
    """
    called: set[str] = set()
    packages = tuple(map(str, PACKAGES.values()))

    def watch(frame: object, event: str, argument: object) -> None:
        code = frame.f_code  # type: ignore[attr-defined]
        function = code.co_flags & inspect.CO_OPTIMIZED and not code.co_name.startswith("<")
        if event == "call" and function and code.co_filename.startswith(packages):
            called.add(code.co_filename)

    with tempfile.TemporaryDirectory() as folder:
        threading.setprofile(watch)
        sys.setprofile(watch)
        try:
            journey(Path(folder))
        finally:
            sys.setprofile(None)
            threading.setprofile(None)  # type: ignore[arg-type]
    imported = {
        str(module.__file__)
        for name, module in list(sys.modules.items())
        if name.startswith("fasterqk") and getattr(module, "__file__", None)
    }
    return called, imported


def package_sizes() -> dict[str, int]:
    """Lines and modules of the two packages, named as in the table of CONTRIBUTING.md."""
    sizes = {}
    for package, folder in PACKAGES.items():
        texts = [path.read_text(encoding="utf-8") for path in folder.rglob("*.py")]
        sizes[f"{package}: lines"] = sum(len(text.splitlines()) for text in texts)
        sizes[f"{package}: modules"] = len(texts)
    return sizes


def main() -> None:
    chosen = sys.argv[1:] or list(JOURNEYS)
    for name in chosen:
        called, imported = passed(JOURNEYS[name])
        print(f"{name}: {len(called)} files passed ({len(imported)} imported so far)")
        if len(sys.argv) > 1:
            for path in sorted(called):
                print(f"  {Path(path).relative_to(ROOT)}")
    if len(sys.argv) == 1:
        for name, size in package_sizes().items():
            print(f"{name}: {size:,}")


if __name__ == "__main__":
    main()
