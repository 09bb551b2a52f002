// The document, what is selected, and helpers. The address keeps the selection, so that a link shows the same.

const doc = JSON.parse(document.getElementById("document").textContent);
const AXES = ["tp", "cp", "pp", "dp", "ep"];
const ranks = new Map(doc.layout.ranks.map((each) => [each.rank, each]));
const layers = doc.model.layers;

/** Place of a rank among those of its pp coordinate, by which shards are listed. */
const placeKey = (at) => `${at.dp},${at.cp},${at.tp}`;
const placesOf = (coordinates) => new Map(coordinates.filter((at) => at.pp === 0).map((at, n) => [placeKey(at), n]));
const places = placesOf(doc.layout.ranks);

const $ = (id) => document.getElementById(id);

function element(create, tag, attributes, children) {
  const made = create(tag);
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return made;
}
const h = (tag, attributes, ...children) => element((name) => document.createElement(name), tag, attributes, children);
const svg = (tag, attributes, ...children) =>
  element((name) => document.createElementNS("http://www.w3.org/2000/svg", name), tag, attributes, children);

const count = (number) => number.toLocaleString("en-US");
function bytes(size) {
  const units = ["bytes", "kB", "MB", "GB", "TB"];
  const at = size < 1000 ? 0 : Math.min(4, Math.floor(Math.log10(size) / 3));
  return at ? `${(size / 1000 ** at).toFixed(1)} ${units[at]}` : `${size} bytes`;
}
const percent = (share, digits = 0) => `${(100 * share).toFixed(digits)} %`;
const sum = (numbers) => numbers.reduce((total, each) => total + each, 0);
const several = (number, thing, ending = "s") => `${count(number)} ${thing}${number === 1 ? "" : ending}`;
function listed(numbers, most = 8) {
  if (numbers.length <= most) return numbers.join(", ");
  return `${numbers.slice(0, most - 1).join(", ")} … ${numbers[numbers.length - 1]}`;
}

// --- What is selected -------------------------------------------------------------------------------------------------

const firstWeight = doc.tensors.findIndex((kind) => kind.layers.length > 1 && kind.shape.length > 1);
const state = {
  tab: "layout",
  rank: doc.layout.ranks[0].rank,
  layer: firstWeight < 0 ? 0 : doc.tensors[firstWeight].layers[0],
  weight: Math.max(0, firstWeight),
  time: 0.27,
  target: 0,
};
const views = [];

function readHash() {
  const given = new URLSearchParams(location.hash.slice(1));
  const whole = (name, known) => {
    const value = Number(given.get(name));
    if (given.has(name) && known(value)) state[name] = value;
  };
  if (["layout", "compare", "proof"].includes(given.get("tab"))) state.tab = given.get("tab");
  whole("rank", (value) => ranks.has(value));
  whole("layer", (value) => layers[value] !== undefined);
  whole("weight", (value) => doc.tensors[value] !== undefined);
  whole("time", (value) => value >= 0 && value <= 1);
  whole("target", (value) => doc.compare !== null && doc.compare.ranks.some((each) => each.rank === value));
  settle();
}

/** Keep the selected weight one of the selected layer. */
function settle() {
  if (!usesOf(doc.tensors[state.weight]).includes(state.layer)) {
    const own = doc.tensors.findIndex((kind) => usesOf(kind).includes(state.layer));
    if (own >= 0) state.weight = own;
  }
}

function select(changes) {
  Object.assign(state, changes);
  settle();
  const { tab, rank, layer, weight, time, target } = state;
  const kept = { tab, rank, layer, weight, time: time.toFixed(3), ...(doc.compare && { target }) };
  history.replaceState(null, "", `#${new URLSearchParams(kept)}`);
  views.forEach((draw) => draw());
}

/** One tab stop for a group of buttons, whose arrow keys move between them. */
function roving(group, chosen) {
  const buttons = [...group.querySelectorAll("button")];
  buttons.forEach((button) => (button.tabIndex = -1));
  const current = buttons.find(chosen) ?? buttons[0];
  if (current) current.tabIndex = 0;
}
function moveByKeys(group) {
  const steps = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 };
  group.addEventListener("keydown", (event) => {
    const buttons = [...group.querySelectorAll("button")];
    const at = buttons.indexOf(document.activeElement);
    const to = { Home: 0, End: buttons.length - 1 }[event.key] ?? at + (steps[event.key] ?? 0);
    if (at < 0 || to === at || !buttons[to]) return;
    event.preventDefault();
    const place = [...group.children].length && to;
    buttons[to].click();
    group.querySelectorAll("button")[place].focus();
  });
}

// --- The model's parts ------------------------------------------------------------------------------------------------

