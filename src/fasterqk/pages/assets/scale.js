// Axes: a scale maps data to pixels and knows its ticks.

function makeScale({ domain, range, log = false }) {
  const forward = log ? Math.log10 : (value) => value;
  const backward = log ? (value) => 10 ** value : (value) => value;
  const [from, to] = domain.map(forward);
  const [start, end] = range;
  const scale = (value) => start + ((forward(value) - from) / (to - from)) * (end - start);
  scale.invert = (pixel) => backward(from + ((pixel - start) / (end - start)) * (to - from));
  scale.log = log;
  scale.domain = domain;
  scale.ticks = (wanted) => (log ? logTicks(domain, wanted) : linearTicks(domain, wanted));
  return scale;
}

function linearTicks(domain, wanted = 5) {
  const [low, high] = [Math.min(...domain), Math.max(...domain)];
  const rough = (high - low) / wanted;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= 0.85 * rough);
  // As many digits as tell neighbours apart.
  const digits = Math.max(3, Math.ceil(Math.log10(Math.max(Math.abs(low), Math.abs(high)) / step)) + 1);
  const ticks = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-9; k += 1) {
    ticks.push({ value: k * step, label: short(Number((k * step).toPrecision(12)), Math.min(12, digits)) });
  }
  return ticks;
}

// Whole powers of ten, thinned out until there are about as many as wanted; linear ticks in a narrow range.
function logTicks(domain, wanted = 6) {
  const [low, high] = [Math.min(...domain), Math.max(...domain)].map(Math.log10);
  if (Math.floor(high + 1e-9) - Math.ceil(low - 1e-9) < 1) return linearTicks(domain, wanted);
  const step = Math.max(1, Math.ceil((Math.floor(high) - Math.ceil(low)) / wanted));
  const ticks = [];
  for (let exponent = Math.ceil(low - 1e-9); exponent <= high + 1e-9; exponent += 1) {
    if (exponent % step !== 0) continue;
    const plain = exponent >= -2 && exponent <= 3;
    const label = plain ? String(Number((10 ** exponent).toPrecision(1))) : powerOfTen(exponent);
    ticks.push({ value: 10 ** exponent, label });
  }
  return ticks;
}
