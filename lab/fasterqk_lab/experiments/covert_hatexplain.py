"""The covert channel in models of HateXplain: does attention on unmarked words carry the label?

In the toy language the query names the class, and the choice of a common token says it again. Here the read
position is a token of its own: with one layer its query is the same for all texts of one length, with two
layers the first can tell it the class. On test posts with marked and unmarked words:

- ``bits``: the mutual information between the class that the *asking* post was given and the unmarked word
  that is attended in *another* post, per head of the last layer: queries of posts of all predicted classes
  are put to the same words. ``null_bits`` is the same with the classes shuffled over the queries;
- accuracy where the last layer sees unmarked words only (``unmarked``), with uniform attention on them
  (``uniform``), marked words only (``marked``), and where it looks at nothing (``blind``: its output is the
  mean over posts);
- ``elsewhere``: the share of right answers whose most attended word is unmarked, and what the answer loses
  without that word (``drop``) and without a random unmarked word (``random_drop``).

The score that decides, named before any run: ``bits`` minus ``null_bits``. All others are exploratory.
"""

from collections.abc import Sequence
from functools import partial
from math import isfinite
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fasterqk.console import print_table
from fasterqk.errors import InputError
from fasterqk_lab.compare import Value, above, correct
from fasterqk_lab.experiments._comparison import (
    BASELINE,
    FASTER,
    Comparison,
    effect_record,
    run_arms,
    show_comparison,
)
from fasterqk_lab.experiments._registry import CellRunner, Experiment, Option, seeds_option
from fasterqk_lab.experiments.ratio_or_rate import RATES, arm_name, ratio_or_rate
from fasterqk_lab.experiments.table_hatexplain import FIRST_SEED
from fasterqk_lab.experiments.table_layers import table_layers
from fasterqk_lab.models import Classifier
from fasterqk_lab.models._classifier import Block, head_rows
from fasterqk_lab.runs import Store
from fasterqk_lab.synthetic._train import mutual_bits
from fasterqk_lab.training import TrainConfig
from fasterqk_lab.training._classification import Classification
from fasterqk_lab.training._loop import load_trained

RATIOS = (1, 30, 100)
# Posts that are asked, and queries of each predicted class that are put to them.
ASKED, QUERIES = 200, 60
SHUFFLES = 5
# Where these scores stand in the table of results.
AT = "end, covert"
DRAWS = 5  # random words per post
SCORES = {
    "mass": "attention on marked words, last layer",
    "bits": "bits",
    "null_bits": "null bits",
    "bits_above_null": "bits − null",
    "accuracy": "accuracy",
    "majority": "most frequent class",
    "unmarked": "accuracy, unmarked words only",
    "uniform": "the same, attention uniform",
    "marked": "accuracy, marked words only",
    "blind": "accuracy, looking at nothing",
    "elsewhere": "right answers that look elsewhere",
    "drop": "loss without that word",
    "random_drop": "loss without a random unmarked word",
}


def covert_hatexplain(seeds: int = 3, layers: Sequence[int] = (1, 2)) -> Comparison:
    """One layer at three ratios (cells of `ratio-or-rate`), two layers in both arms (of `table-layers`).

    >>> list(covert_hatexplain().arms)[2:]
    ['one layer, ratio 100', 'two layers', 'two layers, faster QK']
    """
    shallow, deep = ratio_or_rate().arms, table_layers(2).arms
    arms: dict[str, TrainConfig] = {}
    if 1 in layers:
        arms |= {f"one layer, ratio {ratio}": shallow[arm_name(RATES[0], ratio)] for ratio in RATIOS}
    if 2 in layers:
        arms |= {"two layers": deep[BASELINE], "two layers, faster QK": deep[FASTER]}
    chosen = tuple(range(FIRST_SEED, FIRST_SEED + seeds))
    title = "HateXplain: a covert channel?"
    return Comparison(
        "covert-hatexplain",
        title,
        "paper",
        arms,
        chosen,
        decides=("bits_above_null",),
        scores=SCORES,
        baselines=dict.fromkeys(("two layers", "two layers, faster QK"), "two layers"),
        read_at=dict.fromkeys(SCORES, AT),
    )


