"""describe in one line; check_circuits measures what the ratio promises and changes nothing."""

import copy
import random

import numpy as np
import pytest
import torch
from torch import nn, optim

from fasterqk.errors import InputError
from fasterqk.labels.slices import as_label
from fasterqk.optim import Ramp, check_circuits, describe, make_optimizer, param_groups, rates
from fasterqk.optim._check import rate


def loss_of(model):
    return lambda outputs: (outputs - model.targets).square().mean()


def measured(result):
    return {row.circuit: row.measured for row in result.rows}


@pytest.mark.parametrize("layout", ["rows", "columns", "interleaved"])
@pytest.mark.parametrize("optimizer_class", [optim.AdamW, optim.SGD])
def test_measured_is_promised(layout, optimizer_class, net, label, train):
    model = net(layout)
    optimizer = make_optimizer(
        model,
        optimizer_class,
        lr=1e-3,
        qk_ratio=Ramp(30, 10, 5),
        ov_ratio=0.5,
        weight_decay=0.1,
        decay="independent",
        circuits=label(model),
    )
    train(model, optimizer, 3)
    result = check_circuits(model, optimizer, model.inputs, loss_of(model))
    assert result.ok
    assert measured(result) == pytest.approx({"qk": 18, "ov": 0.5, "rest": 1}, rel=1e-2)


def test_first_steps_of_adam_have_the_size_of_the_rate(net, label):
    model = net()
    optimizer = make_optimizer(model, optim.Adam, lr=1e-3, qk_ratio=20, circuits=label(model))
    for row in check_circuits(model, optimizer, (model.inputs,), loss_of(model)).rows:
        assert row.update == pytest.approx(row.lr, rel=0.05) and row.moved > 0.99


def test_stock_optimizers_are_checked_too(net, label, monkeypatch):
    model = net(separate=True)
    monkeypatch.setattr("fasterqk.optim._check.find_circuits", label)
    optimizer = optim.AdamW(param_groups(model, lr=1e-3, qk_ratio=6, circuits=label(model)))
    by_role = measured(check_circuits(model, optimizer, model.inputs, loss_of(model)))
    assert by_role["q"] == pytest.approx(6, rel=1e-2) == by_role["k"]
    with pytest.raises(InputError, match="are not in this model"):
        check_circuits(net(separate=True), optimizer, model.inputs, loss_of(model))
    optimizer.param_groups[1]["lr"] = None  # as in Adafactor with its own steps
    with pytest.raises(InputError, match="the learning rate of group 1 must be a finite number"):
        check_circuits(model, optimizer, model.inputs, loss_of(model))


def test_an_optimizer_that_ignores_its_rate_is_told(net, label, capsys):
    class Fixed(optim.Optimizer):
        def __init__(self, params, lr):
            super().__init__(params, {"lr": lr})

        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.sub_(parameter.grad, alpha=1e-3)

    model = net(separate=True)
    optimizer = make_optimizer(model, Fixed, lr=1e-3, qk_ratio=5, circuits=label(model))
    result = check_circuits(model, optimizer, model.inputs, loss_of(model))
    assert not result.ok and measured(result)["qk"] == pytest.approx(1)
    assert "DIFFERS" in capsys.readouterr().out


def test_what_never_moves_is_told(net, label):
    model = net(separate=True)
    optimizer = make_optimizer(model, optim.SGD, lr=1e-3, qk_ratio=5, circuits=label(model))
    result = check_circuits(model, optimizer, model.inputs, lambda outputs: 0 * outputs.sum())
    assert not result.ok and "did not move" in str(result)


def test_layers_with_their_own_ratio_have_their_own_row(net, label):
    model = net()
    optimizer = make_optimizer(model, optim.SGD, lr=1e-3, qk_ratio=[2, 8], circuits=label(model))
    ratios = measured(check_circuits(model, optimizer, model.inputs, loss_of(model)))
    assert ratios == pytest.approx({"qk x2": 2, "qk x8": 8, "ov": 1, "rest": 1}, rel=1e-2)


