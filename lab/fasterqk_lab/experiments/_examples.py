"""Results that need the weights of trained cells: test examples with the attention of each arm, and facts."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from fasterqk.attention import Aggregation
from fasterqk.attention.aggregation import null_row
from fasterqk.attention.scores import summarize
from fasterqk_lab.experiments._registry import Cell
from fasterqk_lab.figures import save_examples
from fasterqk_lab.models._classifier import Block, Classifier, attention_rows, head_rows
from fasterqk_lab.models._generator import GPTAnswerGenerator
from fasterqk_lab.runs import Store
from fasterqk_lab.synthetic._train import mutual_bits
from fasterqk_lab.tasks import LabelledInstances, load_task
from fasterqk_lab.training import TrainConfig
from fasterqk_lab.training._batches import EVALUATION_BATCH, pack_questions
from fasterqk_lab.training._classification import Classification
from fasterqk_lab.training._generation import (
    ROLLOUT,
    Generation,
    MeasuredGenerator,
    answered_instances,
    generate,
    measure_fit,
    measure_steps,
)
from fasterqk_lab.training._loop import load_trained

if TYPE_CHECKING:
    from fasterqk_lab.experiments._comparison import Outcome

COUNT = 12
READ_POSITION = "[read]"
# Stands for everything that an arm had written before a step.
ANSWER = "[its own answer so far]"


def trained_facts(outcome: "Outcome", compute: Callable[[Any], Any]) -> dict[Cell, Any]:
    """``compute`` applied to every trained cell as it is in the store, or its result as it was exported."""
    runner = outcome.runner
    assert runner is not None

    def fact(cell: TrainConfig) -> Any:
        return compute(load_trained(cell, Store(runner.out).folder(cell)))

    cells = outcome.comparison.cells().items()
    return {(arm, seed): runner.fact(f"{arm} {seed}", partial(fact, cell)) for (arm, seed), cell in cells}


def save_attention(outcome: "Outcome", arms: Mapping[str, TrainConfig], out: Path) -> None:
    """Write single examples with the attention of all ``arms``, for the page."""
    comparison, config = outcome.comparison, next(iter(arms.values()))
    seed = comparison.seeds[0]
    save_examples(
        out,
        comparison.key,
        title=f"{comparison.title}: where it looks",
        caption=f"Seed {seed}. {outcome.setting()}.",
        arms=list(arms),
        examples=attention_examples(arms, seed, out),
        sensitive=load_task(config.task, form=config.data.form, file=config.data.file).sensitive,
    )


def attention_examples(arms: Mapping[str, TrainConfig], seed: int, out: Path) -> list[dict[str, Any]]:
    """Test examples with relevant tokens, as `fasterqk_lab.figures._documents` keeps them.

    Each has its ``tokens`` (last the read position, where it is an added token), their ``relevance``, the
    ``label`` and, for each of ``arms`` with ``seed``, ``prediction``, ``probability`` of the right answer and
    the weights of each token. The weights of the models come from the store under ``out``.
    """
    cells = {arm: config.replace(seed=seed) for arm, config in arms.items()}
    loaded: dict[str, Any] = {arm: load_trained(cell, Store(out).folder(cell)) for arm, cell in cells.items()}
    first = next(iter(loaded.values()))
    if isinstance(first, Generation):
        return answer_examples(loaded, COUNT)
    task = first.task
    # The read position is the last token, or a token added after it.
    added = 1 if next(iter(cells.values())).model.read == "after" else 0
    chosen = _choose(task.splits["test"], COUNT)
    readings = {arm: _read(workload, chosen) for arm, workload in loaded.items()}
    examples = []
    for place, number in enumerate(chosen):
        example = task.splits["test"][number]
        relevance = np.zeros(len(example.tokens)) if example.relevance is None else example.relevance
        examples.append(
            {
                "tokens": [*(task.vocabulary[token] for token in example.tokens), *[READ_POSITION] * added],
                "relevance": [*relevance.tolist(), *[0.0] * added],
                "read": len(example.tokens) - 1 + added,
                "label": task.classes[example.label],
                "arms": {arm: reading[place] for arm, reading in readings.items()},
            }
        )
    return examples


def _choose(test: LabelledInstances, count: int) -> list[int]:
    """Rated examples, from each group (number of attractors, say) in turn."""
    rated = np.flatnonzero(test.rated)
    groups = next(iter(test.groups.values()), np.zeros(len(test), dtype=np.int64))
    values = np.unique(groups[rated])
    queues = [list(rated[groups[rated] == value]) for value in values]
    chosen: list[int] = []
    while len(chosen) < count and any(queues):
        chosen += [int(queue.pop(0)) for queue in queues if queue]
    return chosen[:count]


def _read(workload: Classification, chosen: Sequence[int]) -> list[dict[str, Any]]:
    split, classes = workload.splits["test"], workload.task.classes
    readings = []
    for number in chosen:
        tokens, read, labels = split.batch(torch.tensor([number]))
        logits, rows, _ = attention_rows(workload.model, tokens, read)
        probability = logits.double().softmax(1)[0]
        heads = head_rows(workload.model, tokens, read)
        names = ["attention"] if len(heads) == 1 else [f"layer {k + 1}" for k in range(len(heads))]
        layers = {name: layer[0].mean(0).tolist() for name, layer in zip(names, heads, strict=True)}
        readings.append(
            {
                "prediction": classes[int(probability.argmax())],
                "probability": float(probability[labels[0]]),
                "layers": ({} if len(heads) == 1 else {"rollout": rows[0].tolist()}) | layers,
                "heads": {name: layer[0].tolist() for name, layer in zip(names, heads, strict=True)},
            }
        )
    return readings


def answer_examples(workloads: Mapping[str, Generation], count: int) -> list[dict[str, Any]]:
    """The first test questions, as `fasterqk_lab.figures._documents` keeps them.

    The weights of an arm are its rollout over the prompt, averaged over the steps of its answer; the last
    weight is that on the answer itself.
    """
    first = next(iter(workloads.values()))
    questions = first.at_end["test"].questions
    shown = questions.take(np.arange(min(count, len(questions))))
    readings = {arm: _readings(workload, shown) for arm, workload in workloads.items()}
    return [
        {
            "tokens": [*_words([first.task.vocabulary[token] for token in prompt]), ANSWER],
            "relevance": [*shown.relevance[place].tolist(), 0],
            "null": _null(first.model, prompt, shown.answers[place], shown.relevance[place]),
            "read": len(prompt) - 1,
            "label": " / ".join(dict.fromkeys(shown.gold[place])),
            "arms": {arm: reading[place] for arm, reading in readings.items()},
        }
        for place, prompt in enumerate(shown.prompts)
    ]


def _words(tokens: Sequence[str]) -> list[str]:
    """Tokens as the page shows them: a part of a word begins with ``##``, if blanks begin the others.

    >>> _words(["Q:", " Who", "ever"]), _words(["Q:", "k01"])
    (['Q:', 'Who', '##ever'], ['Q:', 'k01'])
    """
    if not any(token.startswith(" ") for token in tokens):
        return list(tokens)
    return [
        token[1:] if token.startswith(" ") else f"##{token}" if place else token
        for place, token in enumerate(tokens)
    ]


def _null(model: GPTAnswerGenerator, prompt: Any, answer: Any, relevance: Any) -> float:
    """The mass of rollout of uniform attention on the relevant tokens, mean over the gold answer's steps."""
    patterns = (MeasuredGenerator.pattern,) * len(model.blocks)
    lengths = range(len(prompt), len(prompt) + len(answer))
    rows = [null_row(patterns, ROLLOUT, length, length - 1)[: len(prompt)] for length in lengths]
    return float((torch.stack(rows).double() @ torch.from_numpy(relevance)).mean())


