"""Every code block of the README but the make line is executed."""

import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", README, flags=re.DOTALL)


@cache
def run(language: str, block: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a block in ``folder``, once for all tests, with this Python's commands first on the path."""
    command = {"python": [sys.executable, "-c", block], "bash": ["bash", "-euo", "pipefail", "-c", block]}
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return subprocess.run(
        command[language], cwd=folder, env={**os.environ, "PATH": path}, capture_output=True, text=True
    )


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    """A folder with `my-classifier`: a tiny BERT and its tokenizer, as transformers writes them."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("readme")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "very", "fine", "film"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
    )
    config = BertConfig(
        vocab_size=len(words),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
    )
    torch.manual_seed(0)
    BertForSequenceClassification(config).save_pretrained(folder / "my-classifier")
    fast.save_pretrained(folder / "my-classifier")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(("language", "block"), BLOCKS, ids=[block[:20] for _, block in BLOCKS])
def test_block_runs(language, block, workplace):
    done = run(language, block, workplace)
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_the_first_code_prints_one_table_and_no_warning(workplace):
    """In a process of its own, as a reader would paste it; installed is what the README names."""
    _, block = next(item for item in BLOCKS if item[0] == "python")
    assert "`pip install '.[hf]'` installs torch" in README[: README.index(block)]
    done = run("python", block, workplace)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["circuit", "qk", "ov", "rest"]


def test_the_ratio_in_the_text_is_the_ratio_that_is_printed(workplace):
    block = next(block for _, block in BLOCKS if "theory ratio" in block)
    printed = run("bash", block, workplace).stdout.strip()
    assert f"prints {printed}:" in README


def test_every_link_leads_somewhere():
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]:
        for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)]*))?\)", page.read_text(encoding="utf-8")):
            if "://" not in target:
                path = page.parent / target if target else page
                assert path.exists(), f"{page.name} links to {target}"
                assert not anchor or anchor in anchors(path), f"{page.name} links to {target}#{anchor}"


@cache
def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as the site and GitHub make them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", "-") for heading in headings}
