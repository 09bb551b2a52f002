// The other tabs, what moves to another layout and the proof; then the start of the page.

// --- Compare ----------------------------------------------------------------------------------------------------------

function buildCompare() {
  const moved = doc.compare;
  if (moved === null) {
    $("compare").append(h("section", { class: "wide" }, h("h2", {}, "Compare two layouts"), h("p", { class: "note" }, "Add ", h("code", {}, "--compare dp4·tp2"), " or the path of another config to see which elements of each weight each rank keeps and which it receives.")));
    return;
  }
  const total = (name) => sum(moved.ranks.map((each) => each[name]));
  const [kept, received] = [total("kept"), total("received")];
  const most = Math.max(...moved.ranks.map((each) => each.kept + each.received));
  const mover = (each) =>
    h("button", { class: "mover", "data-rank": each.rank, onclick: () => select({ target: each.rank }) },
      h("span", {}, `rank ${each.rank}`),
      h("span", { class: "bar" }, h("i", { class: "kept", style: `width:${(100 * each.kept) / most}%` }), h("i", { class: "received", style: `width:${(100 * each.received) / most}%` })),
      h("span", { class: "number" }, bytes(moved.itemsize * each.received)));
  $("compare").append(
    h("section", {}, h("h2", {}, `${doc.layout.name} → ${moved.layout.name}`),
      h("p", { class: "note" }, `Of the weights that the ranks need, ${percent(kept / (kept + received))} are there already, ${bytes(moved.itemsize * received)} are received.`),
      h("div", { class: "legend movers-legend" }, h("span", {}, h("i", { class: "kept" }), "kept"), h("span", {}, h("i", { class: "received" }), "received"), h("span", {}, h("i", { class: "before" }), "not held")),
      h("div", { class: "movers", id: "movers", role: "group", "aria-label": "Ranks of the other layout; arrow keys go from one to the next" }, ...moved.ranks.map(mover))),
    h("section", {}, h("h2", {}, h("span", { id: "moved-title" }), h("small", { id: "moved-note" })), h("div", { id: "moved", class: "moved" })),
  );
  moveByKeys($("movers"));
  views.push(drawMoved);
}

function drawMoved() {
  if (state.tab !== "compare") return;
  const moved = doc.compare;
  for (const button of $("movers").querySelectorAll("button")) button.setAttribute("aria-pressed", Number(button.dataset.rank) === state.target);
  roving($("movers"), (button) => Number(button.dataset.rank) === state.target);
  const at = moved.coordinates[moved.layout.ranks.indexOf(state.target)];
  const place = placesOf(moved.coordinates).get(placeKey(at));
  const before = ranks.get(state.target);
  const each = moved.ranks.find((rank) => rank.rank === state.target);
  $("moved-title").textContent = `Rank ${state.target}`;
  $("moved-note").textContent = `becomes dp ${at.dp}, pp ${at.pp}, cp ${at.cp}, tp ${at.tp}; keeps ${count(each.kept)} elements, receives ${count(each.received)}, drops ${count(each.dropped)}`;
  const cards = moved.tensors.flatMap(({ tensor, layers: own, ranks: counts }) => {
    const found = counts.find(([rank]) => rank === state.target);
    if (!found) return [];
    const kind = doc.tensors[tensor];
    const needs = moved.shards[tensor].shards[moved.shards[tensor].shard_of_place[place]];
    const had = before === undefined ? null : shardOf(kind, own[0], before);
    const shards = [needs, ...(had === null ? [] : [meet(needs, kind.shards[had])])];
    const last = own[own.length - 1];
    const run = own.length === last - own[0] + 1 ? kind.name.replace("*", `${layers[own[0]].split(".").pop()}–${layers[last].split(".").pop()}`) : `${kind.name} (${own.length} ×)`;
    const label = own.length > 1 ? run : weightName(kind, own[0]);
    // A vector lies on its side, below the matrices.
    const isVector = kind.shape.length < 2;
    const [shape, drawn] = isVector ? [[1, ...kind.shape], shards.map((bounds) => [[0, 1], ...bounds])] : [kind.shape, shards];
    return [h("div", { style: isVector ? "order:1" : null }, weightPicture(shape, drawn, 90, (number) => ({ class: number ? "kept" : "received", stroke: "var(--card)", "stroke-width": 0.5 })), h("code", {}, label), h("div", { class: "note" }, found[2] === 0 ? "keeps all of it" : found[1] === 0 ? `receives ${count(found[2])}` : `keeps ${count(found[1])}, receives ${count(found[2])}`))];
  });
  $("moved").replaceChildren(...cards);
}

