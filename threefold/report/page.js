"use strict";
// The page of a report: reads the document in #report (threefold/report/document.py) and draws it. A page that
// `threefold watch --serve` serves asks for the document again every data-poll milliseconds; any other asks for nothing.

let report = JSON.parse(document.getElementById("report").textContent);
const view = Object.assign({ axis: "step", smoothing: 3, hidden: [], log: [] }, stateOfHash());
const charts = [];
const COLORS = 8;

// ---- small helpers ------------------------------------------------------------------------------------------------

function make(tag, attributes = {}, ...children) {
  const svg = ["svg", "path", "line", "rect", "circle", "text", "g", "title", "polygon"].includes(tag);
  const made = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined) made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

const color = (run) => `var(--run-${run % COLORS})`;
const grouped = (value) => Math.round(value).toLocaleString("en-US");
const visible = () => report.runs.map((run, index) => [run, index]).filter(([, index]) => !view.hidden.includes(index));

function short(value) {
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 1e9) return `${+(value / 1e9).toPrecision(3)}G`;
  if (size >= 1e6) return `${+(value / 1e6).toPrecision(3)}M`;
  if (size >= 1e4) return `${+(value / 1e3).toPrecision(3)}k`;
  if (size < 1e-3) return value.toExponential(1).replace("e-", "e−");
  return String(+value.toPrecision(4));
}

function bytes(value) {
  const [unit, scale] = value >= 1e9 ? ["GB", 1e9] : value >= 1e6 ? ["MB", 1e6] : ["kB", 1e3];
  return `${(value / scale).toFixed(1)} ${unit}`;
}

function clock(seconds) {
  const all = Math.round(seconds), hours = Math.floor(all / 3600), minutes = Math.floor(all / 60) % 60;
  const two = (number) => String(number).padStart(2, "0");
  return hours ? `${hours}:${two(minutes)}:${two(all % 60)}` : `${minutes}:${two(all % 60)}`;
}

const exactly = (value) => (Math.abs(value) >= 1e4 ? grouped(value) : Math.abs(value) < 1e-3 && value ? value.toExponential(3) : String(+value.toPrecision(5)));
const percent = (value) => `${+(100 * value).toFixed(1)}%`;

function stateOfHash() {
  const given = new URLSearchParams(location.hash.slice(1)), state = {};
  if (["step", "tokens", "time"].includes(given.get("over"))) state.axis = given.get("over");
  if (given.has("smooth")) state.smoothing = Math.min(20, Math.max(0, Number(given.get("smooth")) || 0));
  if (given.has("hide")) state.hidden = given.get("hide").split(",").map(Number);
  if (given.has("log")) state.log = given.get("log").split(",");
  return state;
}

function keepState() {
  const kept = new URLSearchParams({ over: view.axis, smooth: view.smoothing });
  if (view.hidden.length) kept.set("hide", view.hidden.join(","));
  if (view.log.length) kept.set("log", view.log.join(","));
  history.replaceState(null, "", `#${kept}`);
}

// ---- places of steps on the axis that is chosen ----------------------------------------------------------------------

function placesOf(run) {
  const curves = run.curves, other = { tokens: "tokens_so_far", time: "elapsed" }[view.axis];
  if (other) return (curves.values[other] || { mean: [] }).mean;
  return curves.first.map((first, index) => (first + curves.last[index]) / 2);
}

function placeOf(run, step) {
  if (view.axis === "step") return step;
  const places = placesOf(run), last = run.curves.last;
  let low = 0, high = last.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (last[middle] < step) low = middle + 1;
    else high = middle;
  }
  return places[low];
}

function label(x) {
  return view.axis === "time" ? clock(x) : view.axis === "tokens" ? short(x) : grouped(x);
}

// The centered mean over `span` points, an odd number; the first and last span / 2 have none, as a mean over fewer would
// follow single steps there.
function smoothed(values, span) {
  if (span < 3) return values;
  const half = (span - 1) / 2, found = new Array(values.length).fill(null);
  let sum = 0, count = 0;
  const add = (value, sign) => { if (value !== null && value !== undefined) { sum += sign * value; count += sign; } };
  for (let index = 0; index < Math.min(span, values.length); index++) add(values[index], 1);
  for (let middle = half; middle < values.length - half; middle++) {
    found[middle] = count ? sum / count : null;
    add(values[middle - half], -1);
    add(values[middle + half + 1], 1);
  }
  return found;
}

const spanOf = (points) => 2 * Math.round((points * view.smoothing) / 200) + 1;

// ---- a chart ---------------------------------------------------------------------------------------------------------

