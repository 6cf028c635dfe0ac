// Sliders, number boxes, radio buttons and presets: they change the state and follow it.

const BASES = [1, 1.5, 2, 3, 5, 7];

// The values a slider stops at: even steps of the exponent, or round whole numbers.
function sliderStops(name) {
  const { low, high, whole } = NUMBERS[name];
  if (name === "target") return Array.from({ length: 99 }, (_, k) => (k + 1) / 100);
  const stops = [];
  if (whole) {
    for (let value = low; value <= Math.min(high, 12); value += 1) stops.push(value);
    for (let power = 10; power <= high; power *= 10) stops.push(...BASES.map((base) => base * power));
    return stops.filter((value, k) => value <= high && stops.indexOf(value) === k && value >= low).sort((a, b) => a - b);
  }
  for (let k = Math.round(20 * Math.log10(low)); k <= Math.floor(20 * Math.log10(high)); k += 1) {
    stops.push(Number((10 ** (k / 20)).toPrecision(3)));
  }
  return stops;
}

function nearestStop(stops, value) {
  const distance = (stop) => Math.abs(Math.log(stop / value));
  return stops.reduce((best, stop, k) => (distance(stop) < distance(stops[best]) ? k : best), 0);
}

const SPOKEN = {
  r: (value) => speed(value),
  loss: (value) => `loss ${short(value)}`,
  M: (value) => `${value} classes`,
  b: (value) => `${value} distinct tokens per class`,
  m: (value) => `${value} class positions`,
  n: (value) => `${value} background positions`,
  start: (value) => `factorized circuits start at ${short(value)}`,
  target: (value) => `${percent(value)} of the attention`,
};

// `change(part of a state)` is called with what the reader did; the returned function shows a state.
function bindControls(root, change) {
  const followers = [];
  for (const field of root.querySelectorAll("[data-number]")) followers.push(bindNumber(field, change));
  for (const radio of root.querySelectorAll("input[type=radio]")) {
    radio.addEventListener("change", () => change({ [radio.name]: radio.value }));
    followers.push((state) => {
      radio.checked = state[radio.name] === radio.value;
      if (radio.name === "model") radio.disabled = !solvedModels(state.optimizer).includes(radio.value);
    });
  }
  for (const select of root.querySelectorAll("select")) {
    select.addEventListener("change", () => change({ [select.name]: select.value }));
    followers.push((state) => {
      select.value = state[select.name];
    });
  }
  for (const button of root.querySelectorAll("[data-ratio]")) {
    const ratio = Number(button.dataset.ratio);
    button.addEventListener("click", () => change({ r: ratio }));
    followers.push((state) => button.setAttribute("aria-pressed", String(state.r === ratio)));
  }
  return (state) => followers.forEach((follow) => follow(state));
}

function bindNumber(field, change) {
  const name = field.dataset.number;
  const slider = field.querySelector("input[type=range]");
  const box = field.querySelector("input[type=text]");
  const stops = sliderStops(name);
  Object.assign(slider, { min: 0, max: stops.length - 1, step: 1 });
  slider.addEventListener("input", () => change({ [name]: stops[Number(slider.value)] }));
  const follow = (state) => {
    slider.value = nearestStop(stops, state[name]);
    slider.setAttribute("aria-valuetext", SPOKEN[name](state[name]));
    slider.style.setProperty("--filled", `${(100 * slider.value) / slider.max}%`);
    if (document.activeElement !== box) box.value = String(state[name]);
  };
  box.addEventListener("change", () => {
    const value = allowedNumber(name, box.value.replace(",", "."));
    if (value !== null) change({ [name]: value });
    box.blur();
  });
  box.addEventListener("blur", () => change({}));
  return follow;
}
