// Click on a heading to sort by its column; again, the other way round.
for (const table of document.querySelectorAll("table.sortable")) {
  const headings = [...table.tHead.rows[0].cells];
  headings.forEach((heading, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...heading.childNodes);
    heading.append(button);
    heading.setAttribute("aria-sort", "none");
    button.addEventListener("click", () => {
      const down = heading.getAttribute("aria-sort") === "ascending";
      const key = (row) => row.cells[column].dataset.value ?? row.cells[column].textContent.trim();
      const rows = [...table.tBodies[0].rows].sort((a, b) => {
        const [x, y] = [key(a), key(b)];
        const order = Number.parseFloat(x) - Number.parseFloat(y);
        return (down ? -1 : 1) * (Number.isNaN(order) ? x.localeCompare(y, "en") : order);
      });
      headings.forEach((other) => other.setAttribute("aria-sort", "none"));
      heading.setAttribute("aria-sort", down ? "descending" : "ascending");
      table.tBodies[0].append(...rows);
    });
  });
}
