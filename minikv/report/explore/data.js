"use strict";

/* The data of the page, and what follows from it. Written by minikv/explore.py:

   settings, versions    how the page was made
   layers, heads, kv_heads, prompt_tokens
   pieces                [text, ids]: the prompt's text, cut so that each piece is spelled by that many ids
   head_scores           [layer][query head], or null and in without_scores the reason
   start_layer           the layer to begin with
   methods               of each method:
     spec, title, about  as typed, as read, and what its class says of itself
     options             the numbers by which it chooses, by name
     window              the last prompt tokens that choose; 0 where none do
     voters              [layer] the query heads that vote, or null
     entries, bytes      what each layer keeps; bytes of all keys and values
     kept                [layer][KV head] a bitmap of the prompt's positions in base64; one where all heads keep the same
     answer, text        the text of each token; the whole
     seen                [answer token][layer][view] position, thousandths, position, thousandths, ...

   A view is 0 for all heads together and 1 + h for KV head h. Positions from prompt_tokens on are the answer's. */
const data = JSON.parse(document.getElementById("data").textContent);

const element = (id) => document.getElementById(id);

/** A new element with properties of its own and children: elements, or strings that become text. */
function make(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

const count = (number) => number.toLocaleString("en-US");
const percent = (share) => `${(100 * share).toFixed(1)} %`;
const size = (bytes) => (bytes < 1e5 ? `${(bytes / 1e3).toFixed(1)}\u00a0kB` : `${(bytes / 1e6).toFixed(1)}\u00a0MB`);
const sum = (numbers) => numbers.reduce((total, number) => total + number, 0);

/** Text on one line, with its line breaks and tabs to be seen. */
const oneLine = (text) => text.replace(/\r?\n|\r/g, "↵").replace(/\t/g, "⇥");

/** The text of a token for a sentence about it. */
const readable = (text) => oneLine(text.trim()) || (text ? "blank" : "part of a character");

/** One of several texts with its neighbours, each on one line: [before, itself, after]. */
function around(texts, index, reach = 5) {
  const join = (from, to) => oneLine(texts.slice(Math.max(from, 0), to).join(""));
  return [join(index - reach, index), join(index, index + 1) || "∅", join(index + 1, index + 1 + reach)];
}

/** The bits of a bitmap, a byte each. */
function unpack(bitmap) {
  const bytes = atob(bitmap);
  const bits = new Uint8Array(data.prompt_tokens);
  for (let position = 0; position < bits.length; position++) {
    bits[position] = (bytes.charCodeAt(position >> 3) >> (position & 7)) & 1;
  }
  return bits;
}

/** How many KV heads of a view keep each position in a layer, and how many there are. */
function keepers(method, layer, view) {
  const bitmaps = method.kept[layer];
  if (bitmaps.length === 1) return { counts: unpack(bitmaps[0]), of: 1 };
  if (view > 0) return { counts: unpack(bitmaps[view - 1]), of: 1 };
  const counts = new Uint8Array(data.prompt_tokens);
  for (const bits of bitmaps.map(unpack)) bits.forEach((bit, position) => { counts[position] += bit; });
  return { counts, of: bitmaps.length };
}

/** Whether the KV heads of a layer keep different positions. */
const headsDiffer = (method, layer) => method.kept[layer].length > 1;

/** What an answer token looked at in a layer, strongest first: [{position, share}, ...]. */
function looks(method, step, layer, view) {
  const flat = method.seen[step][layer][view];
  const found = [];
  for (let i = 0; i < flat.length; i += 2) found.push({ position: flat[i], share: flat[i + 1] / 1000 });
  return found;
}