// Draws lines of all visible runs. `lines(run)` returns [{ values, name, dots, faint }] with values as in the document;
// `show` formats a value; `marks` draws restarts, checkpoints and events as well.
function chart(title, unit, lines, { show = exactly, tick = short, height = 190, marks = false, fill = false, from = null, size = "half", key = title, text = null } = {}) {
  const drawn = visible().flatMap(([run, index]) => lines(run).filter((line) => line.values).map((line) => ({ ...line, run, index })));
  if (!drawn.some((line) => line.values.mean.some((value) => value !== null))) return null;
  const plot = make("div", { class: "plot", tabindex: 0, role: "img", "aria-label": `${title} over ${view.axis}` });
  const isLog = view.log.includes(key);
  const toggle = make("button", { class: "toggle", type: "button", "aria-pressed": isLog, title: "Logarithmic axis", onclick: () => {
    view.log = isLog ? view.log.filter((each) => each !== key) : [...view.log, key];
    keepState();
    render();
  } }, "log");
  const section = make("section", { class: size }, make("h2", {}, make("span", {}, title, " ", make("small", {}, unit)), toggle), text && make("p", { class: "told" }, text), plot, marks ? marksLegend() : null);
  charts.push({ plot, hover: null, draw: () => drawChart(plot, drawn, { show, tick, height: fill ? Math.max(height, section.clientHeight - 82) : height, marks, from, isLog }) });
  return section;
}

function ticks(low, high, count) {
  const rough = (high - low) / Math.max(1, count), power = 10 ** Math.floor(Math.log10(rough || 1));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((each) => each >= rough) || power;
  const found = [];
  for (let value = Math.ceil(low / step) * step; value <= high + step * 1e-6; value += step) found.push(Math.abs(value) < step * 1e-6 ? 0 : value);
  return found;
}

function drawChart(plot, drawn, { show, tick, height, marks, from, isLog }) {
  const width = Math.max(200, plot.clientWidth), left = 46, right = 10, top = 8, bottom = 22;
  const usable = (value) => value !== null && value !== undefined && (!isLog || value > 0);
  let low = Infinity, high = -Infinity, begin = Infinity, end = -Infinity;
  for (const line of drawn) {
    line.places = line.steps ? line.steps.map((step) => placeOf(line.run, step)) : placesOf(line.run);
    line.smooth = line.dots || line.steps ? line.values.mean : smoothed(line.values.mean, spanOf(line.values.mean.length));
    for (const values of [line.values.mean, line.values.low, line.values.high]) {
      for (const value of values || []) if (usable(value)) { low = Math.min(low, value); high = Math.max(high, value); }
    }
    for (const place of line.places) if (place !== null) { begin = Math.min(begin, place); end = Math.max(end, place); }
  }
  if (!isFinite(low)) { low = isLog ? 1 : 0; high = low + 1; }
  if (from !== null && !isLog) low = Math.min(low, from);
  if (low === high) { low -= Math.abs(low) * 0.05 || 0.5; high += Math.abs(high) * 0.05 || 0.5; if (isLog && low <= 0) low = high / 10; }
  if (begin === end) { begin -= 0.5; end += 0.5; }
  const scale = isLog ? Math.log10 : (value) => value, pad = 0.04 * (scale(high) - scale(low));
  const floor = scale(low) - (from !== null && !isLog && low === from ? 0 : pad), ceiling = scale(high) + pad;
  const x = (place) => left + ((place - begin) / (end - begin)) * (width - left - right);
  const y = (value) => top + (1 - (scale(value) - floor) / (ceiling - floor)) * (height - top - bottom);
  const svg = make("svg", { viewBox: `0 0 ${width} ${height}`, height });
  const levels = isLog && ceiling - floor > 1.2 ? ticks(Math.ceil(floor), Math.floor(ceiling), 4).filter(Number.isInteger).map((power) => 10 ** power)
    : isLog ? ticks(10 ** floor, 10 ** ceiling, 4).filter((value) => value > 0) : ticks(floor, ceiling, Math.max(3, height / 50));
  for (const value of levels) {
    svg.append(make("line", { x1: left, x2: width - right, y1: y(value), y2: y(value), stroke: "var(--grid)" }));
    svg.append(make("text", { x: left - 6, y: y(value) + 4, "text-anchor": "end" }, tick(value)));
  }
  const places = view.axis === "time" ? timeTicks(begin, end, width / 80) : ticks(begin, end, width / 80);
  for (const place of places) {
    const anchor = x(place) > width - 26 ? "end" : "middle";
    svg.append(make("text", { x: x(place), y: height - 6, "text-anchor": anchor }, label(place)));
  }
  svg.append(make("line", { x1: left, x2: width - right, y1: height - bottom, y2: height - bottom, stroke: "var(--line)" }));
  if (marks) drawMarks(svg, x, top, height - bottom);
  for (const line of drawn) {
    const stroke = line.color || color(line.index);
    if (line.values.low) {
      svg.append(make("path", { d: band(line.places, line.values.low, line.values.high, x, y, usable), fill: stroke, "fill-opacity": 0.16 }));
    }
    if (line.smooth !== line.values.mean) {
      svg.append(make("path", { d: path(line.places, line.values.mean, x, y, usable), fill: "none", stroke, "stroke-opacity": 0.28, "stroke-width": 1 }));
    }
    svg.append(make("path", {
      d: path(line.places, line.smooth, x, y, usable), fill: "none", stroke, "stroke-width": line.dots ? 1.5 : 2, "stroke-linejoin": "round",
      "stroke-dasharray": line.dots ? "5 3" : null,
    }));
    if (line.dots && line.places.length <= 120) {
      line.places.forEach((place, index) => usable(line.values.mean[index]) && svg.append(make("circle", { cx: x(place), cy: y(line.values.mean[index]), r: 2.8, fill: "var(--paper)", stroke, "stroke-width": 1.5 })));
    }
  }
  const cursor = make("g");
  svg.append(cursor);
  plot.replaceChildren(svg);
  listen(plot, drawn, cursor, { x, y, begin, end, left, right, width, top, bottom: height - bottom, show, usable });
}

