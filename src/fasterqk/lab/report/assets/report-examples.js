// Single examples: tokens shaded by the attention two arms pay to them, relevant tokens underlined.
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
  const layers = [...new Set(examples.flatMap((one) => Object.values(one.arms).flatMap((arm) => Object.keys(arm.layers))))];
  const picker = labelledSelect("example", titles);
  const layer = labelledSelect("attention of", layers);
  layer.select.value = Math.max(0, layers.indexOf("rollout"));
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
  controls.append(picker.holder, back, forth, layer.holder, ...(arms.length > 2 ? sides.map((side) => side.holder) : []));
  const facts = textElement("p", "facts", "");
  const panes = textElement("div", "panes", "");
  const more = set.total > examples.length ? `The first ${examples.length} of ${set.total} examples. ` : "";
  const key = textElement("p", "key", `${more}Full colour is the most attended token of the two; underlined tokens are relevant.`);
  place.replaceChildren(controls, facts, panes, key);

  function show() {
    const example = examples[Number(picker.select.value)];
    const name = layers[Number(layer.select.value)];
    const chosen = [...new Set(sides.map((side) => arms[Number(side.select.value)]))];
    const most = Math.max(...chosen.flatMap((arm) => example.arms[arm]?.layers[name] ?? [0]), 1e-12);
    const share = example.null ?? example.relevance.reduce((sum, one) => sum + one, 0) / example.relevance.length;
    facts.textContent = `Right answer: ${example.label ?? "unknown"}. Uniform attention would put ${percent(share)} on the relevant tokens.`;
    panes.replaceChildren(...chosen.map((arm) => attentionPane(example, arm, name, most)));
  }
  controls.addEventListener("change", show);
  show();
}

function attentionPane(example, arm, layer, most) {
  const pane = textElement("section", "pane", "");
  pane.append(textElement("h4", "", arm));
  const reading = example.arms[arm];
  const weights = reading?.layers[layer];
  if (!weights) {
    pane.append(textElement("p", "said", "not measured"));
    return pane;
  }
  const mass = weights.reduce((sum, weight, k) => sum + weight * example.relevance[k], 0);
  const total = weights.reduce((sum, weight) => sum + weight, 0) || 1;
  const probability = Number.isFinite(reading.probability) ? ` (right answer: ${percent(reading.probability)})` : "";
  const said = `says ${reading.prediction ?? "nothing"}${probability}; ${percent(mass / total)} of its attention on relevant tokens`;
  pane.append(textElement("p", "said", said));
  const words = textElement("p", "words", "");
  example.tokens.forEach((token, k) => {
    const word = textElement("span", example.relevance[k] > 0 ? "relevant" : "", spelled(token));
    if (k === example.read) word.classList.add("read");
    word.style.setProperty("--weight", Math.min(1, Math.max(0, weights[k] / most)).toFixed(3));
    word.title = `attention ${percent(weights[k])}`;
    words.append(joins(token, k) ? "" : " ", word);
  });
  pane.append(words);
  return pane;
}

// Tokenizers mark blanks and word pieces; readers need not know how.
const spelled = (token) => String(token).replace(/^[Ġ▁]/, "").replace(/^##/, "").replace(/Ċ/g, "⏎") || "␣";

const joins = (token, index) => index === 0 || String(token).startsWith("##");

function opening(tokens) {
  const text = tokens.map((token, k) => (joins(token, k) ? "" : " ") + spelled(token)).join("").trim();
  return text.length > 48 ? `${text.slice(0, 47)}…` : text;
}
