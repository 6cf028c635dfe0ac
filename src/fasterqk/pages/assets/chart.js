// One kind of line chart, drawn as SVG at the width it is given.
//
// A chart is described by a function that returns
//   { x: {label, domain, log}, y: {label, domain, log, format}, lines, guides, marks, summary }
// where a line is {points: [[x, y], ...], color, name, strong, faint, dashed}, a guide {axis, at, drag(value)}
// and a mark {x, y, color, label, hollow}. `refresh()` asks for it again.

const SVG = "http://www.w3.org/2000/svg";

// An SVG element; in its text "_OV" and "_QK" become subscripts.
function svgElement(tag, attributes = {}, text = "") {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  text.split(/_(OV|QK)/).forEach((part, k) => {
    if (part === "") return;
    if (k === 0) return element.append(part);
    const span = document.createElementNS(SVG, "tspan");
    span.textContent = part;
    // An odd part is a subscript; the one after it comes back up to the line.
    span.setAttribute("dy", k % 2 ? 3 : -3);
    if (k % 2) span.setAttribute("font-size", "0.75em");
    element.append(span);
  });
  return element;
}

function makeChart(container, describe, { height = 280 } = {}) {
  const svg = svgElement("svg", { class: "chart", role: "img" });
  container.replaceChildren(svg);
  let current = null;

  function refresh() {
    const width = container.clientWidth;
    if (width === 0) return;
    const description = describe();
    current = { description, ...layout(description, width, height) };
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    svg.setAttribute("height", height);
    svg.setAttribute("aria-label", description.summary);
    svg.replaceChildren(...drawAxes(current), drawLines(current), ...drawGuides(current), ...drawMarks(current));
  }

  followPointer(svg, () => current);
  new ResizeObserver(refresh).observe(container);
  return { refresh };
}

function layout({ x, y }, width, height) {
  const ticks = y.ticks ?? makeScale({ domain: y.domain, range: [1, 0], log: y.log }).ticks(y.log ? 5 : 4);
  const longest = Math.max(...ticks.map((tick) => tick.label.length));
  const box = { left: 14 + 7 * longest, right: width - 14, top: 30, bottom: height - 42 };
  const across = makeScale({ domain: x.domain, range: [box.left, box.right], log: x.log });
  const up = makeScale({ domain: y.domain, range: [box.bottom, box.top], log: y.log });
  return { box, across, up, yTicks: ticks, width, height };
}

function drawAxes({ description, box, across, up, yTicks }) {
  const grid = svgElement("g", { class: "grid" });
  const labels = svgElement("g", { class: "ticks" });
  for (const tick of yTicks) {
    const y = up(tick.value);
    grid.append(svgElement("line", { x1: box.left, x2: box.right, y1: y, y2: y }));
    labels.append(svgElement("text", { x: box.left - 8, y: y + 4, "text-anchor": "end" }, tick.label));
  }
  const wanted = Math.max(2, Math.floor((box.right - box.left) / 68));
  for (const tick of description.x.ticks ?? across.ticks(wanted)) {
    const x = across(tick.value);
    grid.append(svgElement("line", { x1: x, x2: x, y1: box.bottom, y2: box.bottom + 5 }));
    labels.append(svgElement("text", { x, y: box.bottom + 18, "text-anchor": "middle" }, tick.label));
  }
  const names = svgElement("g", { class: "axis-names" });
  names.append(svgElement("text", { x: 0, y: 14 }, description.y.label));
  const right = { x: box.right, y: box.bottom + 36, "text-anchor": "end" };
  names.append(svgElement("text", right, description.x.label));
  return [grid, labels, names];
}

function drawLines({ description, across, up }) {
  const group = svgElement("g", { class: "lines" });
  const ordered = [...description.lines].sort((a, b) => Number(a.strong ?? 0) - Number(b.strong ?? 0));
  for (const line of ordered) {
    const path = line.points
      .map(([x, y]) => [across(x), up(y)])
      .filter(([x, y]) => Number.isFinite(x) && Number.isFinite(y))
      .map(([x, y], k) => `${k ? "L" : "M"}${x.toFixed(2)} ${y.toFixed(2)}`);
    const kind = line.strong ? "strong" : line.faint ? "faint" : "";
    const drawn = svgElement("path", { d: path.join(""), class: kind });
    drawn.style.stroke = line.color;
    if (line.dashed) drawn.style.strokeDasharray = "6 4";
    group.append(drawn);
  }
  return group;
}

function drawMarks({ description, box, across, up }) {
  return (description.marks ?? []).map((mark) => {
    const group = svgElement("g", { class: "mark" });
    const [x, y] = [across(mark.x), up(mark.y)];
    const dot = svgElement("circle", { cx: x, cy: y, r: mark.strong ? 5 : 3.5, class: mark.hollow ? "hollow" : "" });
    dot.style.setProperty("--mark", mark.color);
    group.append(dot);
    if (mark.label) {
      // Curves rise to the right, so there is room below to the right, or above to the left.
      const left = x > box.right - 80;
      const where = left ? { x: x - 10, y: Math.max(y - 10, 12), "text-anchor": "end" } : { x: x + 10, y: y + 19 };
      group.append(svgElement("text", where, mark.label));
    }
    return group;
  });
}

function drawGuides(current) {
  const { box, across, up } = current;
  return (current.description.guides ?? []).map((guide) => {
    const group = svgElement("g", { class: guide.drag ? "guide draggable" : "guide" });
    const vertical = guide.axis === "x";
    const at = vertical ? across(guide.at) : up(guide.at);
    const ends = vertical
      ? { x1: at, x2: at, y1: box.top, y2: box.bottom }
      : { x1: box.left, x2: box.right, y1: at, y2: at };
    group.append(svgElement("line", ends));
    if (!guide.drag) return group;
    group.classList.add(vertical ? "sideways" : "upright");
    group.append(svgElement("line", { ...ends, class: "grip" }));
    group.append(svgElement("circle", { cx: vertical ? at : box.right, cy: vertical ? box.bottom : at, r: 8, class: "handle" }));
    group.dataset.guide = guide.axis;
    return group;
  });
}
