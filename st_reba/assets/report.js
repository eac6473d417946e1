/* A click on a column's head sorts the rows of each part of its table: numbers the highest first, names from A to Z; the
   next click the other way. What is empty stays last. */
for (const head of document.querySelectorAll("thead th")) head.querySelector("button")?.addEventListener("click", () => {
  const table = head.closest("table"), column = [...head.parentNode.cells].indexOf(head);
  const numbers = table.querySelector(`tbody td:nth-child(${column + 1})[data-value]`) !== null;
  const up = head.ariaSort ? head.ariaSort === "descending" : !numbers;
  for (const other of table.querySelectorAll("thead th")) other.ariaSort = null;
  head.ariaSort = up ? "ascending" : "descending";
  const value = ({cells: {[column]: cell}}) => numbers ? cell.dataset.value : cell.textContent.trim();
  const order = (a, b) => (numbers ? a - b : a.localeCompare(b)) * (up ? 1 : -1);
  const empty = text => text === "" || text === "nan";
  for (const body of table.querySelectorAll("tbody:not(.skipped)"))
    body.append(...[...body.rows].filter(row => !row.classList.contains("group")).map(row => [row, value(row)])
      .sort(([, a], [, b]) => empty(a) - empty(b) || order(a, b)).map(([row]) => row));
});
