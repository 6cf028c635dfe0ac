// Theorem 1 solved exactly: the query-key scale as a function of the output-value scale.
//
// M classes, b distinct tokens per class, m class and n background positions, r = eta_QK / eta_OV, eta_OV = 1.
// mu is the output-value scale, q the query-key scale, alpha the attention mass on class tokens:
//   alpha = rho e^q / (rho e^q + 1),  rho = m / n,      loss = log(1 + (M-1) e^(-alpha mu)).
// Dividing the two differential equations separates them; the invariants below follow.
//
// Sign descent (the idealized Adam) is solved for CACO: every entry moves at its learning rate, so
//   mu = mu0 + 2 t,    q = q0 + (r / 2) (|mu| - |mu0|).

const MODELS = ["FAFO", "FACO", "CAFO", "CACO"];

// Everything the equations need, from the numbers a person chooses.
function makeProblem({ r, M, b, m, n, query, model, start, optimizer = "gradient_flow" }) {
  const sign = optimizer === "sign";
  if (sign && model !== "CACO") throw new RangeError(`sign descent is solved for CACO only, not ${model}`);
  const factorizedQK = model[0] === "F";
  const factorizedOV = model[2] === "F";
  const rho = m / n;
  // kappa is linear in r: a query that is a random token of its class shares the gradient of b tokens.
  const kappaPerRatio = (M - 1) / M / (query === "token" ? b : 1);
  return {
    r, M, b, m, n, query, model, sign, factorizedQK, factorizedOV, rho, kappaPerRatio,
    kappa: r * kappaPerRatio,
    gammaOV: 2 * Math.sqrt(b),
    gammaQK: query === "token" ? 2 * b : 2 * Math.sqrt(b),
    // Zero is a saddle for a factorized circuit, so it starts a little above.
    mu0: factorizedOV ? start : 0,
    q0: factorizedQK ? start : 0,
  };
}

const attentionAt = (p, q) => 1 / (1 + Math.exp(-q) / p.rho);

const lossAt = (p, alpha, mu) => Math.log1p((p.M - 1) * Math.exp(-alpha * mu));

// alpha * mu at a given loss: l(L) = log((M-1) / (e^L - 1)).
const logitAt = (p, loss) => Math.log((p.M - 1) / Math.expm1(loss));

// The right-hand side of the invariant per unit of kappa, and its derivative with respect to mu.
function invariant(p, mu) {
  const queryKey = p.factorizedQK ? p.gammaQK : 1;
  return p.factorizedOV
    ? (queryKey / p.gammaOV) * (mu - p.mu0)
    : (queryKey / 2) * (mu - p.mu0) * (mu + p.mu0);
}

function invariantSlope(p, mu) {
  return (p.factorizedQK ? p.gammaQK : 1) * (p.factorizedOV ? 1 / p.gammaOV : mu);
}

// The left-hand side of the invariant, which grows with the query-key scale.
function queryKeyEffort(p, q) {
  if (!p.factorizedQK) return q - p.q0 + p.rho * Math.exp(p.q0) * Math.expm1(q - p.q0);
  // ln(q/q0) + rho (Ei(q) - Ei(q0)), written without cancellation
  const sums = exponentialIntegralSum(q) - exponentialIntegralSum(p.q0);
  return (1 + p.rho) * Math.log(q / p.q0) + p.rho * sums;
}

// q(mu), the exact trajectory.
function queryKeyScale(p, mu) {
  if (p.sign) return p.q0 + (p.r / 2) * (Math.abs(mu) - Math.abs(p.mu0));
  const effort = p.kappa * invariant(p, mu);
  if (!(effort > 0)) return p.q0;
  return p.factorizedQK ? factorizedQueryKeyScale(p, effort) : collapsedQueryKeyScale(p, effort);
}

function collapsedQueryKeyScale(p, effort) {
  const weight = p.rho * Math.exp(p.q0);
  const omega = wrightOmega(Math.log(p.rho) + weight + p.q0 + effort);
  // ln(omega / rho) loses digits when q is tiny; Newton on the invariant brings them back.
  let grown = Math.max(Math.log(omega / p.rho) - p.q0, 0);
  for (let round = 0; round < 4; round += 1) {
    const bend = weight * Math.expm1(grown);
    grown -= (grown + bend - effort) / (1 + weight + bend);
  }
  return p.q0 + grown;
}

function factorizedQueryKeyScale(p, effort) {
  // In x = ln(q/q0) the left side is increasing and convex: Newton from the right never overshoots.
  const sum0 = exponentialIntegralSum(p.q0);
  const height = Math.log(effort / p.rho + sum0 + 2);
  const ceiling = height + Math.log(height + 3) + 1; // S(q) >= (e^q - 1 - q) / q puts q below this
  let x = Math.min(effort / (1 + p.rho), Math.log(ceiling / p.q0));
  for (let round = 0; round < 60; round += 1) {
    const q = p.q0 * Math.exp(x);
    const excess = (1 + p.rho) * x + p.rho * (exponentialIntegralSum(q) - sum0) - effort;
    const step = excess / (1 + p.rho * Math.exp(q));
    x -= step;
    if (Math.abs(step) <= 1e-15 * Math.abs(x)) break;
  }
  return p.q0 * Math.exp(x);
}

// The state of training once the output-value scale is mu.
function stateAt(p, mu) {
  const q = queryKeyScale(p, mu);
  const alpha = attentionAt(p, q);
  return { mu, q, alpha, loss: lossAt(p, alpha, mu) };
}

// r G_A(q) / G_O(mu): how much faster the query-key circuit moves than the output-value circuit right now.
function effectiveRatio(p, { mu, q }) {
  return (p.r * (p.factorizedQK ? p.gammaQK * q : 1)) / (p.factorizedOV ? p.gammaOV * mu : 1);
}