const usesOf = (kind) => [...kind.layers, ...kind.tied_layers];
/** Stages, of these layouts, that hold a weight of a layer: those of all layers that use it. */
function holders(kind, layer, stages) {
  const uses = kind.tied_layers.length ? usesOf(kind) : [layer];
  return stages.filter((stage) => uses.some((use) => use >= stage.first_layer && use < stage.end_layer));
}
const isHeld = (kind, layer, at, stages = doc.stages) =>
  holders(kind, layer, stages).some((stage) => stage.pp_rank === at.pp);
/** Number of the shard of a weight that a rank has, or null. */
function shardOf(kind, layer, at) {
  return isHeld(kind, layer, at) ? kind.shard_of_place[places.get(placeKey(at))] : null;
}
const weightName = (kind, layer) => kind.name.replace("*", layers[layer].split(".").pop());
const groupOf = (axis, rank) => doc.layout.groups[axis].find((group) => group.includes(rank));

const isEmpty = (bounds) => bounds.some(([start, end]) => start >= end);
function shardColor(number, shards) {
  if (shards === 1) return "var(--other)";
  const hue = (205 + (number * 360) / Math.max(3, shards) + (shards === 2 ? number * 45 : 0)) % 360;
  return `hsl(${hue} var(--shard-chroma) var(--shard-light))`;
}
/** A shard in words: rows 0 to 191, columns 0 to 127. */
function span(bounds, shape) {
  const names = shape.length === 1 ? ["elements"] : shape.length === 2 ? ["rows", "columns"] : [];
  const parts = bounds.flatMap(([start, end], dim) =>
    start === 0 && end === shape[dim] ? [] : [`${names[dim] ?? `dim ${dim}:`} ${count(start)} to ${count(end - 1)}`],
  );
  if (isEmpty(bounds)) return "nothing";
  return parts.length ? parts.join(", ") : "all of it";
}

/** The last two dims of a weight, as a rectangle: [rows, columns]; dims before them (experts) lie below one another. */
function flat(shape) {
  if (shape.length === 0) return [1, 1];
  if (shape.length === 1) return [shape[0], 1];
  return [sum([shape.slice(0, -1).reduce((a, b) => a * b, 1)]), shape[shape.length - 1]];
}
function boxesOf(bounds, shape) {
  if (isEmpty(bounds)) return [];
  if (shape.length < 3) {
    const [[top, bottom], [left, right]] = [bounds[0] ?? [0, 1], bounds[1] ?? [0, 1]];
    return [[left, top, right - left, bottom - top]];
  }
  const [outer, [top, bottom], [left, right]] = bounds.slice(-3);
  const rows = shape[shape.length - 2];
  const found = [];
  for (let each = outer[0]; each < outer[1]; each++) found.push([left, each * rows + top, right - left, bottom - top]);
  return found;
}
/** Width and height in pixels of a weight's picture: long sides are shortened, as a norm has one column. */
function sizeOf(shape, most) {
  const [rows, columns] = flat(shape);
  const longest = Math.max(rows, columns);
  const side = (size) => Math.max(7, most * Math.min(1, (size / longest) ** 0.6));
  return [side(columns), side(rows)];
}

/** A stack of many matrices (experts) as one for each part that shards divide it into: strips of all would be too thin. */
function thinned(shape, shards) {
  if (shape.length !== 3 || shape[0] <= 16) return [shape, shards];
  const edges = [...new Set([0, shape[0], ...shards.flatMap(([outer]) => outer)])].sort((a, b) => a - b);
  return [[edges.length - 1, ...shape.slice(1)], shards.map(([outer, ...rest]) => [outer.map((edge) => edges.indexOf(edge)), ...rest])];
}

/** A weight as a picture; `paint` gives each shard's attributes, or null to leave it out. */
function weightPicture(whole, parts, most, paint) {
  const [shape, shards] = thinned(whole, parts);
  const [rows, columns] = flat(shape);
  const [width, height] = sizeOf(shape, most);
  const boxes = shards.flatMap((bounds, number) => {
    const attributes = paint(number);
    return attributes === null
      ? []
      : boxesOf(bounds, shape).map(([x, y, w, h]) =>
          svg("rect", {
            x: (x / columns) * width, y: (y / rows) * height, width: (w / columns) * width, height: (h / rows) * height,
            ...attributes,
          }),
        );
  });
  return svg(
    "svg",
    { viewBox: `-1 -1 ${width + 2} ${height + 2}`, width: width + 2, height: height + 2, "aria-hidden": "true" },
    svg("rect", { x: 0, y: 0, width, height, fill: "var(--idle)" }),
    ...boxes,
    svg("rect", { x: 0, y: 0, width, height, fill: "none", stroke: "var(--soft)", "stroke-width": 0.7 }),
  );
}
