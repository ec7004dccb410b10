/* The figure of all layers, a row each: head scores, where in the prompt entries are kept, and how many. */

const SVG = "http://www.w3.org/2000/svg";
const ROW = Math.min(14, Math.max(4, Math.floor(390 / data.layers)));
const HEIGHT = ROW * data.layers;
const CELL = data.head_scores ? Math.min(10, Math.max(2, Math.floor(128 / data.heads))) : 0;
const BARS = 64; // width of the longest budget bar

function draw(parent, tag, attributes) {
  const shape = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) shape.setAttribute(name, value);
  parent.append(shape);
  return shape;
}

function picture(name, width) {
  const svg = document.createElementNS(SVG, "svg");
  for (const [key, value] of Object.entries({ width, height: HEIGHT, class: name })) svg.setAttribute(key, value);
  return svg;
}

/** Build what does not change. `go` is called with a layer and, for a click in the map of the prompt, a position. */
function buildFigure(go) {
  const numbers = picture("numbers", 22);
  const every = Math.ceil(14 / ROW);
  const labelled = every === 1 && data.layers > 12 ? 5 : Math.max(1, every);
  for (let layer = 0; layer < data.layers; layer += labelled) {
    draw(numbers, "text", { x: 18, y: (layer + 0.5) * ROW, "text-anchor": "end", "dominant-baseline": "central" })
      .textContent = layer;
  }
  const columns = [["", numbers]];
  if (data.head_scores) columns.push(["head scores", headMap()]);
  const map = make("div", { id: "map" }, make("canvas", { id: "kept-map" }), make("canvas", { id: "seen-map" }));
  columns.push(["kept, along the prompt", map]);
  columns.push(["", picture("budgets", BARS)]);
  const figure = element("figure");
  for (const [title] of columns) figure.append(make("span", { className: "quiet", textContent: title }));
  for (const [, column] of columns) figure.append(column);
  element("figure").children[columns.length - 1].id = "budget-title";
  figure.classList.toggle("with-heads", Boolean(data.head_scores));
  const cursor = make("div", { id: "cursor" });
  cursor.style.height = `${ROW}px`;
  map.style.height = `${HEIGHT}px`;
  figure.append(cursor);
  figure.addEventListener("click", (event) => {
    const { top, left, width } = map.getBoundingClientRect();
    const layer = Math.floor((event.clientY - top) / ROW);
    const across = (event.clientX - left) / width;
    if (layer < 0 || layer >= data.layers) return;
    go(layer, across >= 0 && across < 1 ? Math.floor(across * data.prompt_tokens) : null);
  });
  new ResizeObserver(() => go(null, null)).observe(map);
}

function headMap() {
  const svg = picture("heads", CELL * data.heads);
  const best = Math.max(...data.head_scores.flat()) || 1;
  data.head_scores.forEach((row, layer) => row.forEach((score, head) => {
    const cell = { x: head * CELL, y: layer * ROW, width: CELL - 0.5, height: ROW - 0.5, class: "score" };
    draw(svg, "rect", { ...cell, "fill-opacity": (0.06 + 0.94 * Math.max(0, score) / best).toFixed(3) });
  }));
  return svg;
}

/** What changes with the layer: the row, and the heads that vote in it. */
function paintLayer(method, layer) {
  const top = element("map").offsetTop + layer * ROW;
  element("cursor").style.top = `${top}px`;
  const heads = element("figure").querySelector(".heads");
  for (const bar of element("figure").querySelectorAll(".bar")) {
    bar.classList.toggle("current", Number(bar.dataset.layer) === layer);
  }
  if (!heads) return;
  for (const ring of heads.querySelectorAll(".voter")) ring.remove();
  for (const head of method.voters?.[layer] ?? []) {
    const place = { x: head * CELL + 0.5, y: layer * ROW + 0.5, width: CELL - 1.5, height: ROW - 1.5 };
    draw(heads, "rect", { ...place, class: "voter" }).dataset.head = head;
  }
}

/** What changes with the method: a bar for each layer. All compressed caches have one scale. */
function paintBudgets(method) {
  const isFull = (other) => other === data.methods[0];
  const alike = data.methods.filter((other) => isFull(other) === isFull(method));
  const scale = Math.max(...alike.flatMap((other) => other.entries));
  const svg = element("figure").querySelector(".budgets");
  svg.replaceChildren();
  element("budget-title").textContent = `entries, to ${count(scale)}`;
  method.entries.forEach((entries, layer) => {
    const width = (BARS * entries) / scale;
    const bar = draw(svg, "rect", { x: 0, y: layer * ROW + 1, width, height: ROW - 2, class: "bar" });
    bar.dataset.layer = layer;
    bar.dataset.entries = entries;
  });
}

function canvas(id) {
  const drawn = element(id);
  const scale = devicePixelRatio || 1;
  drawn.width = drawn.clientWidth * scale;
  drawn.height = HEIGHT * scale;
  const context = drawn.getContext("2d");
  context.scale(scale, scale);
  context.fillStyle = getComputedStyle(drawn).color; // from the style sheet, so light or dark
  return { context, width: drawn.clientWidth };
}

/** Every layer's kept positions, darker where more of them are kept. */
function paintKeptMap(method, view) {
  const { context, width } = canvas("kept-map");
  const step = Math.max(1, width / data.prompt_tokens);
  for (let layer = 0; layer < data.layers; layer++) {
    const { counts, of } = keepers(method, layer, view);
    for (let x = 0; x < width; x += step) {
      const from = Math.floor((x / width) * data.prompt_tokens);
      const to = Math.max(from + 1, Math.floor(((x + step) / width) * data.prompt_tokens));
      const share = sum(counts.subarray(from, to)) / ((to - from) * of);
      if (!share) continue;
      context.globalAlpha = 0.15 + 0.85 * share;
      context.fillRect(x, layer * ROW, step, ROW - 0.5);
    }
  }
}

/** What the shown answer token looked at, in every layer. */
function paintSeenMap(method, step, view) {
  const { context, width } = canvas("seen-map");
  if (step === null) return;
  for (let layer = 0; layer < data.layers; layer++) {
    for (const { position, share } of looks(method, step, layer, view)) {
      if (position >= data.prompt_tokens) continue;
      context.globalAlpha = Math.min(1, 0.2 + Math.sqrt(share));
      context.fillRect((position / data.prompt_tokens) * width - 1, layer * ROW, 3, ROW - 0.5);
    }
  }
}

/** The layer in words, for those who do not see the figure, too. */
function layerWords(method, layer) {
  const voters = method.voters?.[layer];
  const score = (head) => `${head} (${data.head_scores[layer][head].toPrecision(2)})`;
  const names = voters?.map(data.head_scores ? score : String).join(", ");
  const keeps = `Layer ${layer} keeps ${count(method.entries[layer])} entries.`;
  const scores = data.head_scores ? ", with their retrieval scores" : "";
  if (voters && !voters.length) return `${keeps} None of its heads votes: it follows those of earlier layers.`;
  return voters ? `${keeps} Its voters${scores}: heads ${names}.` : keeps;
}
