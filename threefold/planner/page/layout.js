// The first tab: ranks, layers and weights, the step, memory and traffic of one layout.

// --- The step ---------------------------------------------------------------------------------------------------------

const schedule = doc.schedule;
const afterKnown = Object.values(schedule.after).some((time) => time > 0);
/** Without an estimate, what follows the last pass has no length; it is drawn with a twelfth of the step's. */
const after = afterKnown ? Object.entries(schedule.after) : [["gradients and update", schedule.length / 12]];
const stepLength = (schedule.complete_until ?? schedule.length) + (schedule.complete_until ? 0 : sum(after.map(([, time]) => time)));
const KINDS = { F: "forward", B: "backward", I: "backward, inputs", W: "backward, weights" };
const [STAGE, KIND, MICRO_BATCH, START, END] = [0, 1, 2, 3, 4];

const timeNow = () => state.time * stepLength;
const inTime = (action, time) => time >= action[START] && time < action[END];
const actionAt = (ppRank, time) => schedule.actions[ppRank].find((action) => inTime(action, time));
const isAfter = (time) => !schedule.complete_until && time >= schedule.length;

/** Layer that a pass has reached, as layers take a share of its time by their costs. */
function layerInPass(action, time) {
  const { first_layer: first, end_layer: end } = doc.stages[action[STAGE]];
  const own = doc.model.costs.slice(first, end).map((cost) => cost || 1e-9);
  const done = (time - action[START]) / (action[END] - action[START]);
  let left = (action[KIND] === "F" ? done : 1 - done) * sum(own);
  for (let layer = first; layer < end - 1; layer++) {
    left -= own[layer - first];
    if (left < 0) return layer;
  }
  return end - 1;
}

function drawTimeline() {
  const width = Math.max(260, $("timeline").clientWidth);
  const rows = schedule.actions.length;
  const left = width < 500 ? 44 : 62;
  const right = 46;
  const row = rows <= 4 ? 30 : Math.max(8, Math.min(24, 260 / rows));
  const height = rows * (row + 4) + 20;
  const x = (time) => left + (time / stepLength) * (width - left - right);
  const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": "Passes of each pipeline rank over the step" });
  const tail = schedule.complete_until ? [] : after;
  schedule.actions.forEach((order, ppRank) => {
    const top = ppRank * (row + 4);
    const middle = top + row / 2 + 4;
    const own = [...new Set(order.map((action) => action[STAGE]))].sort((a, b) => a - b);
    if (row > 10 || ppRank % 4 === 0) picture.append(svg("text", { x: 0, y: middle }, rows > 1 ? `pp ${ppRank}` : "all"));
    const end = schedule.complete_until ?? schedule.length;
    picture.append(svg("rect", { class: "idle", x: left, y: top, width: x(end) - left, height: row, rx: 3 }));
    for (const action of order) {
      const [from, to] = [x(action[START]), Math.min(x(action[END]), width - right)];
      const later = own.indexOf(action[STAGE]) > 0 ? " later" : "";
      picture.append(
        svg(
          "rect",
          { class: action[KIND] + later, x: from + 0.5, y: top, width: Math.max(0.5, to - from - 1), height: row, rx: Math.min(3, (to - from) / 5) },
          svg("title", {}, `${KINDS[action[KIND]]} of micro-batch ${action[MICRO_BATCH]}, stage ${action[STAGE]}`),
        ),
      );
      if (row >= 12 && to - from > 8 + 6 * String(action[MICRO_BATCH]).length)
        picture.append(svg("text", { class: "label", x: (from + to) / 2, y: middle }, String(action[MICRO_BATCH])));
    }
    let start = schedule.length;
    for (const [name, time] of tail) {
      if (time > 0) picture.append(svg("rect", { class: "after", x: x(start) + 0.5, y: top, width: Math.max(1, x(start + time) - x(start) - 1), height: row, rx: 3 }, svg("title", {}, name)));
      start += time;
    }
    if (row > 10 || ppRank % 4 === 0)
      picture.append(svg("text", { x: width - right + 6, y: middle, fill: "var(--soft)" }, percent(schedule.busy[ppRank] / schedule.longest)));
  });
  const bottom = height - 4;
  picture.append(svg("text", { x: left, y: bottom, fill: "var(--soft)" }, "0"));
  const unit = schedule.unit === "ms" ? `${count(Number(schedule.length.toPrecision(4)))} ms` : `${schedule.length.toFixed(1)} × a mean forward pass`;
  picture.append(svg("text", { x: x(schedule.length), y: bottom, "text-anchor": "end", fill: "var(--soft)" }, unit));
  picture.append(svg("text", { x: width, y: bottom, "text-anchor": "end", fill: "var(--soft)" }, "works"));
  picture.append(svg("line", { class: "head", id: "head", y1: -2, y2: height - 16 }));
  picture.addEventListener("pointerdown", (event) => {
    const box = picture.getBoundingClientRect();
    const at = ((event.clientX - box.left) / box.width) * width;
    stop();
    select({ time: Math.min(1, Math.max(0, (at - left) / (width - left - right))) });
  });
  $("timeline").replaceChildren(picture);
  $("timeline").scale = x;
  moveHead();
}

