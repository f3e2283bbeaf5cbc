// Draws every figure of the page from the JSON beside it (see chart.py), and follows the window's size and colors.
"use strict";
const fourfold = (() => {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const css = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const escape = text => echarts.format.encodeHTML(String(text));
  const charts = [];

  /** 12.5k, 3.2M, 7B, 0.25, 3e−4: at most so many significant digits. */
  function format(value, digits = 4) {
    if (typeof value !== "number") return String(value ?? "");
    const rounded = Number(value.toPrecision(digits)), size = Math.abs(rounded);
    let text;
    if ((size > 0 && size < 1e-2) || size >= 1e15) {
      const [mantissa, exponent] = rounded.toExponential(digits - 1).split("e");
      text = `${Number(mantissa)}e${Number(exponent)}`;
    } else {
      const [scale, suffix] = [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "k"]].find(([s]) => size >= s) ?? [1, ""];
      text = Number((rounded / scale).toPrecision(Math.max(digits, 3))) + suffix;
    }
    return text.replaceAll("-", "−");
  }

  /** Values like "--s1" are colors of the page. */
  function resolve(value) {
    if (Array.isArray(value)) return value.some(v => typeof v !== "number") ? value.map(resolve) : value;
    if (value && typeof value === "object")
      return Object.fromEntries(Object.entries(value).map(([key, v]) => [key, resolve(v)]));
    return typeof value === "string" && value.startsWith("--") ? css(value) : value;
  }

  function theme() {
    const ink = css("--ink"), faint = css("--faint"), grid = css("--grid"), card = css("--card");
    const axis = {
      axisLine: {lineStyle: {color: faint}}, axisTick: {show: false},
      axisLabel: {color: faint, hideOverlap: true}, nameTextStyle: {color: faint},
      splitLine: {lineStyle: {color: grid}}, nameGap: 26,
    };
    return {
      color: Array.from({length: 12}, (_, i) => css("--s" + i)),
      textStyle: {fontFamily: getComputedStyle(document.body).fontFamily, fontSize: 12, color: ink},
      categoryAxis: {...axis, splitLine: {show: false}}, valueAxis: axis, logAxis: axis,
      tooltip: {backgroundColor: card, borderColor: css("--edge"), textStyle: {color: ink, fontSize: 12.5},
        axisPointer: {lineStyle: {color: faint}}},
      visualMap: {textStyle: {color: faint}},
    };
  }

  const name = text => `<td>${escape(text)}</td>`;
  /** The text under the pointer: a point's own `text`, or a row for each series. */
  function tooltip(axes) {
    return found => {
      const items = [found].flat();
      if (items[0].data?.text && !Array.isArray(found)) return escape(items[0].data.text).replaceAll("\n", "<br>");
      const kind = axes.xAxis?.name ?? "";
      const rows = items.map(item => {
        const value = Array.isArray(item.value) ? item.value[item.encode?.y?.[0] ?? 1] : item.value;
        if (value == null) return "";
        return `<tr><td>${item.marker}</td>${name(item.seriesName)}<td>${escape(item.data?.text ?? format(value, 5))}</td></tr>`;
      });
      const place = typeof items[0].axisValue === "number" ? format(items[0].axisValue, 6) : items[0].name;
      return `${escape(place)} ${escape(kind)}<table class="values">${rows.join("")}</table>`;
    };
  }

  const list = value => value === undefined ? [] : [value].flat();

  /** What every chart has, beside what its own option says. */
  function complete(option) {
    const whole = resolve(option);
    for (const axis of [...list(whole.xAxis), ...list(whole.yAxis)]) {
      if (axis.type !== "category") axis.axisLabel = {formatter: value => format(value, 6), ...axis.axisLabel};
    }
    for (const axis of list(whole.xAxis)) axis.nameLocation ??= "middle";
    for (const axis of list(whole.yAxis)) {
      axis.nameLocation ??= "end";
      axis.nameGap ??= 12;
      axis.nameTextStyle = {align: "left", ...axis.nameTextStyle};
    }
    if (whole.xAxis) whole.grid = {left: 10, right: 18, top: 30, bottom: 12, outerBounds: {left: 4, right: 6, top: 0, bottom: 0}, ...whole.grid};
    whole.tooltip = {confine: true, formatter: tooltip(whole), transitionDuration: 0, ...whole.tooltip};
    return {animation: false, legend: {show: false}, ...whole};
  }

  /** Drag a box to zoom, double-click to see everything; two fingers where there is no mouse. */
  function makeZoomable(chart, figure, option, along) {
    const axes = {xAxisIndex: along.includes("x") ? 0 : "none", yAxisIndex: along.includes("y") ? 0 : "none"};
    option.toolbox = {show: true, itemSize: 0, feature: {dataZoom: {...axes, filterMode: "filter", icon: {zoom: "none", back: "none"}}}};
    option.dataZoom = [..."xy"].filter(d => along.includes(d)).map(d =>
      ({type: "inside", [d + "AxisIndex"]: 0, zoomOnMouseWheel: false, moveOnMouseMove: false, moveOnMouseWheel: false,
        filterMode: along.length > 1 ? "none" : "filter"}));
  }

  const isZoomed = chart => (chart.getOption().dataZoom ?? []).some(zoom => zoom.start > 0 || zoom.end < 100);
  const seeAll = chart => chart.dispatchAction({type: "dataZoom", batch: (chart.getOption().dataZoom ?? [])
    .map((_, dataZoomIndex) => ({dataZoomIndex, start: 0, end: 100}))});

  /** A button for each series, which hides and shows it. */
  function fillLegend(chart, figure, option) {
    const legend = figure.querySelector(".legend");
    const names = [...new Set(list(option.series).filter(series => !series.silent).map(series => series.name).filter(Boolean))];
    if (names.length < 2) return;
    legend.replaceChildren(...names.map(text => {
      const key = document.createElement("button"), swatch = document.createElement("i");
      key.type = "button";
      key.dataset.series = text;
      swatch.style.background = chart.getVisual({seriesName: text}, "color");
      key.append(swatch, text);
      key.onclick = () => {
        chart.dispatchAction({type: "legendToggleSelect", name: text});
        key.setAttribute("aria-pressed", chart.getOption().legend[0].selected[text] !== false);
      };
      key.setAttribute("aria-pressed", chart.getOption().legend?.[0]?.selected?.[text] !== false);
      return key;
    }));
  }

  function draw(entry) {
    const {chart, figure, spec} = entry;
    const option = complete(spec.option);
    if (spec.zoom) makeZoomable(chart, figure, option, spec.zoom);
    chart.setOption(option, {notMerge: true});
    fillLegend(chart, figure, spec.option);
    if (spec.zoom && matchMedia("(hover: hover)").matches)
      chart.dispatchAction({type: "takeGlobalCursor", key: "dataZoomSelect", dataZoomSelectActive: true});
  }

  function start(figure) {
    const plot = figure.querySelector(".plot"), spec = JSON.parse(figure.querySelector("script").textContent);
    const chart = echarts.init(plot, theme(), {renderer: "svg"});
    const entry = {chart, figure, spec, reset: figure.querySelector(".reset")};
    charts.push(entry);
    draw(entry);
    new ResizeObserver(() => chart.resize()).observe(plot);
    if (!spec.zoom) return;
    const showReset = () => entry.reset.hidden = !isZoomed(chart);
    chart.on("datazoom", showReset);
    chart.getZr().on("dblclick", () => seeAll(chart));
    entry.reset.onclick = () => seeAll(chart);
  }

  document.querySelectorAll("figure.chart:has(.plot)").forEach(start);
  dark.addEventListener("change", () => charts.forEach(entry => {
    entry.chart.setTheme(theme());
    draw(entry);
  }));
  return {charts, format};
})();
