"""The explorer's JavaScript against scipy (brentq on the invariants, quad for time) and the package."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.optimize import brentq
from scipy.special import expi, wrightomega

from fasterqk.pages import write_explorer
from fasterqk.theory import Setting, solve

NEXT_FRAME = "() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"
MODELS = ["FAFO", "FACO", "CAFO", "CACO"]
TASKS = [(5, 50, 5, 50), (2, 1, 1, 1), (20, 50, 5, 50), (100, 500, 1, 500), (3, 7, 50, 4)]
GRID = [
    {"model": model, "query": query, "r": r, "loss": loss, "M": M, "b": b, "m": m, "n": n, "start": start}
    for model, query, r, loss, ((M, b, m, n), start) in itertools.product(
        MODELS,
        ["token", "fixed"],
        [0.001, 0.01, 0.1, 1, 10, 100, 1e4],
        [0.5, 0.01, 1e-4, 1e-8],
        zip(TASKS, [1e-3, 1e-3, 1e-6, 1e-3, 0.1], strict=True),
    )
]


class Reference:
    """The dynamics written down a second time, solved without any closed form."""

    def __init__(self, case: dict[str, Any]) -> None:
        self.rho = case["m"] / case["n"]
        self.classes, self.b = case["M"], case["b"]
        token = case["query"] == "token"
        self.kappa = case["r"] * (self.classes - 1) / self.classes / (self.b if token else 1)
        self.gamma_ov = 2 * math.sqrt(self.b)
        self.gamma_qk = 2 * self.b if token else 2 * math.sqrt(self.b)
        self.factorized_qk, self.factorized_ov = case["model"][0] == "F", case["model"][2] == "F"
        self.q0 = case["start"] if self.factorized_qk else 0.0
        self.mu0 = case["start"] if self.factorized_ov else 0.0
        self.logit = math.log((self.classes - 1) / math.expm1(case["loss"]))

    def left(self, q: float) -> float:
        if self.factorized_qk:
            return math.log(q / self.q0) + self.rho * float(expi(q) - expi(self.q0))
        return q - self.q0 + self.rho * math.exp(self.q0) * math.expm1(q - self.q0)

    def right(self, mu: float) -> float:
        grown = (
            (mu - self.mu0) / self.gamma_ov if self.factorized_ov else (mu - self.mu0) * (mu + self.mu0) / 2
        )
        return self.kappa * (self.gamma_qk if self.factorized_qk else 1) * grown

    def q(self, mu: float) -> float:
        wanted = self.right(mu)
        if wanted <= 0:
            return self.q0
        high = max(2 * self.q0, 1e-3)
        while self.left(high) < wanted:
            high *= 1.5
        return brentq(lambda q: self.left(q) - wanted, self.q0, high, xtol=1e-300, rtol=1e-15)

    def alpha(self, mu: float) -> float:
        return 1 / (1 + math.exp(-self.q(mu)) / self.rho)

    def mu_at_loss(self) -> float:
        low = math.log(max(self.mu0, self.logit)) - 1e-9
        high = math.log(self.logit * (1 + math.exp(-self.q0) / self.rho)) + 1e-9
        return math.exp(
            brentq(lambda x: self.alpha(math.exp(x)) * math.exp(x) - self.logit, low, high, xtol=1e-15)
        )

    def time(self, mu: float) -> float:
        def rate(u: float) -> float:
            alpha = self.alpha(u)
            return (math.exp(alpha * u) + self.classes - 1) / alpha

        options = {"epsabs": 0, "epsrel": 1e-12, "limit": 400}
        if self.factorized_ov:
            value, _ = quad(lambda x: rate(math.exp(x)), math.log(self.mu0), math.log(mu), **options)
            return self.b / self.gamma_ov * value
        return self.b * quad(rate, self.mu0, mu, **options)[0]


def relative(ours: float, reference: float) -> float:
    return abs(ours - reference) / abs(reference)


@pytest.fixture(scope="module")
def page(open_shared_page, tmp_path_factory):
    return open_shared_page(write_explorer(tmp_path_factory.mktemp("explorer") / "explorer.html"))


def test_special_functions_equal_scipy(page):
    z = np.concatenate([np.linspace(-45, 45, 901), np.logspace(1.7, 6, 50)])
    omega = page.evaluate("z => z.map(fasterqk.wrightOmega)", z.tolist())
    np.testing.assert_allclose(omega, wrightomega(z), rtol=2e-14)
    x = np.concatenate([np.logspace(-8, 2, 400), [49.999, 50.0, 50.001]])
    sums = np.array(page.evaluate("x => x.map(fasterqk.exponentialIntegralSum)", x.tolist()), dtype=float)
    reference = expi(x) - np.log(x) - np.euler_gamma
    clear = x > 0.1  # below, scipy's difference cancels; the series starts x + x^2/4 + x^3/18 + x^4/96
    np.testing.assert_allclose(sums[clear], reference[clear], rtol=1e-13)
    small = x < 1e-3
    np.testing.assert_allclose(sums[small], (x + x**2 / 4 + x**3 / 18 + x**4 / 96)[small], rtol=1e-14)


def test_states_at_matched_loss_equal_scipy(page):
    found = page.evaluate(
        "cases => cases.map((one) => fasterqk.stateAtLoss(fasterqk.makeProblem(one), one.loss))", GRID
    )
    for case, state in zip(GRID, found, strict=True):
        reference = Reference(case)
        mu = reference.mu_at_loss()
        q, alpha = reference.q(mu), reference.alpha(mu)
        errors = relative(state["mu"], mu), relative(state["q"], q), relative(state["alpha"], alpha)
        assert max(errors) < 1e-9, case
        assert relative(state["loss"], case["loss"]) < 1e-9, case


def test_time_equals_scipy(page):
    cases = GRID[:: len(GRID) // 90]
    found = page.evaluate(
        """cases => cases.map((one) => {
          const problem = fasterqk.makeProblem(one);
          const end = fasterqk.stateAtLoss(problem, one.loss);
          const curve = fasterqk.trajectory(problem, one.loss, 40);
          return [end.mu, fasterqk.timeBetween(problem, problem.mu0, end.mu), curve[curve.length - 1].time];
        })""",
        cases,
    )
    for case, (mu, whole, summed) in zip(cases, found, strict=True):
        time = Reference(case).time(mu)
        assert relative(whole, time) < 1e-9, case
        assert relative(summed, time) < 1e-9, case


def test_the_ratio_for_a_wanted_attention_equals_scipy(page):
    cases = [{**case, "alpha": alpha} for case in GRID if case["r"] == 1 for alpha in (0.2, 0.5, 0.9, 0.999)]
    found = page.evaluate(
        "cases => cases.map((c) => fasterqk.ratioForAttention(fasterqk.makeProblem(c), c.alpha, c.loss))",
        cases,
    )
    reached = 0
    for case, ratio in zip(cases, found, strict=True):
        reference = Reference(case)
        q = math.log(case["alpha"] / (1 - case["alpha"]) / reference.rho)
        grown = reference.right(reference.logit / case["alpha"])
        if q < reference.q0 or grown <= 0:
            assert ratio is None, case
            continue
        if q == reference.q0:
            assert ratio == 0, case
            continue
        assert relative(ratio, reference.left(q) / grown) < 1e-9, case
        reached += 1
    assert reached > len(cases) // 2


def test_the_page_and_the_package_say_the_same(page):
    """Every state, time and effective ratio of the grid against ``fasterqk.theory``."""
    found = page.evaluate(
        """cases => cases.map((one) => {
          const problem = fasterqk.makeProblem(one);
          const {mu, q, alpha} = fasterqk.stateAtLoss(problem, one.loss);
          const time = fasterqk.timeBetween(problem, problem.mu0, mu);
          return [mu, q, alpha, time, fasterqk.effectiveRatio(problem, {mu, q})];
        })""",
        GRID,
    )
    runs: dict[tuple[Any, ...], list[tuple[dict[str, Any], list[float]]]] = {}
    for case, numbers in zip(GRID, found, strict=True):
        key = tuple(case[name] for name in ("model", "query", "M", "b", "m", "n", "start"))
        runs.setdefault(key, []).append((case, numbers))
    for (model, query, M, b, m, n, start), pairs in runs.items():
        solution = solve(
            Setting(M=M, b=b, m=m, n=n, query=query),
            [case["r"] for case, _ in pairs],
            loss=[case["loss"] for case, _ in pairs],
            parameterization=model,
            mu0=start if model[2] == "F" else None,
            q0=start if model[0] == "F" else None,
        )
        ours = np.array([numbers for _, numbers in pairs], dtype=float).T
        theirs = solution.mu_ov, solution.mu_qk, solution.alpha, solution.time, solution.effective_ratio
        np.testing.assert_allclose(ours, theirs, rtol=1e-9, err_msg=f"{model} {query} M={M}")


SIGN_GRID = [case | {"optimizer": "sign"} for case in GRID if case["model"] == "CACO"]


def test_sign_descent_of_the_page_and_of_the_package_are_the_same(page):
    found = page.evaluate(
        """cases => cases.map((one) => {
          const problem = fasterqk.makeProblem(one);
          const {mu, q, alpha, loss} = fasterqk.stateAtLoss(problem, one.loss);
          const curve = fasterqk.trajectory(problem, one.loss, 20);
          const back = fasterqk.ratioForAttention(problem, alpha, one.loss);
          return [mu, q, alpha, loss, curve[curve.length - 1].time, alpha < 0.999999 ? back : one.r];
        })""",
        SIGN_GRID,
    )
    for case, numbers in zip(SIGN_GRID, found, strict=True):
        setting = Setting(M=case["M"], b=case["b"], m=case["m"], n=case["n"], query=case["query"])
        state = solve(setting, case["r"], loss=case["loss"], optimizer="sign")
        theirs = state.mu_ov, state.mu_qk, state.alpha, state.loss, state.time, case["r"]
        np.testing.assert_allclose(numbers[:5], theirs[:5], rtol=1e-9, err_msg=str(case))
        # The ratio is the hard direction: little attention gained, few digits of it.
        np.testing.assert_allclose(numbers[5], theirs[5], rtol=1e-6, err_msg=str(case))


def test_sign_descent_of_a_factorized_circuit_is_refused_by_the_page(page):
    said = page.evaluate(
        """() => { try {
          const task = {r: 1, M: 5, b: 50, m: 5, n: 50, query: "token"};
          fasterqk.makeProblem({...task, model: "FAFO", optimizer: "sign"});
        } catch (error) { return error.message; } }"""
    )
    assert "CACO only, not FAFO" in said


def test_curves_are_finite_and_monotone_in_every_corner(page):
    """At the ends of all sliders: attention, time and loss move one way, and nothing overflows."""
    wrong = page.evaluate(
        """() => {
          const ends = {r: [1e-3, 1e4], loss: [1e-8, 0.5], M: [2, 100], b: [1, 500], m: [1, 50], n: [1, 500],
            start: [1e-6, 0.1], query: ["token", "fixed"], model: ["FAFO", "FACO", "CAFO", "CACO"]};
          let corners = [{}];
          for (const [name, values] of Object.entries(ends)) {
            corners = corners.flatMap((corner) => values.map((value) => ({...corner, [name]: value})));
          }
          const collapsed = corners.filter(({model}) => model === "CACO");
          return [...corners, ...collapsed.map((one) => ({...one, optimizer: "sign"}))].filter((corner) => {
            const path = fasterqk.trajectory(fasterqk.makeProblem(corner), corner.loss, 8);
            return !path.every((state, k) => Object.values(state).every(Number.isFinite) && (k === 0 || (
              state.time > path[k - 1].time && state.alpha >= path[k - 1].alpha * (1 - 1e-14)
              && state.loss <= path[k - 1].loss * (1 + 1e-14))));
          });
        }"""
    )
    assert wrong == []


def test_the_page_prints_the_reference_values(page):
    """M=5 of the theory's reference table at loss 1e-4, as a reader sees it."""
    for ratio, alpha, mu, q, time in [
        (0.01, "13%", "78.77", "0.441", "73 million"),
        (0.1, "25%", "42.39", "1.204", "14.6 million"),
        (1, "52%", "20.46", "2.374", "3.31 million"),
        (10, "88%", "12.03", "4.301", "1.95 million"),
        (100, "98.8%", "10.72", "6.749", "2 million"),
    ]:
        page.click(f'[data-ratio="{ratio}"]')
        page.evaluate(NEXT_FRAME)
        assert page.inner_text(".sentence strong") == alpha
        row = page.locator("#models tr.chosen td").all_inner_texts()
        assert row[:4] == [alpha, mu, q, time]
