// The explorer: one state, one way round. A control changes the state, the state redraws everything.

function startExplorer() {
  const byId = (id) => document.getElementById(id);
  let state = stateFromHash(location.hash);
  let computed = null;
  let waiting = false;
  const get = () => ({ state, computed });

  const change = (part) => {
    state = settled({ ...state, ...part });
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => {
      waiting = false;
      show();
    });
  };

  const followControls = bindControls(document, change);
  const charts = [
    makeChart(byId("chart-loss"), lossChart(get, change), { height: 320 }),
    makeChart(byId("chart-ratio"), ratioChart(get, change), { height: 320 }),
    ...["alpha", "mu", "q", "loss"].map((name) =>
      makeChart(byId(`chart-time-${name}`), quantityChart(() => "time", () => name, get), { height: 230 }),
    ),
    makeChart(byId("chart-free"), quantityChart((now) => now.x, (now) => now.y, get), { height: 320 }),
  ];

  function show() {
    computed = computeAll(state);
    followControls(state);
    document.body.dataset.compare = state.compare;
    document.body.dataset.optimizer = state.optimizer;
    document.body.dataset.own = RATIOS.includes(state.r) ? "no" : "yes";
    showWords(document, state, computed);
    showTokens(byId("tokens"), state, computed);
    showTable(byId("models"), state, computed);
    for (const chart of charts) chart.refresh();
    const hash = hashFromState(state);
    if (hash !== location.hash) history.replaceState(null, "", hash || location.pathname + location.search);
  }

  // A phone shows the answer first and the task on demand; beside a wide page there is room for both.
  const wide = matchMedia("(min-width: 861px)");
  const fold = () => {
    document.querySelector(".task").open = wide.matches;
  };
  wide.addEventListener("change", fold);
  fold();
  addEventListener("hashchange", () => {
    state = stateFromHash(location.hash);
    show();
  });
  byId("reset").addEventListener("click", () => change({ ...DEFAULTS }));
  byId("copy-link").addEventListener("click", async (event) => {
    const button = event.currentTarget;
    const copied = await copyText(location.href);
    button.textContent = copied ? "Link copied" : "Copy the address bar";
    setTimeout(() => {
      button.textContent = "Copy link";
    }, 2000);
  });
  show();
}

// For the browser's console, and for the tests that hold these functions against scipy.
window.fasterqk = {
  makeProblem, stateAt, stateAtLoss, ratioForAttention, timeBetween, trajectory, effectiveRatio, wrightOmega,
  exponentialIntegralSum,
};

startExplorer();
