"""One prefill an example, and every method and budget decoded from it."""

from __future__ import annotations

import functools
import random
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from minikv import command
from minikv.budget import PromptShape, parse
from minikv.cache import KVCache
from minikv.errors import InputError
from minikv.evals.journal import Journal, digest
from minikv.evals.ranks import Ranks
from minikv.files import write_json
from minikv.inference import check_prompt, compress, prefill_for
from minikv.model import Llama
from minikv.policy import METHODS, Policy
from minikv.srh import fingerprint

T = TypeVar("T")
CHOOSING = ("head_ranks", "layer_scores", "head_scores", "traditional_scores")  # of a profile, what methods choose by
SIX = ("full", "streamingllm", "snapkv", "pyramidkv", "cake", "compresskv")  # those of the paper


@dataclass(frozen=True)
class Pair:
    """A method and a budget, as people name them, and the policy that they are."""

    method: str
    budget: str | None  # None: the full cache has none
    policy: Policy

    @property
    def name(self) -> str:
        return self.method if self.budget is None else f"{self.method} {self.budget}"


@dataclass(frozen=True)
class Swept:
    """What one example came to for each pair, in their order."""

    answers: list[list[int]]  # token ids, without the one that stops
    kept: list[float]  # entries a layer, of the prompt
    seconds: dict[str, float]  # prefill, selection, decode: for all pairs together


@torch.no_grad()
def sweep(
    model: Llama,
    ids: list[int],
    policies: list[Policy],
    max_new_tokens: int,
    stop_ids: frozenset[int],
    at_least_one: bool = False,
) -> Swept:
    """Greedy answers to one prompt under each policy, from a single prefill.

    The first token comes from the prefill's logits, that is from full attention, and is the same for all; with
    at_least_one it is not a stop id.
    """
    tokens = torch.tensor([ids], device=model.device)
    check_prompt(model, tokens, max_new_tokens)
    start = _now(model)
    result = prefill_for(model, tokens, policies)
    logits = result.logits.clone()
    if at_least_one:
        logits[:, sorted(stop_ids)] = float("-inf")
    first = logits.argmax(-1)
    prefilled = _now(model)
    caches = [compress(result, policy, reserve=max_new_tokens) for policy in policies]
    kept = [sum(cache.kept) / len(cache) for cache in caches]
    del result  # from here on only what was kept takes memory
    selected = _now(model)
    answers = decode_together(model, caches, first.item(), max_new_tokens, stop_ids)
    seconds = {"prefill": prefilled - start, "selection": selected - prefilled, "decode": _now(model) - selected}
    return Swept(answers, kept, seconds)


def _now(model: Llama) -> float:
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
    return time.perf_counter()


@torch.no_grad()
def decode_together(
    model: Llama, caches: list[KVCache], first: int, max_new_tokens: int, stop_ids: frozenset[int]
) -> list[list[int]]:
    """Greedy answers that begin with the token `first`, from several caches of one prompt.

    A cache leaves the batch when its answer meets a stop id, which is not part of the answer.
    """
    answers: list[list[int]] = [[] for _ in caches]
    going = {index: first for index in range(len(caches))}  # the token at the end of each answer that goes on
    for step in range(max_new_tokens):
        going = {index: token for index, token in going.items() if token not in stop_ids}
        for index, token in going.items():
            answers[index].append(token)
        if not going or step + 1 == max_new_tokens:
            break
        tokens = torch.tensor(list(going.values()), device=model.device)
        going = dict(zip(going, _step(model, [caches[index] for index in going], tokens).tolist()))
    return answers


def _step(model: Llama, caches: list[KVCache], tokens: Tensor) -> Tensor:
    """The next token [pairs] of each cache, given its last one, tokens [pairs].

    The weights are read once for all pairs. Attention is each pair's own, over what it kept: no row is padded to the
    longest, which would cost the memory of the full cache for every pair. All pairs are at the same position.
    """
    x = model.embed(tokens[:, None])
    rope = model.rope(caches[0].length, 1)
    for layer, block in enumerate(model.blocks):
        rows = zip(caches, *(part.split(1) for part in block.project(x, rope)))
        heads = [block.attend(queries, *cache[layer].append(keys, values)) for cache, queries, keys, values in rows]
        x = block.output(x, torch.cat(heads))  # heads: of each pair [1, heads, 1, dim]
    return model.logits(x)[:, -1].argmax(-1)


# --- what the programs that sweep have in common ---


def add_methods_argument(parser: command.Parser, default: list[str]) -> None:
    methods = f"some of {', '.join(METHODS)}, {command.changes_help}"
    parser.add_argument("--methods", nargs="+", default=default, metavar="METHOD", help=methods)


def add_arguments(parser: command.Parser, max_new_tokens: int | None) -> None:
    add_methods_argument(parser, list(SIX))
    parser.add_argument("--budgets", nargs="+", default=["3%", "6%", "12%", "25%"], help=command.budget_help)
    command.add_selection_arguments(parser)
    parser.add_argument("--max-new-tokens", type=command.positive, default=max_new_tokens, help="longest answer, in tokens")
    parser.add_argument("--seed", type=command.seed, default=0, help="of all that is drawn: examples, intervals")
    results = "JSONL: append each result as it is finished, and go on from there (under torchrun FILE.rank1 and so on, too)"
    parser.add_argument("--results", metavar="FILE", help=results)
    parser.add_argument("--json", metavar="FILE", help="write settings and scores to this file")
    parser.add_argument("--plot", metavar="FILE", help="draw the scores into this PNG file")