function timeTicks(begin, end, count) {
  const rough = (end - begin) / Math.max(1, count);
  const steps = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200];
  const step = steps.find((each) => each >= rough) || 86400 * Math.ceil(rough / 86400), found = [];
  for (let value = Math.ceil(begin / step) * step; value <= end; value += step) found.push(value);
  return found;
}

function path(places, values, x, y, usable) {
  let text = "", pen = "M";
  for (let index = 0; index < places.length; index++) {
    if (places[index] === null || !usable(values[index])) { pen = "M"; continue; }
    text += `${pen}${x(places[index]).toFixed(1)} ${y(values[index]).toFixed(1)}`;
    pen = "L";
  }
  return text;
}

function band(places, low, high, x, y, usable) {
  const held = [...places.keys()].filter((index) => places[index] !== null && usable(low[index]) && usable(high[index]));
  const point = (values) => (index) => `${x(places[index]).toFixed(1)} ${y(values[index]).toFixed(1)}`;
  return held.length ? `M${held.map(point(high)).join("L")}L${held.reverse().map(point(low)).join("L")}Z` : "";
}

function marksLegend() {
  const held = visible().map(([run]) => run), found = [];
  if (held.some((run) => run.attempts.length)) found.push(["↻", "started again"]);
  if (held.some((run) => run.checkpoints.listed.length)) found.push(["▲", "checkpoint"]);
  if (held.some((run) => run.events.length)) found.push(["●", "skipped, rolled back or stopped"]);
  return make("div", { class: "legend" }, ...found.map(([sign, text]) => make("span", {}, `${sign} ${text}`)));
}

function drawMarks(svg, x, top, bottom) {
  for (const [run, index] of visible()) {
    for (const attempt of run.attempts) {
      const place = x(view.axis === "time" ? attempt.elapsed : placeOf(run, attempt.step));
      svg.append(make("line", { x1: place, x2: place, y1: top, y2: bottom, stroke: color(index), "stroke-dasharray": "2 3" },
        make("title", {}, `${run.name}: started again with step ${grouped(attempt.step)}`)));
      svg.append(make("text", { x: place + 4, y: top + 9, style: `fill: ${color(index)}` }, "↻"));
    }
    for (const checkpoint of run.checkpoints.listed) {
      const place = placeOf(run, checkpoint.step);
      if (place === undefined || place === null || !run.curves.last.length) continue;
      svg.append(make("polygon", { points: `${x(place) - 4},${bottom} ${x(place) + 4},${bottom} ${x(place)},${bottom - 7}`, fill: color(index) },
        make("title", {}, `${run.name}: ${checkpoint.name}`)));
    }
    for (const event of run.events) {
      const place = placeOf(run, event.step);
      if (place === undefined || place === null || !run.curves.last.length) continue;
      svg.append(make("circle", { cx: x(place), cy: top + 3, r: 3.5, fill: "var(--lost)" }, make("title", {}, `${run.name}, step ${grouped(event.step)}: ${event.text}`)));
    }
  }
}

// ---- values under the pointer ------------------------------------------------------------------------------------------

function nearest(places, place) {
  let best = -1;
  for (let index = 0; index < places.length; index++) {
    if (places[index] !== null && (best < 0 || Math.abs(places[index] - place) < Math.abs(places[best] - place))) best = index;
  }
  return best;
}

function listen(plot, drawn, cursor, frame) {
  const tip = make("div", { class: "tip", hidden: "" });
  plot.append(tip);
  const own = charts.find((each) => each.plot === plot);
  own.point = (place, isOwn) => {
    cursor.replaceChildren();
    tip.hidden = place === null || !isOwn;
    if (place === null || place < frame.begin || place > frame.end) { tip.hidden = true; return; }
    const at = frame.x(place);
    cursor.append(make("line", { x1: at, x2: at, y1: frame.top, y2: frame.bottom, stroke: "var(--faint)" }));
    const rows = [];
    for (const line of drawn) {
      const index = nearest(line.places, place), value = index < 0 ? null : line.values.mean[index];
      if (!frame.usable(value)) continue;
      const smooth = line.smooth[index], curves = line.run.curves;
      cursor.append(make("circle", { cx: frame.x(line.places[index]), cy: frame.y(frame.usable(smooth) ? smooth : value), r: 3.5, fill: line.color || color(line.index) }));
      const steps = line.steps ? grouped(line.steps[index]) : curves.first[index] === curves.last[index] ? grouped(curves.last[index]) : `${grouped(curves.first[index])}–${grouped(curves.last[index])}`;
      const extremes = line.values.low && line.values.low[index] !== line.values.high[index] ? ` from ${frame.show(line.values.low[index])} to ${frame.show(line.values.high[index])}` : "";
      const mean = smooth !== value && frame.usable(smooth) ? ` smoothed ${frame.show(smooth)}` : "";
      rows.push(make("div", {}, make("span", { class: "swatch", style: `background: ${line.color || color(line.index)}` }),
        [report.runs.length > 1 ? line.run.name : "", line.name].filter(Boolean).join(" "), " ", make("b", {}, frame.show(value)), make("i", {}, `${extremes}${mean}, step ${steps}`)));
    }
    tip.replaceChildren(...rows);
    tip.hidden = tip.hidden || !rows.length;
    const beyond = at > frame.width / 2;
    tip.style.left = beyond ? "auto" : `${Math.min(at + 12, frame.width)}px`;
    tip.style.right = beyond ? `${frame.width - at + 12}px` : "auto";
    if (frame.width < 480) { tip.style.left = "0"; tip.style.right = "auto"; }
    tip.style.top = frame.width < 480 ? "auto" : `${frame.top}px`;
    tip.style.bottom = frame.width < 480 ? "100%" : "auto";
  };
  plot.onpointermove = (event) => {
    const share = (event.clientX - plot.getBoundingClientRect().left - frame.left) / (frame.width - frame.left - frame.right);
    pointAll(own, frame.begin + Math.min(1, Math.max(0, share)) * (frame.end - frame.begin));
  };
  plot.onpointerleave = plot.onblur = () => pointAll(own, null);
  plot.onkeydown = (event) => {
    if (!["ArrowLeft", "ArrowRight"].includes(event.key)) return;
    event.preventDefault();
    const places = drawn[0].places, now = own.hover === null ? places.length - 1 : nearest(places, own.hover);
    pointAll(own, places[Math.min(places.length - 1, Math.max(0, now + (event.key === "ArrowLeft" ? -1 : 1)))]);
  };
}

