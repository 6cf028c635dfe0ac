"""The covert channel: models that answer right while attending to tokens that are not marked.

In the toy language (`covert-channel`) the query names the class. A fast query-key circuit can look at another
common token for each class, and the output-value circuit can read the class off there. Parts:

- ``threshold``: the theory's setting (protocol `four-tokens`, SGD, CACO) over the share of class tokens, the
  start, the ratio and the number of common tokens, beside the predicted gain (docs/covert-channel.md);
- ``literal``: the literal reading with SGD and Adam, over ratio and share;
- ``blind``: the same with one query for all classes, which closes the channel.

In HateXplain (`covert-hatexplain`) the read position is a token of its own: with one layer its query is the
same for all texts of one length, with two layers the first can tell it the class. On test posts with marked
and unmarked words:

- ``bits``: the mutual information between the class that the *asking* post was given and the unmarked word
  that is attended in *another* post, per head of the last layer: queries of posts of all predicted classes
  are put to the same words. ``null_bits`` is the same with the classes shuffled over the queries;
- accuracy where the last layer sees unmarked words only (``unmarked``), with uniform attention on them
  (``uniform``), marked words only (``marked``), and where it looks at nothing (``blind``: its output is the
  mean over posts);
- ``elsewhere``: the share of right answers whose most attended word is unmarked, and what the answer loses
  without that word (``drop``) and without a random unmarked word (``random_drop``).
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, reduce
from itertools import product
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fasterqk.theory import solve
from fasterqk_lab.compare import END, Measured, Value, above, correct, measured
from fasterqk_lab.experiments._comparison import BASELINE, FASTER, Comparison, Outcome, of_arms, seeds_from
from fasterqk_lab.experiments._examples import trained_facts
from fasterqk_lab.experiments._registry import CellRunner, Experiment, Option
from fasterqk_lab.experiments._synthetic import Arm, panels, run_grid, theory_setting, with_scale
from fasterqk_lab.experiments.ratio_or_rate import RATES, arm_name, ratio_or_rate
from fasterqk_lab.experiments.table_hatexplain import table_layers
from fasterqk_lab.figures import COLORS, Panel, effect_record, lines_of, save_panels
from fasterqk_lab.models import Classifier
from fasterqk_lab.models._classifier import Block, head_rows
from fasterqk_lab.synthetic import Language, SyntheticCell
from fasterqk_lab.synthetic._train import mutual_bits
from fasterqk_lab.training._classification import Classification

# --- The toy language ---

PARTS = ("threshold", "literal", "blind")
GAMMAS = (0.1, 0.15, 0.2, 0.25, 0.355, 0.5)
SCALES = (1e-6, 1e-4, 1e-3, 1e-2)
RATIOS = (0.1, 1.0, 10.0)
LITERAL_GAMMAS = (0.2, 0.355, 0.5)
LITERAL_RATIOS = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
OPTIMIZERS = {"sgd": 0.2, "adam": 1e-3}  # with their learning rates
LITERAL_MODELS = (("CACO", "sgd"), ("CACO", "adam"), ("FAFO", "adam"))
MANY_COMMON = 40
MOST_STEPS = 200_000
TOY_SCORES = ("mrta", "accuracy", "covert_bits", "covert_null_bits", "covert_common_accuracy")


def arms(parts: Sequence[str] = PARTS) -> list[Arm]:
    """The arms of the named parts; ``gain`` is None where the theory does not apply."""
    return [_arm(part, cell) for part in parts for cell in _CELLS[part]()]


def _arm(part: str, cell: SyntheticCell) -> Arm:
    language = cell.language
    kind = "ever new batches" if cell.fresh else f"sample of {cell.batch * cell.batches}"
    if language.common == MANY_COMMON:
        kind = f"{MANY_COMMON} common tokens"
    name = (
        f"{part}, {cell.parameterization}, {cell.optimizer}, QK x{cell.qk_ratio:g}, gamma"
        f" {language.gamma:g}, init {cell.ov_init.scale:g}, {kind}"
    )
    gain = covert_gain(language, cell.qk_ratio, cell.target_loss) if part == "threshold" else None
    about = {"arm": name, "part": part, "kind": kind, "start": cell.ov_init.scale, "gain": gain}
    about |= {"model": (cell.parameterization, cell.optimizer)}
    return Arm(name, cell, about | {"gamma": language.gamma, "qk_ratio": cell.qk_ratio})


def _threshold() -> list[SyntheticCell]:
    base = replace(panels("four-tokens", ["d"])[0].cell, max_steps=MOST_STEPS)
    cells = [
        with_scale(_at(base, ratio, gamma), scale) for gamma in GAMMAS for scale in SCALES for ratio in RATIOS
    ]
    more = replace(base, language=replace(base.language, common=MANY_COMMON))
    cells += [_at(more, ratio, gamma) for gamma in (0.1, 0.2) for ratio in RATIOS]
    # Is it chance in the training sample that tells the classes apart? More of it, and ever new batches.
    tiny = with_scale(base, SCALES[0])
    for gamma in (0.15, 0.2):
        for ratio in RATIOS:
            cells += [
                replace(_at(tiny, ratio, gamma), **change) for change in ({"batches": 800}, {"fresh": True})
            ]
    return cells


def _literal(ratios: tuple[float, ...] = LITERAL_RATIOS, blind: bool = False) -> list[SyntheticCell]:
    base = replace(panels("literal", ["a"])[0].cell, max_steps=MOST_STEPS)
    if blind:
        base = replace(base, language=replace(base.language, queries=(base.language.queries[0],) * 4))
    return [
        replace(_at(base, ratio, gamma), parameterization=name, optimizer=optimizer, lr=OPTIMIZERS[optimizer])
        for name, optimizer in LITERAL_MODELS
        for gamma in LITERAL_GAMMAS
        for ratio in ratios
    ]


_CELLS = {
    "threshold": _threshold,
    "literal": _literal,
    "blind": lambda: _literal((0.1, 1.0, 10.0), blind=True),
}


def _at(cell: SyntheticCell, ratio: float, gamma: float) -> SyntheticCell:
    return replace(cell, qk_ratio=ratio, language=replace(cell.language, gamma=gamma))


@cache
def covert_gain(language: Language, qk_ratio: float, loss: float) -> float:
    """By which power of e a seed of the covert channel grows until gradient flow (CACO) reaches ``loss``.

    Linear stability of the theorem's path against values V and scores S of common tokens that differ between
    classes. They drive each other, and a higher score falls faster, because it is attended more:
    dV = w S dmu,  dS = r w V dmu - b/(b + C) S dq,  w = b (1 - alpha)/(C alpha). The gain is the logarithm of
    the largest growth of any (V, S / sqrt(r)).

    >>> round(covert_gain(Language(), 1.0, 1e-3), 1), round(covert_gain(Language(gamma=0.1), 1.0, 1e-3), 1)
    (2.3, 10.3)
    """
    setting = theory_setting(language)
    end = float(solve(setting, qk_ratio, loss=loss).mu_ov)
    mu = end * np.linspace(0.0, 1.0, 4001) ** 4  # attention moves early where the ratio is large
    alpha = solve(setting, qk_ratio, mu_ov=mu).alpha
    rate = language.distinct * qk_ratio**0.5 / language.common * (1 - alpha) / alpha
    drive = (rate[1:] + rate[:-1]) / 2 * np.diff(mu)
    q = np.log(alpha / (1 - alpha))
    damping = language.distinct / (language.distinct + language.common) * np.diff(q)
    steps = np.zeros((len(drive), 2, 2))
    steps[:, 0, 1] = steps[:, 1, 0] = drive
    steps[:, 1, 1] = -damping
    values, vectors = np.linalg.eigh(steps)
    grown = (vectors * np.exp(values)[:, None]) @ vectors.transpose(0, 2, 1)
    return float(np.log(np.linalg.norm(reduce(lambda before, step: step @ before, grown), 2)))


def compute(runner: CellRunner, seeds: int, chosen: Sequence[Arm]) -> Measured:
    """The numbers of every cell at the end of its training, and its predicted gain."""
    results = run_grid(chosen, runner, seeds=seeds, title="covert-channel")
    more = [
        Value("covert-channel", arm.name, seed, END, None, score, value)
        for arm, seed in product(chosen, range(seeds))
        for score, value in (
            ("gain", arm.about["gain"]),
            ("reached", float(results[arm.name, seed]["reached"])),
        )
        if value is not None
    ]
    at_end = {cell: {**result, "history": []} for cell, result in results.items()}
    return measured("covert-channel", at_end, more=more)


def separation(pairs: Sequence[tuple[float, float]]) -> dict[str, Any] | None:
    """How well the gain tells open channels (over half of all bits) from closed ones.

    Linear theory says by how much a difference between classes grows, not how large the first one is, so one
    number is fitted: the threshold that makes the fewest errors. ``right`` is the share of cells on its right
    side, ``right_by_constant`` that of the best constant answer.
    """
    if not pairs:
        return None
    gains, bits = np.transpose(pairs)
    opened, ordered = bits > 1, np.unique(gains)
    places = np.concatenate([[ordered[0] - 1], (ordered[1:] + ordered[:-1]) / 2, [ordered[-1] + 1]])
    right = [float(np.mean((gains > place) == opened)) for place in places]
    best = int(np.argmax(right))
    constant = float(max(opened.mean(), 1 - opened.mean()))
    counts = {"cells": len(pairs), "open": int(opened.sum())}
    return counts | {"threshold": places[best], "right": right[best], "right_by_constant": constant}


def save(rows: Sequence[Mapping[str, Any]], table: Measured, out: Path) -> dict[str, str]:
    """Draw bits and attention against the predicted gain and against the ratio; returns the paths."""
    marks = dict(zip(dict.fromkeys(row["kind"] for row in rows), "o^+x", strict=False))

    def by_start(row: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        color = dict(zip(SCALES, COLORS, strict=False)).get(row["start"], "k")
        style = {"marker": marks[row["kind"]], "color": color, "linestyle": "none", "markersize": 3.5}
        return f"start {row['start']:g}, {row['kind']}", style

    def by_share(row: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        named = row["part"] == "literal"
        style = {"marker": "o" if named else "s", "linestyle": "-" if named else ":"}
        style["color"] = COLORS[LITERAL_GAMMAS.index(row["gamma"])]
        return f"γ = {row['gamma']:g}{'' if named else ', blind'}", style

    plots = []
    for score, label in (("covert_bits", "bits that common tokens say (of 2)"), ("mrta", "attention")):
        covered = lines_of((row for row in rows if row["part"] == "threshold"), "gain", score, by_start)
        axes, small = (r"predicted gain $\Lambda$", label), {"fontsize": 6}
        plots.append(Panel("four-tokens, CACO, SGD", axes, covered, log="", legend=small))
        for model in LITERAL_MODELS:
            chosen = (row for row in rows if (row["part"] != "threshold", row["model"]) == (True, model))
            lines = lines_of(chosen, "qk_ratio", score, by_share)
            limits = (-0.05, 2.1 if score == "covert_bits" else 1.05)
            plots.append(Panel(", ".join(model), ("ratio $r$", label), lines, limits=limits, legend=small))
    return save_panels(
        plots,
        out,
        "covert-channel",
        title="The covert channel: sharp is not the same as relevant",
        caption="Left: every arm of the theory's setting (softmax over the four next tokens, CACO, SGD)"
        " against the predicted gain of a difference between classes. Right: the literal reading, what the"
        " attended common token says about the class (two bits name it), and attention on class tokens;"
        " dotted: one query for all classes. Means and 95% intervals over seeds.",
        columns=1 + len(LITERAL_MODELS),
        size=(3.7, 3.3),
        rows=[value._asdict() for value in table.values],
    )


def run(runner: CellRunner, seeds: int = 3, parts: Sequence[str] = PARTS) -> dict[str, Any]:
    chosen = arms(parts)
    table = compute(runner, seeds, chosen)
    runner.add(table.values)
    rows = [
        arm.about | {score: table.interval(arm.name, score, END) for score in TOY_SCORES} for arm in chosen
    ]
    pairs = [
        (arm.about["gain"], bits)
        for arm in chosen
        if arm.about["gain"] is not None
        for bits in table.of(arm.name, "covert_bits", END).values()
    ]
    files = save(rows, table, runner.out)
    return {"arms": rows, "separation": separation(pairs), "files": files}


EXPERIMENT = Experiment(
    "covert-channel",
    run,
    (Option("parts", str, "which (default: all)", choices=PARTS, many=True),),
    examples=("--parts threshold --seeds 1 --json",),
)

# --- HateXplain ---

HATEXPLAIN_RATIOS = (1, 30, 100)
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


def covert_hatexplain(seeds: int = 3) -> Comparison:
    """One layer at three ratios (cells of `ratio-or-rate`), two layers in both arms (of `table-layers`).

    >>> list(covert_hatexplain().arms)[2:]
    ['one layer, ratio 100', 'two layers', 'two layers, faster QK']
    """
    shallow, deep = ratio_or_rate().arms, table_layers(2).arms
    arms = {f"one layer, ratio {ratio}": shallow[arm_name(RATES[0], ratio)] for ratio in HATEXPLAIN_RATIOS}
    arms |= {"two layers": deep[BASELINE], "two layers, faster QK": deep[FASTER]}
    return Comparison(
        "covert-hatexplain",
        "HateXplain: a covert channel?",
        "paper",
        arms,
        seeds_from(seeds),
        decides=("bits_above_null",),
        scores=SCORES,
        baselines=dict.fromkeys(("two layers", "two layers, faster QK"), "two layers"),
        read_at=dict.fromkeys(SCORES, AT),
        more=covert_values,
        answers=answers,
    )


def covert_values(outcome: Outcome) -> list[Value]:
    """All `SCORES` of every trained cell."""
    return [
        Value(outcome.comparison.key, arm, seed, AT, None, score, value)
        for (arm, seed), scores in trained_facts(outcome, measure_covert).items()
        for score, value in scores.items()
        if value is not None and isfinite(value)
    ]


def answers(outcome: Outcome) -> dict[str, Any]:
    """Bits minus those of shuffled classes, arm by arm."""
    arms = outcome.comparison.arms
    bits = [above(outcome.measured, arm, "bits", "null_bits", at=AT, label=arm) for arm in arms]
    return {"bits_above_those_of_shuffled_classes": [effect_record(effect) for effect in correct(bits)]}


@torch.no_grad()
def measure_covert(workload: Classification) -> dict[str, float]:
    """All `SCORES` of a trained model on the test posts that have marked and unmarked words."""
    generator = torch.Generator().manual_seed(workload.config.seed)
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
    posts, at, answers = tokens[chosen], read[chosen], answer[chosen, None]

    def probability(posts: Tensor, at: Tensor) -> Tensor:
        return model(posts, at).double().softmax(1).gather(1, answers)[:, 0]

    before = probability(posts, at)

    def drop(places: Tensor) -> float:
        return float((before - probability(without(posts, places), at - 1)).mean())

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
    scores = {"bits": float(np.mean(bits)), "null_bits": float(np.mean(null))}
    return scores | {"bits_above_null": scores["bits"] - scores["null_bits"]}


HATEXPLAIN = of_arms("covert-hatexplain", covert_hatexplain)
