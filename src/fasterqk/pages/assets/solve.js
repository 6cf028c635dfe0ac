// Questions put to the exact trajectory: at which state is the loss reached, which ratio gives an attention.

const startState = (p) => stateAt(p, p.mu0);

// The state at a loss: one safeguarded Newton solve of alpha(mu) mu = l(loss) in ln mu, no time stepping.
function stateAtLoss(p, loss) {
  const first = startState(p);
  const logit = logitAt(p, loss);
  if (!(loss > 0) || !(logit >= first.alpha * first.mu)) {
    throw new RangeError(`loss ${loss} is not between 0 and the loss at the start, ${first.loss}`);
  }
  if (p.sign) return signStateAtLoss(p, logit, loss);
  // alpha never falls, so mu lies between l (all attention) and l / alpha(start) (attention never moved).
  let low = Math.log(Math.max(p.mu0, logit));
  let high = Math.log(logit / first.alpha);
  let x = high;
  let lastStep = high - low;
  for (let round = 0; round < 200; round += 1) {
    const mu = Math.exp(x);
    const { q, alpha } = stateAt(p, mu);
    const excess = Math.log((alpha * mu) / logit);
    if (excess > 0) high = x;
    else low = x;
    const growth = p.kappa * invariantSlope(p, mu) * (1 - alpha) * (p.factorizedQK ? q : 1);
    let step = -excess / (1 + mu * (1 - alpha) * growth);
    // Newton may circle around the steep part: halve the bracket unless its steps shrink by half.
    const shrinks = Math.abs(step) <= Math.abs(lastStep) / 2 && x + step >= low && x + step <= high;
    if (!shrinks) step = (low + high) / 2 - x;
    x += step;
    lastStep = step;
    if (Math.abs(step) <= 2e-16 * Math.max(1, Math.abs(x))) break;
  }
  return stateAt(p, Math.exp(x));
}

// Sign descent at a loss is explicit: with l the logit and W = rho e^q, u = (r/2) l / W is Wright's omega.
function signStateAtLoss(p, logit, loss) {
  const half = p.r / 2;
  const lag = half * (logit - Math.abs(p.mu0));
  const omega = wrightOmega(Math.log(half * logit) - Math.log(p.rho) - p.q0 - lag);
  const mu = logit + omega / half;
  return { mu, q: p.q0 + lag + omega, alpha: logit / mu, loss };
}

// The ratio that gives attention alpha at a loss; the invariant is linear in r, so this is explicit.
// Attention at or below where it starts needs no learning of the query-key circuit: the answer is then 0,
// or null when the start is already above the wanted value.
function ratioForAttention(p, alpha, loss) {
  const q = Math.log(alpha / (1 - alpha) / p.rho);
  const mu = logitAt(p, loss) / alpha;
  if (p.sign) {
    const ratio = (2 * (q - p.q0)) / (mu - p.mu0);
    return ratio >= 0 ? ratio : null;
  }
  const grown = invariant(p, mu);
  if (!(grown > 0) || (p.factorizedQK && !(q > 0))) return null;
  const ratio = queryKeyEffort(p, q) / (p.kappaPerRatio * grown);
  return ratio >= 0 ? ratio : null;
}