@torch.no_grad()
def measure_covert(workload: Classification, generator: torch.Generator) -> dict[str, float]:
    """All `SCORES` of a trained model on the test posts that have marked and unmarked words."""
    model, split = workload.model, workload.splits["test"]
    words = torch.arange(split.tokens.shape[1]) < split.lengths[:, None]
    marked = (split.relevance > 0) & words
    unmarked = ~marked & words
    rated = (split.rated.bool() & marked.any(1) & unmarked.any(1)).nonzero()[:, 0]
    tokens, read, labels = split.batch(rated)
    marked, unmarked = (mask[rated][:, : tokens.shape[1]] for mask in (marked, unmarked))
    logits = model(tokens, read)
    answer = logits.argmax(1)
    right = answer == labels
    last_layer = head_rows(model, tokens, read)[-1].mean(1)
    return {
        "posts": float(len(rated)),
        "mass": float((last_layer * marked).sum(1).mean()),
        "accuracy": float(right.float().mean()),
        "majority": float(labels.bincount().max() / len(labels)),
        **_accuracies(model, tokens, read, labels, marked, unmarked),
        **_removal(model, tokens, read, answer, right, last_layer, unmarked, generator),
        **choice_bits(model, split, unmarked_of=(rated, unmarked), generator=generator),
    }


def _last(model: Classifier) -> Block:
    block = model.blocks[-1]
    assert isinstance(block, Block)
    return block


def _stream(model: Classifier, tokens: Tensor) -> Tensor:
    """What the last layer reads, ``(batch, position, width)``."""
    stream = model.embedding(tokens) + model.positions[: tokens.shape[1]]
    for block in model.blocks[:-1]:
        stream = block(stream)
    return stream


def _accuracies(
    model: Classifier, tokens: Tensor, read: Tensor, labels: Tensor, marked: Tensor, unmarked: Tensor
) -> dict[str, float]:
    stream, last = _stream(model, tokens), _last(model)
    rows = stream[torch.arange(len(read)), read]
    queries = [last.attention.W_Q, last.attention.b_Q]
    kept = [weight.clone() for weight in queries]

    def accuracy(visible: Tensor) -> float:
        changed = torch.addmm(model.b_U, last(stream, rows, ~visible), model.W_U)
        return float((changed.argmax(1) == labels).float().mean())

    accuracies = {"unmarked": accuracy(unmarked), "marked": accuracy(marked)}
    for weight in queries:  # a query of zero asks all words alike
        weight.zero_()
    accuracies["uniform"] = accuracy(unmarked)
    for weight, before in zip(queries, kept, strict=True):
        weight.copy_(before)
    hook = last.attention.register_forward_hook(lambda _, __, out: out.mean(0, keepdim=True).expand_as(out))
    accuracies["blind"] = accuracy(unmarked | marked)
    hook.remove()
    return accuracies


def _removal(
    model: Classifier,
    tokens: Tensor,
    read: Tensor,
    answer: Tensor,
    right: Tensor,
    attention: Tensor,
    unmarked: Tensor,
    generator: torch.Generator,
) -> dict[str, float]:
    words = torch.arange(tokens.shape[1]) < read[:, None]
    top = (attention * words).argmax(1)
    elsewhere = right & unmarked[torch.arange(len(top)), top]
    chosen = elsewhere.nonzero()[:, 0]
    share = float(elsewhere.sum() / right.sum().clamp(min=1))
    if not len(chosen):
        return {"elsewhere": share, "drop": float("nan"), "random_drop": float("nan")}
    posts, at = tokens[chosen], read[chosen]
    before = _probability(model, posts, at, answer[chosen])

    def drop(places: Tensor) -> float:
        after = _probability(model, without(posts, places), at - 1, answer[chosen])
        return float((before - after).mean())

    draws = torch.multinomial(unmarked[chosen].float(), DRAWS, replacement=True, generator=generator)
    return {
        "elsewhere": share,
        "drop": drop(top[chosen]),
        "random_drop": float(np.mean([drop(draws[:, draw]) for draw in range(DRAWS)])),
    }


def without(tokens: Tensor, places: Tensor) -> Tensor:
    """``tokens`` (batch, position) with the one at ``places`` (batch) left out; the last one is repeated.

    >>> without(torch.tensor([[5, 6, 7, 0]]), torch.tensor([1]))
    tensor([[5, 7, 0, 0]])
    """
    order = torch.arange(tokens.shape[1]).expand_as(tokens)
    return tokens.gather(1, (order + (order >= places[:, None]).long()).clamp(max=tokens.shape[1] - 1))


