"""One batch of sequences, as tokens for the plain model and as counts for the engine."""

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from lab.tests.synthetic.matrices import Sequences, count_tokens, draw_sequences, load_matrices
from torch.nn import functional

from fasterqk_lab.benchmarks.training import AttentionModel
from fasterqk_lab.synthetic import Counts, Language, SyntheticCell


class Batch(NamedTuple):
    sequences: Sequences
    counts: Counts


@pytest.fixture
def draw() -> Any:
    """``draw(language, size, seed)`` gives a batch."""

    def make(language: Language, size: int = 32, seed: int = 0) -> Batch:
        sequences = draw_sequences(language, size, np.random.default_rng(seed))
        return Batch(sequences, count_tokens(language, sequences))

    return make


@pytest.fixture
def plain() -> Any:
    """``plain(cell, matrices, sequences)`` gives the reference model in float64 and its mean loss."""

    def make(
        cell: SyntheticCell, matrices: dict[str, np.ndarray], sequences: Sequences
    ) -> tuple[AttentionModel, torch.Tensor]:
        language = cell.language
        model = AttentionModel(
            cell.parameterization,
            language.vocabulary,
            cell.score_scale,
            language.attend_query,
            cell.outputs,
        )
        load_matrices(model.double(), matrices)
        labels = torch.tensor(cell.labels)[torch.from_numpy(sequences.classes)]
        return model, functional.cross_entropy(model(torch.from_numpy(sequences.tokens)), labels)

    return make
