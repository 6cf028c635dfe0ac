"""The tokenizers of BERT and GPT-2, and GloVe's word vectors, from files in the data folder."""

import re
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from fasterqk.errors import InputError, needs_extra
from fasterqk.files import read_json, read_lines
from fasterqk_lab.tasks._registry import Files

# --- Words as tokens ---

PAD, UNKNOWN = "[PAD]", "[UNK]"


def frequent_words(texts: Iterable[Sequence[str]]) -> tuple[str, ...]:
    """Padding, the unknown word, and the words of ``texts``, most frequent first.

    >>> frequent_words([["b", "a"], ["b"]])
    ('[PAD]', '[UNK]', 'b', 'a')
    """
    counts = Counter(word for words in texts for word in words)
    return (PAD, UNKNOWN, *sorted(counts, key=lambda word: (-counts[word], word)))


# --- BERT's word pieces: words to token ids, with the word of each token ---


WORD_PIECES = Files(
    [["tokenizers/bert-base-uncased/vocab.txt"]],
    "download vocab.txt of bert-base-uncased (https://huggingface.co/google-bert/bert-base-uncased)"
    " to tokenizers/bert-base-uncased/vocab.txt there",
)


class WordPieces:
    """The tokenizer of bert-base-uncased from its vocabulary file, without special tokens."""

    def __init__(self, path: Path) -> None:
        with needs_extra("hf"):
            from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

        self.path = path
        self.vocabulary = tuple(read_lines(path))
        for position, token in ((0, PAD), (100, UNKNOWN)):
            if self.vocabulary[position : position + 1] != (token,):
                raise InputError(
                    f"{str(path)!r} is not BERT's vocabulary: line {position + 1} is not {token}"
                )
        pieces = {token: index for index, token in enumerate(self.vocabulary)}
        self._tokenizer = Tokenizer(models.WordPiece(pieces, unk_token=UNKNOWN))
        self._tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
        self._tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()

    @classmethod
    def find(cls, folder: Path) -> "WordPieces":
        """The word pieces whose vocabulary file is in the data folder."""
        return cls(*WORD_PIECES.require(folder))

    def encode(self, texts: Sequence[Sequence[str]]) -> list[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """The token ids of every text (a list of words), and the index of the word of each token."""
        # Words are cut independently, so each distinct word is cut once.
        distinct = list(dict.fromkeys(word for words in texts for word in words))
        cut = self._tokenizer.encode_batch(
            [[word] for word in distinct], is_pretokenized=True, add_special_tokens=False
        )
        pieces = {word: encoding.ids for word, encoding in zip(distinct, cut, strict=True)}
        encoded = []
        for words in texts:
            ids = [pieces[word] for word in words]
            tokens = np.fromiter(chain.from_iterable(ids), dtype=np.int64)
            encoded.append((tokens, np.repeat(np.arange(len(ids)), [len(word) for word in ids])))
        return encoded


# --- GPT-2's byte pairs: text to token ids with the characters each token covers, and back ---


BYTE_PAIRS = Files(
    [
        ["tokenizers/gpt2/encoder.json", "tokenizers/gpt2/vocab.bpe"],
        ["tokenizers/gpt2/vocab.json", "tokenizers/gpt2/merges.txt"],
    ],
    "download vocab.json and merges.txt of gpt2 (https://huggingface.co/openai-community/gpt2)"
    " to tokenizers/gpt2/ there",
)
END = "<|endoftext|>"
# A word with the blank before it, or other white space. GPT-2's own pattern cuts at all of these places (and
# at more), so each distinct chunk is cut into tokens only once. Python counts four separators as white space
# that Unicode does not.
_WORD, _SPACE = r"[\S\x1c-\x1f]", r"[^\S\x1c-\x1f]"
_CHUNKS = re.compile(rf" ?{_WORD}+|{_SPACE}+(?!{_WORD})|{_SPACE}+")


@dataclass(frozen=True, eq=False)
class Encoded:
    """Texts as concatenated tokens: those of text ``i`` are ``bounds[i]`` to ``bounds[i + 1]``.

    A token covers the characters ``starts`` to ``stops`` of its text, including the blank before it.
    """

    ids: NDArray[np.int64]
    starts: NDArray[np.int32]
    stops: NDArray[np.int32]
    bounds: NDArray[np.int64]

    def overlap(self, first: NDArray[np.int64], last: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether each token covers a character from ``first`` up to ``last`` of its text."""
        lengths = np.diff(self.bounds)
        return (self.starts < np.repeat(last, lengths)) & (self.stops > np.repeat(first, lengths))


class BytePairs:
    """The tokenizer of GPT-2 from its two files, without special tokens.

    ``vocabulary`` has each token as text, or as bytes that are not valid text; ``end`` is the id of the
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
        return cls(*BYTE_PAIRS.require(folder))

    def encode(self, texts: Sequence[str]) -> Encoded:
        """The tokens of every text."""
        chunks: defaultdict[str, int] = defaultdict()
        chunks.default_factory = chunks.__len__
        texts_chunks = [
            np.fromiter(map(chunks.__getitem__, _CHUNKS.findall(text)), dtype=np.int32) for text in texts
        ]
        chunk = np.concatenate([np.empty(0, dtype=np.int32), *texts_chunks])
        cut = self._tokenizer.encode_batch(list(chunks), add_special_tokens=False)
        sizes = np.array([len(encoding) for encoding in cut], dtype=np.int64)
        ids = np.array([number for encoding in cut for number in encoding.ids], dtype=np.int64)
        offsets = np.array(
            [offset for encoding in cut for offset in encoding.offsets], dtype=np.int32
        ).reshape(-1, 2)
        # The position of each occurrence of a chunk, in characters of its text.
        widths = np.array([len(text) for text in chunks], dtype=np.int64)[chunk]
        text_begins = np.cumsum([0, *map(len, texts)])[:-1]
        per_text = np.array([len(numbers) for numbers in texts_chunks], dtype=np.int64)
        begins = np.cumsum(widths) - widths - np.repeat(text_begins, per_text)
        # The tokens of every occurrence are those of its chunk.
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
        """The text of token ids; invalid bytes become replacement characters."""
        return b"".join(self.bytes[number] for number in ids).decode("utf-8", errors="replace")

    @cached_property
    def _tokenizer(self) -> Any:
        with needs_extra("hf"):
            from tokenizers import Tokenizer, models, pre_tokenizers

        lines = (line for line in read_lines(self.paths[1]) if not line.startswith("#version"))
        pairs = [(left, right) for left, blank, right in (line.partition(" ") for line in lines) if blank]
        try:
            tokenizer = Tokenizer(models.BPE(self.numbers, pairs))
        except Exception as error:  # the library raises no specific exception
            raise InputError(
                f"{str(self.paths[1])!r} does not belong to {str(self.paths[0])!r}: {error}"
            ) from None
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        return tokenizer


def _visible_bytes() -> dict[str, int]:
    """The characters for bytes in GPT-2's files: visible bytes themselves, others characters from 256 on."""
    visible = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + i): byte for i, byte in enumerate(hidden)}


