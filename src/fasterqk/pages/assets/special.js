// Special functions of a real argument, to double precision.

// omega(z), the solution w > 0 of w + ln w = z (Wright's omega). Never overflows, never underflows early.
function wrightOmega(z) {
  if (z < -36) return Math.exp(z); // omega(z) = e^z (1 - e^z + ...), and e^-36 is below one rounding
  let w = z > 1 ? z - Math.log(z) : z < -2 ? Math.exp(z) : Math.log1p(Math.exp(z)) * 0.8;
  // Fourth-order iteration of Fritsch, Shafer and Crowley: three rounds from these starts leave rounding only.
  for (let round = 0; round < 3; round += 1) {
    const residual = z - w - Math.log(w);
    const near = 2 * (1 + w) * (1 + w + (2 / 3) * residual);
    w *= 1 + (residual / (1 + w)) * ((near - residual) / (near - 2 * residual));
  }
  return w;
}

// S(x) = sum over k >= 1 of x^k / (k k!) for x >= 0, so that Ei(x) = Euler's gamma + ln x + S(x).
// All terms are positive: differences of Ei built from it do not cancel near the zero of Ei.
function exponentialIntegralSum(x) {
  if (x > 50) {
    let sum = 1;
    for (let k = 1, term = 1; k < 50; k += 1) {
      term *= k / x;
      sum += term;
    }
    return (Math.exp(x) / x) * sum - Math.log(x) - 0.5772156649015329;
  }
  let sum = 0;
  for (let k = 1, power = 1; k < 400; k += 1) {
    power *= x / k;
    sum += power / k;
    if (power / k < sum * 1e-17) break;
  }
  return sum;
}
