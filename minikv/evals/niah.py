"""Needle in a haystack: lengths x depths x needles, every method and budget from one prefill: `python -m minikv.evals.niah`.

Two scores. Recall is the share of the answer's words that the model said (ROUGE-1 recall with stemming, as the paper's
release scores): their order and words around them do not matter. Contained is 1 when the answer occurs word for word,
whatever its case. Intervals are bootstrapped over the needles, since prompts of one needle succeed or fail together.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch

from minikv import command
from minikv.evals import sweep
from minikv.evals.journal import digest
from minikv.evals.needle_cases import begin_anywhere
from minikv.evals.ranks import Ranks, ranks
from minikv.evals.statistics import bootstrap
from minikv.evals.sweep import Pair
from minikv.evals.tasks import MODES, load_tasks
from minikv.haystack import DATA, Task, contains, hide_all, load_haystack, recall
from minikv.inference import check_prompt
from minikv.model import Llama
from minikv.report import eval_plots
from minikv.tokenizer import Prompt, Tokenizer
from minikv.weights import load

SCORES = ("recall", "contained")


@dataclass(frozen=True)
class Example:
    """One cell of the experiment: a task at a prompt length and a depth in percent."""

    task: Task
    number: int  # of the task
    haystack: str  # the task's own
    length: int
    depth: float

    @property
    def key(self) -> str:
        """The example's name in a journal."""
        return f"needle {self.number}, {self.length} tokens, depth {self.depth:g} %"

    def prompt(self, tokenizer: Tokenizer) -> Prompt:
        return hide_all(tokenizer, self.haystack, self.task, self.length, self.depth / 100).prompt


def score(answers: list[str], text: str) -> dict[str, float]:
    """Recall of all answers' words, and the share of the answers that are contained, of what a model said."""
    contained = [contains(answer, text) for answer in answers]
    return {"recall": recall(" ".join(answers), text), "contained": sum(contained) / len(contained)}


def evaluate(model: Llama, tokenizer: Tokenizer, example: Example, pairs: list[Pair], max_new_tokens: int) -> dict:
    """The result of one example: for each pair the text, its scores, and what share of the prompt was kept."""
    ids = example.prompt(tokenizer).ids
    swept = sweep.sweep(model, ids, [pair.policy for pair in pairs], max_new_tokens, tokenizer.stop_ids)
    result: dict = {"seconds": swept.seconds, "pairs": {}}
    for pair, answer, kept in zip(pairs, swept.answers, swept.kept):
        text = tokenizer.decode(answer)
        result["pairs"][pair.name] = {"text": text, "kept": kept / len(ids), **score(example.task.answers, text)}
    return result


def summarise(pair: Pair, examples: list[Example], results: dict[str, dict], seed: int) -> dict:
    """The scores of one method and budget: means with 95 % intervals, by length, and by depth for each length."""
    own = [(example, results[example.key]["pairs"][pair.name]) for example in examples]

    def mean(name: str, **where) -> float | None:  # None for a cell that --limit left empty
        values = [r[name] for example, r in own if all(getattr(example, at) == value for at, value in where.items())]
        return sum(values) / len(values) if values else None

    def interval(name: str) -> list[float]:
        groups: dict[str, list[float]] = {}
        for example, result in own:
            groups.setdefault(str(example.number), []).append(result[name])
        return list(bootstrap(groups, seed=seed)[1:])

    lengths, depths = (sorted({getattr(example, name) for example in examples}) for name in ("length", "depth"))
    return {
        "method": pair.method,
        "budget": pair.budget,
        "window": pair.policy.window or None,
        "n": len(own),
        "kept": mean("kept"),
        **{name: mean(name) for name in SCORES},
        **{f"{name}_interval": interval(name) for name in SCORES},
        "by_length": {str(length): mean("recall", length=length) for length in lengths},
        "by_depth": {f"{depth:g}": [mean("recall", depth=depth, length=length) for length in lengths] for depth in depths},
    }


