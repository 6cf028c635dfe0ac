"""The lab's trainings against plain ones: steps on HateXplain and SQuAD, and on the toy language.

Both ways take the same batches, with AdamW and clipping, and alternate in small blocks.

The plain classifier and generator compute every position of every layer of a padded text. They share the
names of the parameters (classifier) or the weights (generator) with the fast models, but no computation. The
plain model of the toy language is the paper's equation 1: one-hot embedding, one attention layer, no biases.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import replace
from itertools import cycle
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import cross_entropy, dropout, gelu, linear, pad

from fasterqk.trace import record
from fasterqk_lab.benchmarks.library import Progress, compared, operations, race
from fasterqk_lab.experiments._synthetic import panels
from fasterqk_lab.experiments.table_main import SIZES
from fasterqk_lab.models import Classifier, GPTAnswerGenerator
from fasterqk_lab.synthetic import SyntheticCell
from fasterqk_lab.synthetic._cell import layer_names
from fasterqk_lab.synthetic._train import Trainer
from fasterqk_lab.training import TrainConfig
from fasterqk_lab.training._batches import PackedQuestions
from fasterqk_lab.training._classification import Classification
from fasterqk_lab.training._generation import Generation
from fasterqk_lab.training._steps import Steps, build_trainable, one_thread

# --- HateXplain: posts padded to 128 tokens ---
# The plain way computes every position of every post, with the whole vocabulary in the optimizer and torch's
# defaults.

PADDED_TO = 128
ROUNDS = 7
PLAIN_STEPS, OUR_STEPS = 3, 40


def run_training(progress: Progress) -> dict[str, Any]:
    """Seconds per step of both ways and their ratio."""
    config = TrainConfig("hatexplain", qk_ratio=30)
    trainable = build_trainable(config)
    assert isinstance(trainable, Classification)
    ours = Steps(config, trainable)
    speed = _race_steps(_plain_step(trainable), ours.step, (PLAIN_STEPS, OUR_STEPS), ROUNDS, progress)
    return speed | {"batch_size": config.optimisation.batch_size, "rounds": ROUNDS}


def _race_steps(
    plain: Callable[[], Any],
    ours: Callable[[], Any],
    counts: tuple[int, int],
    rounds: int,
    progress: Progress,
) -> dict[str, Any]:
    """Seconds of a step of both ways, in rounds of ``counts`` steps, and the operations of ours."""
    with one_thread():
        ways = {"plain": _repeat(plain, counts[0]), "ours": _repeat(ours, counts[1])}
        blocks = race(ways, rounds, progress)
    speed = compared(blocks["plain_seconds"] / counts[0], blocks["seconds"] / counts[1])
    return speed | {"operations": operations(ours, 4), "threads": 1}


def _repeat(step: Callable[[], Any], count: int) -> Callable[[], Any]:
    return lambda: [step() for _ in range(count)]


def _plain_step(trainable: Classification) -> Callable[[], None]:
    model, train = PlainClassifier(trainable.model), trainable.splits["train"]
    optimizer = _plain_optimizer(model, trainable.config)
    width = min(PADDED_TO, train.tokens.shape[1])
    tokens = pad(train.tokens[:, :width], (0, PADDED_TO - width), value=train.pad)
    read = train.read.clamp_max(PADDED_TO - 1)
    batches = cycle(trainable.batches(0)[:PLAIN_STEPS])

    def step() -> None:
        chosen = next(batches)
        optimizer.zero_grad()
        cross_entropy(model(tokens[chosen], read[chosen]), train.labels[chosen]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def _plain_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    options = config.optimisation
    return torch.optim.AdamW(model.parameters(), lr=options.lr, weight_decay=options.weight_decay)


# --- SQuAD: texts padded to 256 tokens with the head everywhere ---
# Windows at random offsets, with the whole vocabulary of GPT-2, as in the paper: 21.7 million parameters.

BATCH = 16
SQUAD_ROUNDS = 2
SQUAD_STEPS = 1, 2  # plain and ours
IGNORED = -100  # the label of tokens outside answers


def run_squad(progress: Progress) -> dict[str, Any]:
    """Seconds per step of both ways and their ratio."""
    trainable = build_trainable(squad_config())
    assert isinstance(trainable, Generation)
    ours = Steps(trainable.config, trainable)
    speed = _race_steps(_plain_squad_step(trainable), ours.step, SQUAD_STEPS, SQUAD_ROUNDS, progress)
    return speed | {
        "examples_per_second": BATCH / speed["seconds"],
        "plain_examples_per_second": BATCH / speed["plain_seconds"],
        "mean_tokens": float(trainable.train.lengths.double().mean()),
        "parameters": sum(parameter.numel() for parameter in trainable.model.parameters()),
        "batch_size": BATCH,
        "rounds": SQUAD_ROUNDS,
    }


def squad_config() -> TrainConfig:
    """The paper's model and data."""
    data = {"form": "random-full-vocabulary", "train_limit": 20_000}
    changes = data | {"batch_size": BATCH, "accumulate": 1, "qk_ratio": 20}
    return TrainConfig("squad", **(SIZES["paper"] | changes))