function moveHead() {
  const at = $("timeline").scale(timeNow());
  $("head").setAttribute("x1", at);
  $("head").setAttribute("x2", at);
  $("scrub").value = Math.round(1000 * state.time);
  const time = timeNow();
  const said = isAfter(time) ? "after the passes" : schedule.unit === "ms" ? `${time.toFixed(1)} ms` : percent(state.time);
  $("now").textContent = said;
  $("scrub").setAttribute("aria-valuetext", said);
}

let playing = null;
function stop() {
  if (playing !== null) cancelAnimationFrame(playing);
  playing = null;
  $("play").textContent = "▶";
  $("play").setAttribute("aria-label", "Play");
}
function play() {
  const begun = performance.now();
  const from = state.time >= 0.999 ? 0 : state.time;
  const tick = (now) => {
    select({ time: (from + (now - begun) / 12000) % 1 });
    playing = requestAnimationFrame(tick);
  };
  playing = requestAnimationFrame(tick);
  $("play").textContent = "❚❚";
  $("play").setAttribute("aria-label", "Pause");
}

function buildStep() {
  const used = new Set(schedule.actions.flat().map((action) => action[KIND]));
  const legend = Object.keys(KINDS).filter((kind) => used.has(kind)).map((kind) => h("span", {}, h("i", { style: `background:var(--${kind})` }), h("b", {}, kind), ` ${KINDS[kind]}`));
  const tail = schedule.complete_until ? [] : [h("span", {}, h("i", { style: "background:color-mix(in srgb, var(--dp) 55%, var(--card))" }), afterKnown ? "gradient sums, update" : "gradient sums, update (not to scale)")];
  $("kinds").append(...legend, h("span", {}, h("i", { style: "background:var(--idle)" }), "waiting"), ...tail);
  const cut = schedule.complete_until ? `; the first ${percent(schedule.complete_until / schedule.length)} of the step` : "";
  $("time-note").textContent = `${schedule.name}, ${several(schedule.micro_batches, "micro-batch", "es")}: bubble ${percent(schedule.bubble, 1)}${cut}`;
  $("scrub").addEventListener("input", (event) => {
    stop();
    select({ time: event.target.value / 1000 });
  });
  $("play").addEventListener("click", () => (playing === null ? play() : stop()));
  drawTimeline();
  views.push(moveHead);
}

// --- The mesh ---------------------------------------------------------------------------------------------------------

let hovered = null;

function buildMesh() {
  const { world, axes } = doc.layout;
  const isSmall = ranks.size > 32;
  $("mesh").classList.toggle("small", isSmall);
  $("layout").classList.toggle("tall", isSmall);
  const groups = (members, key) => [...Map.groupBy(members, key)];
  const row = (label, tiles) => h("div", { class: label ? "stage" : "" }, label ? h("span", {}, label) : null, h("div", { class: "tiles" }, ...tiles.map(tile)));
  const replica = ([dp, members]) =>
    h("div", { class: "replica" }, h("h4", {}, `replica ${dp}`), ...groups(members, (at) => at.pp).map(([pp, tiles]) => row(`pp ${pp}`, tiles)));
  // Of many ranks, a line is the ranks of one stage of one replica, or, where these are few, all of a node.
  const lines = (own) =>
    axes.tp * axes.cp < 4 ? [row("", own)] : groups(own, (at) => `dp ${at.dp} pp ${at.pp}`).map(([label, tiles]) => row(label, tiles));
  const node = ([number, own]) =>
    h("div", { class: "node" }, h("h3", {}, `node ${number}`), isSmall ? h("div", {}, ...lines(own)) : h("div", { class: "replicas" }, ...groups(own, (at) => at.dp).map(replica)));
  const overlay = (id) => svg("svg", { id, "aria-hidden": "true" });
  $("mesh").append(h("div", { id: "nodes" }, ...groups(doc.layout.ranks, (at) => at.node).map(node), overlay("wires"), overlay("pulses")));
  moveByKeys($("mesh"));
  const rest = world > ranks.size ? `; here one copy of the model, ${count(ranks.size)} ranks of ${count(world)}` : "";
  $("mesh-note").textContent = `${several(world, "rank")} on ${several(Math.ceil(world / doc.layout.ranks_per_node), "node")}${rest}`;
  const names = { tp: "tensor", cp: "context", pp: "pipeline", dp: "data", ep: "experts" };
  $("axes").append(...AXES.filter((axis) => axes[axis] > 1).map((axis) => h("span", { class: `axis-${axis}` }, h("i", { class: "swatch" }), `${axis} ${axes[axis]}, ${names[axis]}`)));
  const used = Object.keys(KINDS).filter((kind) => schedule.actions.flat().some((action) => action[KIND] === kind));
  $("axes").append(h("span", {}, h("b", {}, "F1"), " the forward pass of micro-batch 1", ...used.filter((kind) => kind !== "F").flatMap((kind) => [", ", h("b", {}, kind), ` ${KINDS[kind]}`])));
}