def _readings(workload: Generation, questions: Any) -> list[dict[str, Any]]:
    model, task = workload.model, workload.task
    packed = pack_questions(questions)
    written = generate(model, packed, task.end, workload.config.evaluation.answer_tokens)
    probability = measure_fit(model, packed).mean
    reader = MeasuredGenerator(model, probability, np.zeros(len(written), dtype=bool))
    instances = answered_instances(questions, written)

    def rows(aggregation: Aggregation) -> list[list[float]]:
        measured = measure_steps(reader, instances, aggregation=aggregation)
        prompts = [
            row[: len(prompt)] for row, prompt in zip(measured.importance, questions.prompts, strict=True)
        ]
        return [[*row.tolist(), 1 - float(row.sum())] for row in prompts]

    layers = {"rollout": rows(ROLLOUT)}
    heads: dict[str, list[list[list[float]]]] = {}
    for k in range(len(model.blocks)):
        layers[f"layer {k + 1}"] = rows(Aggregation("layer", k))
        heads[f"layer {k + 1}"] = [
            rows(Aggregation("layer", k, head=head)) for head in range(workload.config.model.heads)
        ]
    return [
        {
            "prediction": task.text([token for token in answer if token != task.end]),
            "probability": float(probability[place]),
            "layers": {name: weights[place] for name, weights in layers.items()},
            "heads": {name: [weights[place] for weights in by_head] for name, by_head in heads.items()},
        }
        for place, answer in enumerate(written)
    ]


# --- Facts of `temperature-hatexplain`: attention made sharper ---

