"""CSS and JavaScript of every page: light and dark colors, layout, and the values under the pointer."""

CSS = """
:root {
  color-scheme: light dark;
  --page: #fbfbfa; --card: #fff; --ink: #1c1e21; --faint: #6b7076; --edge: #e3e4e6; --grid: #ececee;
  --s0: #1f6fb4; --s1: #d5651a; --s2: #178a67; --s3: #b4508f; --s4: #a37a00; --s5: #6a5acd;
  --s6: #5d6b7a; --s7: #b3322b; --s8: #0f8a9c; --s9: #8a5a34; --s10: #6b8e23; --s11: #c2185b;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #141517; --card: #1c1e21; --ink: #e6e7e9; --faint: #979ca3; --edge: #2e3135; --grid: #2a2d31;
    --s0: #5fa8e6; --s1: #f09452; --s2: #4cc29a; --s3: #dc8fc0; --s4: #d9b53f; --s5: #a79bf2;
    --s6: #a3b1c0; --s7: #ef7d74; --s8: #56c4d4; --s9: #c99a72; --s10: #a9c95c; --s11: #f06a9b;
  }
}
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1120px; padding: 28px 24px 48px; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; }
h1 { font-size: 24px; margin: 0; line-height: 1.25; overflow-wrap: anywhere; }
h2 { font-size: 16px; margin: 28px 0 8px; }
.subtitle { color: var(--faint); margin: 2px 0 18px; overflow-wrap: anywhere; }
.facts { display: flex; flex-wrap: wrap; gap: 1px; margin: 0 0 16px; background: var(--edge);
  border: 1px solid var(--edge); border-radius: 8px; overflow: hidden; }
.facts div { flex: 1 1 130px; background: var(--card); padding: 8px 14px; }
.facts dt { color: var(--faint); font-size: 12.5px; }
.facts dd { margin: 0; font-weight: 600; font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }
.rows { border-collapse: collapse; width: 100%; background: var(--card); border: 1px solid var(--edge);
  font-variant-numeric: tabular-nums; }
.rows th, .rows td { padding: 5px 12px; text-align: right; border-bottom: 1px solid var(--edge); }
.rows th:first-child, .rows td:first-child { text-align: left; }
.rows th { color: var(--faint); font-weight: 400; font-size: 12.5px; }
.words { border-collapse: collapse; margin: 0 0 16px; font-variant-numeric: tabular-nums; }
.words th, .words td { padding: 3px 14px 3px 0; text-align: left; border-bottom: 1px solid var(--edge); }
.notice { border-left: 3px solid var(--s1); padding: 4px 12px; margin: 0 0 16px; }
.charts { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 14px; }
.charts .wide { grid-column: 1 / -1; }
figure.chart { margin: 0; background: var(--card); border: 1px solid var(--edge); border-radius: 8px;
  padding: 10px 12px 6px; }
figcaption { display: flex; flex-wrap: wrap; justify-content: space-between; gap: 0 16px; font-size: 13.5px;
  margin-bottom: 4px; min-height: 21px; }
.legend { display: flex; flex-wrap: wrap; gap: 0 14px; color: var(--faint); }
.key { white-space: nowrap; }
.key i { display: inline-block; width: 10px; height: 10px; border-radius: 2px; margin-right: 5px;
  background: currentColor; }
.key output { color: var(--ink); font-variant-numeric: tabular-nums; }
.empty { color: var(--faint); text-align: center; padding: 40px 0; margin: 0; }
svg { display: block; width: 100%; height: auto; overflow: visible; }
svg text { fill: var(--faint); font-size: 11.5px; font-variant-numeric: tabular-nums; }
@media (max-width: 760px) {
  .charts { grid-template-columns: minmax(0, 1fr); }
  .wide svg text { font-size: 16px; }
}
svg .strong { fill: var(--ink); font-weight: 600; }
.grid { stroke: var(--grid); } .axis { stroke: var(--faint); stroke-opacity: 0.6; }
.line { fill: none; stroke: currentColor; stroke-width: 1.5; stroke-linejoin: round; stroke-linecap: round; }
.dot, .mark, .part { fill: currentColor; }
.part { stroke: var(--card); }
.cell { fill: var(--s0); }
.rule, .mark { visibility: hidden; pointer-events: none; }
.rule { stroke: var(--faint); stroke-dasharray: 3 3; } .mark { stroke: var(--card); stroke-width: 1.5; }
.hover .rule, .hover .mark { visibility: visible; }
.s0 { color: var(--s0); } .s1 { color: var(--s1); } .s2 { color: var(--s2); }
.s3 { color: var(--s3); } .s4 { color: var(--s4); } .s5 { color: var(--s5); }
.s6 { color: var(--s6); } .s7 { color: var(--s7); }
.s8 { color: var(--s8); } .s9 { color: var(--s9); } .s10 { color: var(--s10); } .s11 { color: var(--s11); }
pre { background: var(--card); border: 1px solid var(--edge); border-radius: 8px; padding: 12px 16px; margin: 0;
  overflow-x: auto; font: 13px/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
pre.wrap { white-space: pre-wrap; overflow-wrap: anywhere; }
"""

# Each chart carries its points, [x pixel, y pixel, x label, y label] per series, in data-points.
JAVASCRIPT = """
for (const svg of document.querySelectorAll("svg[data-points]")) {
  const figure = svg.closest("figure"), series = JSON.parse(svg.dataset.points), rule = svg.querySelector(".rule");
  const marks = svg.querySelectorAll(".mark"), outputs = figure.querySelectorAll("output");
  const at = figure.querySelector(".at");
  const nearest = (points, x) => points.reduce((a, b) => Math.abs(b[0] - x) < Math.abs(a[0] - x) ? b : a);
  const all = series.flat();
  svg.addEventListener("pointermove", event => {
    const box = svg.getBoundingClientRect();
    const here = nearest(all, (event.clientX - box.left) * svg.viewBox.baseVal.width / box.width);
    rule.setAttribute("x1", here[0]); rule.setAttribute("x2", here[0]);
    at.textContent = here[2] + " " + svg.dataset.x;
    series.forEach((points, i) => {
      if (!points.length) return;
      const point = nearest(points, here[0]);
      marks[i].setAttribute("cx", point[0]); marks[i].setAttribute("cy", point[1]);
      outputs[i].textContent = point[3];
    });
    figure.classList.add("hover");
  });
  svg.addEventListener("pointerleave", () => {
    figure.classList.remove("hover"); at.textContent = ""; outputs.forEach(output => output.textContent = "");
  });
}
"""
