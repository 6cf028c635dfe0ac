// Training curves: one chart per metric, one colour per arm, thin lines for seeds and a thick one for their mean.
// Drawn against the loss, which falls to the right, they compare arms that fit equally well.

const AGAINST_LOSS = { key: "loss", label: "training loss, falling to the right", short: "training loss", log: true, reversed: true };

function showCurves(place, document_) {
  const { cells } = document_;
  const against = place.dataset.against === "loss";
  const x = against ? AGAINST_LOSS : document_.x;
  const metrics = document_.metrics.filter((metric) => metric.key !== x.key);
  const arms = [...new Set(cells.map((cell) => cell.arm))];
  const color = (arm) => `var(--arm-${(arms.indexOf(arm) % 7) + 1})`;
  const legend = document.createElement("p");
  legend.className = "legend";
  for (const arm of arms) {
    const entry = document.createElement("span");
    entry.textContent = arm;
    entry.style.setProperty("--key", color(arm));
    if (arms.indexOf(arm) >= 7) entry.className = "dashed";
    legend.append(entry);
  }
  if (metrics.some((metric) => Number.isFinite(metric.null))) {
    const entry = document.createElement("span");
    entry.className = "null";
    entry.textContent = "uniform attention";
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
      .filter((point) => Number.isFinite(point[x.key]) && (!x.log || point[x.key] > 0) && usable(point[metric.key]))
      .map((point) => [point[x.key], point[metric.key]]);
  const lines = [];
  // The eighth arm has the colour of the first, and dashes.
  const dashed = (arm) => arms.indexOf(arm) >= 7;
  for (const arm of arms) {
    const seeds = cells.filter((cell) => cell.arm === arm).map(pointsOf);
    const mean = meanCurve(seeds);
    for (const points of seeds) lines.push({ points, color: color(arm), dashed: dashed(arm), faint: Boolean(mean), name: mean ? "" : arm });
    if (mean) lines.push({ points: mean, color: color(arm), dashed: dashed(arm), strong: true, name: arm });
  }
  const all = lines.flatMap((line) => line.points);
  if (all.length === 0) return null;
  const values = all.map(([, value]) => value).concat(usable(metric.null) ? [metric.null] : []);
  const across = widened(all.map(([at]) => at), x.log);
  return {
    x: { label: x.label, short: x.short ?? x.label, domain: x.reversed ? across.reverse() : across, log: Boolean(x.log) },
    y: { label: metric.label, domain: widened(values, metric.log), log: Boolean(metric.log) },
    lines,
    guides: usable(metric.null) ? [{ axis: "y", at: metric.null }] : [],
    summary: `${metric.label} against ${x.short ?? x.label}. At the end: ${arms.map((arm) => `${arm} ${endOf(arm)}`).join(", ")}.`,
  };

  // The mean over seeds of the last value that each has.
  function endOf(arm) {
    const ends = cells.filter((cell) => cell.arm === arm).map((cell) => pointsOf(cell).at(-1)?.[1]);
    const known = ends.filter((value) => value !== undefined);
    return known.length ? short(known.reduce((sum, value) => sum + value, 0) / known.length) : "unknown";
  }
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
