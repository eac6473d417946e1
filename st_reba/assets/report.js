/* A click on a column's head sorts the rows of each part of its table, the highest first; the next click the lowest. */
for (const head of document.querySelectorAll("thead th")) head.querySelector("button")?.addEventListener("click", () => {
  const table = head.closest("table"), up = head.ariaSort === "descending" ? 1 : -1;
  const column = [...head.parentNode.cells].indexOf(head);
  for (const other of table.querySelectorAll("thead th")) other.ariaSort = null;
  head.ariaSort = up > 0 ? "ascending" : "descending";
  const number = row => parseFloat(row.cells[column].dataset.value ?? "NaN");
  const text = row => row.cells[column].textContent.trim();
  const order = (a, b) => isNaN(number(a)) || isNaN(number(b))
    ? isNaN(number(a)) - isNaN(number(b)) || -up * text(a).localeCompare(text(b)) : up * (number(a) - number(b));
  for (const body of table.querySelectorAll("tbody:not(.skipped)"))
    body.append(...[...body.rows].filter(row => !row.classList.contains("group")).sort(order));
});
