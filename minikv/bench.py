"""How fast and how large: `python -m minikv.bench`.

Prefill, time to first token, decoding, selection, and memory, for lengths, methods and dtypes, beside other programs where
they are asked for. Each participant is a process of its own that loads and warms up once; then all take turns, round
by round, so that whatever slows the machine down for a while slows all of them. The machine's own rates are measured
between the rounds, and each figure is shown as a share of what they allow (minikv/benchmark/roofline.py).
"""

from __future__ import annotations

import shlex
import sys
from argparse import Namespace

import torch

from minikv import command
from minikv.benchmark import entrants, machine, summary, tables
from minikv.benchmark.participants import Participant, Run, take_turns, time_selections
from minikv.benchmark.random_weights import SHAPES, check_fit
from minikv.benchmark.sources import Source, open_source
from minikv.benchmark.worker import WARM_UP_STEPS, WARM_UP_TOKENS
from minikv.errors import InputError
from minikv.evals import sweep
from minikv.files import write_json
from minikv.inference import check_prompt
from minikv.weights import DTYPES, choose_device

MEMORY = (
    "peak: memory above what the process held after loading and warm-up, in the first round; KV: keys and values held"
    " after the prefill; bound: the least time that reading or arithmetic takes at the machine's best rates, as a share of"
    " the measured time"
)


def parse_arguments() -> Namespace:
    parser = command.Parser("Measure speed and memory, beside other programs if asked for.")
    command.add_model_arguments(parser, compiles=True)
    parser.add_argument("--lengths", type=command.positive, nargs="+", default=[2000, 8000], help="prompt lengths in tokens")
    sweep.add_methods_argument(parser, ["full", "compresskv"])
    parser.add_argument("--budget", default="256", help=command.budget_help)
    command.add_selection_arguments(parser)
    dtypes = {"choices": DTYPES, "default": ["float32", "bfloat16"], "help": "each measured in turn; --dtype: only that one"}
    parser.add_argument("--dtypes", nargs="+", **dtypes)
    count = "tokens of each answer, the first included"
    parser.add_argument("--new-tokens", type=command.not_negative, default=32, help=count)
    parser.add_argument("--repeats", type=command.positive, default=5, help="rounds, in each of which all take their turn")
    against = f"others to measure, comma-separated: {','.join(entrants.PEERS)}; kvpress=PYTHON runs it in that Python"
    parser.add_argument("--against", metavar="PEERS", default="", help=against)
    gguf = "what llama.cpp runs; default: the default model's own GGUF file"
    parser.add_argument("--llama-gguf", metavar="FILE", help=gguf)
    random = f"measure a shape with random weights, no checkpoint: {', '.join(SHAPES)}"
    parser.add_argument("--random-weights", metavar="SHAPE", choices=SHAPES, help=random)
    parser.add_argument("--json", metavar="FILE", help="write all measurements into this JSON file")
    parser.add_argument("--plot", metavar="FILE", help="draw prefill and decode times into this PNG file")
    arguments = parser.parse_args()
    if arguments.dtype != "auto":  # of add_model_arguments, where one dtype is all there is
        arguments.dtypes = [arguments.dtype]
    if not set(arguments.dtypes) <= set(DTYPES):
        raise InputError(f"--dtype {arguments.dtype} is not supported; accepted: auto, {', '.join(DTYPES)}")
    arguments.methods = sweep.listed("methods", arguments.methods)
    arguments.dtypes = list(dict.fromkeys(arguments.dtypes))
    arguments.lengths = sorted(set(arguments.lengths))  # the shortest first: what it leaves in memory is the least
    arguments.against = entrants.read_peers(arguments.against)
    for spec in arguments.methods:
        command.read_spec(spec)
    command.check_outputs(arguments, "json", "plot")
    return arguments


def prepare(arguments: Namespace, device: torch.device) -> Source:
    """The model, once it is clear that all that was asked for can be run. Raises InputError."""
    most = max(arguments.lengths) + arguments.new_tokens
    if arguments.random_weights:
        per_dtype = 1 + sum(name in arguments.against for name in ("transformers", "kvpress"))
        check_fit(arguments.random_weights, most, arguments.dtypes * per_dtype, machine.free_memory(device))
    source = open_source(arguments.model, arguments.random_weights, most)
    check_prompt(Namespace(config=source.config), torch.empty(1, max(arguments.lengths)), arguments.new_tokens)
    entrants.check_methods(arguments, source.config)
    return source