function pointAll(own, place) {
  own.hover = place;
  for (const each of charts) each.point(place, each === own);
}

// ---- what ran -----------------------------------------------------------------------------------------------------------

// A cell for each rank: a block for each replica, in it the stages of the pipeline from left to right, and in each the
// ranks that share a layer. More than the coordinates given: one replica, and how many there are.
function layoutPicture(layout) {
  const { dp, pp, cp, tp, ep } = layout.sizes, cell = 15, gap = 3, most = 4;
  const replicas = Math.min(dp, most), stages = Math.min(pp, 16), across = Math.min(tp, 8), down = Math.min(cp, 8);
  const stageWidth = across * cell + gap, stageHeight = down * cell + gap, columns = replicas > 1 && stages * stageWidth < 60 ? 2 : 1;
  const width = stages * (stageWidth + gap) + 10, height = stageHeight + 9;
  const rows = Math.ceil(replicas / columns), svg = make("svg", { viewBox: `0 0 ${columns * width} ${rows * height + 2}`, style: `width: ${columns * width}px; max-width: 100%`, role: "img", "aria-label": `${dp * pp * cp * tp} ranks` });
  const names = new Map(layout.ranks.map((place, rank) => [place.join(), rank]));
  for (let d = 0; d < replicas; d++) {
    const x = (d % columns) * width, y = Math.floor(d / columns) * height;
    svg.append(make("rect", { x: x + 1, y: y + 1, width: width - 4, height: height - 3, rx: 4, fill: "none", stroke: "var(--line)" }));
    for (let p = 0; p < stages; p++) for (let c = 0; c < down; c++) for (let t = 0; t < across; t++) {
      const rank = names.get([d, p, c, t].join());
      svg.append(make("rect", {
        x: x + 5 + p * (stageWidth + gap) + t * cell, y: y + 4.5 + c * cell, width: cell - 2, height: cell - 2, rx: 2.5,
        fill: `var(--run-${p % COLORS})`, "fill-opacity": 0.95 - 0.5 * (across > 1 ? t / (across - 1) : 0),
      }, make("title", {}, `${rank === undefined ? "" : `rank ${rank}: `}dp ${d}, pp ${p}, cp ${c}, tp ${t}`)));
    }
  }
  const words = [`${dp} ${dp === 1 ? "replica" : "replicas"}`];
  if (pp > 1) words.push(`${pp} stages`);
  if (cp > 1) words.push(`sequences in ${cp}`);
  if (tp > 1) words.push(`weights in ${tp}`);
  if (ep > 1) words.push(`experts over ${ep}`);
  const shown = replicas * stages * down * across < dp * pp * cp * tp ? ` (${replicas * stages * down * across} of ${grouped(dp * pp * cp * tp)} ranks drawn)` : "";
  return make("div", { class: "layout" }, make("div", {}, svg), make("small", {}, words.join(" × ") + shown));
}

const TILES = { loss: "loss", validation: "validation loss", speed: "speed", MFU: "MFU", compute: "compute", memory: "memory", goodput: "goodput" };

function swatch(index) {
  return make("span", { class: "swatch", style: `background: ${color(index)}` });
}

function summaryTable() {
  const names = [...new Set(report.runs.flatMap((run) => Object.keys(run.summary)))].filter((name) => name !== "state" && !(report.runs.length === 1 && TILES[name]));
  const several = report.runs.length > 1;
  const head = make("thead", {}, make("tr", {}, make("th"), ...report.runs.map((run, index) => make("th", {}, swatch(index), run.name))));
  const rows = [make("tr", {}, make("th", {}, "state"), ...report.runs.map((run) => make("td", {}, make("span", { class: `state ${run.state}` }, run.summary.state))))];
  for (const name of names) {
    rows.push(make("tr", {}, make("th", {}, name), ...report.runs.map((run) => make("td", {}, run.summary[name] ?? "–", name === "layout" && run.layout ? layoutPicture(run.layout) : null))));
  }
  return make("section", { class: several ? "" : "third" }, make("h2", {}, several ? "Runs" : "What ran"),
    make("div", { class: "scroll" }, make("table", { class: several ? "summary" : "" }, several ? head : null, make("tbody", {}, ...rows))));
}

