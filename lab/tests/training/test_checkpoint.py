"""Checkpoints: bit-exact there and back, and one clear line for everything that is not a checkpoint."""

import dataclasses
import pickle
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fasterqk.errors import InputError
from fasterqk.optim import Ramp, make_optimizer
from fasterqk_lab.training import _loop as checkpoint

OPTIMIZERS = {
    "adamw": (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1}),
    "adamw-amsgrad": (torch.optim.AdamW, {"lr": 1e-2, "amsgrad": True}),
    "sgd-momentum": (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "nesterov": True}),
    "sgd": (torch.optim.SGD, {"lr": 1e-2}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 1e-3, "centered": True}),
    "adafactor": (torch.optim.Adafactor, {"lr": 1e-2}),
}


@dataclasses.dataclass(frozen=True)
class Config:
    seed: int = 0


class Tied(nn.Module):
    """A small model with a tied weight, a buffer and dropout, so that every kind of state is there."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 6)
        self.fused = nn.Linear(6, 18)
        self.norm = nn.BatchNorm1d(6)
        self.output = nn.Linear(6, 7, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        query, key, value = self.fused(self.embedding(tokens)).chunk(3, dim=-1)
        return self.output(self.norm(query * key + value))


class Run:
    """A training with its own random generator, made anew from a seed."""

    def __init__(self, optimizer: str = "adamw", seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = Tied()
        kind, options = OPTIMIZERS[optimizer]
        self.optimizer = kind(self.model.parameters(), **options)
        self.generator = torch.Generator().manual_seed(seed)

    def train(self, steps: int) -> "Run":
        for _ in range(steps):
            tokens = torch.randint(7, (5,), generator=self.generator)
            self.optimizer.zero_grad()
            nn.functional.cross_entropy(self.model(tokens), (tokens + 1) % 7).backward()
            self.optimizer.step()
        return self

    def save(self, folder: Path, scalars: dict[str, Any] | None = None, config: Any = None) -> None:
        checkpoint.save_checkpoint(
            folder,
            model=self.model,
            optimizer=self.optimizer,
            scalars={"generator": self.generator.get_state(), "own": scalars or {}},
            config=config,
        )

    def load(self, folder: Path, config: Any = None) -> dict[str, Any] | None:
        state: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer}
        scalars = checkpoint.load_checkpoint(folder, **state, config=config)
        if scalars is None:
            return None
        self.generator.set_state(scalars["generator"])
        own: dict[str, Any] = scalars["own"]
        return own

    def state(self) -> list[Any]:
        return [self.model.state_dict(), self.optimizer.state_dict(), self.generator.get_state()]


def assert_identical(left: Any, right: Any) -> None:
    assert type(left) is type(right)
    if isinstance(left, Tensor):
        assert left.dtype == right.dtype
        assert torch.equal(left, right)
    elif isinstance(left, dict):
        assert left.keys() == right.keys()
        for key in left:
            assert_identical(left[key], right[key])
    elif isinstance(left, list | tuple):
        assert len(left) == len(right)
        for one, other in zip(left, right, strict=True):
            assert_identical(one, other)
    else:
        assert left == right


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_resumed_training_ends_bit_identical(tmp_path: Path, optimizer: str) -> None:
    straight = Run(optimizer).train(9)
    Run(optimizer).train(4).save(tmp_path)
    resumed = Run(optimizer, seed=1).train(2)  # any other state is replaced
    resumed.load(tmp_path)
    resumed.train(5)
    assert_identical(resumed.state(), straight.state())
    files = [tmp_path / name for name in ("straight", "resumed")]
    for run, folder in zip((straight, resumed), files, strict=True):
        run.save(folder)
    assert len({(folder / checkpoint.CHECKPOINT).read_bytes() for folder in files}) == 1


@pytest.mark.parametrize("ratio", [30.0, Ramp(1.0, 30.0, steps=6)], ids=["constant", "ramp"])
def test_an_optimizer_by_circuit_resumes_bit_identical(tmp_path: Path, ratio: Any) -> None:
    def start(seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        model = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        optimizer = make_optimizer(model, torch.optim.AdamW, lr=1e-2, qk_ratio=ratio, decay="independent")
        return {"model": model, "optimizer": optimizer}

    def step(run: dict[str, Any], steps: range) -> None:
        for index in steps:
            run["optimizer"].zero_grad()
            inputs = torch.linspace(-1, 1, 48).reshape(2, 3, 8) + index
            run["model"](inputs).square()[..., ::2].sum().backward()
            run["optimizer"].step()

    straight, resumed = start(0), start(1)
    step(straight, range(4))
    checkpoint.save_checkpoint(tmp_path, scalars={}, **straight)
    step(straight, range(4, 9))
    checkpoint.load_checkpoint(tmp_path, **resumed)
    step(resumed, range(4, 9))
    assert_identical(resumed["model"].state_dict(), straight["model"].state_dict())
    assert_identical(resumed["optimizer"].state_dict(), straight["optimizer"].state_dict())


def test_learning_rates_of_the_groups_come_back(tmp_path: Path) -> None:
    run = Run().train(1)
    run.optimizer.param_groups[0]["lr"] = 1e-2 / 3
    run.save(tmp_path)
    other = Run()
    other.load(tmp_path)
    assert other.optimizer.param_groups[0]["lr"] == 1e-2 / 3
    assert other.optimizer.param_groups[0]["betas"] == (0.9, 0.999)


def test_a_folder_has_one_checkpoint_or_none(tmp_path: Path) -> None:
    run = Run()
    assert run.load(tmp_path) is None
    run.save(tmp_path)
    run.train(1).save(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [checkpoint.CHECKPOINT]


plain_data = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text() | st.integers(), inner, max_size=3)
    ),
    max_leaves=12,
)


@settings(max_examples=30, deadline=None)
@given(scalars=st.dictionaries(st.text(), plain_data, max_size=4))
def test_scalars_come_back_with_their_types(tmp_path_factory: Any, scalars: dict[str, Any]) -> None:
    folder = tmp_path_factory.mktemp("scalars")
    run = Run()
    run.save(folder, scalars)
    assert_identical(run.load(folder), scalars)


def test_tensors_among_the_scalars(tmp_path: Path) -> None:
    run = Run()
    scalars = {
        "order": torch.arange(3),
        "half": [torch.ones(2, dtype=torch.bfloat16)],
        "none": torch.empty(0),
    }
    run.save(tmp_path, scalars)
    assert_identical(run.load(tmp_path), scalars)


def test_what_is_not_plain_data_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="scalars/own/thing"):
        Run().save(tmp_path, {"thing": object()})
    assert not list(tmp_path.iterdir())


def refusal(folder: Path, run: Run | None = None, config: Any = None) -> str:
    """The one line with which a checkpoint is refused, after checking that it names the file."""
    run = run or Run()
    before = [run.model.state_dict()["fused.weight"].clone(), run.generator.get_state()]
    with pytest.raises(InputError) as caught:
        run.load(folder, config)
    message = str(caught.value)
    assert str(folder / checkpoint.CHECKPOINT) in message
    assert "\n" not in message
    assert_identical(before, [run.model.state_dict()["fused.weight"], run.generator.get_state()])
    return message


def test_a_checkpoint_of_another_config(tmp_path: Path) -> None:
    Run().save(tmp_path, config=Config(1))
    assert Run().load(tmp_path, config=Config(1)) == {}
    assert "another configuration" in refusal(tmp_path, config=Config(2))
    assert "another configuration" in refusal(tmp_path)


def test_a_checkpoint_of_another_optimizer(tmp_path: Path) -> None:
    Run().save(tmp_path)
    assert "'its class' is AdamW there and SGD here" in refusal(tmp_path, Run("sgd"))
    grouped = Run()
    first, *rest = grouped.model.parameters()
    grouped.optimizer = torch.optim.AdamW([{"params": [first]}, {"params": rest}])
    assert "in group 0 there and parameter 1, in group 1 here" in refusal(tmp_path, grouped)


def test_a_checkpoint_of_another_model(tmp_path: Path) -> None:
    Run().save(tmp_path)
    larger = Run()
    larger.model.fused = nn.Linear(6, 36)
    assert "'fused.weight' is (18, 6)" in refusal(tmp_path, larger)
    extra = Run()
    extra.model.extra = nn.Linear(1, 1)
    assert "'extra.weight' is None there and (1, 1)" in refusal(tmp_path, extra)


@pytest.mark.parametrize("protocol", [0, 2, 5])
def test_a_pickle_in_its_place_is_not_loaded(tmp_path: Path, protocol: int) -> None:
    (tmp_path / checkpoint.CHECKPOINT).write_bytes(pickle.dumps({"step": 3}, protocol))
    assert "not a fasterqk checkpoint" in refusal(tmp_path)


def test_other_formats_in_its_place(tmp_path: Path) -> None:
    torch.save({"step": 3}, tmp_path / checkpoint.CHECKPOINT)
    assert "pickle" in refusal(tmp_path)
    safetensors.torch.save_file({"weight": torch.ones(2)}, tmp_path / checkpoint.CHECKPOINT)
    assert "not a fasterqk checkpoint" in refusal(tmp_path)


def test_a_newer_format_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "_VERSION", 2)
        Run().save(tmp_path)
    assert "version 2" in refusal(tmp_path)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("good")
    Run().train(2).save(folder, {"step": 2})
    return (folder / checkpoint.CHECKPOINT).read_bytes()


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_truncated_file_is_noticed(tmp_path_factory: Any, good: bytes, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("truncated")
    length = data.draw(st.integers(0, len(good) - 1))
    (folder / checkpoint.CHECKPOINT).write_bytes(good[:length])
    refusal(folder)


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_any_changed_byte_is_noticed(tmp_path_factory: Any, good: bytes, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("flipped")
    place = data.draw(st.integers(0, len(good) - 1))
    change = data.draw(st.integers(1, 255))
    damaged = bytearray(good)
    damaged[place] ^= change
    (folder / checkpoint.CHECKPOINT).write_bytes(damaged)
    run = Run()
    try:
        run.load(folder)
    except InputError as error:
        assert str(folder / checkpoint.CHECKPOINT) in str(error)
    else:  # a blank of the header's padding, say: harmless only if everything else is as it was
        assert_identical(run.state(), Run().train(2).state())
