"""How faithful a compressed cache is to the full one: `python -m minikv.evals.fidelity`.

The full cache decodes its own answer greedily; then every compressed cache is fed those same tokens, and each next
token's distribution is compared with the full cache's. That is a dense measure: every token of every answer counts,
whether the answer is right or not. One prefill serves all methods and budgets.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from minikv import command
from minikv.cache import KVCache
from minikv.errors import InputError
from minikv.evals import sweep
from minikv.evals.fidelity_prompts import KINDS, ask
from minikv.evals.ranks import Ranks, ranks
from minikv.evals.statistics import bootstrap
from minikv.evals.sweep import Pair
from minikv.inference import Prefill, check_prompt, compress, decode, prefill_for
from minikv.model import Llama
from minikv.offline import relative_error
from minikv.policy import METHODS, Full, Policy
from minikv.report import eval_plots
from minikv.tokenizer import Tokenizer
from minikv.weights import load


@dataclass(frozen=True)
class Fidelity:
    """Means over an answer's tokens from the second on; the first comes from the prefill, the same for all methods."""

    kl: float  # nats, of the full cache's distribution from the compressed one's
    agreement: float  # share of tokens whose most likely successor is the full cache's
    nll: float  # nats a token of the full cache's answer
    kept: float  # share of the prompt's entries kept
    attention_error: float  # of the attention output, relative, from the full cache's hidden states, mean over layers
    layer_errors: list[float]  # the same layer by layer


@torch.no_grad()
def next_logits(model: Llama, cache: KVCache, answer: Tensor) -> Tensor:
    """Logits [tokens - 1, vocab] of the answer's second token on, with the answer [tokens] fed to a prompt's cache."""
    return model(answer[None, :-1], cache)[0]


@torch.no_grad()
def attention_errors(model: Llama, prefilled: Prefill, policies: list[Policy], answer: Tensor) -> list[list[float]]:
    """Relative error of each layer's attention output when only a policy's entries are kept, for each policy.

    The hidden states are those of the full cache, so that a layer's error is its own and not inherited.
    """
    full = compress(prefilled, Full(), reserve=len(answer))
    caches = [compress(prefilled, policy, reserve=len(answer)) for policy in policies]
    errors: list[list[float]] = [[] for _ in policies]
    x = model.embed(answer[None, :-1])
    rope = model.rope(full.length, x.shape[1])
    for layer, block in enumerate(model.blocks):
        queries, keys, values = block.project(x, rope)
        exact = block.attend(queries, *full[layer].append(keys, values))
        exact_output = block.self_attn.output(exact)
        for cache, found in zip(caches, errors):
            cut = block.attend(queries, *cache[layer].append(keys, values))
            found.append(relative_error(block.self_attn.output(cut), exact_output))
        x = block.output(x, exact)
    return errors


def compare(exact: Tensor, logits: Tensor, answer: Tensor, error: list[float], kept: float) -> Fidelity:
    """One policy's logits [tokens - 1, vocab] beside the full cache's, for the answer [tokens]."""
    exact, logits = exact.float().log_softmax(-1), logits.float().log_softmax(-1)
    return Fidelity(
        kl=F.kl_div(logits, exact, log_target=True, reduction="none").sum(-1).mean().item(),
        agreement=(exact.argmax(-1) == logits.argmax(-1)).float().mean().item(),
        nll=-logits.gather(-1, answer[1:, None]).mean().item(),
        kept=kept,
        attention_error=sum(error) / len(error),
        layer_errors=error,
    )


def measure(model: Llama, tokenizer: Tokenizer, ids: list[int], pairs: list[Pair], max_answer_tokens: int) -> dict:
    """The fidelity of each method-budget pair on one prompt, by name; {} when the answer has fewer than two tokens."""
    policies = [pair.policy for pair in pairs]
    prefilled = prefill_for(model, torch.tensor([ids], device=model.device), policies)
    full = compress(prefilled, Full(), reserve=max_answer_tokens)
    answer = list(decode(model, full, prefilled.logits, max_answer_tokens, tokenizer.stop_ids))
    if len(answer) < 2:
        return {}
    answer = torch.cat(answer)
    exact = next_logits(model, compress(prefilled, Full(), reserve=len(answer)), answer)
    results = {}
    for pair, error in zip(pairs, attention_errors(model, prefilled, policies, answer)):
        cache = compress(prefilled, pair.policy, reserve=len(answer))
        kept = sum(cache.kept) / (len(cache) * prefilled.length)
        found = compare(exact, next_logits(model, cache, answer), answer, error, kept)
        results[pair.name] = asdict(found)
    return results


def parse_arguments():
    parser = command.Parser("Compare every method's compressed cache with the full one, token by token.")
    command.add_model_arguments(parser)
    sweep.add_arguments(parser, max_new_tokens=48)
    parser.set_defaults(methods=[name for name in METHODS if name != "full"], budgets=["1%", "3%", "6%", "12%", "25%"])
    parser.add_argument("--lengths", type=command.positive, nargs="+", default=[2048, 3072, 4096], help="prompt lengths in tokens")
    parser.add_argument("--prompts", type=command.positive, default=24, help="number of prompts, the kinds in turn")
    kinds = f"some of {', '.join(KINDS)}; the last four hide more than one sentence"
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS[:3]), metavar="KIND", help=kinds)
    arguments = parser.parse_args()
    sweep.check_arguments(arguments)
    arguments.methods = [name for name in arguments.methods if name != "full"]
    if not arguments.methods:
        raise InputError("--methods names only full, which the others are compared with; name one of them")
    return arguments