function tile(at) {
  const show = (rank) => () => {
    hovered = rank;
    drawWires();
    drawTraffic();
  };
  return h(
    "button",
    { class: "tile", "data-rank": at.rank, onclick: () => select({ rank: at.rank }), onpointerenter: show(at.rank), onpointerleave: show(null), onfocus: () => state.rank !== at.rank && select({ rank: at.rank }) },
    h("b", {}, String(at.rank)), h("span", { class: "doing" }), h("span", { class: "own" }, h("i", {})),
  );
}

function drawTiles() {
  const time = timeNow();
  const kind = doc.tensors[state.weight];
  for (const button of $("mesh").querySelectorAll(".tile")) {
    const at = ranks.get(Number(button.dataset.rank));
    const action = isAfter(time) ? undefined : actionAt(at.pp, time);
    if (action) button.dataset.kind = action[KIND];
    else delete button.dataset.kind;
    button.querySelector(".doing").textContent = action ? `${action[KIND]}${action[MICRO_BATCH]}` : "";
    button.setAttribute("aria-pressed", at.rank === state.rank);
    const shard = shardOf(kind, state.layer, at);
    const mark = button.querySelector(".own i");
    const bounds = shard === null ? null : kind.shards[shard];
    const dim = bounds === null ? -1 : bounds.findIndex(([start, end], each) => end - start < kind.shape[each]);
    const [start, end] = dim < 0 ? [0, bounds === null ? 0 : 1] : bounds[dim].map((bound) => bound / kind.shape[dim]);
    mark.hidden = bounds === null || isEmpty(bounds);
    mark.style.cssText = `left:${100 * start}%;width:${100 * (end - start)}%;background:${shardColor(shard ?? 0, kind.shards.length)};box-shadow:0 0 0 1px var(--card)`;
    const doing = action ? `${KINDS[action[KIND]]} of micro-batch ${action[MICRO_BATCH]}` : isAfter(time) ? "sums and update" : "waits";
    const owned = bounds === null ? "no part" : span(bounds, kind.shape);
    button.setAttribute("aria-label", `rank ${at.rank}: dp ${at.dp}, pp ${at.pp}, cp ${at.cp}, tp ${at.tp}; ${doing}; of ${weightName(kind, state.layer)} ${owned}`);
  }
  roving($("mesh"), (button) => Number(button.dataset.rank) === state.rank);
  drawWires();
}

/** Lines of the groups of the selected rank, and pulses of the collectives at this time. */
function drawWires() {
  const wires = $("wires");
  const origin = $("nodes").getBoundingClientRect();
  const middle = (rank) => {
    const box = $("mesh").querySelector(`[data-rank="${rank}"]`).getBoundingClientRect();
    return [box.left + box.width / 2 - origin.left, box.top + box.height / 2 - origin.top];
  };
  wires.replaceChildren();
  $("pulses").replaceChildren();
  const rank = hovered ?? state.rank;
  for (const axis of AXES) {
    const group = groupOf(axis, rank) ?? [];
    for (let n = 1; n < group.length; n++) {
      const [[x1, y1], [x2, y2]] = [middle(group[n - 1]), middle(group[n])];
      wires.append(svg("line", { class: `axis-${axis}`, stroke: "var(--axis)", x1, y1, x2, y2 }));
    }
  }
  const dot = (axis, [x1, y1], [x2, y2], share) =>
    $("pulses").append(svg("circle", { class: `axis-${axis}`, fill: "var(--axis)", r: ranks.size > 32 || innerWidth < 500 ? 3.5 : 6, cx: x1 + (x2 - x1) * share, cy: y1 + (y2 - y1) * share }));
  for (const { axis, from, to, share } of pulsesAt(timeNow())) dot(axis, middle(from), middle(to), share);
}

