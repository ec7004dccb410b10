"""A page that shows what each method kept and what its answer looked at: `python -m minikv.explore`.

One prefill serves all methods. Each answer is decoded from the method's own cache, and of every attention row the few
positions are written down that got the most. The page is one file that needs nothing else: see report/explore_page.py.
"""

from __future__ import annotations

import base64
import inspect
from argparse import Namespace
from pathlib import Path

import torch
from torch import Tensor

from minikv import command
from minikv.cache import KVCache
from minikv.errors import InputError
from minikv.evals import sweep
from minikv.evals.sweep import Pair
from minikv.files import write_json, write_text
from minikv.inference import Prefill, compress, prefill_for
from minikv.model import Llama
from minikv.prompts import add_prompt_arguments, make_prompt, read_prompt
from minikv.report.explore_page import render
from minikv.report.titles import title
from minikv.scores import group_mean, window_attention
from minikv.srh import Profile, strongest
from minikv.tokenizer import Prompt, Tokenizer
from minikv.weights import load

STRONGEST, FAINTEST = 10, 5  # of an attention row that many positions are shown, with at least so many thousandths each

Row = list[list[int]]  # see most_attended
Seen = list[list[Row]]  # of each token of an answer the Row of each layer


@torch.no_grad()
def decode_and_watch(
    model: Llama, prefilled: Prefill, cache: KVCache, max_new_tokens: int, stop_ids: frozenset[int]
) -> tuple[list[int], Seen]:
    """The greedy answer from a compressed `cache` of the prompt, and what each of its tokens looked at in each layer.

    The row that counts for a token is that of the query which produced it. For the first token that is the last prompt
    token's, over the full cache; for the others it is the token's before, over what was kept and decoded since. The
    token that ends the turn is not part of the answer.
    """
    answer, seen = [], []
    token = prefilled.logits.argmax(-1, keepdim=True)
    rows = [
        most_attended(prefilled.last_queries(layer, 1), full.keys, full.positions)
        for layer, full in enumerate(prefilled.cache.layers)
    ]
    for step in range(max_new_tokens):
        if token.item() in stop_ids:
            break
        answer.append(token.item())
        seen.append(rows)
        if step + 1 < max_new_tokens:
            token, rows = watch_step(model, token, cache)
    return answer, seen


def watch_step(model: Llama, token: Tensor, cache: KVCache) -> tuple[Tensor, list[Row]]:
    """The token [1, 1] that follows `token`, and the Row of each layer; `token` is appended to the cache."""
    x, rope, rows = model.embed(token), model.rope(cache.length, 1), []
    for layer, block in enumerate(model.blocks):
        queries, keys, values = block.project(x, rope)
        keys, values = cache[layer].append(keys, values)
        rows.append(most_attended(queries, keys, cache[layer].positions))
        x = block.output(x, block.attend(queries, keys, values))
    return model.logits(x)[:, -1].argmax(-1, keepdim=True), rows


def most_attended(queries: Tensor, keys: Tensor, positions: Tensor) -> Row:
    """The positions that one query looks at most: averaged over all heads, then over the heads of each KV head.

    queries [1, heads, 1, dim], keys [1, kv_heads, kept, dim] and their positions [1, kv_heads, kept]. Each list holds
    position, weight, position, weight and so on, strongest first, weights in thousandths of the whole row.
    """
    by_kv_head = group_mean(window_attention(queries, keys)[:, :, 0], keys.shape[1])[0]  # [kv_heads, kept]
    positions = positions[0]
    row = by_kv_head.new_zeros(len(positions), int(positions.max()) + 1).scatter(1, positions, by_kv_head)
    row = torch.cat([row.mean(0, keepdim=True), row])  # KV heads may keep different positions
    weights, places = row.topk(min(STRONGEST, row.shape[1]))
    weights = (1000 * weights).round().int().tolist()
    return [
        [number for place, weight in zip(*pair) if weight >= FAINTEST for number in (place, weight)]
        for pair in zip(places.tolist(), weights)
    ]