function tiles() {
  if (report.runs.length > 1) return null;
  const summary = report.runs[0].summary, found = [];
  for (const [name, title] of Object.entries(TILES)) {
    if (!summary[name] || (name === "compute" && summary.MFU)) continue;
    const [number, ...rest] = summary[name].split(" ");
    found.push(make("div", {}, make("span", {}, title), make("b", {}, number), make("i", {}, rest.join(" "))));
  }
  return found.length ? make("section", { class: "tiles" }, ...found) : null;
}

// ---- where the time went ------------------------------------------------------------------------------------------------

const PHASE_COLORS = { data: "--data", callbacks: "--callbacks", forward_backward: "--compute", update: "--update" };
const LEDGER_COLORS = { steps: "--good", repeated: "--again", evaluating: "--evaluate", saving: "--save", starting: "--start", lost: "--lost" };

function legend(names, colors, held, more = []) {
  return make("div", { class: "legend" }, ...Object.keys(names).filter((name) => held(name)).map((name) => make("span", {}, make("span", { class: "swatch", style: `background: var(${colors[name]})` }), names[name])),
    ...more.map(([text, name]) => make("span", {}, make("span", { class: "swatch", style: `background: var(${name})` }), text)));
}

function phases(size) {
  const held = visible().filter(([run]) => run.seconds > 0 && Object.keys(run.phases).length);
  if (!held.length) return null;
  const longest = Math.max(...held.map(([run]) => run.seconds / stepsOf(run)));
  const bars = held.map(([run, index]) => {
    const count = stepsOf(run), svg = make("svg", { viewBox: "0 0 1000 30", preserveAspectRatio: "none", height: 30 });
    let at = 0;
    for (const [name, seconds] of Object.entries(run.phases)) {
      const width = (1000 * seconds) / count / longest;
      svg.append(make("rect", { x: at, y: 0, width, height: 20, fill: `var(${PHASE_COLORS[name]})` }, make("title", {}, `${report.phases[name]}: ${time(seconds / count)} (${percent(seconds / run.seconds)})`)));
      at += width;
    }
    svg.append(make("rect", { x: 0, y: 22, width: (1000 * run.waited) / count / longest, height: 6, fill: "var(--wait)" }, make("title", {}, `waiting: ${time(run.waited / count)}`)));
    const waits = run.waited ? `, ${percent(run.waited / run.seconds)} of it waiting` : "";
    return make("div", { class: "bar" }, make("p", {}, swatch(index), `${run.name}: `, make("b", {}, time(run.seconds / count)), waits), svg);
  });
  return make("section", { class: size }, make("h2", {}, make("span", {}, "Phases of a step ", make("small", {}, "mean"))), ...bars, legend(report.phases, PHASE_COLORS, (name) => held.some(([run]) => run.phases[name]), [["waiting for other ranks, on rank 0", "--wait"]]));
}

const time = (seconds) => (seconds < 10 ? `${exactly(+(1000 * seconds).toPrecision(3))} ms` : `${seconds.toFixed(1)} s`);

function stepsOf(run) {
  return run.curves.last.reduce((sum, last, index) => sum + last - run.curves.first[index] + 1, 0) || 1;
}

// A strip for each run, from its start to its end over all attempts: between two checkpoints, the shares of what the time
// was spent on, from the bottom.
function goodput() {
  const held = visible().filter(([run]) => run.goodput.now && run.goodput.now.seconds.total > 0);
  if (!held.length) return null;
  const longest = Math.max(...held.map(([run]) => run.goodput.now.seconds.total)), high = 54;
  const strips = held.map(([run, index]) => {
    const svg = make("svg", { viewBox: `0 0 1000 ${high + 2}`, preserveAspectRatio: "none", height: high + 2 }), now = run.goodput.now;
    let before = {}, restarts = 0;
    for (const ledger of [...run.goodput.ledgers, now]) {
      const total = (ledger.seconds.total || 0) - (before.total || 0), x = (1000 * (before.total || 0)) / longest;
      if (total > 0) {
        const width = (1000 * total) / longest;
        let y = high;
        svg.append(make("rect", { x, y: 0, width, height: high, fill: "var(--rest)" }));
        for (const name of Object.keys(report.ledger)) {
          const share = Math.max(0, (ledger.seconds[name] || 0) - (before[name] || 0)) / total;
          y -= high * Math.min(1, share);
          const title = make("title", {}, `${report.ledger[name]}: ${percent(share)} of ${clock(total)}${ledger.step ? ` up to step ${grouped(ledger.step)}` : ""}`);
          svg.append(make("rect", { x, y, width: Math.max(width - 0.6, 0.4), height: high * share, fill: `var(${LEDGER_COLORS[name]})` }, title));
        }
      }
      before = ledger.seconds;
    }
    for (const attempt of run.attempts) {
      const x = (1000 * attempt.elapsed) / longest;
      svg.append(make("line", { x1: x, x2: x, y1: 0, y2: high + 2, stroke: "var(--ink)", "stroke-width": 2, "stroke-dasharray": "4 3", "vector-effect": "non-scaling-stroke" }, make("title", {}, `started again with step ${grouped(attempt.step)}`)));
    }
    restarts = run.attempts.length ? `, started again ${run.attempts.length === 1 ? "once" : `${run.attempts.length} times`}` : "";
    return make("div", { class: "bar" }, make("p", {}, swatch(index), `${run.name}: `, make("b", {}, percent((now.seconds.steps || 0) / now.seconds.total)), ` of ${clock(now.seconds.total)} in steps made for the first time${restarts}`), svg);
  });
  return make("section", {}, make("h2", {}, make("span", {}, "Goodput ", make("small", {}, "over the time of the run"))), ...strips, legend(report.ledger, LEDGER_COLORS, (name) => held.some(([run]) => run.goodput.now.seconds[name]), [["between them", "--rest"]]));
}

