// Training curves: one chart per metric, one colour per arm, thin lines for seeds and a thick one for their mean.

function showCurves(place, document_) {
  const { x, metrics, cells } = document_;
  const arms = [...new Set(cells.map((cell) => cell.arm))];
  const color = (arm) => `var(--arm-${(arms.indexOf(arm) % 7) + 1})`;
  const legend = document.createElement("p");
  legend.className = "legend";
  for (const arm of arms) {
    const entry = document.createElement("span");
    entry.textContent = arm;
    entry.style.setProperty("--key", color(arm));
    legend.append(entry);
  }
  const charts = document.createElement("div");
  charts.className = "multiples";
  place.replaceChildren(legend, charts);
  for (const metric of metrics) {
    const frame = document.createElement("div");
    frame.className = "chart-frame";
    charts.append(frame);
    const description = describeCurves(x, metric, cells, arms, color);
    if (description) makeChart(frame, () => description, { height: 250 });
    else frame.textContent = `${metric.label}: no numbers`;
  }
}

function describeCurves(x, metric, cells, arms, color) {
  const usable = (value) => Number.isFinite(value) && (!metric.log || value > 0);
  const pointsOf = (cell) =>
    cell.points
      .filter((point) => Number.isFinite(point[x.key]) && usable(point[metric.key]))
      .map((point) => [point[x.key], point[metric.key]]);
  const lines = [];
  for (const arm of arms) {
    const seeds = cells.filter((cell) => cell.arm === arm).map(pointsOf);
    const mean = meanCurve(seeds);
    for (const points of seeds) lines.push({ points, color: color(arm), faint: seeds.length > 1, name: mean ? "" : arm });
    if (mean) lines.push({ points: mean, color: color(arm), strong: true, name: arm });
  }
  const all = lines.flatMap((line) => line.points);
  if (all.length === 0) return null;
  const values = all.map(([, value]) => value).concat(usable(metric.null) ? [metric.null] : []);
  return {
    x: { label: x.label, short: x.label, domain: widened(all.map(([at]) => at), false) },
    y: { label: metric.label, domain: widened(values, metric.log), log: Boolean(metric.log) },
    lines,
    guides: usable(metric.null) ? [{ axis: "y", at: metric.null }] : [],
    summary: `${metric.label} against ${x.label} for ${arms.join(", ")}`,
  };
}

// The mean over seeds, where there are several and all were measured at the same places.
function meanCurve(seeds) {
  const [first, ...others] = seeds;
  if (others.length === 0 || first.length === 0) return null;
  const same = others.every(
    (points) => points.length === first.length && points.every(([at], k) => at === first[k][0]),
  );
  if (!same) return null;
  return first.map(([at], k) => [at, seeds.reduce((sum, points) => sum + points[k][1], 0) / seeds.length]);
}

function widened(values, log) {
  const low = values.reduce((a, b) => Math.min(a, b));
  const high = values.reduce((a, b) => Math.max(a, b));
  if (log) return [low / 1.15, high * 1.15];
  const margin = (high - low || Math.abs(high) || 1) * 0.04;
  return [low >= 0 && low < high / 2 ? 0 : low - margin, high + margin];
}