def table(scores: list[dict]) -> str:
    """The scores as text: recall with its interval, and by length."""
    full = next((row["recall"] for row in scores if row["method"] == "full"), None)
    lengths = list(scores[0]["by_length"])
    head = ("method", "budget", "kept", "window", "n", "recall", "95 %", "of full", "contained")
    rows = [(*head, *(f"{length} tokens" for length in lengths))]
    for row in scores:
        low, high = row["recall_interval"]
        rows.append(
            (
                row["method"],
                row["budget"] or "-",
                f"{row['kept']:.1%}",
                str(row["window"] or "-"),
                str(row["n"]),
                f"{row['recall']:.3f}",
                f"{low:.2f} to {high:.2f}",
                f"{row['recall'] / full:.0%}" if full else "-",
                f"{row['contained']:.3f}",
                *("-" if value is None else f"{value:.3f}" for value in row["by_length"].values()),
            )
        )
    return command.text_table(rows)


def parse_arguments():
    parser = command.Parser("Ask for needles hidden in a haystack, with every method and budget from one prefill.")
    command.add_model_arguments(parser)
    own = "how many of the project's own, or a JSONL file: needle, question, answer (modes all and distractors: families)"
    modes = "; ".join(f"{name}: {what}" for name, what in MODES.items())
    lengths, depths = [1024, 2048, 4096], [0, 25, 50, 75, 100]
    parser.add_argument("--haystack", default=str(DATA / "evaluate/essays"), help="a text file, or a folder of .txt files")
    parser.add_argument("--needles", default="24", help=own)
    parser.add_argument("--mode", choices=MODES, default="single", help=modes)
    parser.add_argument("--hidden", type=command.positive, default=4, help="needles in a prompt, in modes other than single")
    parser.add_argument("--lengths", type=command.positive, nargs="+", default=lengths, help="prompt lengths in tokens")
    parser.add_argument("--depths", type=command.percent, nargs="+", default=depths, help="depths of the needle in percent")
    parser.add_argument("--limit", type=command.positive, help="only so many examples, drawn by --seed")
    sweep.add_arguments(parser, max_new_tokens=32)
    arguments = parser.parse_args()
    sweep.check_arguments(arguments)
    return arguments


def make_examples(arguments, model: Llama, tokenizer: Tokenizer) -> list[Example]:
    """All examples, or those that --limit draws; InputError, before any long work, where a length cannot be had."""
    lengths, depths = sorted(set(arguments.lengths)), sorted(set(arguments.depths))
    check_prompt(model, torch.empty(1, lengths[-1]), arguments.max_new_tokens)
    tasks = load_tasks(arguments.needles, arguments.mode, arguments.hidden, arguments.seed)
    text = load_haystack(arguments.haystack)
    examples = []
    for number, task in enumerate(tasks, 1):
        haystack = begin_anywhere(text, f"{arguments.seed} {number}")
        cells = [Example(task, number, haystack, length, depth) for length in lengths for depth in depths]
        cells[0].prompt(tokenizer)
        examples += cells
    return sweep.draw(examples, arguments.limit, arguments.seed)


def experiment(arguments, group: Ranks) -> None:
    """Run or go on with the experiment; rank 0 reports."""
    model, tokenizer = load(arguments.model, group.device(arguments.device), arguments.dtype, arguments.plain)
    examples = make_examples(arguments, model, tokenizer)
    pairs = sweep.make_pairs(model, arguments)
    texts = [[example.haystack, asdict(example.task)] for example in examples]
    settings = sweep.settings_of(model, pairs, arguments) | {"texts": digest(texts)}
    by_key = {example.key: example for example in examples}

    def one(key: str) -> dict:
        return evaluate(model, tokenizer, by_key[key], pairs, arguments.max_new_tokens)

    results = sweep.run(list(by_key), one, settings, arguments.results, group)
    if group.reports:
        window = max(pair.policy.window or 0 for pair in pairs)
        record = {
            "settings": settings,
            "versions": command.versions(),
            "seconds": sweep.mean_seconds(results),
            "window": examples[0].prompt(tokenizer).tail(window),
            "scores": [summarise(pair, examples, results, arguments.seed) for pair in pairs],
        }
        sweep.report(record, arguments, table(record["scores"]), eval_plots.draw_niah)


def main() -> None:
    arguments = parse_arguments()
    with ranks() as group:
        experiment(arguments, group)


if __name__ == "__main__":
    command.run(main)