// ---- tables -----------------------------------------------------------------------------------------------------------

function table(title, head, rows, kind = "wide", size = "") {
  if (!rows.length) return null;
  return make("section", { class: size }, make("h2", {}, title), make("div", { class: "scroll" }, make("table", { class: kind },
    make("thead", {}, make("tr", {}, ...head.map((name) => make("th", {}, name)))), make("tbody", {}, ...rows.map((row) => make("tr", {}, ...row.map((each) => make("td", {}, each))))))));
}

function checkpoints() {
  const several = report.runs.length > 1, rows = [];
  for (const [run, index] of visible()) for (const each of [...run.checkpoints.listed].reverse()) {
    rows.push([...(several ? [make("span", {}, swatch(index), run.name)] : []), grouped(each.step), each.saved ? each.saved.replace("T", " ").replace("+00:00", " UTC") : "–", bytes(each.bytes), each.reason || each.state, each.layout, make("code", {}, each.weights || "–")]);
  }
  return table("Checkpoints", [...(several ? ["run"] : []), "step", "saved", "size", "state", "layout", "weights"], rows);
}

const written = (value) => (value === null || value === undefined ? "–" : typeof value === "string" ? value : JSON.stringify(value));

// The runs of a sweep, from the best loss to the worst.
function outcomes() {
  if (!report.outcomes) return null;
  const place = new Map(report.runs.map((run, index) => [run.name, index]));
  const cell = (each, column) => (column === 0 ? make("span", {}, place.has(each) ? swatch(place.get(each)) : null, each) : typeof each === "number" ? each.toFixed(4) : written(each));
  return table("Runs of the sweep, best first", report.outcomes.columns, report.outcomes.rows.map((row) => row.map(cell)));
}

function differences() {
  const rows = Object.entries(report.differences).map(([name, values]) => [make("code", {}, name), ...values.map(written)]);
  const section = table("Settings that differ", ["setting", ...report.runs.map((run) => run.name)], rows, "differences");
  if (report.runs.length > 1 && !rows.length) return make("section", {}, make("h2", {}, "Settings that differ"), "None.");
  return section;
}

function events() {
  const rows = visible().flatMap(([run, index]) => run.events.map((event) => make("li", {}, report.runs.length > 1 ? swatch(index) : null, `step ${grouped(event.step)}: ${event.text}`)));
  return rows.length ? make("section", {}, make("h2", {}, "Events"), make("ul", {}, ...rows)) : null;
}

function samples() {
  const found = visible().flatMap(([run, index]) => run.samples.map((sample) => make("p", { class: "sample" },
    make("small", {}, report.runs.length > 1 ? swatch(index) : null, `${run.name}, step ${grouped(sample.step)}`), make("b", {}, sample.prompt), sample.text)));
  return found.length ? make("section", {}, make("h2", {}, "Generated text"), ...found.reverse()) : null;
}

function settings() {
  const opened = new Set([...document.querySelectorAll("details[open]")].map((each) => each.dataset.run));
  return visible().filter(([run]) => Object.keys(run.settings).length).map(([run, index]) => {
    const rows = Object.entries(run.settings).flatMap(([section, values]) => Object.entries(values).map(([key, value]) => make("tr", {}, make("th", {}, `${section}.${key}`), make("td", {}, written(value)))));
    const folder = make("details", { "data-run": run.name }, make("summary", {}, "All settings", report.runs.length > 1 ? ` of ${run.name}` : ""), make("div", { class: "scroll" }, make("table", {}, make("tbody", {}, ...rows))));
    folder.open = opened.has(run.name);
    return make("section", { class: report.runs.length > 1 ? "half" : "" }, folder);
  });
}

function warnings() {
  const found = report.runs.flatMap((run) => run.warnings.map((text) => make("p", {}, text)));
  return found.length ? make("section", { class: "warnings" }, ...found) : null;
}

// ---- the page -----------------------------------------------------------------------------------------------------------

const value = (name) => (run) => [{ values: run.curves.values[name] }];

function shareOf(run, part) {
  const seconds = run.curves.values.seconds, found = run.curves.values[part];
  if (!seconds || !found || !found.mean.some((each) => each)) return undefined;
  return { mean: found.mean.map((each, index) => (each === null || !seconds.mean[index] ? null : each / seconds.mean[index])) };
}

