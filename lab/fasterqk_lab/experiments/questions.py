"""The open questions: what was believed, what was run, what came out, and what the paper's claim becomes.

Like `claims`, the page is computed from the tables in `docs/results`. A question whose experiment is not
published there says so, with the command that answers it and its cost.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fasterqk.errors import InputError
from fasterqk_lab.experiments import _answers as answers
from fasterqk_lab.experiments._evidence import Effect, Results, results_folder, stands_alone
from fasterqk_lab.experiments._registry import CellRunner, Experiment, Option
from fasterqk_lab.experiments._what_holds import comparisons, save_what_holds

TITLE = "What holds: nine open questions"
INTRODUCTION = """\
For each question the score that decides was named before its run; other scores are exploratory.
Arms are compared at equal training loss unless it says otherwise, differences are paired by seed, ± is a 95%
t-interval over n seeds, and *null* is what uniform attention or a random ranking scores. How an effect stands
to the hypothesis (*supports*, *against*, *open*, of one seed *points*) is decided by its whole interval, as
in [claims.md](claims.md#how-a-verdict-is-reached). Where there are several effects, *alone* marks those that
stand so only if they are not corrected for their number (Holm; exploratory ones are counted apart). All
values of single seeds are in [results](results), tables in [results.md](results.md).

![attention with equal rates and with a faster query-key circuit, line by line](images/questions.svg)"""


@dataclass(frozen=True)
class Question:
    """One question. ``effects`` reads what is published, nothing where the experiment has not been run.

    ``becomes`` says what is left of the paper's claim, given the effects. ``asked`` are the experiments that
    answer it, each with the table that it publishes, ``cost`` what they take.
    """

    title: str
    believed: str
    hypothesis: str
    asked: Mapping[str, str]
    design: str
    decides: str
    cost: str
    effects: Callable[[Results], list[Effect]]
    becomes: Callable[[Sequence[Effect]], str]
    exploratory: Callable[[Results], list[Effect]] = lambda results: []


def _commands(names: Iterable[str]) -> str:
    return ", ".join(f"`fasterqk-lab reproduce {name}`" for name in names)


# Experiments of the picture.
SHOWN_BY = (
    *(f"table-{name}" for name in ("hatexplain", "sva", "agreement", "layers", "squad")),
    *("tuned", "depth-hatexplain", "carried-kvqa", "finetune-hatexplain"),
)
QUESTIONS = (
    Question(
        "Ratio or rate?",
        "The paper: the ratio of the two learning rates governs how attention concentrates. Our ablation did "
        "not fit: with QK times 30 attention on relevant tokens was .679, with OV slowed by 30, the same "
        "ratio, .448.",
        "the ratio alone decides",
        {"ratio-or-rate": answers.MAP_NAME},
        "One-layer HateXplain, 4 base rates x 5 ratios, and one arm in which everything but QK is slowed by "
        "30 (30 times the epochs, no decay); 3 seeds, constant rate. Rates of single roles, one product R of "
        "ratios made by one or two of them (exploratory), are those of "
        "`fasterqk-lab reproduce product-law --parts hatexplain --seeds 3`.",
        "attention on relevant tokens (MRTA) at the lowest training loss that all arms reach",
        "63 cells: 60 of about 40 seconds and 3 of about 20 minutes of one core",
        answers.ratio_or_rate,
        answers.ratio_or_rate_becomes,
        exploratory=answers.by_ratio,
    ),
    Question(
        "Tuned against tuned",
        "The paper multiplies the query-key rate of a baseline whose base rate was tuned for it. On "
        "HateXplain validation prefers a base rate forty times the paper's.",
        "with base rate and ratio chosen for each arm, the faster arm attends more to relevant tokens",
        {f"tuned --data {name}": f"tuned-{name}-paper" for name in answers.TUNED},
        "Base rate and ratio of each arm by validation (HateXplain 4 x 5, three seeds; SVA 3 x 4, one seed; "
        "SQuAD small 4 x 4 on a quarter of an epoch), then 5 seeds of the two winners (SQuAD: 2; a third was "
        "added after looking at them, and is exploratory). On HateXplain and in both forms of SVA the chosen "
        "base rates lie at an edge of the grid; on SQuAD validation itself prefers equal rates to any "
        "ratio.",
        "MRTA on the test split at the best validation epoch",
        "HateXplain 4 cells more than ratio-or-rate; SVA about 20 cells of a minute each way; SQuAD 16 cells "
        "of about 3 minutes and 6 of about 24",
        answers.tuned,
        answers.says(
            "It holds where each arm has the rates that validation prefers among those tried.",
            "It does not hold where each arm has the rates that validation prefers among those tried.",
            "It holds in part where each arm has the rates that validation prefers among those tried.",
            "Open: the intervals are too wide to tell.",
        ),
        exploratory=answers.tuned_every_seed,
    ),
    Question(
        "Stronger nulls",
        "Against uniform attention, an AC of 71% on HateXplain looks high (null 31%). But attention on one "
        "random token has an AC of 100 times the uniform MRTA: 40%.",
        "on one-layer HateXplain the faster arm is above the stronger nulls, too",
        {"ratio-or-rate": answers.MAP_NAME},
        "All attention on one random visible token (*sharp*), and the model's own rows dealt out anew to the "
        "tokens (*permuted*), measured along every training on real or generated text that does not read "
        "attention as the notebooks did; in tables and in the values of single seeds. Decided on one-layer "
        "HateXplain (5e-5, ratio 30, 3 seeds), looked at in all other comparisons of the picture above: "
        f"{_commands(SHOWN_BY)}.",
        "AC and ACMC minus both nulls on HateXplain at the lowest common training loss",
        "no more than ratio-or-rate",
        answers.above_nulls,
        answers.says(
            "It holds on one-layer HateXplain: the faster arm is above what sharpness alone would score. "
            "Elsewhere it does not always hold: the exploratory lines. Read AC beside the sharp null, not "
            "beside the uniform one.",
            "AC of the faster arm is no more than sharpness alone would score.",
            "Read AC beside the sharp null, not beside the uniform one.",
            "Open: the intervals are too wide to tell.",
        ),
        exploratory=lambda results: (
            answers.above_nulls(results, answers.MAP_BASE) + answers.above_nulls_elsewhere(results)
        ),
    ),
    Question(
        "Only temperature?",
        "Faster QK could merely sharpen the softmax: the same ranking of tokens with more contrast.",
        "the faster arm is more than the baseline with a sharper softmax",
        {"temperature-hatexplain": "temperature-hatexplain-paper"},
        "One-layer HateXplain, both arms stopped at training loss .6, 5 seeds. The baseline is sharpened to "
        "the mean entropy of the faster arm: as read (its rows raised to a power) and in the model (its "
        "scores multiplied).",
        "MRTA of the faster arm minus that of the baseline sharpened as read; AOPC comprehensiveness above "
        "random rankings, minus that of the baseline sharpened in the model",
        "10 cells of 1 to 3 minutes of one core, and as much for the readings",
        answers.temperature,
        answers.says(
            "Faster QK is more than a sharper softmax: at equal loss and entropy it attends more to relevant "
            "tokens and is more faithful than its baseline sharpened to match.",
            "In the scores that decide faster QK is not shown to be more than a sharper softmax: where a "
            "line says *against*, its baseline, sharpened to the same entropy, is above it. Whether a model "
            "that is sharpened so still answers, its accuracy says (exploratory).",
            "Faster QK is more than a sharper softmax in one of the two scores that decide.",
            "Open: the intervals are too wide to tell.",
        ),
        exploratory=answers.temperature_accuracy,
    ),
    Question(
        "Depth",
        "The paper: the effect persists with two and four layers. In our tables it was a third as large with "
        "two layers, and in a first run with four one seed of three fell.",
        "with QK rates that are stable, attention rises in deeper models",
        {f"depth-hatexplain --layers {depth}": f"depth-hatexplain-{depth}" for depth in (2, 4)},
        "2 and 4 layers, 5 seeds, a small ratio (3), at which training was stable; rollout with residual 0 "
        "and .5, every layer and head.",
        "MRTA of rollout at equal loss",
        "20 cells of 1 to 4 minutes of one core",
        lambda results: [
            effect
            for depth in (2, 4)
            for effect in answers.decided(results, f"depth-hatexplain-{depth}", "more", f"{depth} layers")
        ],
        answers.says(
            "It persists in deeper models, at the small ratio that keeps the QK rate stable there.",
            "It does not persist in deeper models.",
            "It persists in part in deeper models.",
            "Open: the intervals are too wide to tell.",
        ),
        exploratory=answers.depth_above_permuted,
    ),
    Question(
        "Faithfulness against its own chance",
        "Comprehensiveness rises with faster QK. So does that of a random ranking: a model that relies on "
        "few words loses more whatever is removed.",
        "comprehensiveness above that of random rankings rises",
        {f"faithfulness --data {name}": f"faithfulness-{name}" for name in ("hatexplain", "sva-whole")},
        "Both arms as in the tables (SVA at 1e-3 and ratio 100), random rankings measured along training, 5 "
        "seeds. Tuned arms are another comparison ([results.md](results.md#tuned-against-tuned)).",
        "AOPC comprehensiveness minus that of random rankings, at the lowest common training loss",
        "10 cells of about 2 minutes of one core for HateXplain",
        lambda results: (
            answers.decided(results, "faithfulness-hatexplain", "more", "HateXplain")
            + answers.decided(results, "faithfulness-sva-whole", "more", "SVA, whole sentences")
        ),
        answers.says(
            "It holds above chance.",
            "It does not hold above chance: what is above it falls.",
            "It holds above chance in part.",
            "Not shown above chance: the interval includes zero.",
        ),
        exploratory=answers.faithful_at_higher_losses,
    ),
    Question(
        "Pretrained models",
        "The paper trains from scratch. In MiniLM, two seeds, attention on the marked words rose with the "
        "ratio, but most of it is on `[CLS]` and `[SEP]`.",
        "fine-tuned with a faster QK circuit, a pretrained encoder attends more to the marked words",
        {"finetune-hatexplain": "finetune-hatexplain-words"},
        "all-MiniLM-L6-v2 on HateXplain, ratios 1, 5 and 20, 5 seeds; the share on special tokens as a "
        "number of its own, the mass renormalised over words.",
        "attention on the marked words, among words, at equal training loss",
        "15 cells of about 7 minutes of one core",
        lambda results: answers.decided(results, "finetune-hatexplain-words", "more"),
        answers.says(
            "It holds for this pretrained encoder, by little (two of its seeds had been looked at before).",
            "It does not hold for this pretrained encoder.",
            "It holds in part for this pretrained encoder.",
            "Open: the intervals are too wide to tell.",
        ),
    ),
    Question(
        "Key-value questions: is the pair found sooner?",
        "With two layers, attention on the asked pairs fell rather than rose with a faster QK circuit.",
        "with relevance that includes where the pair was carried to, attention rises, and the task is learnt "
        "in fewer steps",
        {"carried-kvqa": "carried-kvqa"},
        "Ratios 1, 2 and 5, 10 seeds; relevance of the pair and of the token behind it; every head; steps "
        "until the task is learnt.",
        "MRTA of rollout with either relevance at equal loss, and the steps until learnt",
        "30 cells of about 50 seconds of one core",
        answers.carried,
        answers.carried_becomes,
    ),
    Question(
        "The paper's future work",
        "The paper expects an initial imbalance, decay by circuit and normalised gradients to act like a "
        "ratio.",
        "each raises attention on relevant tokens at equal rates, as a faster QK circuit does",
        {
            "future-work --parts toy": "future-work-toy-sgd-four-tokens",
            "future-work --parts hatexplain --optimizers AdamW": "future-work-hatexplain-adamw",
            "future-work --parts hatexplain --optimizers SGD": "future-work-hatexplain-sgd",
        },
        "Initial imbalance between QK and OV, decay by circuit, gradient normalisation, at ratio 1, under "
        "plain SGD and Adam: toy language (protocol `four-tokens`; protocol and loss chosen after one seed), "
        "5 seeds; one arm each on HateXplain, 3 seeds with either optimizer (2 more with SGD were added "
        "after looking, and are exploratory).",
        "attention on relevant tokens at equal loss",
        "minutes for the toy language; HateXplain cells of about a minute",
        answers.future_work_effects,
        answers.says(
            "All of them raise attention; how far, beside a faster QK circuit, the lines above say.",
            "They do not raise attention.",
            "Some raise attention; how far, beside a faster QK circuit, the lines above say.",
            "Open: the intervals are too wide to tell.",
        ),
        exploratory=answers.future_work_explored,
    ),
)


# --- The page ---


def heading(number: int, question: Question) -> str:
    return f"{number}. {question.title}"


def place_of(number: int, question: Question) -> str:
    """Where a question stands in the documentation.

    >>> place_of(4, QUESTIONS[3])
    'questions.md#4-only-temperature'
    """
    words = "".join(
        letter for letter in heading(number, question).lower() if letter.isalnum() or letter in " -"
    )
    return f"questions.md#{words.replace(' ', '-')}"


def document(results: Results) -> str:
    """`docs/questions.md`."""
    lacking = {question.title: missing(question, results) for question in QUESTIONS}
    whole = [question.title for question in QUESTIONS if not lacking[question.title]]
    part = [
        question.title for question in QUESTIONS if 0 < len(lacking[question.title]) < len(question.asked)
    ]
    none = [title for title in lacking if title not in whole + part]
    lines = [
        f"# {TITLE}",
        "",
        "<!-- Generated by `fasterqk-lab reproduce questions > docs/questions.md`; do not edit. -->",
        "",
        INTRODUCTION,
        "",
        f"{len(whole)} of {len(QUESTIONS)} are answered by published cells."
        + "".join(
            f" {how}: {', '.join(title[0].lower() + title[1:] for title in titles)}."
            for how, titles in (("In part", part), ("Not run to the end", none))
            if titles
        ),
    ]
    for number, question in enumerate(QUESTIONS, 1):
        lines += [
            "",
            f"## {heading(number, question)}",
            "",
            *_section(question, results, lacking[question.title]),
        ]
    return "\n".join(lines)


def missing(question: Question, results: Results) -> list[str]:
    """The experiments of a question whose tables are not published."""
    return [
        name
        for name, table in question.asked.items()
        if not results.has(table) and not (results.folder / f"{table}.csv").is_file()
    ]


def _section(question: Question, results: Results, missing: Sequence[str]) -> list[str]:
    effects, explored = question.effects(results), question.exploratory(results)
    commands = _commands(name for name in question.asked if not effects or name not in missing)
    lines = [
        f"**Believed.** {question.believed}",
        "",
        f"**{'Run' if effects else 'To run'}.** {commands}. {question.design}",
        "",
        f"**Decides.** {question.decides[0].upper()}{question.decides[1:]}. Hypothesis: "
        f"{question.hypothesis}.",
        "",
    ]
    if not effects:
        return [*lines, f"**Not run to the end yet.** Cost: {question.cost}."]
    lines += ["**Came out.**", ""]
    lines += [f"- {effect.text(mark)}" for effect, mark in zip(effects, stands_alone(effects), strict=True)]
    if explored:
        marks = stands_alone(explored)
        lines += ["", "**Exploratory.**", ""]
        lines += [f"- {effect.text(mark)}" for effect, mark in zip(explored, marks, strict=True)]
    lines += [
        "",
        f"**The claim becomes{', so far' if missing else ''}.** {question.becomes(effects).strip()}",
    ]
    if missing:
        lines += ["", f"**Not run to the end yet.** {_commands(missing)}. Cost of all: {question.cost}."]
    return lines


def run(runner: CellRunner, results: str | None) -> dict[str, Any]:
    folder = results_folder(results)
    if folder is None:
        raise InputError("no docs/results beside this installation; name the folder with --results DIR")
    found = Results(Path(folder))
    summary: dict[str, Any] = {"document": document(found)}
    if shown := comparisons(found):
        summary["figure"] = save_what_holds(shown, runner.out)
    return summary


def show(summary: dict[str, Any]) -> None:
    print(summary["document"])


EXPERIMENT = Experiment(
    name="questions",
    chapter="Questions",
    options=(
        Option("results", str, "published results (default: docs/results of the checkout)", metavar="DIR"),
    ),
    run=run,
    show=show,
    examples=(
        "fasterqk-lab reproduce questions --out out",
        "fasterqk-lab reproduce questions > docs/questions.md     # after docs/results has changed",
    ),
    details="Reads docs/results; nothing is trained.",
    trains=False,
)