def check_arguments(arguments: Namespace) -> None:
    """Split lists at commas, too, and refuse what is not a method or a budget before anything is loaded."""
    command.check_outputs(arguments, "results", "json", "plot")
    for name in ("methods", "budgets"):
        setattr(arguments, name, listed(name, getattr(arguments, name)))
    check_specs(arguments)


def check_specs(arguments: Namespace) -> None:
    """Refuse what is not a method or a budget."""
    for method in arguments.methods:
        command.read_spec(method)
    for budget in arguments.budgets:
        parse(budget)


def listed(name: str, words: list[str]) -> list[str]:
    """The items of an argument that may be set apart by blanks or commas, each once."""
    items = [item for word in words for item in word.split(",") if item]
    if not items:
        raise InputError(f"--{name} lists nothing; at least one is needed")
    return list(dict.fromkeys(items))


def make_pairs(model: Llama, arguments: Namespace) -> list[Pair]:
    """Every method with every budget; the full cache, which has none, once. InputError for a budget too small for it."""
    shape = PromptShape(model.config.layers, model.config.context, model.new_layer_cache(1, 1).entry_bytes)
    profile = functools.cache(functools.partial(command.load_profile, model, arguments.profile, arguments.model))
    pairs = []
    for method in arguments.methods:
        for budget in [None] if method == "full" else arguments.budgets:
            options = Namespace(**vars(arguments) | {"budget": budget})
            pair = Pair(method, budget, command.make_policy(method, options, profile))
            if budget is not None:
                pair.policy.mean_entries(shape)  # how long a prompt is makes no budget too small
            pairs.append(pair)
    return pairs


def settings_of(model: Llama, pairs: list[Pair], arguments: Namespace) -> dict:
    """All that the results follow from, for the record and to tell the runs in a journal apart."""
    apart = ("json", "plot", "results", "debug", "device", "dtype", "profile")
    profiles = [pair.policy.profile for pair in pairs if hasattr(pair.policy, "profile")]
    return {
        **{name: _plain(name, value) for name, value in vars(arguments).items() if name not in apart},
        "options": {pair.method: command.options_of(pair.policy) for pair in pairs},
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": model.device.type,
        "weights": fingerprint(model),
        "profile": digest([getattr(profiles[0], name) for name in CHOOSING]) if profiles else None,
    }


def _plain(name: str, value):
    """A setting for JSON. Of a path the last two parts: where a folder lies on some machine is no setting."""
    if name in ("model", "haystack", "needles", "data", "config") and value is not None:
        return "/".join(Path(value).parts[-2:])
    return value


def draw(examples: list[T], limit: int | None, seed: int) -> list[T]:
    """`limit` of the examples, drawn by `seed`, in their order; all of them without a limit."""
    if limit is None or limit >= len(examples):
        return examples
    return [examples[index] for index in sorted(random.Random(seed).sample(range(len(examples)), limit))]


def run(
    keys: list[str], evaluate: Callable[[str], dict], settings: dict, path: str | None, ranks: Ranks
) -> dict[str, dict]:
    """The result of each example, in order, on rank 0: found in the journal or evaluated now. Other ranks get none.

    Examples are done in a shuffled order, so that long ones are spread evenly over the ranks and the time left is
    told rightly.
    """
    share = ranks.share(random.Random(0).sample(keys, len(keys)))
    with Journal(path, settings, ranks.rank) as journal:
        missing = [key for key in share if key not in journal.done]
        with command.show_progress(len(missing), "examples", shown=ranks.reports) as bar:
            for key in missing:
                journal.add(key, evaluate(key))
                bar.update()
    merged = ranks.merge({key: journal.done[key] for key in share})
    return {key: merged[key] for key in keys} if ranks.reports else {}


def mean_seconds(results: dict[str, dict]) -> dict[str, float]:
    """What an example took on average, by part."""
    parts = [result["seconds"] for result in results.values()]
    return {name: sum(part[name] for part in parts) / len(parts) for name in parts[0]}


def report(record: dict, arguments: Namespace, table: str, draw_scores: Callable[[dict, str], list[Path]]) -> None:
    """JSON and pictures, then the table and what it needs to be read rightly: who stops reading early loses no file."""
    drawn = write(record, arguments, draw_scores)
    print(f"{table}\n\nThe first token of each answer comes from full attention in the prefill and is the same for every method.")
    if record["window"]:
        print(f"The window that chooses, in the first prompt: {record['window']!r}")
    parts = ", ".join(f"{name} {value:.2f} s" for name, value in record["seconds"].items())
    print(f"An example took on average: {parts} (one prefill; selection and decode of all methods and budgets)")
    print_drawn(drawn)


def write(record: dict, arguments: Namespace, draw_scores: Callable[[dict, str], list[Path]]) -> list[Path]:
    """The record to --json and its pictures to --plot, where they were asked for; the pictures' files."""
    if arguments.json:
        write_json(arguments.json, record)
    return draw_scores(record, arguments.plot) if arguments.plot else []


def print_drawn(files: list[Path]) -> None:
    if files:
        print("drawn: " + ", ".join(map(str, files)))