function losses(run) {
  const evaluations = run.evaluations, steps = evaluations.last;
  const found = [{ values: run.curves.values.loss, name: "training" }, { values: evaluations.values.valid_loss, name: "validation", dots: true, steps }];
  const averaged = evaluations.values.valid_loss_average;
  return averaged ? [...found, { values: averaged, name: "validation of averaged weights", dots: true, steps }] : found;
}

// Differences from the losses of the first run, of runs that should have the same ones.
function differencesOfLoss(run) {
  return run.difference ? [{ values: run.difference.values.loss, steps: run.difference.last }] : [];
}

// The terms of a loss of several, and the validation losses of the corpora of a mixture.
function parts() {
  const found = new Map();
  for (const run of report.runs) {
    for (const name of Object.keys(run.curves.values)) if (name.startsWith("term/")) found.set(name, [`Term ${name.slice(5)}`, value(name)]);
    for (const name of Object.keys(run.evaluations.values)) {
      if (!name.includes("/")) continue;
      const title = name.startsWith("valid_term/") ? `Validation of term ${name.slice(11)}` : `Validation loss of ${name.slice(11)}`;
      found.set(name, [title, (each) => [{ values: each.evaluations.values[name], dots: true, steps: each.evaluations.last }]]);
    }
  }
  return [...found.values()].map(([title, lines]) => chart(title, "", lines, { size: "half third" }));
}

// Norms of layers (`log.layers`): for each kind and run a picture with a row for each layer and a column for each step.
const LAYERS = {
  gradient: ["Gradient of each layer", "norm, before clipping"], update: ["Update of each layer", "norm of the change / norm of the weights"],
  activation: ["Output of each layer", "root mean square"], dead: ["Dead units of each layer", "fraction of the feed-forward network's"],
};

function layers() {
  return visible().flatMap(([run, index]) => Object.entries(LAYERS).map(([kind, [title, unit]]) => {
    const begins = `layers/${kind}/`, names = Object.keys(run.logged.values).filter((name) => name.startsWith(begins));
    if (!names.length) return null;
    const { first, last } = run.logged, count = Math.min(first.length, 120), log = kind !== "dead";
    const from = (column) => Math.floor((column * first.length) / count);
    const cell = (name, column) => {
      const held = run.logged.values[name].mean.slice(from(column), from(column + 1)).filter((each) => each !== null);
      return held.length ? held.reduce((sum, each) => sum + each, 0) / held.length : null;
    };
    const rows = names.map((name) => [name.slice(begins.length), [...Array(count).keys()].map((column) => cell(name, column))]);
    const usable = (each) => each !== null && (!log || each > 0), scale = log ? Math.log10 : (each) => each;
    const all = rows.flatMap(([, cells]) => cells).filter(usable);
    const low = log ? scale(Math.min(...all)) : 0, high = log ? scale(Math.max(...all)) : 1;
    const height = Math.min(16, Math.max(4, 300 / rows.length)), left = 78, width = 420, each = (width - left) / count;
    const svg = make("svg", { viewBox: `0 0 ${width} ${rows.length * height + 16}`, role: "img", "aria-label": `${title} over step` });
    rows.forEach(([name, cells], row) => {
      if (height >= 9 || row % Math.ceil(9 / height) === 0) svg.append(make("text", { x: left - 4, y: (row + 0.5) * height + 3.5, "text-anchor": "end" }, name));
      cells.forEach((found, column) => {
        const share = usable(found) ? (high > low ? (scale(found) - low) / (high - low) : 0.5) : null;
        const steps = first[from(column)] === last[from(column + 1) - 1] ? `step ${grouped(first[from(column)])}` : `steps ${grouped(first[from(column)])} to ${grouped(last[from(column + 1) - 1])}`;
        svg.append(make("rect", { x: left + column * each, y: row * height, width: each + 0.3, height: height - 0.6, fill: share === null ? "var(--rest)" : color(index), "fill-opacity": share === null ? 1 : 0.08 + 0.92 * share },
          make("title", {}, `${name}, ${steps}: ${found === null ? "–" : exactly(found)}`)));
      });
    });
    const bottom = rows.length * height + 12;
    svg.append(make("text", { x: left, y: bottom }, `step ${grouped(first[0])}`), make("text", { x: width, y: bottom, "text-anchor": "end" }, grouped(last[last.length - 1])));
    const ends = log ? all.length ? `${exactly(Math.min(...all))} (pale) to ${exactly(Math.max(...all))}` : "all 0" : "0 (pale) to 1";
    return make("section", { class: "half" }, make("h2", {}, make("span", {}, title, " ", make("small", {}, `${report.runs.length > 1 ? `${run.name}, ` : ""}${unit}: ${ends}`))), svg);
  }));
}

