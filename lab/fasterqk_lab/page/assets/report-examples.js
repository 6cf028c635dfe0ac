// Single examples: tokens shaded by the attention of two arms, with relevant tokens underlined.
// All text from data enters the page as text, never as markup.

function textElement(tag, className, text) {
  const element = document.createElement(tag);
  element.className = className;
  element.textContent = text;
  return element;
}

function showExamples(place, set) {
  if (!set.sensitive) return openExamples(place, set);
  const warning = textElement("p", "warning", "These texts can be hateful or upsetting; they were collected for that reason.");
  const button = textElement("button", "", "Show them");
  button.type = "button";
  button.addEventListener("click", () => openExamples(place, set));
  place.replaceChildren(warning, button);
}

function labelledSelect(label, options) {
  const holder = textElement("label", "", `${label} `);
  const select = document.createElement("select");
  select.setAttribute("aria-label", label);
  select.append(...options.map((text, k) => new Option(text, k)));
  holder.append(select);
  return { holder, select };
}

function openExamples(place, set) {
  const { examples, arms } = set;
  if (examples.length === 0) return place.replaceChildren(textElement("p", "", "No examples were kept."));
  const titles = examples.map((example, k) => `${k + 1}. ${opening(example.tokens)}`);
  const readings = examples.flatMap((one) => Object.values(one.arms));
  const layers = [...new Set(readings.flatMap((reading) => Object.keys(reading.layers)))];
  const picker = labelledSelect("example", titles);
  const layer = labelledSelect("attention of", layers);
  layer.select.value = Math.max(0, layers.indexOf("rollout"));
  const head = labelledSelect("head", []);
  const sides = [0, Math.min(1, arms.length - 1)].map((index, k) => {
    const side = labelledSelect(k ? "against" : "arm", arms);
    side.select.value = index;
    return side;
  });
  const [back, forth] = [["←", "previous example", -1], ["→", "next example", 1]].map(([sign, name, step]) => {
    const button = textElement("button", "", sign);
    button.type = "button";
    button.setAttribute("aria-label", name);
    button.addEventListener("click", () => {
      picker.select.value = (Number(picker.select.value) + step + examples.length) % examples.length;
      show();
    });
    return button;
  });
  const controls = textElement("div", "controls", "");
  controls.append(picker.holder, back, forth, layer.holder, head.holder, ...(arms.length > 2 ? sides.map((side) => side.holder) : []));
  const facts = textElement("p", "facts", "");
  const panes = textElement("div", "panes", "");
  const more = set.total > examples.length ? `The first ${examples.length} of ${set.total} examples. ` : "";
  const key = textElement("p", "key", `${more}Full colour is the most attended token of the two; underlined tokens are relevant.`);
  place.replaceChildren(controls, facts, panes, key);

  // The heads of the chosen layer, if they were kept.
  function listHeads() {
    const name = layers[Number(layer.select.value)];
    const number = Math.max(0, ...readings.map((reading) => reading.heads?.[name]?.length ?? 0));
    head.select.replaceChildren(new Option("all, mean", -1), ...Array.from({ length: number }, (_, k) => new Option(k + 1, k)));
    head.holder.hidden = number < 2;
  }

  function show() {
    const example = examples[Number(picker.select.value)];
    const name = layers[Number(layer.select.value)];
    const chosen = [...new Set(sides.map((side) => arms[Number(side.select.value)]))];
    facts.textContent = factsOf(example);
    panes.replaceChildren(...attentionPanes(example, chosen, name, Number(head.select.value), "h4"));
  }
  layer.select.addEventListener("change", listHeads);
  controls.addEventListener("change", show);
  listHeads();
  show();
}

// The example of the first screen: both arms, words that can hurt blurred until somebody asks for them.
function showGlance(place, set, { index, arms, titles, note }) {
  const example = set.examples[index];
  const layers = [...new Set(arms.flatMap((arm) => Object.keys(example.arms[arm].layers)))];
  const name = layers.includes("rollout") ? "rollout" : layers[0];
  const panes = textElement("div", "panes", "");
  const key = textElement("p", "key", `The stronger the colour, the more attention; underlined: relevant. ${factsOf(example)} ${note}`);
  const draw = (masked) => {
    panes.replaceChildren(...attentionPanes(example, arms, name, -1, "h3", masked));
    panes.querySelectorAll("h3").forEach((heading, k) => {
      heading.textContent = titles[k];
    });
  };
  place.replaceChildren(panes, key);
  draw(set.sensitive);
  if (!set.sensitive) return;
  const button = textElement("button", "", "Show the words: the text can be hateful");
  button.type = "button";
  button.addEventListener("click", () => {
    draw(false);
    button.remove();
  });
  place.append(button);
}

function factsOf(example) {
  const share = example.null ?? example.relevance.reduce((sum, one) => sum + one, 0) / example.relevance.length;
  return `Right answer: ${example.label ?? "unknown"}. Uniform attention would put ${percent(share)} on the relevant tokens.`;
}

function weightsOf(reading, layer, head) {
  return head >= 0 ? reading?.heads?.[layer]?.[head] : reading?.layers[layer];
}

// One pane per arm, with the same scale of shades.
function attentionPanes(example, arms, layer, head, heading, masked = false) {
  const most = Math.max(...arms.flatMap((arm) => weightsOf(example.arms[arm], layer, head) ?? [0]), 1e-12);
  return arms.map((arm) => attentionPane(example, arm, weightsOf(example.arms[arm], layer, head), most, heading, masked));
}

function attentionPane(example, arm, weights, most, heading, masked) {
  const pane = textElement("section", "pane", "");
  pane.append(textElement(heading, "", arm));
  const reading = example.arms[arm];
  if (!weights) {
    pane.append(textElement("p", "said", "not measured"));
    return pane;
  }
  const mass = weights.reduce((sum, weight, k) => sum + weight * example.relevance[k], 0);
  const total = weights.reduce((sum, weight) => sum + weight, 0) || 1;
  const probability = Number.isFinite(reading.probability) ? ` (right answer: ${percent(reading.probability)})` : "";
  const said = `says ${reading.prediction ?? "nothing"}${probability}; ${percent(mass / total)} of its attention on relevant tokens`;
  pane.append(textElement("p", "said", said));
  const words = textElement("p", masked ? "words masked" : "words", "");
  if (masked) words.setAttribute("aria-label", "The words are hidden until asked for.");
  example.tokens.forEach((token, k) => {
    const word = textElement("span", example.relevance[k] > 0 ? "relevant" : "", masked ? "" : spelled(token));
    // The word itself is not here, only a placeholder of its length.
    if (masked) word.append(textElement("b", "", "x".repeat(Math.min(12, spelled(token).length))));
    if (k === example.read) word.classList.add("read");
    word.style.setProperty("--weight", Math.min(1, Math.max(0, weights[k] / most)).toFixed(3));
    if (!masked) word.title = `attention ${percent(weights[k])}`;
    words.append(joins(token, k) ? "" : " ", word);
  });
  pane.append(words);
  return pane;
}

// Hide the marks of tokenizers for blanks and word pieces.
const spelled = (token) => String(token).replace(/^[Ġ▁]/, "").replace(/^##/, "").replace(/Ċ/g, "⏎") || "␣";

const joins = (token, index) => index === 0 || String(token).startsWith("##");

function opening(tokens) {
  const text = tokens.map((token, k) => (joins(token, k) ? "" : " ") + spelled(token)).join("").trim();
  return text.length > 48 ? `${text.slice(0, 47)}…` : text;
}
