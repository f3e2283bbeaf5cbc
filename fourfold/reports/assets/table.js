// Tables of class "search": a click on a header sorts, and a field below it keeps rows (8, <=4, 1-4, 1,2, or a part of a word).
"use strict";
for (const table of document.querySelectorAll("table.search")) {
  const body = table.tBodies[0], rows = [...body.rows], headers = [...table.tHead.rows[0].cells];
  const note = table.closest(".scroll").previousElementSibling;
  const number = text => Number(text.replaceAll(",", "").replace(/[–%].*$/, "") || NaN);
  const plain = String.raw`(?:\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d*\.?\d+)`;
  const isNumber = text => new RegExp(`^${plain}$`).test(text);
  const wanted = headers.map(() => "");

  function keeps(cell, filter) {
    const limit = filter.match(/^\s*(<=|>=|≤|≥|<|>|=)\s*([\d.,]+)\s*%?\s*$/);
    if (limit) {
      const value = number(cell), bound = number(limit[2]);
      return {"<=": value <= bound, "≤": value <= bound, "≥": value >= bound, ">=": value >= bound, "<": value < bound, ">": value > bound, "=": value === bound}[limit[1]];
    }
    const whole = filter.trim(), parts = whole.split(",").map(part => part.trim()).filter(Boolean);
    const isOne = text => isNumber(cell) && isNumber(text) ? number(cell) === number(text)
      : cell.toLowerCase().includes(text.toLowerCase());
    const range = whole.match(new RegExp(`^(${plain})\\s*[-–]\\s*(${plain})$`));
    if (range && isNumber(cell)) return number(cell) >= number(range[1]) && number(cell) <= number(range[2]);
    return [whole, ...parts].some(isOne);  // 1,000 is one number, or two of a list
  }

  function show() {
    let count = 0;
    rows.forEach(row => {
      row.hidden = wanted.some((filter, column) => filter.trim() && !keeps(row.cells[column].textContent, filter));
      count += !row.hidden;
    });
    note.textContent = `${count.toLocaleString("en")} of ${rows.length.toLocaleString("en")} rows`;
  }

  const fields = table.tHead.insertRow();
  headers.forEach((header, column) => {
    const field = document.createElement("input"), label = header.textContent || "rank";
    field.setAttribute("aria-label", `keep rows by ${label}`);
    field.placeholder = "all";
    field.oninput = () => { wanted[column] = field.value; show(); };
    fields.appendChild(document.createElement("th")).append(field);
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = label;
    header.replaceChildren(button);
    button.onclick = () => {
      const down = header.getAttribute("aria-sort") === "ascending";
      headers.forEach(each => each.removeAttribute("aria-sort"));
      header.setAttribute("aria-sort", down ? "descending" : "ascending");
      const key = row => row.cells[column].textContent, sign = down ? -1 : 1;
      const compare = (a, b) => {
        const [x, y] = [number(key(a)), number(key(b))];
        if (!Number.isNaN(x) && !Number.isNaN(y)) return sign * (x - y);
        if (!key(a) || !key(b)) return !key(a) - !key(b);  // blank cells are last
        return sign * key(a).localeCompare(key(b));
      };
      body.append(...[...rows].sort(compare));
    };
  });
  show();
}
