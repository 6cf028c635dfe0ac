// The report: fills the elements that need a script with their data.

const data = JSON.parse(document.getElementById("data").textContent);
document.querySelectorAll("table.sortable").forEach(makeSortable);
document.querySelectorAll("[data-examples]").forEach((place) => showExamples(place, data.examples[place.dataset.examples]));
document.querySelectorAll("[data-glance]").forEach((place) => showGlance(place, data.examples[place.dataset.glance], data.glance));
document.querySelectorAll(".scroll").forEach(hintAtMore);

// Unfold tables for printing.
window.addEventListener("beforeprint", () => {
  document.querySelectorAll("details:not([open])").forEach((one) => {
    one.open = true;
    one.dataset.folded = "";
  });
});
window.addEventListener("afterprint", () => {
  document.querySelectorAll("details[data-folded]").forEach((one) => {
    one.open = false;
    delete one.dataset.folded;
  });
});
