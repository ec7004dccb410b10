/* What is chosen, and what follows when it changes. */

const chosen = {
  method: data.methods[1] ?? data.methods[0], // the first is the full cache
  layer: data.start_layer,
  view: 0,
  held: null, // the answer token that stays shown
  under: null, // the one under the pointer, or with the focus
};

const shownToken = () => chosen.under ?? chosen.held;

function changeMethod(index) {
  chosen.method = data.methods[index];
  chosen.under = null;
  if (chosen.held !== null && chosen.held >= chosen.method.answer.length) chosen.held = null;
  buildAnswer(chosen.method, actOnToken);
  element("answer-title").textContent = chosen.method.title;
  element("about-method").textContent = aboutMethod(chosen.method);
  element("figure-words").textContent = `${aboutHeads(chosen.method)} Click a row to go to its layer.`;
  paintBudgets(chosen.method);
  changeView(chosen.view);
}

function changeView(view) {
  chosen.view = view;
  paintKeptMap(chosen.method, view);
  changeLayer(chosen.layer);
}

function changeLayer(layer) {
  chosen.layer = layer;
  const { method, view } = chosen;
  element("layer").value = layer;
  element("layer-number").textContent = layer;
  paintKept(keepers(method, layer, view));
  paintLayer(method, layer);
  element("legend-some").hidden = view > 0 || !headsDiffer(method, layer);
  element("readout").textContent = "Point at a token to see who keeps it.";
  element("numbers").textContent = numbers(method, layer);
  element("layer-words").textContent = layerWords(method, layer);
  changeToken();
}

function changeToken() {
  const { method, layer, view, held } = chosen;
  const shown = shownToken();
  const found = listLooks(method, shown, layer, view, goToPosition);
  paintLooks(found);
  paintAnswer(shown, held, found);
  paintSeenMap(method, shown, view);
}

function actOnToken(what, step) {
  if (what === "hold") {
    chosen.held = chosen.held === step ? null : step;
    // The first token of a prompt is where attention rests that is not needed: there is little to see.
    const place = looks(chosen.method, step, chosen.layer, chosen.view).map(({ position }) => position)
      .find((position) => position > 0 && position < data.prompt_tokens);
    if (chosen.held !== null && place !== undefined) showPosition(place);
  } else {
    chosen.under = what === "enter" ? step : null;
  }
  changeToken();
}

/** Show a position, and the prompt where it is not on the screen. */
function goToPosition(position) {
  element("prompt").scrollIntoView({ block: "nearest" });
  showPosition(position);
}

function aboutMethod({ about, window, options }) {
  const chosen = Object.entries(options).map(([name, value]) => `${name.replaceAll("_", " ")} ${value}`).join(", ");
  if (chosen) about = `${about} Here: ${chosen}.`;
  if (!window) return about;
  const last = Math.min(window, data.prompt_tokens);
  const seen = oneLine(textOf(data.prompt_tokens - last, data.prompt_tokens).trim());
  return `${about} The last ${last} tokens choose, and are kept where the layer's budget holds them: “${seen}”.`;
}

function aboutHeads({ voters }) {
  if (!data.head_scores) return `${data.without_scores} So there are no head scores to show.`;
  return `The more a head stands out, the more it retrieves${voters ? "; framed heads vote" : ""}.`;
}

function numbers(method, layer) {
  const here = `${count(method.entries[layer])} of ${count(data.prompt_tokens)} entries in layer ${layer}`;
  const share = percent(method.entries[layer] / data.prompt_tokens);
  const whole = percent(sum(method.entries) / (data.layers * data.prompt_tokens));
  const full = size((method.bytes / sum(method.entries)) * data.layers * data.prompt_tokens);
  return `${method.title}: ${here} (${share}), ${whole} in all layers, ${size(method.bytes)} of ${full}`;
}

function build() {
  const { settings, versions } = data;
  const question = settings.question ? ` The question: “${settings.question}”` : "";
  const read = `${settings.model} has read ${count(data.prompt_tokens)} tokens, and answers from what each method keeps`;
  element("about").textContent = `${read} of them.${question}`;
  document.title = `What was kept: ${settings.model}`;
  element("made").textContent = `minikv ${versions.minikv}, torch ${versions.torch}, ${settings.dtype};`
    + ` budget ${settings.budget}; greedy decoding.`;
  const heads = Array.from({ length: data.kv_heads }, (_, head) => `KV head ${head}`);
  [`all ${data.heads}, averaged`, ...heads].forEach((name, view) => element("view").append(new Option(name, view)));
  element("view-label").hidden = data.kv_heads === 1;
  element("layer").max = data.layers - 1;
  element("layer").disabled = data.layers === 1;

  buildPrompt();
  buildMethods(changeMethod);
  buildFigure((layer, position) => {
    if (layer === null) paintKeptMap(chosen.method, chosen.view);
    changeLayer(layer ?? chosen.layer);
    if (position !== null) goToPosition(position);
  });
  element("layer").addEventListener("input", (event) => changeLayer(Number(event.target.value)));
  element("view").addEventListener("change", (event) => changeView(Number(event.target.value)));
  element("prompt").addEventListener("pointerover", ({ target }) => {
    if (target.piece === undefined) return;
    element("readout").textContent = describePiece(target.piece, chosen.method, chosen.layer, chosen.view);
  });
  addEventListener("keydown", (event) => {
    if (event.key !== "Escape") return;
    chosen.held = null;
    changeToken();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => changeView(chosen.view));
  begin();
}

/** Begin where the address says, as in explore.html#method=snapkv&layer=17&token=3, or where there is most to see. */
function begin() {
  const wanted = new URLSearchParams(location.hash.slice(1));
  const [layer, token] = ["layer", "token"].map((name) => Number.parseInt(wanted.get(name), 10));
  if (layer >= 0 && layer < data.layers) chosen.layer = layer;
  const named = data.methods.find(({ spec }) => spec === wanted.get("method"));
  const start = data.methods.indexOf(named ?? chosen.method);
  element("methods").querySelectorAll("input")[start].checked = true;
  changeMethod(start);
  if (token >= 1 && token <= chosen.method.answer.length) actOnToken("hold", token - 1);
}

build();