def _plain_squad_step(trainable: Generation) -> Callable[[], None]:
    config, options = trainable.config, trainable.config.optimisation
    model = PlainGenerator(trainable.model, config.model.dropout).train()
    optimizer = _plain_optimizer(model, config)
    batches = cycle(trainable.batches(0))

    def step() -> None:
        tokens, labels = padded(trainable.train, next(batches), config.model.context)
        optimizer.zero_grad()
        cross_entropy(
            model(tokens).flatten(0, 1),
            labels.flatten(),
            ignore_index=IGNORED,
            label_smoothing=options.label_smoothing,
        ).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), options.clip or torch.inf)
        optimizer.step()

    return step


def padded(split: PackedQuestions, chosen: Tensor, context: int) -> tuple[Tensor, Tensor]:
    """Texts padded to ``context``, and the label of every position, both ``(batch, context)``."""
    tokens = torch.zeros(len(chosen), context, dtype=torch.long)
    labels = torch.full_like(tokens, IGNORED)
    for row, number in enumerate(chosen.tolist()):
        start, prompt, length = (
            int(column[number]) for column in (split.start, split.prompts, split.lengths)
        )
        text = split.tokens[start : start + length]
        tokens[row, :length] = text
        labels[row, prompt - 1 : length - 1] = text[prompt:]
    return tokens, labels


# --- The toy language: a plain PyTorch loop against the compiled engine, per step --- The plain way is a
# straightforward script: 32 calls of ``numpy.random.Generator.choice`` per batch, one-hot vectors, a module,
# autograd, SGD; one training on one thread. Ours trains the 40 cells of figure 2 (eight panels, five seeds)
# in two threads of one process. Both draw new sequences in every step, without evaluations.

PANELS = list("abcdefgh")
SEEDS, THREADS = 5, 2
TOY_ROUNDS, TOY_PLAIN_STEPS, TOY_STEPS = 5, 60, 1000


def run_synthetic(progress: Progress) -> dict[str, Any]:
    """Seconds per step of both ways and their ratio; the engine compiles in the warm-up round."""
    cells = [replace(panel.cell, fresh=True, stop="never") for panel in panels("literal", PANELS)]
    trainers = [Trainer(replace(cell, seed=seed)) for cell in cells for seed in range(SEEDS)]
    steps = [_plain_toy_step(cell) for cell in cells]

    def advance_all() -> None:
        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(lambda trainer: trainer.advance(TOY_STEPS), trainers))

    plain = _repeat(lambda: [step() for step in steps], TOY_PLAIN_STEPS)
    with one_thread():
        blocks = race({"plain": plain, "ours": advance_all}, TOY_ROUNDS, progress)
    plain_seconds = blocks["plain_seconds"] / (len(cells) * TOY_PLAIN_STEPS)
    speed = compared(plain_seconds, blocks["seconds"] / (len(trainers) * TOY_STEPS))
    return speed | {"cells": len(trainers), "rounds": TOY_ROUNDS, "threads": THREADS}


def _plain_toy_step(cell: SyntheticCell) -> Callable[[], Any]:
    language, generator = cell.language, np.random.default_rng(cell.seed)
    model = AttentionModel(cell.parameterization, language.vocabulary)
    groups: list[dict[str, Any]] = [
        {"params": [weight], "lr": cell.lr * (cell.qk_ratio if name.startswith(("key", "query")) else 1)}
        for name, weight in model.named_parameters()
    ]
    optimizer = torch.optim.SGD(groups)
    support, probabilities = language.support, language.probabilities

    def step() -> float:
        rows, labels = [], []
        for _ in range(cell.batch):
            c = int(generator.integers(language.classes))
            context = generator.choice(support[c], size=language.context, p=probabilities)
            rows.append(np.append(context, language.queries[c]))
            labels.append(language.next_tokens[c])
        optimizer.zero_grad()
        loss = cross_entropy(model(torch.tensor(np.array(rows))), torch.tensor(labels))
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


# --- The paper's models, written plainly; tests compare ours with them ---


class PlainClassifier(nn.Module):
    """A full-sequence copy of a :class:`Classifier`; both give the same logits to the same input."""

    def __init__(self, model: Classifier) -> None:
        super().__init__()
        self.heads = model.config.heads
        self.residual = model.config.residual
        self.W_E = _copy(model.embedding.full_table())
        self.positions = _copy(model.positions)
        self.blocks = nn.ModuleList(_PlainBlock(block, self.residual) for block in model.blocks)
        self.W_U, self.b_U = _copy(model.W_U), _copy(model.b_U)

    def forward(self, tokens: Tensor, read: Tensor) -> Tensor:
        """Logits (batch, class) of ``tokens`` (batch, position) read at ``read`` (batch)."""
        stream = self.W_E[tokens] + self.positions[: tokens.shape[1]]
        for block in self.blocks:
            stream = block(stream)
        logits = stream @ self.W_U + self.b_U
        return logits[torch.arange(len(tokens)), read]


