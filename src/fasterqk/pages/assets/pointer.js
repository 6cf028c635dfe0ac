// What a pointer does on a chart: drag a guide, or read the values of the lines under it.

function followPointer(svg, getCurrent) {
  let dragging = null;

  const position = (event) => {
    const frame = svg.getBoundingClientRect();
    const { width, height } = getCurrent();
    return [((event.clientX - frame.left) * width) / frame.width, ((event.clientY - frame.top) * height) / frame.height];
  };

  svg.addEventListener("pointerdown", (event) => {
    const handle = event.target.closest("[data-guide]");
    if (!handle || !getCurrent()) return;
    dragging = handle.dataset.guide;
    svg.setPointerCapture(event.pointerId);
    event.preventDefault();
  });

  svg.addEventListener("pointermove", (event) => {
    const current = getCurrent();
    if (!current) return;
    const [x, y] = position(event);
    if (dragging === null) return showReading(svg, current, x, y);
    hideReading(svg);
    // The guide is looked up anew: every drag redraws the chart.
    const guide = current.description.guides.find((one) => one.drag && one.axis === dragging);
    const { box, across, up } = current;
    if (dragging === "x") guide.drag(across.invert(Math.min(Math.max(x, box.left), box.right)));
    else guide.drag(up.invert(Math.min(Math.max(y, box.top), box.bottom)));
  });

  for (const kind of ["pointerup", "pointercancel"]) {
    svg.addEventListener(kind, () => {
      dragging = null;
    });
  }
  svg.addEventListener("pointerleave", () => hideReading(svg));
}

function hideReading(svg) {
  svg.querySelector(".reading")?.remove();
}

// A hairline and the value of every line where it crosses.
function showReading(svg, current, x, y) {
  hideReading(svg);
  const { description, box, across, up } = current;
  if (x < box.left || x > box.right || y < box.top - 8 || y > box.bottom + 8) return;
  const at = across.invert(x);
  const format = description.y.format ?? short;
  const rows = description.lines
    .map((line) => ({ line, value: valueAt(line.points, at, across, up) }))
    .filter(({ line, value }) => value !== null && line.name)
    .sort((a, b) => b.value - a.value)
    .slice(0, 6);
  if (rows.length === 0) return;
  const group = svgElement("g", { class: "reading" });
  group.append(svgElement("line", { x1: x, x2: x, y1: box.top, y2: box.bottom }));
  const heading = `${description.x.short ?? description.x.label} ${(description.x.format ?? short)(at)}`;
  const texts = [heading, ...rows.map(({ line, value }) => `${line.name}: ${format(value)}`)];
  const width = 32 + 6.6 * Math.max(...texts.map((text) => text.length));
  const left = x + 12 + width > box.right ? Math.max(x - 12 - width, 2) : x + 12;
  const top = box.top + 4;
  group.append(svgElement("rect", { x: left, y: top, width, height: 12 + 16 * texts.length, rx: 5 }));
  texts.forEach((text, k) => {
    group.append(svgElement("text", { x: left + (k ? 21 : 9), y: top + 18 + 16 * k, class: k ? "" : "heading" }, text));
    if (!k) return;
    const swatch = svgElement("rect", { x: left + 9, y: top + 9 + 16 * k, width: 8, height: 8, rx: 2, class: "swatch" });
    swatch.style.fill = rows[k - 1].line.color;
    group.append(swatch);
  });
  svg.append(group);
}

// The line's value at x, by interpolation in what is drawn; null outside of it.
function valueAt(points, at, across, up) {
  const pixel = across(at);
  for (let k = 1; k < points.length; k += 1) {
    const [before, after] = [across(points[k - 1][0]), across(points[k][0])];
    if (!Number.isFinite(before) || (pixel - before) * (pixel - after) > 0 || before === after) continue;
    const share = (pixel - before) / (after - before);
    return up.invert(up(points[k - 1][1]) * (1 - share) + up(points[k][1]) * share);
  }
  return null;
}