const kindOfAxis = (axis) => (axis.startsWith("dp") || axis === "expert copies" ? "dp" : axis === "tie" ? "pp" : axis === "tp shares" ? "tp" : axis);

/** Messages on their way at a time: axis, rank that sends, rank that gets it, and the share of the way. */
function pulsesAt(time) {
  if (doc.collectives.ranks === null) return [];
  const found = [];
  const around = (axis, group, phase) => group.forEach((rank, n) => group.length > 1 && found.push({ axis, from: rank, to: group[(n + 1) % group.length], share: phase % 1 }));
  for (const { pp_rank: ppRank, collectives } of doc.collectives.ranks) {
    const has = (...when) => [...new Set(collectives.filter((each) => when.includes(each.when) && each.axis !== "world").map((each) => kindOfAxis(each.axis)))];
    const own = (axis) => (doc.layout.groups[axis] ?? []).filter((group) => ranks.get(group[0]).pp === ppRank);
    if (isAfter(time)) {
      const phase = (4 * (time - schedule.length)) / (stepLength - schedule.length);
      has("end").filter((axis) => axis !== "pp" && axis !== "tp").forEach((axis) => own(axis).forEach((group) => around(axis, group, phase)));
      continue;
    }
    const action = actionAt(ppRank, time);
    if (action) {
      const share = (time - action[START]) / (action[END] - action[START]);
      const when = action[KIND] === "F" ? ["pass"] : ["pass", "backward"];
      has(...when).forEach((axis) => own(axis).forEach((group) => around(axis, group, 4 * share)));
    }
    if (has("send").length) sendsAt(ppRank, time).forEach((each) => found.push(each));
  }
  return found;
}

/** What the ranks at a pp coordinate send to a neighboring stage within a tenth of a pass after its end. */
function sendsAt(ppRank, time) {
  const found = [];
  for (const action of schedule.actions[ppRank]) {
    const window = 0.35 * (action[END] - action[START]);
    if (time < action[END] || time >= action[END] + window || action[KIND] === "W") continue;
    const next = doc.stages[action[STAGE] + (action[KIND] === "F" ? 1 : -1)];
    if (next === undefined || next.pp_rank === ppRank) continue;
    for (const at of ranks.values()) {
      if (at.pp !== ppRank) continue;
      const to = groupOf("pp", at.rank).find((rank) => ranks.get(rank).pp === next.pp_rank);
      found.push({ axis: "pp", from: at.rank, to, share: (time - action[END]) / window });
    }
  }
  return found;
}

// --- Layers and weights -----------------------------------------------------------------------------------------------

function buildLayers() {
  const short = (name) => (/\.\d+$/.test(name) ? name.split(".").pop() : name);
  const few = $("layers").clientWidth / layers.length > 22;
  $("layers").classList.toggle("many", layers.length > 34);
  const of = (stage, number) =>
    h("div", { class: "layer-stage", style: `flex:${stage.end_layer - stage.first_layer} 1 0` }, h("div", {},
      h("div", { class: "row" }, ...layers.slice(stage.first_layer, stage.end_layer).map((name, n) =>
        h("button", { class: "layer", style: /\d$/.test(name) ? null : "flex-grow:1.5;min-width:max-content", "data-layer": stage.first_layer + n, "aria-label": name, title: name, onclick: () => select({ layer: stage.first_layer + n }) }, few ? short(name) : ""))),
      h("span", {}, doc.stages.length > 12 ? String(number) : `stage ${number}`)));
  $("layers").append(...doc.stages.map(of));
  moveByKeys($("layers"));
  moveByKeys($("weights"));
  $("model-note").textContent = `${several(layers.length, "layer")} in ${several(doc.stages.length, "stage")}; ${count(doc.model.parameters)} parameters`;
}