_BYTES = _visible_bytes()


def _counts_up(numbers: Any) -> bool:
    """Whether ``numbers`` is an object that maps names to 0, 1, 2, ..."""
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


# --- Word vectors (GloVe, Pennington et al. 2014) that initialise embeddings ---


# 300 dimensions before 100.
_GLOVE = ("glove.6B.300d.txt", "glove.6B.100d.gpt2vocab.f16.npz", "glove.6B.100d.txt")
WORD_VECTORS = Files(
    [[f"{place}{name}"] for name in _GLOVE for place in ("glove/", "")],
    "download glove.6B.zip (https://nlp.stanford.edu/projects/glove/)",
    shown=[[name] for name in _GLOVE],
    otherwise="embeddings start at random",
)


def read_word_vectors(path: Path, vocabulary: Sequence[str]) -> NDArray[np.float32]:
    """Vectors (token, dimension) for ``vocabulary``; NaN for tokens that are not words of GloVe.

    The packed file has rows by GPT-2's token ids, so it needs GPT-2's whole ``vocabulary``.
    """
    return _packed(path, len(vocabulary)) if path.suffix == ".npz" else _official(path, vocabulary)


def _packed(path: Path, tokens: int) -> NDArray[np.float32]:
    try:
        with np.load(path, allow_pickle=False) as arrays:
            ids, row, table = arrays["token_ids"], arrays["row"], arrays["vectors"].astype(np.float32)
        vectors = np.full((tokens, table.shape[1]), np.nan, dtype=np.float32)
        vectors[ids] = table[row]
    except (OSError, EOFError, ValueError, KeyError, IndexError, BadZipFile, zlib.error) as error:
        raise InputError(f"{str(path)!r} does not hold GloVe for GPT-2's tokens ({error})") from None
    return vectors


def _official(path: Path, vocabulary: Sequence[str]) -> NDArray[np.float32]:
    """Vectors from the official text file; looks up tokens as they are, in lower case, and without blank."""
    spellings = [(token, token.lower(), token.removeprefix(" ").lower()) for token in vocabulary]
    wanted = {spelling for accepted in spellings for spelling in accepted}
    rows: dict[str, NDArray[np.float32]] = {}
    for number, line in enumerate(read_lines(path), start=1):
        word, _, numbers = line.partition(" ")
        if word in wanted:
            try:
                rows[word] = np.array(numbers.split(" "), dtype=np.float32)
            except ValueError:
                raise InputError(f"{str(path)!r} line {number} is not a word and its vector") from None
    widths = {len(vector) for vector in rows.values()}
    if len(widths) != 1:
        raise InputError(f"{str(path)!r} does not hold word vectors of one length")
    vectors = np.full((len(vocabulary), widths.pop()), np.nan, dtype=np.float32)
    for row, accepted in zip(vectors, spellings, strict=True):
        known = next((rows[spelling] for spelling in accepted if spelling in rows), None)
        if known is not None:
            row[:] = known
    return vectors


def start_vectors(vectors: NDArray[np.float32], width: int, seed: int) -> NDArray[np.float32]:
    """Initial embeddings (token, ``width``): known rows mapped to the width, unknown rows random.

    An orthonormal map takes the known rows to a larger width, which preserves inner products; their principal
    directions to a smaller one. Unknown rows are normal with the known rows' standard deviation.
    """
    generator = np.random.default_rng(seed)
    known = np.isfinite(vectors).all(axis=1)
    rows = vectors[known].astype(np.float64)
    if width < rows.shape[1]:
        turn = np.linalg.eigh(rows.T @ rows)[1][:, ::-1][:, :width]
    else:  # uniform over all such maps
        orthonormal, triangle = np.linalg.qr(generator.normal(size=(width, rows.shape[1])))
        turn = (orthonormal * np.sign(np.diag(triangle))).T
    turned = rows @ turn
    start = generator.normal(scale=turned.std() if turned.size else 1.0, size=(len(vectors), width))
    start[known] = turned
    return start.astype(np.float32)
