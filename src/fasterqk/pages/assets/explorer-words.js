// The state of the model in plain words, as a row of tokens, and as a table.

const NAMES = {
  FAFO: "both circuits factorized",
  FACO: "factorized query-key, collapsed output-value",
  CAFO: "collapsed query-key, factorized output-value",
  CACO: "both circuits collapsed",
};

function speed(r) {
  if (r === 1) return "as fast as";
  return r > 1 ? `${short(r)} times as fast as` : `${short(1 / r)} times slower than`;
}

// How to reach the wanted attention, in one sentence.
function neededSentence(state, { needed, start, end }) {
  const wish = `For ${percent(state.target)} on the class tokens at loss ${short(state.loss)}`;
  if (state.target <= start.alpha) {
    return `${wish} nothing needs to be learned: training starts with ${percent(start.alpha)} there.`;
  }
  if (needed === null) return `${wish} no ratio is enough: the loss is reached before attention can move.`;
  const step = end.alpha < state.target ? "more" : "less";
  return `${wish}, let the query-key circuit learn ${speed(Number(needed.toPrecision(3)))} the output-value circuit${
    Math.abs(Math.log(needed / state.r)) < 0.01 ? ": the ratio you have now." : `: ${step} than the ${short(state.r)} you have now.`
  }`;
}

function showWords(root, state, { chosen }) {
  const { end } = chosen;
  const uniform = state.m / (state.m + state.n);
  const fill = (name, text) => {
    for (const slot of root.querySelectorAll(`[data-slot="${name}"]`)) slot.textContent = text;
  };
  fill("r", short(state.r));
  fill("speed", speed(state.r));
  fill("loss", short(state.loss));
  fill("alpha", percent(end.alpha));
  fill("m", String(state.m));
  fill("positions", String(state.m + state.n));
  fill("target", percent(state.target));
  fill("uniform", percent(uniform));
  fill("gain", `${short(end.alpha / uniform, 2)} times`);
  fill("time", amount(end.time));
  fill("mu", short(end.mu, 4));
  fill("q", short(end.q, 4));
  fill("odds", end.q > 30 ? `e^${short(end.q)}` : amount(Number(Math.exp(end.q).toPrecision(3))));
  fill("needed-sentence", neededSentence(state, chosen));
}

// One square per position; the fuller its colour, the more attention it gets.
function showTokens(strip, state, { chosen }) {
  const { alpha } = chosen.end;
  const positions = state.m + state.n;
  const classAt = new Set();
  for (let k = 0; k < state.m; k += 1) classAt.add(Math.floor(((k + 0.5) * positions) / state.m));
  const perClass = alpha / state.m;
  const perBackground = (1 - alpha) / state.n;
  const most = Math.max(perClass, perBackground);
  if (strip.childElementCount !== positions) {
    strip.replaceChildren(...Array.from({ length: positions }, () => document.createElement("i")));
  }
  [...strip.children].forEach((square, k) => {
    const isClass = classAt.has(k);
    square.className = isClass ? "class" : "";
    square.style.setProperty("--weight", ((isClass ? perClass : perBackground) / most).toFixed(4));
  });
  strip.classList.toggle("dense", positions > 160);
  strip.setAttribute("aria-label", `${state.m} class tokens get ${percent(perClass)} of the attention each, ${
    state.n} background tokens ${percent(perBackground)} each`);
}

// The four parameterizations and sign descent at the chosen loss.
function showTable(body, state, { models }) {
  const rows = models.map(({ name, color, model, chosen, end, problem, needed }) => {
    const row = document.createElement("tr");
    row.className = chosen ? "chosen" : "";
    const head = document.createElement("th");
    head.scope = "row";
    head.textContent = name;
    head.title = NAMES[model];
    head.style.setProperty("--key", color);
    row.append(head);
    const cells = [
      percent(end.alpha), short(end.mu, 4), short(end.q, 4), amount(end.time),
      short(effectiveRatio(problem, end)), needed === null ? "–" : short(needed),
    ];
    for (const text of cells) {
      const cell = document.createElement("td");
      cell.textContent = text;
      row.append(cell);
    }
    return row;
  });
  body.replaceChildren(...rows);
}