function drawLayers() {
  const time = timeNow();
  const running = new Map();
  if (!isAfter(time))
    schedule.actions.forEach((_, ppRank) => {
      const action = actionAt(ppRank, time);
      if (action) running.set(action[STAGE], action);
    });
  for (const button of $("layers").querySelectorAll("button")) {
    const layer = Number(button.dataset.layer);
    const stage = doc.stages.findIndex((each) => layer >= each.first_layer && layer < each.end_layer);
    const action = running.get(stage);
    if (action) button.dataset.kind = action[KIND];
    else delete button.dataset.kind;
    button.classList.toggle("active", action !== undefined && layerInPass(action, time) === layer);
    button.setAttribute("aria-pressed", layer === state.layer);
  }
  roving($("layers"), (button) => Number(button.dataset.layer) === state.layer);
}

let drawnWeights = null;
function drawWeights() {
  const shown = `${state.layer} ${state.weight} ${state.rank}`;
  if (drawnWeights === shown) return;
  drawnWeights = shown;
  const at = ranks.get(state.rank);
  const parts = new Map();
  doc.tensors.forEach((kind, number) => {
    if (!usesOf(kind).includes(state.layer)) return;
    const name = weightName(kind, kind.layers.includes(state.layer) ? state.layer : kind.layers[0]);
    const inside = name.startsWith(`${layers[state.layer]}.`) ? name.slice(layers[state.layer].length + 1) : name;
    const [part, ...rest] = inside.split(".");
    const own = rest.length > 1 || (rest.length && !["weight", "bias"].includes(rest[0])) ? [part, rest.join(".")] : [part, rest[0] ?? part];
    if (!parts.has(own[0])) parts.set(own[0], []);
    parts.get(own[0]).push([kind, number, own[1]]);
  });
  const button = ([kind, number, name]) =>
    h("button", { class: "weight", "data-weight": number, "aria-pressed": number === state.weight, "aria-label": `${weightName(kind, state.layer)}, ${kind.shape.join(" by ")}`, onclick: () => select({ weight: number }) },
      weightPicture(kind.shape, kind.shards, innerWidth < 500 ? 60 : 84, (shard) => ({ fill: shardColor(shard, kind.shards.length), stroke: kind.shards.length > 16 ? "none" : "var(--card)", "stroke-width": 0.8, "fill-opacity": shardOf(kind, state.layer, at) === shard ? 1 : 0.42 })),
      name.replace(/\.weight$/, ""), h("small", {}, kind.shape.map(count).join(" × ") || "1"));
  // A norm begins a line of the block: what it feeds stands beside it.
  const flows = [];
  for (const [part, own] of parts) {
    if (!flows.length || own.every(([kind]) => kind.shape.length === 1)) flows.push([]);
    flows[flows.length - 1].push(h("div", { class: "part" }, h("span", {}, part), h("div", { class: "row" }, ...own.map(button))));
  }
  $("weights").replaceChildren(...flows.map((flow) => h("div", { class: "flow" }, ...flow)));
  roving($("weights"), (each) => Number(each.dataset.weight) === state.weight);
  drawWeight(at);
}

function drawWeight(at) {
  const kind = doc.tensors[state.weight];
  const mine = shardOf(kind, state.layer, at);
  const stages = holders(kind, state.layer, doc.stages).map((stage) => stage.pp_rank);
  const owners = kind.shards.map(() => []);
  for (const each of ranks.values())
    if (stages.includes(each.pp)) owners[kind.shard_of_place[places.get(placeKey(each))]].push(each.rank);
  const picture = weightPicture(kind.shape, kind.shards, 170, (shard) => ({
    fill: shardColor(shard, kind.shards.length), stroke: mine === shard ? "var(--ink)" : kind.shards.length > 32 ? "none" : "var(--card)", "stroke-width": mine === shard ? 2 : 1, "fill-opacity": mine === null || mine === shard ? 1 : 0.6,
  }));
  const cuts = kind.cuts.filter(([axis]) => doc.layout.axes[axis] > 1).map(([axis, dim]) => `${kind.shape.length === 2 ? ["rows", "columns"][dim] : `dim ${dim}`} over ${axis}`);
  const zero = doc.layout.settings.zero && kind.shards.length > 1 ? [`ZeRO ${doc.layout.settings.zero}`] : [];
  const how = [...cuts, ...zero].join(", ") || "whole on each rank of its stage";
  const items = kind.shards.map((bounds, shard) =>
    h("li", { class: shard === mine ? "mine" : null }, h("i", { style: `background:${shardColor(shard, kind.shards.length)}` }), `${span(bounds, kind.shape)}: ${owners[shard].length === 1 ? "rank" : "ranks"} ${listed(owners[shard])}`));
  $("weight").replaceChildren(picture, h("div", {}, h("code", {}, weightName(kind, state.layer)), h("p", { class: "note" }, `${kind.shape.map(count).join(" × ")}; ${kind.rule}: ${how}`), h("ul", { tabindex: kind.shards.length > 5 ? 0 : null }, ...items)));
}

