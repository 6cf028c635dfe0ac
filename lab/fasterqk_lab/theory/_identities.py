"""Every identity of the theory, checked numerically (``fasterqk-lab reproduce identities``).

Each check computes the same numbers in two independent ways and yields their relative differences over a
fixed set of cases. ``CHECKS``, at the end, lists them.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from fasterqk.theory import (
    PARAMETERIZATIONS,
    QUERIES,
    Setting,
    growth_bounds,
    integrate,
    product_law,
    ratio_for,
    saturated_remainder,
    solve,
)
from fasterqk_lab.theory._descent import descend, small_start
from fasterqk_lab.theory._flow import (
    Matrices,
    Omega,
    Population,
    balanced_factors,
    collapsed,
    flow,
    gradients,
    look,
    matching_rates,
    ov_imbalance,
    qk_imbalance,
    scales,
    theorem_weights,
)

Check = Callable[[], Iterable[ArrayLike]]

_LOSSES = np.array([0.3, 1e-2, 1e-4, 1e-7])
_SMALL = {"M": 3, "b": 2, "m": 2, "n": 2}  # 384 sequences with a token query


@dataclass(frozen=True)
class Identity:
    """One identity: its statement, the largest difference found between its two sides, and the tolerance."""

    name: str
    says: str
    error: float
    tolerance: float

    @property
    def ok(self) -> bool:
        return self.error <= self.tolerance  # false for not-a-number


def check_identities(
    progress: Callable[[float, float], None] | None = None, names: Collection[str] | None = None
) -> list[Identity]:
    """Check all identities of the theory, or those with these ``names``; takes a few seconds.

    Arguments:
        progress: Called as ``progress(done, total)`` after each check.
        names: The checks to run; by default all.

    Returns:
        One :class:`Identity` per check, with its largest error and its tolerance.
    """
    chosen = [name for name in CHECKS if names is None or name in names]
    identities = []
    for name in chosen:
        says, tolerance, function = CHECKS[name]
        identities.append(Identity(name, says, largest_error(function), tolerance))
        if progress is not None:
            progress(len(identities), len(chosen))
    return identities


def largest_error(check: Check) -> float:
    """The largest error that ``check`` yields, at least zero; not-a-number if any error is."""
    return float(np.max([0.0, *(np.max(error) for error in check())]))


def _apart(ours: ArrayLike, theirs: ArrayLike) -> float:
    """The largest relative difference."""
    return float(np.max(np.abs(np.subtract(ours, theirs)) / np.abs(theirs)))


_SIZES = ((2, 1, 1, 3), (5, 50, 5, 50), (300, 7, 40, 200))


def _settings() -> Iterator[tuple[Setting, dict[str, Any]]]:
    for query, name, size, ratio in product(QUERIES, PARAMETERIZATIONS, _SIZES, (1e-2, 1e2)):
        yield Setting(*size, query), {"qk_ratio": ratio, "parameterization": name}


def _closed_form_against_integration() -> Iterator[ArrayLike]:
    for setting, options in _settings():
        exact = solve(setting, loss=_LOSSES, **options)
        other = integrate(setting, losses=_LOSSES, **options)
        for name in ("mu_ov", "mu_qk", "alpha"):
            yield _apart(getattr(exact, name), getattr(other, name))


def _time_against_integration() -> Iterator[ArrayLike]:
    for setting, options in _settings():
        exact = solve(setting, loss=_LOSSES, **options)
        other = integrate(setting, times=exact.time, **options)
        yield _apart(exact.mu_ov, other.mu_ov)
        yield _apart(exact.mu_qk, other.mu_qk)


def _wright_omega() -> Iterator[ArrayLike]:
    from scipy.special import wrightomega

    mu = np.geomspace(0.1, 1e3, 30)
    for setting, options in _settings():
        state = solve(setting, mu_ov=mu, **options)
        if not state.path.factorized_qk:
            energy = state.path.strength(options["qk_ratio"]) * state.path.ov_integral(mu)
            z = np.log(setting.rho) + setting.rho + energy
            # A complex step differentiates omega without cancellation.
            yield _apart(state.alpha, (wrightomega(z + 1e-200j) / 1e-200).imag)


def _matched_loss() -> Iterator[ArrayLike]:
    for setting, options in _settings():
        state = solve(setting, loss=_LOSSES, **options)
        yield _apart(state.alpha * state.mu_ov, setting.margin(_LOSSES))
        yield _apart(solve(setting, mu_ov=state.mu_ov, **options).mu_qk, state.mu_qk)


def _inverse_design() -> Iterator[ArrayLike]:
    for setting, options in _settings():
        state = solve(setting, loss=_LOSSES, **options)
        if (state.alpha > 0.999999).any() or (state.alpha < 1.001 * setting.uniform_attention).any():
            continue  # there alpha itself no longer carries the digits of the ratio
        back = ratio_for(setting, state.alpha, _LOSSES, parameterization=options["parameterization"])
        yield _apart(back, np.full(back.shape, options["qk_ratio"]))


def _against_scales(population: Population, path: Iterable[Matrices], exact: Any) -> Iterator[ArrayLike]:
    """Full matrices at the points of ``exact``: their scales, their direction, attention and loss."""
    for index, matrices in enumerate(path):
        mu, q, off = scales(population, matrices)
        state = look(population, matrices)
        yield off
        yield _apart(mu, exact.mu_ov[index])
        yield _apart(q, exact.mu_qk[index])
        yield _apart(state.mass, exact.alpha[index])
        yield _apart(state.loss, exact.loss[index])


def _full_matrices() -> Iterator[ArrayLike]:
    for query, name in product(QUERIES, PARAMETERIZATIONS):
        setting = Setting(**_SMALL, query=query)
        population = Population.of(setting)
        exact = solve(setting, 3.0, loss=[0.5, 0.05], parameterization=name, mu0=0.1, q0=0.1)
        first = theorem_weights(population, name, 0.1, 0.1)
        yield from _against_scales(population, flow(population, first, exact.time, qk_ratio=3.0), exact)


def _random_model(balanced: bool) -> tuple[Population, Matrices]:
    population, random = Population.of(Setting(2, 2, 2, 2)), np.random.default_rng(7)
    d = population.width
    o, v, k, q = (0.4 * random.normal(size=(rows, d)) for rows in (2, d, d, d))
    if balanced:
        (o, v), (k, queries) = balanced_factors(o @ v, d), balanced_factors(k @ q.T, d)
        q = queries.T
    return population, {"o": o, "v": v, "k": k, "q": q}


def _complex_step() -> Iterator[ArrayLike]:
    population, matrices = _random_model(balanced=False)
    exact = gradients(population, matrices)
    for name, matrix in matrices.items():
        for place in np.ndindex(matrix.shape):
            moved = matrix.astype(complex)
            moved[place] += 1e-100j
            slope = look(population, matrices | {name: moved}).loss.imag / 1e-100
            yield abs(slope - exact[name][place]) / np.abs(exact[name]).max()


def _balance() -> Iterator[ArrayLike]:
    population, first = _random_model(balanced=False)
    last = flow(population, first, np.array([5.0]), qk_ratio=2.0)[0]
    for imbalance, (left, right) in ((ov_imbalance, "ov"), (qk_imbalance, "kq")):
        before = imbalance(first[left], first[right])
        yield np.abs(imbalance(last[left], last[right]) - before) / np.abs(before).max()


def _omega() -> Iterator[ArrayLike]:
    population, matrices = _random_model(balanced=True)
    o, v, k, q = matrices.values()
    slopes = gradients(population, matrices)
    products = {
        "ov": slopes["o"] @ v + o @ slopes["v"],
        "qk": slopes["k"] @ q.T + k @ slopes["q"].T,
    }
    whole = {circuit: collapsed(matrices, circuit) for circuit in products}
    for circuit, gradient in gradients(population, whole).items():
        omega, product_rule = Omega.of(whole[circuit]), products[circuit]
        dense = (omega.dense() @ gradient.ravel(order="F")).reshape(gradient.shape, order="F")
        doubled = Omega.of(2 * whole[circuit])(gradient) / 2  # degree-1 homogeneous
        for side in (omega(gradient), dense, doubled):
            yield np.abs(side - product_rule) / np.abs(product_rule).max()


def _growth() -> Iterator[ArrayLike]:
    for setting, options in _settings():
        if options["parameterization"] == "CACO":
            state = solve(setting, loss=_LOSSES, **options)
            bounds = growth_bounds(setting, options["qk_ratio"], state.time)
            for value, low, high in (
                (state.mu_ov, bounds.mu_ov_lower, bounds.mu_ov_upper),
                (state.mu_qk, bounds.mu_qk_lower, bounds.mu_qk_upper),
            ):
                yield (low - value) / value
                yield (value - high) / value


def _saturation() -> Iterator[ArrayLike]:
    for setting, options in _settings():
        state = solve(setting, mu_ov=1e25, **options)
        law = saturated_remainder(setting, mu_ov=1e25, mu_qk=state.mu_qk, **options)
        yield _apart(law, 1 / (1 + state.path.odds(state.mu_qk))) * state.mu_qk / 2


def _collapsed_with_growing_rates() -> Iterator[ArrayLike]:
    times = np.array([2.0, 8.0])
    for query, name in product(QUERIES, ("FAFO", "FACO", "CAFO")):
        population = Population.of(Setting(2, 2, 2, 2, query))
        collapsed_start, start = (theorem_weights(population, kind, 0.2, 0.2) for kind in ("CACO", name))
        ours = flow(population, collapsed_start, times, rates=matching_rates(name, qk_ratio=2.0))
        theirs = flow(population, start, times, qk_ratio=2.0)
        for (a, b), circuit in product(zip(ours, theirs, strict=True), ("ov", "qk")):
            factorized = collapsed(b, circuit)
            yield np.abs(a[circuit] - factorized) / np.abs(factorized).max()


# Sign descent. Starts (mu0, q0): zero, ahead, and on the wrong side, where the circuit first looks away.
_SIGN_STARTS = ((0.0, 0.0), (0.7, 0.4), (-1.2505, 0.5), (-0.6505, -1.0))


def _sign_cases() -> Iterator[tuple[Setting, float, dict[str, Any]]]:
    for size, ratio, (mu0, q0) in product(_SIZES, (1e-2, 1.0, 1e2), _SIGN_STARTS):
        yield Setting(*size), ratio, {"mu0": mu0, "q0": q0}


def _sign_matched_loss() -> Iterator[ArrayLike]:
    for setting, ratio, start in _sign_cases():
        state = solve(setting, ratio, loss=_LOSSES, optimizer="sign", **start)
        roots = [_sign_root(setting, ratio, margin, **start) for margin in setting.margin(_LOSSES)]
        yield _apart(state.mu_ov, roots)
        yield _apart(state.alpha * state.mu_ov, setting.margin(_LOSSES))
        along = solve(setting, ratio, time=state.time, optimizer="sign", **start)
        yield _apart(along.loss, _LOSSES)


def _sign_root(setting: Setting, ratio: float, margin: float, mu0: float, q0: float) -> float:
    """mu_ov at a margin above zero, by bracketing."""
    from scipy.optimize import brentq

    def excess(mu: float) -> float:
        q = q0 + ratio / 2 * (abs(mu) - abs(mu0))
        return float(mu / (1 + np.exp(-q) / setting.rho) - margin)

    high = 10.0
    while excess(high) < 0:
        high *= 2
    return float(brentq(excess, 0.0, high, xtol=1e-300, rtol=1e-15))


def _sign_inverse_design() -> Iterator[ArrayLike]:
    for setting, ratio, start in _sign_cases():
        state = solve(setting, ratio, loss=_LOSSES, optimizer="sign", **start)
        first = state.path.start_alpha
        clear = (np.abs(state.alpha / first - 1) > 1e-3) & (state.alpha < 0.999999) & (state.alpha > 1e-6)
        if clear.any():
            back = ratio_for(setting, state.alpha[clear], _LOSSES[clear], optimizer="sign", **start)
            yield _apart(back, np.full(back.shape, ratio))


def sign_descent_errors(query: str, step: float, starts: Sequence[tuple[float, float]]) -> ArrayLike:
    """Attention by sign descent of the full matrices minus the law's: at equal time, and at equal loss.

    Absolute, shape (times, 2, arms); the arms are ``starts`` (mu0, q0), each with ratios 0.3, 1 and 2.
    A step may pass mu_ov = 0, where the query-key circuit turns round: mu_qk is then up to 2 r steps late.
    """
    setting = Setting(M=3, b=2, m=1, n=1, query=query)
    population = Population.of(setting)
    arms = list(product((0.3, 1.0, 2.0), starts))
    start = {
        "ov": [mu0 * population.ov_direction for _, (mu0, _) in arms],
        "qk": [q0 * population.qk_direction for _, (_, q0) in arms],
    }
    rates = {"ov": [step] * len(arms), "qk": [ratio * step for ratio, _ in arms]}
    length = round(2.4 / step)
    errors = []
    for record in descend(population, start, rates, every=length // 4, steps=length):
        if record.step:
            exact: list[list[float]] = [[], []]
            for (ratio, (mu0, q0)), loss in zip(arms, record.loss, strict=True):
                where = ({"time": record.step * step}, {"loss": loss})
                for column, place in zip(exact, where, strict=True):
                    column.append(solve(setting, ratio, optimizer="sign", mu0=mu0, q0=q0, **place).alpha)
            errors.append(np.abs(record.alpha - exact))
    return np.array(errors)


def _sign_matrices() -> Iterator[ArrayLike]:
    for query in QUERIES:
        yield sign_descent_errors(query, 1e-3, _SIGN_STARTS)


def _sign_converges() -> Iterator[ArrayLike]:
    coarse, fine = (sign_descent_errors("fixed", step, _SIGN_STARTS[:1]) for step in (4e-3, 2e-3))
    yield np.abs(np.divide(fine, coarse) - 0.5)


def _sign_saturation() -> Iterator[ArrayLike]:
    for setting, ratio, _ in _sign_cases():
        state = solve(setting, ratio, mu_ov=20 / ratio, optimizer="sign")
        law = np.exp(-ratio * state.mu_ov / 2) / setting.rho
        yield _apart(1 / (1 + state.path.odds(state.mu_qk)), law) / law


def _product_law_flow() -> Iterator[ArrayLike]:
    """FAFO with four rates against FAFO with one ratio, sqrt(R), from factors balanced with their rates."""
    for query, (q, k, v, o) in product(QUERIES, ((9.0, 1.0, 1.0, 1.0), (0.5, 6.0, 2.0, 0.3))):
        setting = Setting(**_SMALL, query=query)
        population = Population.of(setting)
        ratio = product_law(q, k, v, o, optimizer="gradient_flow")
        rate = float(np.sqrt(v * o))
        start: dict[str, Any] = {"parameterization": "FAFO", "mu0": 0.1, "q0": 0.1, "eta_ov": rate}
        exact = solve(setting, ratio, loss=[0.5, 0.05], **start)
        first = theorem_weights(population, "FAFO", 0.1, 0.1)
        ov_tilt, qk_tilt = (o / v) ** 0.25, (k / q) ** 0.25
        tilts = {"o": ov_tilt, "v": 1 / ov_tilt, "k": qk_tilt, "q": 1 / qk_tilt}
        first = {name: matrix * tilts[name] for name, matrix in first.items()}
        ratios = {"q": q, "k": k, "v": v, "o": o}
        path = flow(population, first, exact.time, role_ratios=ratios)
        yield from _against_scales(population, path, exact)


def _product_law_sign() -> Iterator[ArrayLike]:
    """FAFO from small starts that leave the background alone, three splits of R, two pairs of widths."""
    setting = Setting(M=2, b=2, m=1, n=2, query="fixed")
    population = Population.of(setting)
    splits = np.array([(0.5, 0.5, 1.0, 1.0), (1.0, 0.25, 1.0, 1.0), (1.0, 1.0, 2.0, 2.0)])
    for qk_width, ov_width in ((24, 24), (24, 48)):
        start = small_start(population, qk_width, ov_width, 5e-3, np.random.default_rng(0))
        arms = {name: np.repeat(matrix[None], len(splits), axis=0) for name, matrix in start.items()}
        rates = {name: 1e-4 * splits[:, place] for place, name in enumerate("qkvo")}
        ratio = product_law(1, 0.25, optimizer="sign", classes=2, qk_width=qk_width, ov_width=ov_width)
        *_, last = descend(population, arms, rates, until=0.05, every=10_000)
        for loss, alpha in zip(last.loss, last.alpha, strict=True):
            yield abs(alpha - solve(setting, ratio, loss=loss, optimizer="sign").alpha)


def _one_hot_populations() -> Iterator[Population]:
    for query, common in product(QUERIES, (2, 3)):
        yield Population.of(Setting(M=2, b=2, m=2, n=2, query=query, common=common))


def _one_hot_flow() -> Iterator[ArrayLike]:
    for population in _one_hot_populations():
        exact = solve(population.setting, 2.0, loss=[0.5, 0.05])
        zero = theorem_weights(population, "CACO", 0.0, 0.0)
        for index, matrices in enumerate(flow(population, zero, exact.time, qk_ratio=2.0)):
            state = look(population, matrices)
            yield _apart(state.mass, exact.alpha[index])
            yield _apart(state.loss, exact.loss[index])


def _one_hot_sign() -> Iterator[ArrayLike]:
    for population in _one_hot_populations():
        zero = theorem_weights(population, "CACO", 0.0, 0.0)
        start = {name: matrix[None] for name, matrix in zero.items()}
        for record in descend(population, start, {"ov": [1e-3], "qk": [1e-3]}, every=500, steps=1500):
            law = solve(population.setting, 1.0, time=record.step * 1e-3, optimizer="sign").alpha
            yield np.abs(record.alpha - law)


# name: (statement, tolerance, check)
CHECKS: dict[str, tuple[str, float, Check]] = {
    "invariant": ("closed form = DOP853 at matched losses", 1e-8, _closed_form_against_integration),
    "time": ("time by quadrature = time integrated by DOP853", 1e-8, _time_against_integration),
    "wright_omega": ("alpha = omega'(z) for collapsed attention", 1e-11, _wright_omega),
    "matched_loss": ("alpha mu_ov = log((M-1)/(e^L-1)), on the invariant", 1e-11, _matched_loss),
    "inverse_design": ("solving at the designed ratio gives the ratio back", 1e-8, _inverse_design),
    "theorem_1": ("full-matrix flow = the two scalars, all four, both queries", 1e-8, _full_matrices),
    "propositions_1_2": ("hand-written gradients = complex-step gradients", 1e-11, _complex_step),
    "balancedness": ("W_O^T W_O - W_V W_V^T and W_K^T W_K - W_Q^T W_Q are constant", 1e-8, _balance),
    "omega": ("factorized flow = Omega times collapsed flow, both circuits", 1e-11, _omega),
    "growth_rates": ("the growth lemma's bounds (largest violation)", 0.0, _growth),
    "saturation": ("1 - alpha at mu_ov = 1e25 against its law, in units of 2/mu_qk", 1.0, _saturation),
    "collapsed_twin": ("collapsed with rates 2 |W| = factorized", 1e-8, _collapsed_with_growing_rates),
    "sign_law": ("sign descent at matched loss: Wright omega = root by brentq", 1e-11, _sign_matched_loss),
    "sign_design": ("sign descent: the designed ratio gives the ratio back", 1e-8, _sign_inverse_design),
    "sign_matrices": (
        "alpha by sign descent of full matrices, step 1e-3 = the law",
        1e-3,
        _sign_matrices,
    ),
    "sign_converges": ("half the step halves that error (distance from 1/2)", 0.05, _sign_converges),
    "sign_saturation": ("1 - alpha = e^(-r mu/2)/rho, in units of itself", 1.0, _sign_saturation),
    "one_hot_flow": ("one-hot background: full-matrix flow = ratio times 1 + b/C", 1e-8, _one_hot_flow),
    "one_hot_sign": ("one-hot background: sign descent, step 1e-3 = ratio times 2", 1e-3, _one_hot_sign),
    "product_law": ("gradient flow of FAFO with four rates = ratio sqrt(R)", 1e-8, _product_law_flow),
    "product_law_sign": (
        "sign descent of FAFO = CACO at R h_QK/(h_OV p_M)",
        0.02,
        _product_law_sign,
    ),
}
