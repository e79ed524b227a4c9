document.querySelectorAll(".table-wrapper").forEach((wrapper) =>
  wrapper.classList.toggle("tight", wrapper.scrollWidth > wrapper.clientWidth));

// On phones a row of a table is a block of lines (site.css); each line begins with its column's name.
document.querySelectorAll("table.docutils").forEach((table) => {
  const names = [...table.querySelectorAll("thead th")].map((head) => head.textContent.trim());
  table.querySelectorAll("tbody tr").forEach((row) =>
    [...row.cells].forEach((cell, i) => names[i] && (cell.dataset.label = names[i])));
});
