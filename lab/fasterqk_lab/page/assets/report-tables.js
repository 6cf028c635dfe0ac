// Tables that are sorted by a click on a column and can be copied into a spreadsheet.

function makeSortable(table) {
  const rows = [...table.tBodies[0].rows];
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const direction = head.getAttribute("aria-sort") === "ascending" ? "descending" : "ascending";
      heads.forEach((one) => one.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", direction);
      table.tBodies[0].append(...sortedRows(rows, column, direction === "ascending" ? 1 : -1));
    });
  });
  const copy = document.createElement("button");
  copy.type = "button";
  copy.className = "copy";
  copy.textContent = "Copy table";
  copy.addEventListener("click", async () => {
    copy.textContent = (await copyText(tableText(table))) ? "Copied" : "Could not copy";
    setTimeout(() => {
      copy.textContent = "Copy table";
    }, 2000);
  });
  table.parentElement.after(copy);
}

// A note below tables and pictures that are wider than their place.
function hintAtMore(place) {
  const hint = document.createElement("p");
  hint.className = "hint";
  hint.textContent = "There is more to the right: scroll sideways, or press the arrow keys here.";
  hint.hidden = true;
  place.after(hint);
  new ResizeObserver(() => {
    hint.hidden = place.scrollWidth <= place.clientWidth + 1;
  }).observe(place);
}

// Numbers by value, texts alphabetically, missing cells last in both directions.
function sortedRows(rows, column, sign) {
  const key = (row) => {
    const cell = row.cells[column];
    if (cell.dataset.sort !== undefined) return Number(cell.dataset.sort);
    return cell.textContent === "–" ? null : cell.textContent;
  };
  return [...rows].sort((first, second) => {
    const [a, b] = [key(first), key(second)];
    if (a === null || b === null) return Number(a === null) - Number(b === null);
    if (typeof a === "number" && typeof b === "number") return sign * (a - b);
    return sign * String(a).localeCompare(String(b), "en", { numeric: true });
  });
}

// Tab-separated lines, as spreadsheets paste them, in the order shown.
function tableText(table) {
  return [...table.rows].map((row) => [...row.cells].map((cell) => cell.textContent.trim()).join("\t")).join("\n");
}
