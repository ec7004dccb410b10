"""The 16 English sets of LongBench, every method and budget from one prefill: `python -m minikv.evals.longbench DATA`.

DATA is a folder with the benchmark's files, SET.jsonl. Its prompts and answer lengths are read from its own two files
(--config); without them the program has its own wording, whose numbers cannot be compared with published ones. A
set's score is 100 times the mean over its examples, a group's the mean of its sets, and the mean that of all sets.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from minikv import command
from minikv.errors import InputError
from minikv.evals import sweep
from minikv.evals.journal import digest
from minikv.evals.longbench_prompts import (
    GROUPS,
    Protocol,
    Record,
    check_room,
    find_sets,
    make_prompt,
    read_protocols,
    read_records,
)
from minikv.evals.metrics import score
from minikv.evals.ranks import Ranks, ranks
from minikv.evals.sweep import Pair
from minikv.model import Llama
from minikv.report import eval_plots
from minikv.tokenizer import Tokenizer
from minikv.weights import load

NOT_COMPARABLE = "Without --config these are not the benchmark's prompts: the scores cannot be compared with published ones."


def evaluate(
    model: Llama, tokenizer: Tokenizer, record: Record, protocol: Protocol, pairs: list[Pair], max_length: int
) -> dict:
    """The result of one example: for each pair the answer, its score, and what share of the prompt was kept."""
    ids = make_prompt(tokenizer, record, protocol, max_length).ids
    stops, line_ends = tokenizer.stop_ids, record.dataset == "samsum"
    if line_ends:  # its answers are one line
        stops |= {tokenizer.encode("\n")[-1]}
    policies = [pair.policy for pair in pairs]
    swept = sweep.sweep(model, ids, policies, protocol.max_new_tokens, stops, at_least_one=line_ends)
    result: dict = {"tokens": len(ids), "seconds": swept.seconds, "pairs": {}}
    for pair, answer, kept in zip(pairs, swept.answers, swept.kept):
        text = tokenizer.decode(answer)
        points = score(record.dataset, text, record.answers, record.all_classes)
        result["pairs"][pair.name] = {"text": text, "kept": kept / len(ids), "score": points}
    return result


def summarise(pair: Pair, records: list[Record], results: dict[str, dict]) -> dict:
    """The scores of one method and budget, 0 to 100: of each set, each group, and their mean."""
    own = [(record.dataset, results[record.key]["pairs"][pair.name]) for record in records]
    sets = {name: _mean([100 * r["score"] for dataset, r in own if dataset == name]) for name in dict(own)}
    groups = {group: [sets[name] for name in members if name in sets] for group, members in GROUPS.items()}
    return {
        "method": pair.method,
        "budget": pair.budget,
        "window": pair.policy.window or None,
        "kept": _mean([result["kept"] for _, result in own]),
        "sets": sets,
        "groups": {group: _mean(values) for group, values in groups.items() if values},
        "mean": _mean(list(sets.values())),
    }


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def table(scores: list[dict], counts: dict[str, int], part: str) -> str:
    """The scores of the sets or the groups (`part`), the mean, and the mean's share of the full cache's, as text."""
    full = next((row["mean"] for row in scores if row["method"] == "full"), None)
    names = [f"{name} ({counts[name]})" if name in counts else name for name in scores[0][part]]
    rows = [("method", "budget", "kept", "window", *names, "mean", "of full")]
    for row in scores:
        points = [*row[part].values(), row["mean"]]
        share = f"{row['mean'] / full:.1%}" if full else "-"
        start = (row["method"], row["budget"] or "-", f"{row['kept']:.1%}", str(row["window"] or "-"))
        rows.append((*start, *(f"{value:.2f}" for value in points), share))
    return command.text_table(rows)


def parse_arguments():
    parser = command.Parser("Score LongBench's English sets, with every method and budget from one prefill.")
    parser.add_argument("data", help="folder with the benchmark's SET.jsonl")
    command.add_model_arguments(parser)
    parser.add_argument("--config", help="folder with the benchmark's dataset2prompt.json and dataset2maxlen.json")
    parser.add_argument("--sets", nargs="+", help="only these sets; default: all that DATA has")
    parser.add_argument("--limit", type=command.positive, help="only so many examples of each set, drawn by --seed")
    context = "tokens of a prompt and its answer together; default: the model's context"
    parser.add_argument("--max-length", type=command.positive, help=context)
    sweep.add_arguments(parser, max_new_tokens=None)
    arguments = parser.parse_args()
    sweep.check_arguments(arguments)
    if arguments.sets is not None:
        arguments.sets = sweep.listed("sets", arguments.sets)
    return arguments


def read_examples(arguments) -> tuple[list[Record], dict[str, Protocol]]:
    """The records to run and how each set is asked."""
    folder = Path(arguments.data)
    sets = find_sets(folder, arguments.sets)
    protocols = read_protocols(Path(arguments.config) if arguments.config else None, sets)
    if arguments.max_new_tokens:
        protocols = {name: Protocol(protocol.prompt, arguments.max_new_tokens) for name, protocol in protocols.items()}
    records = [sweep.draw(read_records(folder, name), arguments.limit, arguments.seed) for name in sets]
    return [record for of_set in records for record in of_set], protocols


def experiment(arguments, group: Ranks) -> None:
    """Run or go on with the experiment; rank 0 reports."""
    records, protocols = read_examples(arguments)
    model, tokenizer = load(arguments.model, group.device(arguments.device), arguments.dtype, arguments.plain)
    arguments.max_length = arguments.max_length or model.config.context
    if arguments.max_length > model.config.context:
        raise InputError(f"--max-length {arguments.max_length} exceeds the model's context of {model.config.context}")
    pairs = sweep.make_pairs(model, arguments)
    for record in records:
        check_room(tokenizer, record, protocols[record.dataset], arguments.max_length)
    texts = [[record.content for record in records], {name: asdict(protocol) for name, protocol in protocols.items()}]
    settings = sweep.settings_of(model, pairs, arguments) | {"texts": digest(texts)}
    by_key = {record.key: record for record in records}

    def one(key: str) -> dict:
        record = by_key[key]
        return evaluate(model, tokenizer, record, protocols[record.dataset], pairs, arguments.max_length)

    results = sweep.run(list(by_key), one, settings, arguments.results, group)
    if group.reports:
        counts = {name: sum(record.dataset == name for record in records) for name in protocols}
        window = max(pair.policy.window or 0 for pair in pairs)
        first = make_prompt(tokenizer, records[0], protocols[records[0].dataset], arguments.max_length)
        record = {
            "settings": settings,
            "comparable": bool(arguments.config),
            "versions": command.versions(),
            "seconds": sweep.mean_seconds(results),
            "window": first.tail(window),
            "examples": counts,
            "scores": [summarise(pair, records, results) for pair in pairs],
        }
        tables = [table(record["scores"], counts, part) for part in ("sets", "groups")]
        notes = ["Scores are 0 to 100; the numbers of examples are in brackets.", *([] if arguments.config else [NOT_COMPARABLE])]
        sweep.report(record, arguments, "\n\n".join([*tables, "\n".join(notes)]), eval_plots.draw_longbench)


def main() -> None:
    arguments = parse_arguments()
    with ranks() as group:
        experiment(arguments, group)


if __name__ == "__main__":
    command.run(main)
