"""One cell: a parameterization, an optimizer setting and a seed, described completely."""

from dataclasses import dataclass, field
from math import inf

from fasterqk.errors import InputError
from fasterqk.synthetic.language import Language
from fasterqk.synthetic.parameterization import PARAMETERIZATIONS, Init

OPTIMIZERS = ("sgd", "adam")
STOP_RULES = ("epoch", "accumulated", "never")


@dataclass(frozen=True)
class SyntheticCell:
    """A run on the toy language; the defaults are the `paper` protocol of figure 2.

    The query-key circuit learns at ``qk_ratio * lr``, the output-value circuit at ``lr``. With
    ``ramp_steps`` the ratio grows linearly from 1 over that many steps and is then held.

    An epoch is ``batches`` batches of ``batch`` sequences: the same ones each time, or with ``fresh``
    new ones. ``stop`` says when the loss counts as reached: ``epoch`` when the mean loss of an epoch is
    at most ``target_loss``; ``accumulated`` is the released rule, which compares the sum of the epoch
    means since the last multiple of 100 epochs; ``never`` runs to ``max_steps``.
    """

    parameterization: str
    seed: int = 0
    qk_ratio: float = 1.0
    ramp_steps: int = 0
    lr: float = 0.2  # the scan that chose it and the scale of the init: docs/synthetic.md
    optimizer: str = "sgd"
    language: Language = field(default_factory=Language)
    qk_init: Init = field(default_factory=Init)
    ov_init: Init = field(default_factory=Init)
    init_seed: int | None = None  # the seed unless given
    scaled_scores: bool = False  # scores divided by the square root of the vocabulary
    batch: int = 32
    batches: int = 200
    fresh: bool = False
    stop: str = "epoch"
    target_loss: float = 0.001
    max_steps: int = 500_000
    evaluated: int = 1600  # held-out sequences behind every number
    closed: bool = False  # the softmax runs over the classes' next tokens only, as in the theory

    def __post_init__(self) -> None:
        _check_choice("parameterization", self.parameterization, PARAMETERIZATIONS)
        _check_choice("optimizer", self.optimizer, OPTIMIZERS)
        _check_choice("stop", self.stop, STOP_RULES)
        for name in ("qk_ratio", "lr", "batch", "batches", "max_steps", "evaluated"):
            if not 0 < getattr(self, name) < inf:
                raise InputError(f"{name} {getattr(self, name)} is not a finite number above 0")
        for name in ("seed", "ramp_steps"):
            if getattr(self, name) < 0:
                raise InputError(f"{name} {getattr(self, name)} must not be negative")

    @property
    def score_scale(self) -> float:
        """What scores are multiplied by."""
        return self.language.vocabulary**-0.5 if self.scaled_scores else 1.0

    @property
    def outputs(self) -> tuple[int, ...]:
        """The tokens that can be predicted."""
        return self.language.next_tokens if self.closed else tuple(range(self.language.vocabulary))

    @property
    def labels(self) -> tuple[int, ...]:
        """For each class, where its next token stands among ``outputs``."""
        return tuple(self.outputs.index(token) for token in self.language.next_tokens)


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise InputError(f"unknown {name} {value!r}; choose from {', '.join(choices)}")