def pieces(prompt: Prompt) -> list[tuple[str, int]]:
    """The prompt's text cut into pieces, each with the number of ids that spell it; joined they are the whole text.

    Ids that share a character share a piece. A piece of 0 ids is what the vocabulary has no ids for; an id that spells
    nothing has a piece without text.
    """
    found: list[tuple[str, int]] = []
    end = 0
    for start, stop in prompt.offsets:
        if start > end:
            found.append((prompt.text[end:start], 0))
            end = start
        fresh = prompt.text[end : max(stop, end)]
        if start < end and found:
            text, count = found.pop()
            found.append((text + fresh, count + 1))
        else:
            found.append((fresh, 1))
        end += len(fresh)
    return found + [(prompt.text[end:], 0)] * (end < len(prompt.text))


def answer_pieces(tokenizer: Tokenizer, answer: list[int]) -> list[str]:
    """The text that became final with each id of the answer: "" where its character goes on in the next."""
    stream = tokenizer.stream()
    texts = [stream.put(id) for id in answer]
    return [*texts[:-1], texts[-1] + stream.end()] if texts else []


def bitmaps(positions: Tensor, length: int) -> list[str]:
    """For each KV head a base64 text of bytes in which bit p % 8 of byte p // 8 says whether position p is kept.

    positions [kv_heads, kept]. Only one text where all KV heads keep the same.
    """
    if (positions == positions[0]).all():
        positions = positions[:1]
    bits = torch.zeros(len(positions), -(-length // 8) * 8, dtype=torch.long).scatter(1, positions.cpu(), 1)
    packed = (bits.unflatten(1, (-1, 8)) << torch.arange(8)).sum(2)
    return [base64.b64encode(bytes(row)).decode() for row in packed.tolist()]


def watch(model: Llama, tokenizer: Tokenizer, prefilled: Prefill, pair: Pair, max_new_tokens: int) -> dict:
    """What the page shows of one method."""
    cache = compress(prefilled, pair.policy, reserve=max_new_tokens)
    policy, layers, name = pair.policy, range(len(cache)), title(pair.method)
    result = {
        "spec": pair.method,
        "title": name[:1].upper() + name[1:],
        "about": first_paragraph(policy),
        "options": command.options_of(policy),
        "window": policy.window or 0,
        "voters": [policy.voters(layer) for layer in layers] if hasattr(policy, "voters") else None,
        "entries": cache.kept,
        "bytes": cache.nbytes,
        "kept": [bitmaps(layer.positions[0], prefilled.length) for layer in cache.layers],
    }
    answer, seen = decode_and_watch(model, prefilled, cache, max_new_tokens, tokenizer.stop_ids)
    return {**result, "answer": answer_pieces(tokenizer, answer), "text": tokenizer.decode(answer), "seen": seen}


def first_paragraph(policy) -> str:
    """What a method's class says of itself."""
    about = inspect.getdoc(type(policy)) or ""
    generated = about.startswith(type(policy).__name__ + "(")  # a dataclass without a docstring gets its signature
    return "" if generated else " ".join(about.split("\n\n")[0].split())


def explore(model: Llama, tokenizer: Tokenizer, prompt: Prompt, pairs: list[Pair], max_new_tokens: int) -> dict:
    """All that the page shows. InputError where the model's output is NaN."""
    with command.show_progress(1 + len(pairs), "prefill, then the methods") as bar:
        tokens = torch.tensor([prompt.ids], device=model.device)
        prefilled = prefill_for(model, tokens, [pair.policy for pair in pairs])
        if prefilled.logits.isnan().any():
            raise InputError(f"the model's output is NaN in {model.dtype}; its weights are broken, or try another --dtype")
        bar.update()
        methods = []
        for pair in pairs:
            methods.append(watch(model, tokenizer, prefilled, pair, max_new_tokens))
            bar.update()
    config = model.config
    profile = next((pair.policy.profile for pair in pairs if hasattr(pair.policy, "profile")), None)
    return {
        "layers": config.layers,
        "heads": config.heads,
        "kv_heads": config.kv_heads,
        "prompt_tokens": prefilled.length,
        "pieces": pieces(prompt),
        "methods": methods,
        **head_scores(profile, config.layers),
    }


def head_scores(profile: Profile | None, layers: int) -> dict:
    """The map of head scores, or why there is none, and the layer to begin with: that of the strongest head."""
    if profile is None:
        return {"head_scores": None, "without_scores": "None of these methods needs a profile.", "start_layer": layers // 2}
    if profile.head_scores is None:
        return {"head_scores": None, "without_scores": "The profile holds ranks only.", "start_layer": layers // 2}
    scores = [[float(f"{score:.4g}") for score in row] for row in profile.head_scores]
    return {"head_scores": scores, "start_layer": strongest(torch.tensor(profile.head_scores))[0][0]}


def parse_arguments():
    parser = command.Parser(
        "Write a page that shows what each method kept of a prompt, and what the tokens of its answer looked at."
        " Without --prompt or --file: the demonstration on a built-in document."
    )
    command.add_model_arguments(parser)
    add_prompt_arguments(parser)
    methods = ["compresskv", "snapkv", "streamingllm"]
    sweep.add_methods_argument(parser, methods)
    parser.add_argument("--budget", default="12%", help=command.budget_help)
    command.add_selection_arguments(parser)
    parser.add_argument("--max-new-tokens", type=command.not_negative, default=64, help="longest answer, in tokens")
    parser.add_argument("--html", metavar="FILE", default="explore.html", help="the page; the full cache is on it, too")
    parser.add_argument("--json", metavar="FILE", help="write settings, answers and figures to this file")
    arguments = parser.parse_args()
    command.check_outputs(arguments, "html", "json")
    arguments.methods = list(dict.fromkeys(["full", *sweep.listed("methods", arguments.methods)]))
    arguments.budgets = [arguments.budget]
    sweep.check_specs(arguments)
    return arguments


def table(methods: list[dict], prompt_tokens: int) -> str:
    """What each method kept, as text."""
    rows = [("method", "entries kept", "of", "share", "KV MB")]
    for method in methods:
        kept, of = sum(method["entries"]), len(method["entries"]) * prompt_tokens
        rows.append((method["spec"], f"{kept:,}", f"{of:,}", f"{kept / of:.1%}", f"{method['bytes'] / 1e6:.1f}"))
    return command.text_table(rows)


def settings_of(model: Llama, arguments: Namespace, question: str | None) -> dict:
    """What the page's last line and the record say of how it was made."""
    names = ("methods", "budget", "max_new_tokens")
    settings = {name: getattr(arguments, name) for name in names}
    dtype = str(model.dtype).removeprefix("torch.")
    return {"model": Path(arguments.model).name, "dtype": dtype, "question": question, **settings}


def main() -> None:
    arguments = parse_arguments()
    text, question = read_prompt(arguments)
    model, tokenizer = load(arguments.model, arguments.device, arguments.dtype, arguments.plain)
    pairs = sweep.make_pairs(model, arguments)
    prompt = make_prompt(model, tokenizer, text, question, arguments)
    data = explore(model, tokenizer, prompt, pairs, arguments.max_new_tokens)
    record = {"settings": settings_of(model, arguments, question), "versions": command.versions()}
    write_text(arguments.html, render(record | data))
    if arguments.json:
        figures = ("spec", "options", "text", "entries", "bytes")
        methods = [{name: method[name] for name in figures} for method in data["methods"]]
        write_json(arguments.json, {**record, "prompt_tokens": data["prompt_tokens"], "methods": methods})
    for method in data["methods"]:
        print(f"[{method['spec']}] {method['text']}\n")
    print(table(data["methods"], data["prompt_tokens"]))
    print(f"\nThe page: {arguments.html}, {Path(arguments.html).stat().st_size / 1e6:.1f} MB; open it in a browser")


if __name__ == "__main__":
    command.run(main)
