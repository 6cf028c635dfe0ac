// What the reader has chosen, and the link that brings it back.

const RATIOS = [0.01, 0.1, 1, 10, 100]; // the five of the paper's simulation figure

const NUMBERS = {
  r: { low: 1e-3, high: 1e4 },
  loss: { low: 1e-8, high: 0.5 },
  M: { low: 2, high: 100, whole: true },
  b: { low: 1, high: 500, whole: true },
  m: { low: 1, high: 50, whole: true },
  n: { low: 1, high: 500, whole: true },
  start: { low: 1e-6, high: 0.1 },
  target: { low: 0.01, high: 0.999 },
};

// What is solved for an optimizer: sign descent so far for collapsed circuits only.
const solvedModels = (optimizer) => (optimizer === "sign" ? ["CACO"] : MODELS);

const CHOICES = {
  optimizer: ["gradient_flow", "sign"],
  query: ["token", "fixed"],
  model: MODELS,
  compare: ["models", "ratios", "laws"],
  clock: ["plain", "normalised"],
  x: ["time", "mu", "q", "alpha", "loss"],
  y: ["time", "mu", "q", "alpha", "loss"],
};

const DEFAULTS = {
  r: 10, loss: 1e-4, M: 5, b: 50, m: 5, n: 50, start: 1e-3, target: 0.9,
  optimizer: "gradient_flow", query: "token", model: "CACO", compare: "models", clock: "plain", x: "mu", y: "q",
};

// A number brought into its range; null when it is none.
function allowedNumber(name, value) {
  const { low, high, whole } = NUMBERS[name];
  const number = typeof value === "string" && value.trim() === "" ? NaN : Number(value);
  if (!Number.isFinite(number)) return null;
  return Math.min(Math.max(whole ? Math.round(number) : number, low), high);
}

// A state whose model is solved for its optimizer.
const settled = (state) => (solvedModels(state.optimizer).includes(state.model) ? state : { ...state, model: "CACO" });

// The state in a link; what is missing or makes no sense keeps its default.
function stateFromHash(hash) {
  const state = { ...DEFAULTS };
  const given = new URLSearchParams(hash.replace(/^#/, ""));
  for (const name of Object.keys(NUMBERS)) {
    if (given.has(name)) state[name] = allowedNumber(name, given.get(name)) ?? state[name];
  }
  for (const [name, allowed] of Object.entries(CHOICES)) {
    if (allowed.includes(given.get(name))) state[name] = given.get(name);
  }
  return settled(state);
}

function hashFromState(state) {
  const chosen = Object.entries(state).filter(([name, value]) => value !== DEFAULTS[name]);
  return chosen.length ? `#${new URLSearchParams(chosen)}` : "";
}
