// Numbers as people read them.

const SUPERSCRIPTS = "⁰¹²³⁴⁵⁶⁷⁸⁹";
const LARGE = [[1e12, "trillion"], [1e9, "billion"], [1e6, "million"]];

// A power of ten: 10⁻⁴.
function powerOfTen(exponent) {
  const digits = [...String(Math.abs(exponent))].map((digit) => SUPERSCRIPTS[Number(digit)]).join("");
  return `10${exponent < 0 ? "⁻" : ""}${digits}`;
}

// Three significant digits; very small and very large numbers as a multiple of a power of ten.
function short(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e-4 * (1 - 1e-9) && size < 1e6) {
    const rounded = Number(value.toPrecision(digits));
    if (Math.abs(rounded) >= 1000) return rounded.toLocaleString("en-US").replace("-", "−");
    return String(rounded).replace("-", "−");
  }
  const [mantissa, exponent] = value.toExponential(digits - 1).split("e");
  const trimmed = String(Number(mantissa));
  const power = powerOfTen(Number(exponent));
  return (trimmed === "1" ? power : `${trimmed} × ${power}`).replace("-", "−");
}

// Large amounts in words: 1.95 million.
function amount(value) {
  for (const [size, name] of LARGE) {
    if (value >= size && value < size * 1000) return `${Number((value / size).toPrecision(3))} ${name}`;
  }
  return short(value);
}

// A share as a percentage that tells 99% from 99.99% and 1% from 0.01%.
function percent(share) {
  const value = 100 * share;
  const distance = Math.min(value, 100 - value);
  if (distance >= 10) return `${value.toFixed(0)}%`;
  if (distance >= 1) return `${Number(value.toFixed(1))}%`;
  if (distance <= 1e-9) return `${value.toFixed(0)}%`;
  return `${value.toFixed(Math.min(8, -Math.floor(Math.log10(distance))))}%`;
}
