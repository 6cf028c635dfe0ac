// The report: finds the places that want a script and the data that belongs there.

const data = JSON.parse(document.getElementById("data").textContent);
document.querySelectorAll("table.sortable").forEach(makeSortable);
document.querySelectorAll("[data-curves]").forEach((place) => showCurves(place, data.curves[place.dataset.curves]));
document.querySelectorAll("[data-examples]").forEach((place) => showExamples(place, data.examples[place.dataset.examples]));