def measure(arguments: Namespace, source: Source, device: torch.device) -> tuple[Run, dict, list[dict]]:
    """All rounds, or those before Ctrl-C: the run, the record, and the rows of its table. Workers are ended."""
    threads, run = torch.get_num_threads(), Run()
    arguments.llama_gguf = entrants.find_gguf(arguments, source)
    prompts = {length: source.prompt(length) for length in arguments.lengths}
    rates = machine.Rates(source.config, arguments.dtypes, device)
    participants: list[Participant] = []
    selections: dict[tuple, list[float]] = {}
    try:
        entrants.enter(entrants.all_settings(arguments, source, prompts, threads), arguments.against, run, participants)
        rates.measure()
        asked = arguments.repeats * len(prompts) * sum(len(participant.methods) for participant in participants)
        with command.show_progress(asked, "measuring") as bar:
            take_turns(participants, prompts, arguments.new_tokens, arguments.repeats, run, rates.measure, bar.update)
        selections = time_selections(participants, prompts, arguments.repeats, run)
    except KeyboardInterrupt:
        run.interrupted = True
    finally:
        for participant in participants:
            participant.close()
    rows = summary.summarize(run.measurements, selections)
    weight_bytes = {who.name: who.facts["weight_bytes"] for who in participants if "weight_bytes" in who.facts}
    summary.add_bounds(rows, source.config, rates, arguments.new_tokens, weight_bytes)
    record = {
        "command": shlex.join(["python", "-m", "minikv.bench", *sys.argv[1:]]),
        "settings": settings_of(arguments),
        "versions": command.versions(),
        "machine": machine.describe(device, threads),
        "rates": {name: getattr(rates, name) for name in ("bytes_per_second", "multiply_adds_per_second")},
        "participants": [{"name": who.name, "facts": who.facts} for who in participants],
        "left_out": run.failures,
        "interrupted": run.interrupted,
        "rows": rows,
        "ratios": summary.ratios(run.measurements),
        "remarks": summary.remarks(rows),
        "measurements": run.measurements,
    }
    return run, record, rows


def settings_of(arguments: Namespace) -> dict:
    apart = ("json", "plot", "debug", "dtype", "random_weights", "model")
    settings = {name: value for name, value in vars(arguments).items() if name not in apart}
    settings["model"] = f"random weights, {arguments.random_weights}" if arguments.random_weights else arguments.model
    return settings | {"warm_up": f"a prefill of {WARM_UP_TOKENS} tokens and {WARM_UP_STEPS} decode steps for each method"}


def report(record: dict, arguments: Namespace) -> None:
    """JSON and picture, then the tables and what they were measured on."""
    if arguments.json:
        write_json(arguments.json, record)
    if arguments.plot:
        from minikv.report.bench_plot import draw

        draw(record, arguments.plot)
    print(tables.figures(record["rows"]))
    print(f"\nn rounds, median (least-greatest). {MEMORY}.")
    if record["ratios"]:
        print(f"\nHow many times faster than the peer, median of the rounds' ratios\n{tables.against(record['ratios'])}")
    if record["remarks"]:
        print("\nWhat to expect\n" + "\n".join(record["remarks"]))
    print("\n" + tables.short_form(record["machine"], record["rates"], record["participants"]))
    for failure in record["left_out"]:
        print(f"left out: {failure['participant']}: {failure['reason']}")
    print(f"Warm-up: {record['settings']['warm_up']}. Command: {record['command']}")


def main() -> None:
    arguments = parse_arguments()
    device = choose_device(arguments.device)
    run, record, rows = measure(arguments, prepare(arguments, device), device)
    if rows:
        report(record, arguments)
    if run.interrupted:
        raise KeyboardInterrupt
    if not rows:
        reasons = "; ".join(f"{failure['participant']}: {failure['reason']}" for failure in run.failures)
        raise InputError(f"nothing could be measured: {reasons}")


if __name__ == "__main__":
    command.run(main)
