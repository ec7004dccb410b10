/* The prompt's text: a span for each piece, lit where its entry is kept. */

const texts = data.pieces.filter(([, ids]) => ids > 0).map(([text]) => text);
const spans = []; // of each of these pieces
const firstPosition = []; // of each, too
const pieceAt = new Int32Array(data.prompt_tokens); // the piece of each position
let levels = []; // of each piece how lit it is, 0 to 4
let lookedAt = []; // the spans that the chosen answer token looked at

/** The blocks let a browser skip the text that is not on the screen; each ends with a line of the text. */
function buildPrompt() {
  const blocks = [make("div")];
  let position = 0;
  for (const [text, ids] of data.pieces) {
    const block = blocks.at(-1);
    if (ids === 0) {
      block.append(text);
    } else {
      const span = make("span", { textContent: text, piece: spans.length });
      if (text === "") span.dataset.mark = "∅";
      if (/^[\r\n]+$/.test(text)) span.dataset.mark = "↵";
      pieceAt.fill(spans.length, position, position + ids);
      spans.push(span);
      firstPosition.push(position);
      block.append(span);
      position += ids;
    }
    if (text.endsWith("\n")) blocks.push(make("div"));
  }
  firstPosition.push(position);
  levels = new Uint8Array(spans.length);
  element("prompt").append(...blocks);
}

/** Light what is kept. A piece of several ids is as lit as the brightest of them. */
function paintKept({ counts, of }) {
  spans.forEach((span, piece) => {
    let most = 0;
    for (let position = firstPosition[piece]; position < firstPosition[piece + 1]; position++) {
      most = Math.max(most, counts[position]);
    }
    const level = Math.ceil((4 * most) / of);
    if (level === levels[piece]) return;
    span.className = level ? `kept-${level}` : "";
    levels[piece] = level;
  });
}

/** Mark what the chosen answer token looked at: [{position, share}, ...]. */
function paintLooks(found) {
  for (const span of lookedAt) delete span.dataset.seen;
  lookedAt = [];
  for (const { position, share } of [...found].reverse()) {
    if (position >= data.prompt_tokens) continue;
    const span = spans[pieceAt[position]];
    span.dataset.seen = "";
    span.style.setProperty("--share", Math.sqrt(share).toFixed(3)); // the first token alone can have most of it
    lookedAt.push(span);
  }
}

/** Scroll the prompt to a position; the page itself stays where it is. */
function showPosition(position) {
  const [span, frame] = [spans[pieceAt[position]].getBoundingClientRect(), element("prompt").getBoundingClientRect()];
  const calm = matchMedia("(prefers-reduced-motion: reduce)").matches;
  const top = span.top + span.height / 2 - frame.top - frame.height / 2;
  element("prompt").scrollBy({ top, behavior: calm ? "auto" : "smooth" });
}

/** The text of the positions from one to another, that one left out. */
const textOf = (from, to) => texts.slice(pieceAt[from], pieceAt[to - 1] + 1).join("");

/** The text of a position with that of its neighbours: [before, itself, after]. */
const inContext = (position) => around(texts, pieceAt[position]);

/** What is known of the piece under the pointer. */
function describePiece(piece, method, layer, view) {
  const [first, end] = [firstPosition[piece], firstPosition[piece + 1]];
  const name = end - first > 1 ? `Tokens ${count(first)} to ${count(end - 1)}` : `Token ${count(first)}`;
  const { counts, of } = keepers(method, layer, view);
  const kept = Math.max(...counts.subarray(first, end));
  const verdict = kept === 0 ? "evicted" : of > 1 ? `kept by ${kept} of ${of} KV heads` : "kept";
  const isKept = (_, other) => keepers(method, other, view).counts.subarray(first, end).some(Boolean);
  const layers = method.kept.filter(isKept).length;
  const here = `“${readable(texts[piece])}”: ${verdict} in layer ${layer}`;
  return `${name}, ${here}, kept in ${layers} of ${data.layers} layers.`;
}