def _probability(model: Classifier, tokens: Tensor, read: Tensor, answer: Tensor) -> Tensor:
    return model(tokens, read).double().softmax(1).gather(1, answer[:, None])[:, 0]


def choice_bits(
    model: Classifier, split: Any, *, unmarked_of: tuple[Tensor, Tensor], generator: torch.Generator
) -> dict[str, float]:
    """Bits between the class of the asking post and the unmarked word attended in another one."""
    rated, unmarked = unmarked_of
    everyone = torch.arange(len(split))
    tokens, read, _ = split.batch(everyone)
    predicted = model(tokens, read).argmax(1)
    asking = []
    for label in predicted.unique():
        posts = (predicted == label).nonzero()[:, 0]
        asking.append(posts[torch.randperm(len(posts), generator=generator)[:QUERIES]])
    # As many of every class, so that the most that can be said is the same for all models.
    count = min(map(len, asking))
    pool = torch.cat([posts[:count] for posts in asking])
    attention = _last(model).attention
    stream = _stream(model, tokens[pool])
    rows = stream[torch.arange(len(pool)), read[pool]]
    heads, _, width = attention.W_Q.shape
    query = torch.baddbmm(attention.b_Q[:, None], rows.expand(heads, -1, -1), attention.W_Q)
    asked = torch.bmm(query, attention.W_K.transpose(1, 2)) * width**-0.5  # (head, query, width)
    labels = predicted[pool].numpy()
    shuffles = np.random.default_rng(int(generator.initial_seed()))
    bits, null = [], []
    for place in torch.randperm(len(rated), generator=generator)[:ASKED].tolist():
        words = unmarked[place].nonzero()[:, 0]
        keys = _stream(model, split.tokens[rated[place]][None, : int(split.read[rated[place]]) + 1])[0, words]
        share = (asked @ keys.T).double().softmax(2).numpy()  # (head, query, word)
        bits += [mutual_bits(head, labels) for head in share]
        null += [mutual_bits(head, shuffles.permutation(labels)) for head in share for _ in range(SHUFFLES)]
    above = float(np.mean(bits) - np.mean(null))
    return {"bits": float(np.mean(bits)), "null_bits": float(np.mean(null)), "bits_above_null": above}


def measured_covert(cell: TrainConfig, store: Store) -> dict[str, float]:
    """All `SCORES` of a trained cell."""
    workload = load_trained(cell, store.folder(cell))
    assert isinstance(workload, Classification)
    return measure_covert(workload, torch.Generator().manual_seed(cell.seed))


def run(runner: CellRunner, seeds: int, layers: Sequence[int]) -> dict[str, Any]:
    for depth in layers:
        if depth not in (1, 2):
            raise InputError(f"--layers {depth}: covert-hatexplain has models of 1 and 2 layers")
    comparison = covert_hatexplain(seeds, layers)
    outcome = run_arms(comparison, runner)
    values = []
    for (arm, seed), cell in comparison.cells().items():
        scores = runner.fact(f"{arm} {seed}", partial(measured_covert, cell, Store(runner.out)))
        values += [
            Value(comparison.key, arm, seed, AT, None, score, value)
            for score, value in scores.items()
            if value is not None and isfinite(value)
        ]
    outcome = outcome.with_values(values, runner)
    bits = [above(outcome.measured, arm, "bits", "null_bits", at=AT, label=arm) for arm in comparison.arms]
    above_null = [effect_record(effect) for effect in correct(bits)]
    return {**outcome.summary(), "above_null": above_null, "files": outcome.save(runner.out)}


def show(summary: dict[str, Any]) -> None:
    show_comparison(summary)
    keys = ("arm", "difference", "p", "stands")
    rows = [{key: effect[key] for key in keys} for effect in summary["above_null"]]
    print_table(rows, title="\nbits − those of shuffled classes")


EXPERIMENT = Experiment(
    name="covert-hatexplain",
    chapter="Covert",
    options=(
        seeds_option(3),
        Option("layers", int, "which depths, of 1 and 2", default=(1, 2), many=True),
    ),
    run=run,
    show=show,
    examples=(
        "fasterqk-lab reproduce covert-hatexplain --out out",
        "fasterqk-lab reproduce covert-hatexplain --layers 1 --seeds 1 --json",
    ),
    needs_data=True,
)
