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

  const isColor = key => /color$/i.test(key);
  /** Colors like "--s1" are the page's. */
  function resolve(value, key = "") {
    if (Array.isArray(value)) return value.some(v => typeof v !== "number") ? value.map(v => resolve(v, key)) : value;
    if (value && typeof value === "object")
      return Object.fromEntries(Object.entries(value).map(([k, v]) => [k, resolve(v, k)]));
    return typeof value === "string" && isColor(key) && value.startsWith("--") ? css(value) : value;
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

  const row = (color, name, text) => `<tr><td><i style="background:${color}"></i></td><td>${escape(name)}</td>`
    + `<td>${escape(text)}</td></tr>`;

  /** The text under the pointer: a point's own `text`, or a row for each series. */
  function tooltip(entry) {
    return found => {
      if (!Array.isArray(found)) return found.data?.text ? escape(found.data.text).replaceAll("\n", "<br>") : "";
      const {series, xAxis} = entry.drawn, [{axisValue, axisType}] = found;
      if (axisType.endsWith("category")) {
        const rows = found.map(item => row(item.color, item.seriesName, item.data?.text ?? format(item.value, 5)));
        return `${escape(found[0].name)}<table class="values">${rows.join("")}</table>`;
      }
      const selected = entry.chart.getOption().legend[0].selected;
      const rows = series.map((each, seriesIndex) => {
        if (each.silent || selected[each.name] === false) return "";
        const point = nearest(each.data, axisValue);
        const color = entry.chart.getVisual({seriesIndex}, "color");
        return point ? row(color, each.name, format(point[1], 5)) : "";
      });
      return `${format(axisValue, 4)} ${escape(xAxis.name)}<table class="values">${rows.join("")}</table>`;
    };
  }

  /** The point [x, y] beside x; none beyond the ends. ECharts shows only series that have the nearest point of all. */
  function nearest(data, x) {
    const points = data.filter(point => point[1] !== null);
    const near = points.reduce((a, b) => a && Math.abs(a[0] - x) <= Math.abs(b[0] - x) ? a : b, null);
    const reach = points.length > 1 ? (points.at(-1)[0] - points[0][0]) / (points.length - 1) : 0;
    return near && Math.abs(near[0] - x) <= Math.max(reach, 0.01 * points.at(-1)[0]) ? near : null;
  }

  const list = value => value === undefined ? [] : [value].flat();

  /** What every chart has, beside what its own option says. */
  function complete(option, entry) {
    const {chart, plot} = entry;
    const whole = resolve(option);
    for (const axis of [...list(whole.xAxis), ...list(whole.yAxis)]) {
      if (axis.type === "category") continue;
      const isRound = typeof axis.max !== "number" || Number(axis.max.toPrecision(2)) === axis.max;
      axis.axisLabel = {formatter: value => format(value, 6), showMaxLabel: isRound ? null : false, ...axis.axisLabel};
    }
    for (const series of whole.series) {
      if (series.type !== "line" || !series.label?.show) continue;
      series.label = {color: css("--ink"), fontSize: 11, formatter: ({value}) => format(value[1], 3), ...series.label};
      series.labelLayout = {hideOverlap: true};
      whole.grid = {top: 44, right: 30, ...whole.grid};
      list(whole.yAxis)[0].nameGap = 26;
    }
    for (const axis of list(whole.xAxis)) axis.nameLocation ??= "middle";
    for (const axis of list(whole.yAxis)) {
      axis.nameLocation ??= "end";
      axis.nameGap ??= 12;
      axis.nameTextStyle = {align: "left", ...axis.nameTextStyle};
    }
    const outerBounds = {left: 4, right: 6, top: 0, bottom: 0};
    if (whole.xAxis) whole.grid = {left: 10, right: 18, top: 30, bottom: 12, outerBounds, ...whole.grid};
    whole.tooltip = {confine: true, formatter: tooltip(entry), transitionDuration: 0, ...whole.tooltip};
    return {animation: false, legend: {show: false}, ...whole};
  }

  /** Drag a box to zoom, double-click to see everything; two fingers where there is no mouse. */
  function makeZoomable(option, along) {
    const axes = {xAxisIndex: along.includes("x") ? 0 : "none", yAxisIndex: along.includes("y") ? 0 : "none"};
    const filterMode = along.length > 1 ? "none" : "filter";
    option.toolbox = {itemSize: 0, feature: {dataZoom: {...axes, filterMode, icon: {zoom: "none", back: "none"}}}};
    option.dataZoom = [...along].map(direction => ({type: "inside", [direction + "AxisIndex"]: 0, filterMode,
      zoomOnMouseWheel: false, moveOnMouseMove: false, moveOnMouseWheel: false, preventDefaultMouseMove: false}));
  }

  /** Round numbers of [low, high], about `target` of them, evenly spread on a logarithmic axis. */
  function logTicks(low, high, target) {
    const decades = [];
    for (let d = Math.floor(Math.log10(low)); d <= Math.log10(high); d++) decades.push(d);
    for (const mantissas of [[1, 1.5, 2, 3, 4, 5, 6, 8], [1, 2, 3, 5], [1, 2, 5], [1, 3], [1]]) {
      const ticks = decades.flatMap(d => mantissas.map(m => Number(`${m}e${d}`))).filter(t => t >= low && t <= high);
      if (ticks.length <= target + 1 && ticks.length >= 3) return ticks;
      if (ticks.length < 3) break;
    }
    if (decades.length > target)
      return decades.filter((_, i) => i % Math.ceil(decades.length / target) === 0).map(d => Number(`1e${d}`));
    const raw = (high - low) / target, power = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 5, 10].map(m => m * power).find(each => each >= raw * (1 - 1e-9));
    return Array.from({length: 20}, (_, i) => Number(((Math.ceil(low / step) + i) * step).toPrecision(12)))
      .filter(tick => tick <= high);
  }

  /** ECharts' logarithmic axis ends at powers of ten and names nothing between them: fit it to what is shown. */
  function fitLogAxis({chart, spec}, option) {
    if (option.yAxis?.type !== "log") return;
    const [alongX, alongY] = chart.getOption().dataZoom ?? [];
    const isShown = x => alongX?.startValue == null || (x >= alongX.startValue && x <= alongX.endValue);
    const values = list(option.series).flatMap(series => series.data).map(item => item.value ?? item)
      .filter(([x, y]) => y > 0 && (alongY || isShown(x))).map(([, y]) => y);
    if (!values.length) return;
    const least = Math.min(...values), most = Math.max(...values);
    const margin = most > least * (1 + 1e-9) ? (most / least) ** 0.05 : 1.5;
    const min = least / margin, max = most * margin;
    const [low, high] = alongY?.startValue == null ? [min, max] : [alongY.startValue, alongY.endValue];
    const customValues = logTicks(low, high, Math.max(3, Math.round(chart.getHeight() / 50)));
    const ticks = {axisLabel: {customValues}, axisTick: {customValues}, splitLine: {customValues}};
    chart.setOption({yAxis: {min, max, ...ticks}});
  }

  const isZoomed = chart => (chart.getOption().dataZoom ?? []).some(zoom => zoom.start > 0 || zoom.end < 100);
  const seeAll = chart => chart.dispatchAction({type: "dataZoom", batch: (chart.getOption().dataZoom ?? [])
    .map((_, dataZoomIndex) => ({dataZoomIndex, start: 0, end: 100}))});

  /** A button for each series, which hides and shows it; none for one that is called like its chart. */
  function fillLegend(chart, figure, {option, marks}) {
    const legend = figure.querySelector(".legend");
    const listed = list(option.series).filter(series => series.name && !series.silent);
    const names = [...new Set(listed.map(series => series.name))];
    const notes = [];
    if (marks?.length && figure.closest(".wide")) {
      notes.push(document.createElement("span"));
      notes[0].textContent = "┊ resumed from a checkpoint";
    }
    legend.replaceChildren(...notes);
    if (names.length > 1 || names[0] !== figure.querySelector("b").textContent) legend.append(...names.map(text => {
      const key = document.createElement("button"), swatch = document.createElement("i");
      key.type = "button";
      key.dataset.series = text;
      swatch.style.background = chart.getVisual({seriesName: text}, "color");
      const {type} = list(option.series).find(series => series.name === text).lineStyle ?? {};
      if (type && type !== "solid") swatch.className = type === "dashed" ? type : "dotted";
      key.append(swatch, text);
      key.onclick = () => {
        chart.dispatchAction({type: "legendToggleSelect", name: text});
        key.setAttribute("aria-pressed", chart.getOption().legend[0].selected[text] !== false);
      };
      key.setAttribute("aria-pressed", chart.getOption().legend?.[0]?.selected?.[text] !== false);
      return key;
    }));
  }

  // Curves of runs, which all follow the controls of the page.
  const state = {x: "tokens", loss: "loss", scale: "linear", smoothing: 0};
  const column = {steps: 0, tokens: 1, time: 2};
  const hasCurves = ({spec}) => spec.curves !== undefined;
  /** The part of a run over which the average reaches: up to a tenth. */
  const reach = () => (state.smoothing / 100) ** 2 * 0.1;

  /** The mean of a curve's neighbors, [step, ..., y], weighted by exp(−distance/tau): the past alone would lag. */
  function smoothed(points, tau) {
    const past = averaging(points, tau), future = averaging(points.toReversed(), tau).toReversed();
    return points.map((point, i) => point[3] === null ? point : [...point.slice(0, 3),
      (past[i].sum + future[i].sum - point[3]) / (past[i].weight + future[i].weight - 1)]);
  }

  /** The weighted sum of each point and those before it. */
  function averaging(points, tau) {
    let sum = 0, weight = 0, last = points[0][0];
    return points.map(([step, , , y]) => {
      const decay = Math.exp(-Math.abs(step - last) / tau);
      [sum, weight, last] = [decay * sum + (y ?? 0), decay * weight + (y !== null), step];
      return {sum, weight};
    });
  }

  /** The runs of a dozen have a color each; those of the next have the same colors with other dashes and symbols. */
  const dashes = ["solid", "dotted", [10, 4, 2, 4]], symbols = ["circle", "triangle", "rect"];

  /** The points of a curve that no line reaches. */
  const alone = data => data.filter(([, y], i) => y !== null && (data[i - 1]?.[1] ?? data[i + 1]?.[1] ?? null) === null);

  /** The option of a chart of curves. */
  function curveOption({spec}) {
    const at = column[state.x], shared = charts.filter(hasCurves).flatMap(({spec}) => spec.curves);
    const longest = Math.max(...shared.flatMap(curve => curve.points.map(point => point[at])));
    const [unit, size] = state.x !== "time" ? [state.x, 1]
      : [["days", 172800, 86400], ["hours", 7200, 3600], ["minutes", 120, 60], ["seconds", 0, 1]]
        .filter(([, least]) => longest >= least).map(([word, , seconds]) => [word + " of training", seconds])[0];
    const isPerplexity = spec.isLoss && state.loss === "perplexity";
    const shown = y => y === null || !isPerplexity ? y : Math.exp(y) < Infinity ? Math.exp(y) : null;
    const data = points => points.map(point => [point[at] / size, shown(point[3])]);
    const isPositive = spec.curves.every(curve => curve.points.every(([, , , y]) => y === null || shown(y) > 0));
    const isLog = state.scale === "log" && isPositive;
    const series = [];
    for (const [number, curve] of spec.curves.entries()) {
      const dozen = Math.floor(curve.color / 12) % dashes.length;
      const color = css("--s" + curve.color % 12), tau = reach() * curve.points.at(-1)[0];
      const isSmooth = curve.smooth && tau > 0;
      const line = {type: "line", name: curve.name, symbol: symbols[dozen], symbolSize: 5, color,
        showSymbol: curve.marked, itemStyle: {color}, connectNulls: curve.marked};
      const shape = data(isSmooth ? smoothed(curve.means ?? curve.points, tau) : curve.points), lone = alone(shape);
      if (isSmooth) series.push({...line, id: `raw ${number}`, data: data(curve.points), silent: true,
        z: 1, lineStyle: {width: 1, opacity: 0.22}});
      series.push({...line, id: `curve ${number}`, z: curve.marked ? 4 : 3, data: shape,
        lineStyle: {width: curve.marked ? 1.25 : 1.6, type: curve.marked ? "dashed" : dashes[dozen]}});
      if (lone.length && !curve.marked) series.push({...line, id: `alone ${number}`, z: 3, data: lone, silent: true,
        showSymbol: true, lineStyle: {width: 0}});
    }
    if (spec.marks.length) series[0].markLine = {silent: true, symbol: "none", label: {show: false},
      data: spec.marks.map(({place, color}) => ({xAxis: place[at] / size,
        lineStyle: {color: css("--s" + color % 12), type: "dotted", width: 1.5}}))};
    const max = longest / size;
    return {
      xAxis: {type: "value", name: unit, min: 0, max},
      yAxis: {type: isLog ? "log" : "value", name: isPerplexity ? "perplexity" : spec.unit, scale: !spec.fromZero},
      tooltip: {trigger: "axis"}, series,
    };
  }

  function followControls() {
    const controls = document.querySelector(".controls");
    controls?.addEventListener("click", ({target}) => {
      const set = target.closest("[data-control]");
      if (!target.matches("button")) return;
      for (const button of set.querySelectorAll("button")) button.setAttribute("aria-pressed", button === target);
      state[set.dataset.control] = target.value;
      drawAll(charts.filter(hasCurves));
    });
    controls?.querySelector("input").addEventListener("input", ({target}) => {
      state.smoothing = Number(target.value);
      target.nextElementSibling.textContent = state.smoothing ? `over ${format(100 * reach(), 2)} % of the run` : "off";
      drawAll(charts.filter(hasCurves), true);
    });
  }

  /** Zoom all curves of the page alike. */
  function zoomCurves(from) {
    const {start, end} = from.chart.getOption().dataZoom[0];
    for (const entry of charts.filter(hasCurves)) {
      const now = entry.chart.getOption().dataZoom[0];
      if (now.start !== start || now.end !== end)
        entry.chart.dispatchAction({type: "dataZoom", dataZoomIndex: 0, start, end});
    }
  }

  /** Do something for a figure; where that fails, the figure says so, and the others stay. */
  function attempt(figure, work) {
    try {
      work();
    } catch (error) {
      console.error(error);
      const place = charts.findIndex(entry => entry.figure === figure), note = document.createElement("p");
      if (place >= 0) charts.splice(place, 1);
      note.className = "empty";
      note.textContent = "This chart cannot be drawn; the browser's console says why.";
      figure.querySelector(".legend").replaceChildren();
      figure.querySelector(".plot").replaceWith(note);
    }
  }

  const draw = (entry, keepZoom = false) => attempt(entry.figure, () => drawChart(entry, keepZoom));
  const drawAll = (entries, keepZoom = false) => [...entries].forEach(entry => draw(entry, keepZoom));

  function drawChart(entry, keepZoom) {
    const {chart, figure, spec} = entry;
    const zoomed = keepZoom && chart.getOption().dataZoom?.[0];
    if (hasCurves(entry)) spec.option = curveOption(entry);
    const option = complete(spec.option, entry);
    if (spec.zoom) makeZoomable(option, spec.zoom);
    chart.setOption(option, {notMerge: true});
    if (zoomed) chart.dispatchAction({type: "dataZoom", dataZoomIndex: 0, start: zoomed.start, end: zoomed.end});
    else if (entry.reset) entry.reset.hidden = true;
    fitLogAxis(entry, option);
    entry.drawn = option;
    fillLegend(chart, figure, spec);
    if (spec.zoom && matchMedia("(hover: hover)").matches)
      chart.dispatchAction({type: "takeGlobalCursor", key: "dataZoomSelect", dataZoomSelectActive: true});
  }

  function start(figure) {
    const plot = figure.querySelector(".plot"), spec = JSON.parse(figure.querySelector("script").textContent);
    const chart = echarts.init(plot, theme(), {renderer: "svg"});
    plot.dataset.height = plot.style.height;
    const entry = {chart, figure, plot, spec, reset: figure.querySelector(".reset")};
    charts.push(entry);
    let width = plot.clientWidth;
    new ResizeObserver(() => {
      if (plot.clientWidth === width || !charts.includes(entry)) return;
      width = plot.clientWidth;
      chart.resize();
      if (!isZoomed(chart)) draw(entry);
    }).observe(plot);
    if (!spec.zoom) return;
    chart.on("datazoom", () => {
      entry.reset.hidden = !isZoomed(chart);
      fitLogAxis(entry, entry.drawn);
      if (hasCurves(entry)) zoomCurves(entry);
    });
    chart.getZr().on("dblclick", () => seeAll(chart));
    entry.reset.onclick = () => seeAll(chart);
  }

  document.querySelectorAll(".plot").forEach(plot => {
    const figure = plot.closest("figure");
    attempt(figure, () => start(figure));
  });
  drawAll(charts);
  followControls();
  dark.addEventListener("change", () => {
    for (const {chart} of charts) chart.setTheme(theme());
    drawAll(charts);
  });
  return {charts, format};
})();