/** The part of two shards that they have in common, to draw it; counts come from the document. */
const meet = (one, other) => one.map(([start, end], dim) => [Math.max(start, other[dim][0]), Math.min(end, other[dim][1])]);

// --- Proof ------------------------------------------------------------------------------------------------------------

function buildProof() {
  const proof = doc.proof;
  if (proof === null) {
    $("proof").append(h("section", { class: "wide" }, h("h2", {}, "Proof"), h("p", { class: "note" }, "Run ", h("code", {}, "threefold verify CONFIG --json > report.json"), " and add ", h("code", {}, "--verify report.json"), " to see how far each weight of each layout is from one process.")));
    return;
  }
  const LEAST = -18;
  const x = (error) => `${Math.min(100, Math.max(0, (100 * (Math.log10(Math.max(error, 1e-18)) - LEAST)) / -LEAST))}%`;
  const number = (error) => (error === "inf" ? Infinity : error);
  const row = (name, errors) => {
    const known = errors.map((error, layout) => [number(error), layout]).filter(([error]) => error !== null);
    const worst = Math.max(...known.map(([error]) => error));
    const dots = known.map(([error, layout]) => h("i", { class: error > proof.tolerance ? "wrong" : null, style: `left:${x(error)}`, title: `${proof.layouts[layout].name}: ${error.toExponential(1)}` }));
    return h("div", { class: "error" }, h("code", { title: name }, name), h("div", { class: "axis" }, h("u", { style: `left:${x(proof.tolerance)}` }), ...dots), h("span", { class: "number" }, worst === Infinity ? "∞" : worst.toExponential(1)));
  };
  const marks = [-18, -15, -12, -9, -6, -3, 0].map((power) => h("span", { style: `left:${x(10 ** power)}` }, `1e${power}`));
  const equal = proof.layouts.filter((each) => each.verdict === "equal").length;
  $("proof").append(
    h("section", { class: "wide" }, h("h2", {}, `${equal} of ${several(proof.layouts.length, "layout")} compute what one process computes`, h("small", {}, `${proof.steps} steps in ${proof.dtype}${proof.full ? "" : ", of a shrunk model"}; ${proof.tolerance.toExponential()} is rounding`)),
      h("div", { class: "chips" }, ...proof.layouts.map((each) => h("span", { class: `chip ${each.verdict}`, title: each.verdict }, each.name)))),
    h("section", { class: "wide" }, h("h2", {}, "Largest relative error of each weight", h("small", {}, "a dot is a layout; the red line is the tolerance")),
      h("div", { class: "errors" }, h("div", { class: "error scale" }, h("span", {}), h("div", { class: "axis" }, ...marks), h("span", {})), ...proof.parameters.map((name, n) => row(name, proof.errors[n])))),
  );
}

// --- Start ------------------------------------------------------------------------------------------------------------

function drawTabs() {
  for (const name of ["layout", "compare", "proof"]) {
    $(`tab-${name}`).setAttribute("aria-selected", state.tab === name);
    $(name).hidden = state.tab !== name;
  }
  roving(document.querySelector("[role=tablist]"), (button) => button.id === `tab-${state.tab}`);
}

function start() {
  const { layout, model } = doc;
  const options = [layout.dtype, layout.settings.zero ? `ZeRO ${layout.settings.zero}` : "", layout.settings.sequence_parallel ? "sequence parallel" : "", layout.settings.recompute === "none" ? "" : `recompute ${layout.settings.recompute}`, layout.settings.exact ? "exact: the same bits in every layout" : "", layout.hardware ?? ""];
  $("title").textContent = `${model.preset ?? model.name} · ${layout.name}`;
  document.title = $("title").textContent;
  $("facts").textContent = [`${count(model.parameters)} parameters`, several(layout.world, "rank"), ...options].filter(Boolean).join(" · ");
  for (const name of ["layout", "compare", "proof"])
    $(`tab-${name}`).addEventListener("click", () => {
      stop();
      select({ tab: name });
      if (name === "layout") drawTimeline();
    });
  moveByKeys(document.querySelector("[role=tablist]"));
  readHash();
  buildMesh();
  buildLayers();
  buildMemory();
  buildStep();
  buildCompare();
  buildProof();
  views.unshift(drawTabs);
  views.push(drawTiles, drawLayers, drawWeights, drawTraffic);
  views.forEach((draw) => draw());
  addEventListener("resize", () => {
    drawTimeline();
    drawWires();
  });
  addEventListener("hashchange", () => {
    readHash();
    views.forEach((draw) => draw());
  });
}
start();
