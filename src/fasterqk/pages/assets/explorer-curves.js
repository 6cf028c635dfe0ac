// From a state to everything the charts and sentences show.

const LOWEST_LOSS = NUMBERS.loss.low;

const LAWS = { gradient_flow: "gradient flow", sign: "sign descent" };

// Both laws of one model; beside sign descent of collapsed circuits stands gradient flow of the chosen ones.
function bothLaws(state) {
  return Object.entries(LAWS).map(([optimizer, name]) => {
    const model = optimizer === "sign" ? "CACO" : state.model;
    return {
      name: `${model}, ${name}`,
      color: optimizer === "sign" ? "var(--sign)" : "var(--ink)",
      strong: optimizer === state.optimizer,
      problem: makeProblem({ ...state, optimizer, model }),
    };
  });
}

// The lines of the comparison: the parameterizations at one ratio, five ratios in one, or both laws.
function comparedSettings(state) {
  if (state.compare === "laws") return bothLaws(state);
  if (state.compare === "models") {
    return solvedModels(state.optimizer).map((model) => ({
      name: model,
      color: `var(--${model.toLowerCase()})`,
      strong: model === state.model,
      problem: makeProblem({ ...state, model }),
    }));
  }
  const settings = RATIOS.map((r, k) => ({
    name: `r = ${r}`,
    color: `var(--ratio-${k + 1})`,
    strong: r === state.r,
    problem: makeProblem({ ...state, r }),
  }));
  if (settings.some((setting) => setting.strong)) return settings;
  const current = { name: `r = ${short(state.r)}`, color: "var(--ink)", strong: true };
  return [...settings, { ...current, problem: makeProblem(state) }];
}

// States from the start down to the lowest loss on the axis, closer together where attention moves fast.
function lossPath(problem, points = 110) {
  const first = startState(problem);
  const path = [];
  const top = Math.min(first.loss * 0.999, 1);
  for (let k = 0; k <= points; k += 1) {
    path.push(stateAtLoss(problem, top * (LOWEST_LOSS / top) ** ((k / points) ** 1.6)));
  }
  return path;
}

// Attention at the chosen loss for every ratio on the axis.
function attentionByRatio(state, points = 110) {
  const { low, high } = NUMBERS.r;
  return Array.from({ length: points + 1 }, (_, k) => {
    const r = low * (high / low) ** (k / points);
    return [r, stateAtLoss(makeProblem({ ...state, r }), state.loss).alpha];
  });
}

function computeAll(state) {
  const settings = comparedSettings(state).map((setting) => {
    const training = trajectory(setting.problem, state.loss);
    return { ...setting, training, end: training[training.length - 1], path: lossPath(setting.problem) };
  });
  const cases = [...MODELS.map((model) => ["gradient_flow", model]), ["sign", "CACO"]];
  const models = cases.map(([optimizer, model]) => {
    const problem = makeProblem({ ...state, optimizer, model });
    const end = stateAtLoss(problem, state.loss);
    return {
      model,
      optimizer,
      name: optimizer === "sign" ? "CACO, sign descent" : model,
      color: optimizer === "sign" ? "var(--sign)" : `var(--${model.toLowerCase()})`,
      chosen: model === state.model && optimizer === state.optimizer,
      problem,
      end: { ...end, time: timeBetween(problem, problem.mu0, end.mu) },
      start: startState(problem),
      byRatio: attentionByRatio({ ...state, optimizer, model }),
      needed: ratioForAttention(problem, state.target, state.loss),
    };
  });
  return { settings, models, chosen: models.find((model) => model.chosen) };
}
