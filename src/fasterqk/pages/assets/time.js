// Time along the trajectory is one integral over the output-value scale:
//   t = b * integral of (e^(alpha u) + M - 1) / (alpha G_O(u)) du,  with eta_OV = 1.

const KRONROD_NODES = [
  0.991455371120812639206854697526329, 0.949107912342758524526189684047851, 0.864864423359769072789712788640926,
  0.741531185599394439863864773280788, 0.586087235467691130294144691693013, 0.405845151377397166906606412076961,
  0.207784955007898467600689403773245, 0,
];
const KRONROD_WEIGHTS = [
  0.022935322010529224963732008058970, 0.063092092629978553290700663189204, 0.104790010322250183839876322541518,
  0.140653259715525918745189590510238, 0.169004726639267902826583426598550, 0.190350578064785409913256402421014,
  0.204432940075298892414161999234649, 0.209482141084727828012999174891714,
];
const GAUSS_WEIGHTS = [
  0.129484966168869693270611432679082, 0.279705391489276667901467771423780, 0.381830050505118944950369775488975,
  0.417959183673469387755102040816327,
];

// Gauss-Kronrod (7, 15) on one panel, halved until the two rules agree to `tolerance` of the value.
function integrate(f, from, to, tolerance = 1e-12, depth = 24) {
  const middle = (from + to) / 2;
  const half = (to - from) / 2;
  let fine = KRONROD_WEIGHTS[7] * f(middle);
  let coarse = (GAUSS_WEIGHTS[3] * fine) / KRONROD_WEIGHTS[7];
  for (let k = 0; k < 7; k += 1) {
    const pair = f(middle - half * KRONROD_NODES[k]) + f(middle + half * KRONROD_NODES[k]);
    fine += KRONROD_WEIGHTS[k] * pair;
    if (k % 2 === 1) coarse += GAUSS_WEIGHTS[(k - 1) / 2] * pair;
  }
  if (depth === 0 || Math.abs(fine - coarse) <= tolerance * Math.abs(fine)) return fine * half;
  return integrate(f, from, middle, tolerance, depth - 1) + integrate(f, middle, to, tolerance, depth - 1);
}

// Time spent while the output-value scale grows from one value to another.
function timeBetween(p, from, to) {
  if (p.sign) return (to - from) / 2; // sign descent moves the scale by twice the learning rate per step
  const rate = (mu) => {
    const alpha = attentionAt(p, queryKeyScale(p, mu));
    return (Math.exp(alpha * mu) + p.M - 1) / alpha;
  };
  if (!p.factorizedOV) return p.b * integrate(rate, from, to);
  // G_O = gamma mu: in the variable ln mu the saddle at zero is harmless.
  return (p.b / p.gammaOV) * integrate((x) => rate(Math.exp(x)), Math.log(from), Math.log(to));
}

// Output-value scales from the start to a state. Half of them are even in the scale (logarithmically near the
// start), half in the logit: late in training the loss falls far while the scale hardly moves.
function scalesUpTo(p, end, points) {
  const scales = [];
  const logit = end.alpha * end.mu;
  const first = startState(p);
  for (let k = 1; k < points / 2; k += 1) {
    const share = (2 * k) / points;
    scales.push(
      p.factorizedOV ? p.mu0 * (end.mu / p.mu0) ** share : (end.mu * Math.sinh(9 * share)) / Math.sinh(9),
    );
    const wanted = logit * share;
    if (wanted > first.alpha * first.mu) scales.push(stateAtLoss(p, Math.log1p((p.M - 1) * Math.exp(-wanted))).mu);
  }
  return [...scales.sort((a, b) => a - b).filter((mu) => mu < end.mu), end.mu];
}

// States from the start to a loss, with the time of each: what the curves are drawn from.
function trajectory(p, loss, points = 160) {
  const states = [{ ...startState(p), time: 0 }];
  for (const mu of scalesUpTo(p, stateAtLoss(p, loss), points)) {
    const last = states[states.length - 1];
    states.push({ ...stateAt(p, mu), time: last.time + timeBetween(p, last.mu, mu) });
  }
  return states;
}