// --- Memory and traffic -----------------------------------------------------------------------------------------------

function buildMemory() {
  const { stages, why, limit, limit_of: limitOf } = doc.memory;
  if (stages === null) {
    $("memory").append(h("p", { class: "note" }, why));
    return;
  }
  const peaks = stages.map((causes) => sum(Object.values(causes)));
  const most = Math.max(...peaks);
  const barsOf = (scale) => h("div", { class: "bars" }, ...stages.flatMap((causes, ppRank) => [
    h("span", { "data-pp": ppRank }, `pp ${ppRank}`),
    h("div", { class: "bar" }, ...Object.entries(causes).map(([cause, size]) => h("i", { title: `${cause}: ${bytes(size)}`, style: `width:${(100 * size) / scale}%;background:var(--${cause})` })), limit !== null && limit < most ? h("span", { class: "limit", style: `left:${(100 * limit) / scale}%` }) : null),
    h("span", { class: "number" }, bytes(peaks[ppRank])),
  ]));
  // Bars are as long as the device's memory; what takes little of it is drawn again, enlarged, so that its parts are seen.
  const isSmall = limit !== null && limit > 4 * most;
  $("memory").append(barsOf(limit === null ? most : Math.max(limit, most)));
  if (isSmall) $("memory").append(h("p", { class: "note enlarged" }, `enlarged ${count(Number((limit / most).toPrecision(2)))} times:`), barsOf(most));
  const causes = Object.keys(stages[0]).filter((cause) => stages.some((stage) => stage[cause]));
  $("causes").append(...causes.map((cause) => h("span", {}, h("i", { style: `background:var(--${cause})` }), cause)));
  if (limit !== null && limit < most) $("causes").append(h("span", {}, h("i", { style: "background:var(--limit)" }), "limit"));
  const share = limit !== null && most > limit ? "does not fit" : `${percent(most / limit, most / limit < 0.1 ? 1 : 0)} used`;
  $("memory-note").textContent = limit === null ? "at the peak of a step; no limit without --hardware" : `${share} of ${bytes(limit)} (${limitOf})`;
}

const WHEN = { pass: "each pass", backward: "each backward", send: "after passes", start: "at the start", end: "at the end" };

function drawTraffic() {
  const rank = hovered ?? state.rank;
  const at = ranks.get(rank);
  $("traffic-note").textContent = `of rank ${rank} in a step: dp ${at.dp}, pp ${at.pp}, cp ${at.cp}, tp ${at.tp}`;
  const found = doc.collectives.ranks?.find((each) => each.pp_rank === at.pp);
  const rows = AXES.filter((axis) => doc.layout.axes[axis] > 1).flatMap((axis) => {
    const own = (found?.collectives ?? []).filter((each) => kindOfAxis(each.axis) === axis);
    const whole = doc.layout.axes[axis];
    const group = groupOf(axis, rank);
    const members = group.length < whole ? `${whole} ranks` : listed(group, 4);
    return (own.length ? own : [null]).map((each, n) =>
      h("tr", { class: `axis axis-${axis}` },
        h("td", {}, ...(n ? [] : [h("i", {}), axis])), h("td", {}, n ? "" : members),
        ...(each ? [h("td", {}, `${each.operation.replaceAll("_", "-")}${each.axis === axis ? "" : ` (${each.axis})`}`), h("td", { class: "number" }, `${count(each.count)} ×`), h("td", { class: "number" }, bytes(each.bytes)), h("td", {}, WHEN[each.when])] : [h("td", { colspan: 4, class: "note" }, doc.collectives.ranks ? "none" : "not counted")])));
  });
  const head = h("tr", {}, ...["axis", "ranks", "collective", "times", "bytes", "when"].map((name, n) => h("th", { class: n === 3 || n === 4 ? "number" : null }, name)));
  const table = rows.length ? h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Collectives" }, h("table", {}, head, ...rows)) : h("p", { class: "note" }, "One rank, which sends nothing.");
  $("traffic").replaceChildren(table, doc.collectives.why ? h("p", { class: "note" }, `No collectives: ${doc.collectives.why}.`) : "");
  for (const label of $("memory").querySelectorAll("[data-pp]")) label.classList.toggle("picked", Number(label.dataset.pp) === at.pp);
}
