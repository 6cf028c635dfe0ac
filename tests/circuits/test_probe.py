"""What the probe sees: circuits by row, by function and not by name."""

import pytest
import torch
from torch import Tensor, nn

from fasterqk.circuits._inputs import run_guessed
from fasterqk.circuits._probe import noisy_copy, probe

WIDTH = 6


class Attention(nn.Module):
    """Single-head attention whose parts a test may replace; names say nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def scores(self, x: Tensor) -> Tensor:
        return self.a(x) @ self.b(x).transpose(1, 2)

    def values(self, x: Tensor) -> Tensor:
        return self.c(x)

    def end(self, context: Tensor, x: Tensor) -> Tensor:
        return self.d(context)

    def forward(self, x: Tensor) -> Tensor:
        return self.end(self.scores(x).softmax(-1) @ self.values(x), x)


def seen(model: nn.Module) -> dict[str, object]:
    evidence = probe(model, run_guessed, [""])
    return {
        name: finding.role or [(start, stop, role) for start, stop, role in finding.spans]
        for name, finding in evidence.findings.items()
    }


def test_each_part_is_known_by_what_it_reaches() -> None:
    found = seen(Attention())
    assert {name.split(".")[0]: role for name, role in found.items()} == {
        "a": "q",
        "b": "k",
        "c": "v",
        "d": "o",
    }


def test_what_reaches_both_circuits_is_shared() -> None:
    class Bottleneck(Attention):
        def __init__(self) -> None:
            super().__init__()
            self.down = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(self.down(x))

    assert seen(Bottleneck())["down.weight"] == "shared"


def test_a_table_and_a_scale_of_the_scores_are_about_looking() -> None:
    class Scaled(Attention):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.zeros(30))
            self.strength = nn.Parameter(torch.ones(1))

        def scores(self, x: Tensor) -> Tensor:
            place = torch.arange(x.shape[1])
            return super().scores(x) * self.strength + self.table[place[:, None] - place + 15]

    found = seen(Scaled())
    # Only some distances occur in a short text: the others are like them.
    assert found["table"] == "k" and found["strength"] == "k"


def test_gates_are_parted_from_the_queries_they_are_fused_with() -> None:
    class Gated(Attention):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(WIDTH, 2 * WIDTH)

        def scores(self, x: Tensor) -> Tensor:
            return self.a(x)[..., :WIDTH] @ self.b(x).transpose(1, 2)

        def end(self, context: Tensor, x: Tensor) -> Tensor:
            return self.d(context * self.a(x)[..., WIDTH:].sigmoid())

    assert seen(Gated())["a.weight"] == [(0, WIDTH, "q"), (WIDTH, 2 * WIDTH, "o")]


def test_parameters_at_zero_do_not_hide_anything() -> None:
    model = Attention()
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    assert set(seen(model).values()) == {"q", "k", "v", "o"}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_any_precision(dtype: torch.dtype) -> None:
    assert set(seen(Attention().to(dtype)).values()) == {"q", "k", "v", "o"}


def test_weights_that_layers_share_are_seen_in_their_own_layer() -> None:
    class Repeated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = Attention()

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x + self.layer(x))

    findings = probe(Repeated(), run_guessed, ["layer"]).findings
    assert findings["layer.c.weight"].role == "v" and findings["layer.d.weight"].role == "o"


def test_attention_outside_the_given_blocks_is_reported() -> None:
    evidence = probe(nn.Sequential(nn.Linear(WIDTH, WIDTH), Attention()), run_guessed, [])
    assert evidence.elsewhere == ("1",) and not evidence.findings


def test_the_copy_is_scrambled_and_the_original_is_not() -> None:
    model = Attention()
    before = [parameter.clone() for parameter in model.parameters()]
    copied = noisy_copy(model)
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), before, strict=True))
    assert not any(torch.equal(one, other) for one, other in zip(copied.parameters(), before, strict=True))
