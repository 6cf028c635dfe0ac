"""GPT-2's byte pairs: text to token ids with the characters each token covers, and back."""

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fasterqk.errors import InputError
from fasterqk.tasks.data_folder import read_json, read_lines, require_files

FILES = [
    ["tokenizers/gpt2/encoder.json", "tokenizers/gpt2/vocab.bpe"],
    ["tokenizers/gpt2/vocab.json", "tokenizers/gpt2/merges.txt"],
]
DOWNLOAD = (
    "download vocab.json and merges.txt of gpt2 (https://huggingface.co/openai-community/gpt2)"
    " to tokenizers/gpt2/ there"
)
END = "<|endoftext|>"

# A word with the blank before it, or other white space: GPT-2's own pattern cuts at all of these places
# (and at more), so that each distinct chunk needs to be cut into tokens only once. Python counts four
# separators as white space that Unicode does not.
_WORD, _SPACE = r"[\S\x1c-\x1f]", r"[^\S\x1c-\x1f]"
_CHUNKS = re.compile(rf" ?{_WORD}+|{_SPACE}+(?!{_WORD})|{_SPACE}+")


@dataclass(frozen=True, eq=False)
class Encoded:
    """Texts as tokens, one after another: those of text ``i`` are ``bounds[i]`` to ``bounds[i + 1]``.

    ``starts`` and ``stops`` are the characters of its text that a token covers, with the blank before it.
    """

    ids: NDArray[np.int64]
    starts: NDArray[np.int32]
    stops: NDArray[np.int32]
    bounds: NDArray[np.int64]

    def overlap(self, first: NDArray[np.int64], last: NDArray[np.int64]) -> NDArray[np.bool_]:
        """For every token, whether it covers a character from ``first`` up to ``last`` of its text."""
        lengths = np.diff(self.bounds)
        return (self.starts < np.repeat(last, lengths)) & (self.stops > np.repeat(first, lengths))


class BytePairs:
    """The tokenizer of GPT-2 from its two files; no special tokens are added.

    ``vocabulary`` shows each token as text, or its bytes where they are no text; ``end`` is the id of the
    end-of-text token.
    """

    def __init__(self, vocabulary: Path, merges: Path) -> None:
        self.paths = [vocabulary, merges]
        numbers = read_json(vocabulary)
        if not _counts_up(numbers):
            raise InputError(f"{str(vocabulary)!r} is not GPT-2's vocabulary: it does not number its tokens")
        if END not in numbers or not _BYTES.keys() <= numbers.keys():
            raise InputError(f"{str(vocabulary)!r} is not GPT-2's vocabulary: not every byte has a token")
        self.numbers: dict[str, int] = numbers
        self.end = numbers[END]
        written = sorted(numbers, key=numbers.__getitem__)
        self.bytes = [token.encode() if token == END else _as_bytes(token) for token in written]
        self.vocabulary = tuple(_shown(token) for token in self.bytes)

    @classmethod
    def find(cls, folder: Path) -> "BytePairs":
        """The byte pairs whose files are in the data folder."""
        return cls(*require_files(folder, FILES, DOWNLOAD))

    def encode(self, texts: Sequence[str]) -> Encoded:
        """The tokens of every text."""
        found: defaultdict[str, int] = defaultdict()
        found.default_factory = found.__len__
        texts_chunks = [
            np.fromiter(map(found.__getitem__, _CHUNKS.findall(text)), dtype=np.int32) for text in texts
        ]
        chunk = np.concatenate([np.empty(0, dtype=np.int32), *texts_chunks])
        cut = self._tokenizer.encode_batch(list(found), add_special_tokens=False)
        sizes = np.array([len(one) for one in cut], dtype=np.int64)
        ids = np.array([number for one in cut for number in one.ids], dtype=np.int64)
        offsets = np.array([offset for one in cut for offset in one.offsets], dtype=np.int32).reshape(-1, 2)
        # Where each occurrence of a chunk begins, counted in characters of its own text.
        widths = np.array([len(text) for text in found], dtype=np.int64)[chunk]
        text_begins = np.cumsum([0, *map(len, texts)])[:-1]
        per_text = np.array([len(own) for own in texts_chunks], dtype=np.int64)
        begins = np.cumsum(widths) - widths - np.repeat(text_begins, per_text)
        # Tokens of every occurrence: those of its chunk, one after another.
        counts = sizes[chunk]
        token_bounds = np.concatenate([[0], np.cumsum(counts)])
        firsts = (np.cumsum(sizes) - sizes)[chunk]
        place = np.arange(token_bounds[-1]) + np.repeat(firsts - token_bounds[:-1], counts)
        token_begins = np.repeat(begins.astype(np.int32), counts)
        return Encoded(
            ids=ids[place],
            starts=token_begins + offsets[place, 0],
            stops=token_begins + offsets[place, 1],
            bounds=token_bounds[np.concatenate([[0], np.cumsum(per_text)])],
        )

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids; bytes that are no text become replacement characters."""
        return b"".join(self.bytes[number] for number in ids).decode("utf-8", errors="replace")

    @cached_property
    def _tokenizer(self) -> Any:
        from tokenizers import Tokenizer, models, pre_tokenizers

        lines = (line for line in read_lines(self.paths[1]) if not line.startswith("#version"))
        pairs = [(left, right) for left, blank, right in (line.partition(" ") for line in lines) if blank]
        try:
            tokenizer = Tokenizer(models.BPE(self.numbers, pairs))
        except Exception as error:  # the library raises nothing more exact
            raise InputError(
                f"{str(self.paths[1])!r} does not belong to {str(self.paths[0])!r}: {error}"
            ) from None
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        return tokenizer


def _visible_bytes() -> dict[str, int]:
    """How GPT-2's files write a byte: itself where it is visible, else the next character from 256 on."""
    visible = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + i): byte for i, byte in enumerate(hidden)}


_BYTES = _visible_bytes()


def _counts_up(numbers: Any) -> bool:
    """Whether it is an object that gives its names the numbers from 0 on."""
    if not isinstance(numbers, dict) or not all(isinstance(number, int) for number in numbers.values()):
        return False
    return set(numbers.values()) == set(range(len(numbers)))


def _as_bytes(token: str) -> bytes:
    try:
        return bytes(_BYTES[character] for character in token)
    except KeyError:
        return token.encode()


def _shown(token: bytes) -> str:
    try:
        return token.decode("utf-8")
    except UnicodeDecodeError:
        return "".join(f"<{byte:02X}>" for byte in token)