# Powers of attention, and factors of its scores, evenly spaced in their logarithm.
SHARPENINGS = tuple(float(x) for x in np.geomspace(1, 4096, 13))
ABOVE_RANDOM = "comprehensiveness_above_random"
KEPT = ("loss", "acmc", "mrta", "ac", ABOVE_RANDOM, "test_accuracy", "test_loss", "entropy")


@torch.no_grad()
def sharpened_as_read(
    workload: Classification, powers: Sequence[float] = SHARPENINGS
) -> list[dict[str, float]]:
    """Entropy and the scores of attention on relevant tokens with the test rows raised to each power."""
    split = workload.splits["test"]
    batches: dict[float, list[tuple[np.ndarray, ...]]] = {power: [] for power in powers}
    for chosen in split.by_length(EVALUATION_BATCH):
        tokens, read, labels = split.batch(chosen)
        logits, rows, _ = attention_rows(workload.model, tokens, read)
        rows = rows.double()
        probability = logits.double().softmax(1).gather(1, labels[:, None])[:, 0]
        relevance = (split.relevance[chosen] * split.rated[chosen, None])[:, : rows.shape[1]].double()
        relevance = torch.nn.functional.pad(relevance, (0, rows.shape[1] - relevance.shape[1]))
        for power in powers:
            # Divided by its largest weight first, so that no row underflows as a whole.
            raised = (rows / rows.amax(1, keepdim=True)) ** power
            sharper = raised / raised.sum(1, keepdim=True)
            entropy = -torch.special.xlogy(sharper, sharper).sum(1)
            mass = (sharper * relevance).sum(1)
            columns = (entropy, mass, probability, relevance.sum(1) > 0)
            batches[power].append(tuple(column.numpy() for column in columns))
    curve = []
    for power, parts in batches.items():
        entropies, masses, probabilities, relevant = map(np.concatenate, zip(*parts, strict=True))
        scores = summarize(masses[relevant], probabilities[relevant])
        masses_of = {name: scores[name] for name in ("mrta", "ac", "acmc")}
        curve.append({"factor": power, "entropy": float(entropies.mean()), **masses_of})
    return curve


@torch.no_grad()
def sharpened_in_the_model(
    workload: Classification, factors: Sequence[float] = SHARPENINGS
) -> list[dict[str, float]]:
    """Everything that is measured along training, with the attention scores multiplied by each factor."""
    weights = dict(workload.model.named_parameters())
    queries = [weight for name, weight in weights.items() if name.endswith((".W_Q", ".b_Q"))]
    curve = []
    for factor in factors:
        with scaled(queries, factor):
            record = workload.evaluate()
        random = record["null_aopc_comprehensiveness"]
        record[ABOVE_RANDOM] = record["aopc_comprehensiveness"] - random
        curve.append({"factor": factor} | {name: record[name] for name in KEPT})
    return curve


@contextmanager
def scaled(weights: Sequence[Tensor], factor: float) -> Iterator[None]:
    """Multiply ``weights`` in place, and restore them on exit."""
    before = [weight.clone() for weight in weights]
    for weight in weights:
        weight.mul_(factor)
    try:
        yield
    finally:
        for weight, kept in zip(weights, before, strict=True):
            weight.copy_(kept)


def sharpened(workload: Classification) -> dict[str, list[dict[str, float]]]:
    """The curves of a trained cell: its attention sharpened as ``read``, and in the ``model``."""
    workload.config = workload.config.replace(random_along=True)
    return {"read": sharpened_as_read(workload), "model": sharpened_in_the_model(workload)}


# --- Facts of `covert-hatexplain`: what unmarked words carry ---

# Posts that are asked, and queries of each predicted class that are put to them.
ASKED, QUERIES = 200, 60
SHUFFLES = 5
DRAWS = 5  # random words per post


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
    """The input of the last layer, ``(batch, position, width)``."""
    stream = model.embedding(tokens) + model.positions[: tokens.shape[1]]
    for block in model.blocks[:-1]:
        stream = block(stream)
    return stream


def _accuracies(
    model: Classifier, tokens: Tensor, read: Tensor, labels: Tensor, marked: Tensor, unmarked: Tensor
) -> dict[str, float]:
    stream, last = _stream(model, tokens), _last(model)
    rows = stream[torch.arange(len(read)), read]

    def accuracy(visible: Tensor) -> float:
        changed = torch.addmm(model.b_U, last(stream, rows, ~visible), model.W_U)
        return float((changed.argmax(1) == labels).float().mean())

    accuracies = {"unmarked": accuracy(unmarked), "marked": accuracy(marked)}
    with scaled([last.attention.W_Q, last.attention.b_Q], 0.0):  # a query of zero asks all words alike
        accuracies["uniform"] = accuracy(unmarked)
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