class _PlainBlock(nn.Module):
    def __init__(self, block: nn.Module, residual: bool) -> None:
        super().__init__()
        self.residual = residual
        for name, parameter in block.named_parameters():
            setattr(self, name.rpartition(".")[2], _copy(parameter))

    def forward(self, stream: Tensor) -> Tensor:
        block: Any = self  # it has the block's weights by name

        def by_head(weight: Tensor, bias: Tensor) -> Tensor:
            return torch.einsum("btd,hde->bhte", stream, weight) + bias[:, None]

        query, key = by_head(block.W_Q, block.b_Q), by_head(block.W_K, block.b_K)
        mixed = _causal(query, key) @ by_head(block.W_V, block.b_V)
        read = torch.einsum("bhte,hed->btd", mixed, block.W_O) + block.b_O
        stream = stream + read if self.residual else read
        if not hasattr(self, "W_in"):
            return stream
        added: Tensor = gelu(stream @ block.W_in + block.b_in, approximate="tanh") @ block.W_out + block.b_out
        return stream + added if self.residual else added


class PlainGenerator(nn.Module):
    """A copy of a :class:`GPTAnswerGenerator` with torch's dropout."""

    def __init__(self, model: GPTAnswerGenerator, dropout: float = 0.0) -> None:
        super().__init__()
        self.rate = dropout
        self.embedding = _copy(model.embedding.weight)
        self.positions = _copy(model.positions.weight)
        self.blocks = nn.ModuleList(_PlainGeneratorBlock(block, dropout) for block in model.blocks)
        self.norm = deepcopy(model.norm)
        self.head_bias = _copy(model.head_bias)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (batch, token, vocabulary) of ``tokens`` (batch, token)."""
        stream = self.embedding[tokens] + self.positions[: tokens.shape[1]]
        stream = dropout(stream, self.rate, self.training)
        for block in self.blocks:
            stream = block(stream)
        return linear(self.norm(stream), self.embedding, self.head_bias)


class _PlainGeneratorBlock(nn.Module):
    def __init__(self, block: nn.Module, dropout: float) -> None:
        super().__init__()
        self.rate = dropout
        self.block = deepcopy(block)  # only its linear maps and norms are called

    def forward(self, stream: Tensor) -> Tensor:
        block: Any = self.block
        attention = block.attention
        batch, length, _ = stream.shape
        normed = block.attention_norm(stream)
        q, k, v = (
            part(normed).view(batch, length, attention.heads, -1).transpose(1, 2)
            for part in (attention.query, attention.key, attention.value)
        )
        weights = dropout(_causal(q, k), self.rate, self.training)
        stream = stream + attention.out((weights @ v).transpose(1, 2).reshape(batch, length, -1))
        middle = dropout(gelu(block.mlp.inward(block.mlp_norm(stream))), self.rate, self.training)
        return stream + dropout(block.mlp.outward(middle), self.rate, self.training)


def _causal(query: Tensor, key: Tensor) -> Tensor:
    """Causal attention (batch, head, query, key)."""
    scores = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return scores.masked_fill(hidden, -torch.inf).softmax(-1)


def _copy(parameter: Tensor) -> nn.Parameter:
    return nn.Parameter(parameter.detach().clone())


class AttentionModel(nn.Module):
    """One of the four parameterizations; its layers are named as in ``layer_names``.

    It reads tokens (batch, context + 1), of which the last is the query, and returns logits (batch, outputs)
    for the next token, over the whole vocabulary or only the tokens ``outputs``. The query attends to the
    context and, with ``attend_query``, to itself. Scores are multiplied by ``score_scale`` (1 in the paper,
    1/sqrt(50) in the released code).

    >>> model = AttentionModel("FACO")
    >>> [name for name, _ in model.named_parameters()]
    ['key.weight', 'query.weight', 'output_value.weight']
    >>> model(torch.tensor([[10, 0, 3, 5]])).shape
    torch.Size([1, 50])
    """

    def __init__(
        self,
        parameterization: str,
        vocabulary: int = 50,
        score_scale: float = 1.0,
        attend_query: bool = False,
        outputs: Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        self.vocabulary, self.score_scale, self.attend_query = vocabulary, score_scale, attend_query
        self.outputs = list(range(vocabulary) if outputs is None else outputs)
        for name in layer_names(parameterization):
            self.add_module(name, nn.Linear(vocabulary, vocabulary, bias=False))

    def forward(self, tokens: Tensor) -> Tensor:
        embedded = functional.one_hot(tokens, self.vocabulary).to(next(self.parameters()).dtype)
        attended = embedded if self.attend_query else embedded[:, :-1]
        layer, query = self.get_submodule, embedded[:, -1]
        if hasattr(self, "query_key"):
            keys = layer("query_key")(attended)
        else:
            keys, query = layer("key")(attended), layer("query")(query)
        scores = self.score_scale * torch.einsum("btd,bd->bt", keys, query)
        attention = torch.softmax(scores, dim=-1)
        record(self, attention[:, None, None, :])
        factorized = not hasattr(self, "output_value")
        values = layer("value")(attended) if factorized else attended
        output = layer("output" if factorized else "output_value")
        logits: Tensor = output(torch.einsum("bt,btd->bd", attention, values))
        return logits[:, self.outputs]