// What callbacks logged (`record.log`): a chart for each name, and one for all names with the same beginning.
function logged() {
  const groups = new Map();
  for (const run of report.runs) for (const kind of ["logged", "valid_logged"]) for (const name of Object.keys(run[kind].values)) {
    if (LAYERS[name.split("/")[1]] && name.startsWith("layers/")) continue;
    const cut = name.lastIndexOf("/"), group = cut < 0 ? name : name.slice(0, cut);
    if (!groups.has(group)) groups.set(group, new Map());
    groups.get(group).set(`${kind} ${name}`, [kind, name, cut < 0 ? "" : name.slice(cut + 1)]);
  }
  // Without the points that other names alone have, which would interrupt the line.
  const held = (points, values) => (values ? points.filter((_, index) => values.mean[index] !== null) : []);
  const line = (run, [kind, name, rest], number, count) => {
    const values = run[kind].values[name], kept = values && Object.fromEntries(Object.entries(values).map(([of, points]) => [of, held(points, values)]));
    const own = report.runs.length === 1 && count > 1 ? color(number) : undefined;
    return { values: kept, steps: held(run[kind].last, values), name: count > 1 ? rest : "", color: own, dots: kind === "valid_logged" };
  };
  return [...groups].map(([group, members]) => {
    const found = [...members.values()], title = found.length > 1 ? group : found[0][1];
    return chart(title, "", (run) => found.map((each, number) => line(run, each, number, found.length)), { size: "half third" });
  });
}

function render() {
  charts.length = 0;
  document.title = report.runs.map((run) => run.name).join(", ") + " – Threefold report";
  document.querySelector("h1").textContent = report.runs.map((run) => run.name).join(" · ");
  document.querySelector(".made").textContent = `${report.runs.map((run) => run.summary.state).join(" · ")} – report of ${report.made.replace("T", " ").replace("+00:00", " UTC")}${report.threefold && `, Threefold ${report.threefold}`}`;
  const chips = report.runs.length < 2 ? [] : report.runs.map((run, index) => make("button", { type: "button", "aria-pressed": !view.hidden.includes(index), onclick: () => {
    view.hidden = view.hidden.includes(index) ? view.hidden.filter((each) => each !== index) : [...view.hidden, index];
    keepState();
    render();
  } }, swatch(index), run.name));
  document.querySelector(".chips").replaceChildren(...chips);
  const points = Math.max(0, ...visible().map(([run]) => run.curves.first.length)), width = Math.max(1, ...visible().map(([run]) => run.curves.width));
  const span = spanOf(points) * width;
  document.querySelector("nav output").textContent = span > 1 ? `mean over ${grouped(span)} steps` : "none";
  const single = report.runs.length === 1, third = { size: "half third" }, hasMFU = visible().some(([run]) => run.curves.values.mfu);
  const top = [
    warnings(), tiles(), outcomes(),
    chart("Loss", "nats per token; dashed: validation", losses, { height: 340, marks: true, fill: single, size: single ? "two-thirds" : "", key: "loss" }),
    chart("Difference of the loss", `from that of ${report.runs[0].name}`, differencesOfLoss, { height: 150, from: 0, size: "", text: report.comparison }),
    summaryTable(),
  ];
  const small = [
    ...parts(),
    chart("Learning rate", "", value("lr"), { ...third, from: 0 }),
    chart("Gradient norm", "before clipping", value("grad_norm"), { ...third, from: 0 }),
    chart("Throughput", "tokens/s", value("tokens_per_second"), { ...third, from: 0, show: grouped }),
    chart("MFU", "", value("mfu"), { ...third, from: 0, show: percent, tick: percent }),
    hasMFU ? null : chart("Compute", "model TFLOP/s a rank", value("tflops"), { ...third, from: 0 }),
    chart("Time of a step", "seconds", value("seconds"), { ...third, from: 0, show: time, key: "seconds" }),
    chart("Waiting", "in collectives, share of a step on rank 0", (run) => [{ values: shareOf(run, "waited") }], { ...third, from: 0, show: percent, tick: percent }),
    chart("Memory", "peak so far of the rank that takes most", value("memory"), { ...third, from: 0, show: bytes, tick: (size) => (size ? bytes(size).replace(/\.0 /, " ") : "0") }),
    chart("Loss scale", "", value("loss_scale"), third),
    ...logged(),
  ].filter(Boolean);
  // The phases fill the row that the small charts leave open.
  const bottom = [...layers(), phases(["", "two-thirds", "half third"][small.length % 3]), goodput(), differences(), checkpoints(), events(), samples(), ...settings()];
  document.querySelector("main").replaceChildren(...[...top, ...small, ...bottom].filter(Boolean));
  for (const each of charts) each.draw();
}

const axis = document.getElementById("axis"), slider = document.getElementById("smoothing");
axis.value = view.axis;
slider.value = view.smoothing;
axis.onchange = () => { view.axis = axis.value; keepState(); render(); };
slider.oninput = () => { view.smoothing = Number(slider.value); keepState(); render(); };
let drawnWidth = window.innerWidth;
window.onresize = () => { if (window.innerWidth !== drawnWidth) { drawnWidth = window.innerWidth; for (const each of charts) each.draw(); } };
render();

const poll = Number(document.body.dataset.poll);
if (poll) {
  let last = "";
  setInterval(async () => {
    try {
      const answer = await fetch("report.json");
      const fresh = await answer.text();
      if (fresh === last) return;
      last = fresh;
      report = JSON.parse(fresh);
      render();
    } catch {
      document.querySelector(".made").textContent = "threefold watch has ended; this is the last that it told.";
    }
  }, poll);
}
