// What the timeline of a step needs beside charts.js: its bars, the text under the pointer, and its file for Perfetto.
"use strict";
const plugins = {
  renderItem: {
    bar(params, api) {
      const [rank, begin, end, odd] = [0, 1, 2, 5].map(place => api.value(place));
      const start = api.coord([begin, rank]), stop = api.coord([end, rank]);
      const height = Math.max(api.size([0, 1])[1] - 5, 3);
      const shape = echarts.graphic.clipRectByRect(
        {x: start[0], y: start[1] - height / 2, width: Math.max(stop[0] - start[0], 0.3), height}, params.coordSys);
      const wide = stop[0] - start[0] > 3;
      return shape && {type: "rect", shape, style: {fill: api.visual("color"), opacity: odd ? 0.55 : 1,
        stroke: wide ? getComputedStyle(document.documentElement).getPropertyValue("--card").trim() : "none"}};
    },
  },
  formatter: {
    bar(found) {
      const [rank, begin, end, microBatch, stage] = found.value, format = fourfold.format;
      const of = microBatch < 0 ? "" : ` of micro-batch ${microBatch}, stage ${stage}`;
      return `${found.marker}${found.seriesName}${of}<br>rank ${rank}: ${format(begin)} to ${format(end)} s`;
    },
  },
};

/** The timeline as the JSON of https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU. */
function chromeTrace(series, title) {
  const events = series.flatMap(kind => kind.data.map(([rank, begin, end, microBatch, stage]) => ({
    ph: "X", cat: kind.name, name: microBatch < 0 ? kind.name : `${kind.name} ${microBatch}`, pid: 0, tid: rank,
    ts: 1e6 * begin, dur: 1e6 * (end - begin), args: microBatch < 0 ? {} : {micro_batch: microBatch, stage},
  })));
  const ranks = [...new Set(events.map(event => event.tid))];
  const names = ranks.map(tid => ({ph: "M", name: "thread_name", pid: 0, tid, args: {name: `rank ${tid} of pp`}}));
  return {displayTimeUnit: "ms", traceEvents: [
    {ph: "M", name: "process_name", pid: 0, tid: 0, args: {name: title}}, ...names, ...events]};
}

addEventListener("click", event => {
  const button = event.target.closest("button.trace");
  if (!button) return;
  const data = button.closest(".wide").querySelector("script[type='application/json']").textContent;
  const text = JSON.stringify(chromeTrace(JSON.parse(data).option.series, document.title));
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], {type: "application/json"}));
  link.download = "step.trace.json";
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
});
