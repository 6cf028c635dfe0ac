// The charts of the explorer: each reads the state and what was computed from it.

const SHARE_TICKS = [0, 0.25, 0.5, 0.75, 1].map((value) => ({ value, label: `${100 * value}%` }));

const QUANTITIES = {
  time: { label: "training time t (steps × η_OV)", short: "t", log: true, format: amount },
  mu: { label: "output-value scale μ_OV", short: "μ_OV" },
  q: { label: "query-key scale μ_QK", short: "μ_QK" },
  alpha: { label: "attention on class tokens α", short: "α", format: percent, ticks: SHARE_TICKS, domain: [0, 1] },
  loss: { label: "loss", short: "loss", log: true },
};

const clockFactor = (state, setting) => (state.clock === "normalised" ? Math.min(1, setting.problem.r) : 1);

function reading(state, setting, name, point) {
  return name === "time" ? point.time * clockFactor(state, setting) : point[name];
}

// The axis of a quantity, wide enough for every line of the comparison.
function axisFor(name, state, computed) {
  const axis = { ...QUANTITIES[name] };
  if (name === "time" && state.clock === "normalised") axis.label = "normalised time t · min(1, r)";
  if (axis.domain) return axis;
  const ends = computed.settings.map((setting) => reading(state, setting, name, setting.end));
  const highest = Math.max(...ends);
  if (name === "time") return { ...axis, domain: [Math.min(...ends) * 1e-3, highest * 1.3] };
  if (name === "loss") return { ...axis, domain: [state.loss * 0.7, Math.max(1, Math.log(state.M)) * 1.2] };
  return { ...axis, domain: [0, highest * 1.05] };
}

function quantityChart(getX, getY, get) {
  return () => {
    const { state, computed } = get();
    const [nameX, nameY] = [getX(state), getY(state)];
    const [x, y] = [axisFor(nameX, state, computed), axisFor(nameY, state, computed)];
    if (nameX === "loss") x.domain = [...x.domain].reverse(); // training runs from left to right
    const inside = (value, { domain }) => value >= Math.min(...domain);
    const lines = computed.settings.map((setting) => ({
      ...setting,
      points: setting.training
        .map((point) => [reading(state, setting, nameX, point), reading(state, setting, nameY, point)])
        .filter(([across, up]) => inside(across, x) && inside(up, y)),
    }));
    const marks = lines.map((line) => {
      const [markX, markY] = line.points[line.points.length - 1];
      return { x: markX, y: markY, color: line.color, strong: line.strong };
    });
    return { x, y, lines, marks, summary: `${y.label} against ${x.label}, up to loss ${short(state.loss)}` };
  };
}

function lossChart(get, change) {
  return () => {
    const { state, computed } = get();
    const lines = computed.settings.map((setting) => ({
      ...setting,
      points: setting.path.map(({ loss, alpha }) => [loss, alpha]),
    }));
    const marks = computed.settings.map(({ end, color, strong }) => ({
      x: end.loss, y: end.alpha, color, strong, label: strong ? percent(end.alpha) : "",
    }));
    return {
      x: { ...QUANTITIES.loss, label: "loss (training runs to the right)", domain: [1, LOWEST_LOSS] },
      y: QUANTITIES.alpha,
      lines,
      marks,
      guides: [{ axis: "x", at: state.loss, drag: (loss) => change({ loss: tidy("loss", loss) }) }],
      summary: `attention on class tokens against loss; at loss ${short(state.loss)}: ${computed.settings
        .map(({ name, end }) => `${name} ${percent(end.alpha)}`)
        .join(", ")}`,
    };
  };
}

function ratioChart(get, change) {
  return () => {
    const { state, computed } = get();
    const { needed } = computed.chosen;
    const { low, high } = NUMBERS.r;
    const lines = computed.models.map(({ name, color, chosen, byRatio }) => ({
      name, color, strong: chosen, points: byRatio,
    }));
    const { color } = computed.chosen;
    const marks = [{ x: state.r, y: computed.chosen.end.alpha, color, hollow: true }];
    if (needed !== null && needed >= low && needed <= high) {
      marks.push({ x: needed, y: state.target, color, strong: true, label: `r = ${short(needed)}` });
    }
    return {
      x: { label: "learning-rate ratio r = η_QK / η_OV", short: "r", domain: [low, high], log: true },
      y: QUANTITIES.alpha,
      lines,
      marks,
      guides: [
        { axis: "x", at: state.r },
        { axis: "y", at: state.target, drag: (target) => change({ target: tidy("target", target) }) },
      ],
      summary: `attention on class tokens at loss ${short(state.loss)} against the learning-rate ratio; ${percent(
        state.target,
      )} needs ratio ${short(needed)}`,
    };
  };
}

// A dragged value in its range and with few digits, so that links stay short.
function tidy(name, value) {
  return allowedNumber(name, Number(value.toPrecision(3)));
}
