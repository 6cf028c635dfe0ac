"""Word vectors (GloVe, Pennington et al. 2014) for a vocabulary of tokens, to start embeddings from."""

import zlib
from collections.abc import Sequence
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from fasterqk.errors import InputError
from fasterqk.tasks.data_folder import find_files, read_lines

NAMES = ("glove.6B.300d.txt", "glove.6B.100d.gpt2vocab.f16.npz", "glove.6B.100d.txt")
FILES = [[f"{place}{name}"] for name in NAMES for place in ("glove/", "")]


def find_word_vectors(folder: Path) -> Path | None:
    """GloVe's file in the data folder (300 dimensions before 100), or None."""
    found = find_files(folder, FILES)
    return found[0] if found else None


def read_word_vectors(path: Path, vocabulary: Sequence[str]) -> NDArray[np.float32]:
    """(tokens, dimensions), a row for every token of ``vocabulary``, NaN where GloVe has no word for it.

    The packed file has rows by GPT-2's token ids, so ``vocabulary`` must be GPT-2's whole one.
    """
    return _packed(path, len(vocabulary)) if path.suffix == ".npz" else _official(path, vocabulary)


def start_vectors(vectors: NDArray[np.float32], width: int, seed: int) -> NDArray[np.float32]:
    """(tokens, ``width``) to start an embedding from: known rows turned, unknown ones drawn.

    To a larger width the known rows go by an orthonormal map, which keeps all inner products; to a smaller
    one by their principal directions. Unknown rows are normal with the known rows' standard deviation.
    """
    generator = np.random.default_rng(seed)
    known = np.isfinite(vectors).all(axis=1)
    rows = vectors[known].astype(np.float64)
    turned = rows @ (_wider if width >= rows.shape[1] else _narrower)(rows, width, generator)
    scale = turned.std() if turned.size else 1.0
    start = generator.normal(scale=scale, size=(len(vectors), width))
    start[known] = turned
    return start.astype(np.float32)


def _wider(rows: NDArray[np.float64], width: int, generator: np.random.Generator) -> NDArray[np.float64]:
    """(dimensions, width) with orthonormal rows, uniform over all such maps."""
    normal = generator.normal(size=(width, rows.shape[1]))
    orthonormal, triangle = np.linalg.qr(normal)
    return np.asarray((orthonormal * np.sign(np.diag(triangle))).T)


def _narrower(rows: NDArray[np.float64], width: int, generator: np.random.Generator) -> NDArray[np.float64]:
    """(dimensions, width): the directions in which the rows are longest."""
    _, directions = np.linalg.eigh(rows.T @ rows)
    return np.asarray(directions[:, ::-1][:, :width])


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
    """Rows of the official text file: a token is looked up as it is, in lower case, and without its blank."""
    spellings = [_spellings(token) for token in vocabulary]
    wanted = {spelling for own in spellings for spelling in own}
    found: dict[str, NDArray[np.float32]] = {}
    for number, line in enumerate(read_lines(path), start=1):
        word, _, numbers = line.partition(" ")
        if word in wanted:
            try:
                found[word] = np.array(numbers.split(" "), dtype=np.float32)
            except ValueError:
                raise InputError(f"{str(path)!r} line {number} is not a word and its vector") from None
    widths = {len(vector) for vector in found.values()}
    if len(widths) != 1:
        raise InputError(f"{str(path)!r} does not hold word vectors of one length")
    vectors = np.full((len(vocabulary), widths.pop()), np.nan, dtype=np.float32)
    for row, own in zip(vectors, spellings, strict=True):
        known = next((found[spelling] for spelling in own if spelling in found), None)
        if known is not None:
            row[:] = known
    return vectors


def _spellings(token: str) -> tuple[str, ...]:
    return token, token.lower(), token.removeprefix(" ").lower()