def summary(results: list[dict], pairs: list[Pair], seed: int) -> list[dict]:
    """For each method and budget the mean of each measure over the prompts, with its interval, and of layer errors."""
    rows = []
    for pair in pairs:
        row = {"method": pair.method, "budget": pair.budget}
        for name, *_ in MEASURES:
            values = {str(number): [result[pair.name][name]] for number, result in enumerate(results)}
            row[name] = dict(zip(("mean", "low", "high"), bootstrap(values, seed=seed)))
        by_layer = zip(*(result[pair.name]["layer_errors"] for result in results))
        row["layer_errors"] = [sum(errors) / len(results) for errors in by_layer]
        rows.append(row)
    return rows


def table(rows: list[dict], budgets: list[str], measure: str, form: str) -> str:
    """One measure as text: a line for each method, a column for each budget, with 95 % intervals."""
    cells: dict[str, list[str]] = {}
    for row in rows:
        value = row[measure]
        mean, low, high = (f"{value[name]:{form}}" for name in ("mean", "low", "high"))
        cell = mean if low == high else f"{mean} ({low} to {high})"
        cells.setdefault(row["method"], []).append(cell)
    return command.text_table([("method", *budgets), *((method, *line) for method, line in cells.items())])


def experiment(arguments, group: Ranks) -> None:
    """Run or go on with the experiment; rank 0 reports."""
    model, tokenizer = load(arguments.model, group.device(arguments.device), arguments.dtype, arguments.plain)
    check_prompt(model, torch.empty(1, max(arguments.lengths)), arguments.max_new_tokens)
    pairs = sweep.make_pairs(model, arguments)
    settings = sweep.settings_of(model, pairs, arguments)
    prompts = {name: (kind, ids) for kind, name, ids in ask(tokenizer, arguments.lengths, arguments.prompts, arguments.kinds)}

    def one(key: str) -> dict:
        return measure(model, tokenizer, prompts[key][1], pairs, arguments.max_new_tokens)

    found = sweep.run(list(prompts), one, settings, arguments.results, group)
    if group.reports:
        by_kind: dict[str, list[dict]] = {kind: [] for kind in arguments.kinds}
        for key, result in found.items():
            if result:
                by_kind[prompts[key][0]].append(result)
        report({kind: results for kind, results in by_kind.items() if results}, pairs, settings, arguments)


def report(by_kind: dict[str, list[dict]], pairs: list[Pair], settings: dict, arguments) -> None:
    """JSON and picture, then a table of each measure, and of each kind of prompts at each budget."""
    results = [result for own in by_kind.values() for result in own]
    if not results:
        raise InputError("no answer had two tokens or more, so there is nothing to compare; give more --max-new-tokens")
    rows = summary(results, pairs, arguments.seed)
    kinds = {kind: {"prompts": len(own), "rows": summary(own, pairs, arguments.seed)} for kind, own in by_kind.items()}
    record = {"settings": settings, "versions": command.versions(), "prompts": len(results), "rows": rows, "kinds": kinds}
    drawn = sweep.write(record, arguments, eval_plots.draw_fidelity)
    print(f"{len(results)} prompts. The first answer token comes from the prefill, the same for all methods: it is left out.")
    for name, what, form in MEASURES:
        print(f"\n{what}\n{table(rows, arguments.budgets, name, form)}")
    for budget in arguments.budgets:
        print(f"\nKL divergence, top-1 agreement by kind of prompt at {budget}\n{kinds_table(kinds, budget)}")
    sweep.print_drawn(drawn)


def kinds_table(kinds: dict[str, dict], budget: str) -> str:
    """A line for each method, a column for each kind of prompts."""
    lines: dict[str, list[str]] = {}
    for found in kinds.values():
        for row in found["rows"]:
            if row["budget"] == budget:
                lines.setdefault(row["method"], []).append(f"{row['kl']['mean']:.2f}, {row['agreement']['mean']:.0%}")
    return command.text_table([("method", *kinds), *((method, *cells) for method, cells in lines.items())])


def main() -> None:
    arguments = parse_arguments()
    with ranks() as group:
        experiment(arguments, group)


MEASURES = [
    ("kl", "KL divergence from the full cache's next-token distribution, nats a token (95 % interval over prompts)", ".2f"),
    ("agreement", "top-1 agreement with the full cache, share of tokens", ".2f"),
    ("nll", "negative log-likelihood of the full cache's answer, nats a token", ".2f"),
    ("attention_error", "relative error of the attention output, mean over layers", ".2f"),
    ("kept", "entries kept, share of the prompt's", ".3f"),
]


if __name__ == "__main__":
    command.run(main)