def test_nothing_is_touched(net, label, train):
    model = net("columns")
    optimizer = make_optimizer(model, optim.AdamW, lr=1e-3, qk_ratio=Ramp(1, 9, 4), circuits=label(model))
    train(model, optimizer, 2)
    model.loss().backward()

    def seen():
        saved = copy.deepcopy(optimizer.state_dict())
        return (
            [p.detach().clone() for p in model.parameters()],
            [p.grad.clone() for p in model.parameters()],
            [value for state in saved["state"].values() for value in state.values()],
            [torch.get_rng_state(), torch.from_numpy(np.random.get_state()[1].copy())],  # noqa: NPY002
        )

    groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    before, mode, python = seen(), model.training, random.getstate()
    check_circuits(model, optimizer, model.inputs, loss_of(model))
    assert model.training == mode and random.getstate() == python
    for old, new in zip(before, seen(), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(old, new, strict=True))
    assert groups == [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    optimizer.step()  # and it still works


def test_dropout_draws_the_same_numbers_in_both_steps(net, label):
    class Noisy(type(net())):
        def forward(self, x):
            return super().forward(nn.functional.dropout(x, 0.5))

    model = Noisy("rows")
    optimizer = make_optimizer(model, optim.SGD, lr=1e-3, qk_ratio=5, circuits=label(model))
    state = torch.get_rng_state()
    assert check_circuits(model, optimizer, {"x": model.inputs}, loss_of(model)).ok
    assert torch.equal(state, torch.get_rng_state())


def test_it_prints_and_shows(net, label, capsys):
    model = net()
    optimizer = make_optimizer(model, optim.AdamW, lr=1e-3, qk_ratio=20, circuits=label(model))
    result = check_circuits(model, optimizer, model.inputs, loss_of(model))
    printed = capsys.readouterr().out
    assert printed == f"{result}\n"
    assert printed.splitlines()[0].startswith("Net, AdamW, base lr 1e-3, fasterqk ")
    assert printed.splitlines()[2].split()[:4] == ["qk", "624", "4", "0.02"]
    assert result._repr_html_().count("<tr>") == 4


def test_a_state_that_cannot_be_copied_is_told(net, label, train):
    """As that of 8-bit optimizers, whose tensors have no ``copy_``."""

    class Uncopied(torch.Tensor):
        def __deepcopy__(self, memo):
            raise NotImplementedError("no kernel")

    model = net()
    optimizer = make_optimizer(model, optim.AdamW, lr=1e-3, qk_ratio=20, circuits=label(model))
    train(model, optimizer, 1)
    state = next(iter(optimizer.state.values()))
    state["exp_avg"] = state["exp_avg"].as_subclass(Uncopied)
    with pytest.raises(InputError, match=r"AdamW cannot be copied .*no kernel.* before the first step"):
        check_circuits(model, optimizer, model.inputs, loss_of(model))


def test_a_missing_loss_is_told(net, label):
    model = net()
    optimizer = make_optimizer(model, optim.AdamW, lr=1e-3, qk_ratio=20, circuits=label(model))
    with pytest.raises(InputError, match="returned Tensor without a loss"):
        check_circuits(model, optimizer, model.inputs)


def test_a_rate_of_zero_is_told(net, label):
    model = net(separate=True)
    optimizer = make_optimizer(model, optim.AdamW, lr=1e-3, qk_ratio=20, circuits=label(model))
    optim.lr_scheduler.LambdaLR(optimizer, lambda step: float(step))
    with pytest.raises(InputError, match="is 0 at this step"):
        check_circuits(model, optimizer, model.inputs, loss_of(model))


# --- One line about an optimizer ---


@pytest.mark.parametrize(
    ("value", "text"),
    [(1e-3, "1e-3"), (1.5e-4, "1.5e-4"), (0.5, "0.5"), (0, "0"), (5e-5, "5e-5"), (2000, "2e3")],
)
def test_rates(value, text):
    assert rate(value) == text


def test_by_circuit(net, label):
    model = net("columns")
    optimizer = make_optimizer(model, optim.AdamW, lr=1e-4, qk_ratio=10, circuits=label(model))
    assert describe(optimizer) == (
        "qk 624 parameters (4 tensors, 4 split) lr 1e-3"
        " - ov 624 parameters (8 tensors, 4 split) lr 1e-4"
        " - rest 76 parameters (4 tensors) lr 1e-4"
    )


def test_several_and_changing_rates(net, label, train):
    model = net(separate=True)
    optimizer = make_optimizer(model, optim.SGD, lr=1e-4, qk_ratio=[1, Ramp(2, 4, 2)], circuits=label(model))
    assert "lr 1e-4 to 2e-4 at this step - ov" in describe(optimizer)
    train(model, optimizer, 5)
    assert "lr 1e-4 to 4e-4 at this step - ov" in describe(optimizer)


def test_any_optimizer_by_group(net):
    model = net()
    assert describe(optim.SGD(model.parameters(), lr=0.1)) == "group 0 1.3k parameters (12 tensors) lr 0.1"


@pytest.mark.parametrize("separate", [True, False])
@pytest.mark.parametrize("by_role", [True, False])
def test_ratio_one_has_the_rows_of_every_ratio(separate, by_role, net, label):
    """A sweep over ratios prints one kind of table, also where the optimizer has no hooks."""
    rows = {}
    for ratio in (1, 3):
        model = net(separate=separate)
        ratios = {"ratios": {"q": ratio}} if by_role else {"qk_ratio": ratio}
        optimizer = make_optimizer(model, optim.AdamW, lr=1e-3, circuits=label(model), **ratios)
        optimizer.param_groups[-1]["lr"] *= 2 if ratio == 1 else 1  # the user's own
        result = check_circuits(model, optimizer, model.inputs, loss_of(model))
        assert result.ok and result.audit == ()
        rows[ratio] = [(row.circuit, row.parameters, row.tensors) for row in result.rows]
    assert rows[1] == rows[3]
    assert [name for name, _, _ in rows[1]] == (
        ["q", "k", "v", "o", "rest"] if by_role else ["qk", "ov", "rest"]
    )


# --- Optimizers that were made elsewhere ---


def test_an_audit_of_any_optimizer(net, label):
    """Effective rates by role, and what is trained not at all, or twice."""
    model = net(separate=True)
    names = dict(model.named_parameters())
    fast = [names[name] for name in names if name.split(".")[-1][0] in "qk"]
    left_out = names["head.bias"]
    slow = [p for p in names.values() if all(p is not other for other in (*fast, left_out))]
    model.idle = nn.Parameter(torch.ones(3))
    groups = [{"params": [model.idle], "lr": 0.0}, {"params": slow}, {"params": fast, "lr": 0.05}]
    optimizer = torch.optim.SGD(groups, lr=0.01)
    optimizer.param_groups[2]["params"].append(names["norm.weight"])
    roles = label_patterns(net(separate=True), label) | {"idle": "rest"}
    result = check_circuits(model, optimizer, (model.inputs,), lambda out: out.square().mean(), roles)
    promised = {row.circuit: (row.promised, row.ok) for row in result.rows}
    assert promised["q"] == promised["k"] == (5, True) and promised["v"] == promised["o"] == (1, True)
    assert result.audit == (
        "1 trainable parameters are in no group: head.bias",
        "1 parameters are in several groups: norm.weight",
        "3 parameters did not move: idle, layers.*.k_bias",  # the softmax does not see a key bias
    )
    assert all(line in str(result) for line in result.audit)


def label_patterns(model, label):
    names = dict.fromkeys(part.parameter for part in label(model))
    return {name: as_label(part for part in label(model) if part.parameter == name) for name in names}


def test_an_optimizer_that_needs_a_closure_is_refused():
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    with pytest.raises(InputError, match="LBFGS computes the loss several times in a step"):
        check_circuits(model, optim.LBFGS(model.parameters()), (torch.ones(2, 3, 8),), torch.sum)


def test_a_group_without_a_rate_is_described():
    optimizer = optim.SGD([nn.Parameter(torch.ones(3))], lr=0.1)
    optimizer.param_groups[0]["lr"] = None
    assert describe(optimizer) == "group 0 3 parameters (1 tensor) lr none" and rates(optimizer) == {}
