"""Measure a model's profile, once: `python -m minikv.profile`.

Asks for needles hidden in essays, scores every head by what it attended to while the model answered, ranks the heads,
and then measures how much keeping only 32 entries would change each layer's output (CompressKV, sections 3.2 and 3.3).
An interrupted measurement goes on where it was.
"""

from __future__ import annotations

import datetime
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from minikv import command, offline
from minikv.errors import InputError
from minikv.evals.error_prompts import ErrorPrompt, add_error_arguments, error_sets
from minikv.evals.journal import Journal, digest
from minikv.evals.needle_cases import NeedleCase, add_needle_arguments, describe, describe_runs, needle_cases
from minikv.files import write_json
from minikv.haystack import recall
from minikv.srh import Profile, fingerprint, rank_heads, strongest
from minikv.weights import load

FOUND = 0.5  # a run counts when more than this share of the answer's words was found
FEW_RUNS, FEW_OF_ALL = 10, 1 / 3  # a ranking from fewer counted runs than that deserves a warning


@dataclass(frozen=True)
class Identification:
    """The runs whose answer was found: both scores [runs, layers, heads], and the needle that each run asked for."""

    semantic: Tensor
    traditional: Tensor
    needles: list[str]
    runs: int  # all that were made


def identify(model, tokenizer, cases: list[NeedleCase], max_answer_tokens: int, journal: Journal) -> Identification:
    """Score the heads in a run of each case. InputError when no answer was found: such scores would say nothing."""
    with command.show_progress(len(cases), "scoring heads") as bar:
        for case in cases:
            if heads_key(case) not in journal.done:
                journal.add(heads_key(case), run_case(model, tokenizer, case, max_answer_tokens))
            bar.update()
    counted = [(case, journal.done[heads_key(case)]) for case in cases]
    counted = [(case, result) for case, result in counted if result["recall"] > FOUND]
    if not counted:
        journal.remove()
        raise InputError(
            f"in none of {len(cases)} runs did the model find the needle, so no head can be scored;"
            " try shorter --lengths, or other --needles"
        )
    if len(counted) < max(FEW_RUNS, len(cases) * FEW_OF_ALL):
        few = f"{len(counted)} of {len(cases)} runs found the needle, which is few: the ranking may be chance"
        print(f"warning: {few} (see its stability)", file=sys.stderr)
    semantic, traditional = (
        torch.tensor([result[name] for _, result in counted]) for name in ("semantic", "traditional")
    )
    return Identification(semantic, traditional, [case.needle.needle for case, _ in counted], len(cases))


def heads_key(case: NeedleCase) -> str:
    return f"heads: {case.key}"


def run_case(model, tokenizer, case: NeedleCase, max_answer_tokens: int) -> dict:
    """One needle run as the journal keeps it; a score in JSON is the same number when it is read again."""
    prompt = case.prompt(tokenizer)
    run = offline.score_heads(model, prompt.ids, prompt.answer_positions, tokenizer.stop_ids, max_answer_tokens)
    text = tokenizer.decode(run.answer)
    return {
        "answer": text,
        "recall": recall(case.needle.answer, text),
        "semantic": run.semantic.tolist(),
        "traditional": run.traditional.tolist(),
    }


def measure_layers(
    model,
    tokenizer,
    sets: dict[str, list[ErrorPrompt]],
    ranks: list[list[int]],
    max_answer_tokens: int,
    journal: Journal,
) -> dict[str, Tensor]:
    """The layers' errors [layers] in each data set, summed over its prompts."""
    sums = {name: torch.zeros(model.config.layers, dtype=torch.float64) for name in sets}
    with command.show_progress(sum(map(len, sets.values())), "measuring layers") as bar:
        for name, prompts in sets.items():
            for prompt in prompts:
                ids = prompt.make().ids
                key = f"errors {digest([ids, ranks])}: {name}, {prompt.key}"  # by other ranks other entries are kept
                if key not in journal.done:
                    errors = offline.layer_errors(model, ids, ranks, tokenizer.stop_ids, max_answer_tokens)
                    journal.add(key, {"errors": errors.tolist()})
                sums[name] += torch.tensor(journal.done[key]["errors"], dtype=torch.float64)
                bar.update()
            if not sums[name].sum() > 0:
                raise InputError(
                    f"in the data set {name!r} no layer's error could be measured: no prompt was longer than 32 tokens"
                    " with an answer longer than one"
                )
    return sums


def make_profile(
    arguments, model, cases: list[NeedleCase], found: Identification, errors: dict[str, Tensor]
) -> Profile:
    """The measurements with everything that says where they come from.

    The same measurement on the same day gives the same file, byte for byte: there is no time of day in it.
    """
    semantic, traditional = found.semantic.mean(0), found.traditional.mean(0)
    config = model.config
    shape = {name: getattr(config, name) for name in ("layers", "heads", "kv_heads", "head_dim")}
    counts = {"runs": found.runs, "runs_counted": len(found.needles)}
    return Profile(
        head_ranks=rank_heads(semantic),
        layer_scores=offline.layer_scores(errors.values()),
        head_scores=semantic.tolist(),
        traditional_scores=traditional.tolist(),
        model={"name": Path(arguments.model).name, **shape, "weights": fingerprint(model)},
        settings={**describe(arguments, cases), "error_prompts": list(errors), **counts, "dtype": dtype_name(model)},
        versions={**command.versions(), "date": datetime.date.today().isoformat()},
        stability={
            name: offline.stability(scores, found.needles, arguments.seed)
            for name, scores in (("semantic", found.semantic), ("traditional", found.traditional))
        },
        layer_scores_by_set={name: offline.layer_scores([sums]) for name, sums in errors.items()},
    )


def dtype_name(model) -> str:
    return str(model.dtype).removeprefix("torch.")


def parse_arguments():
    parser = command.Parser("Measure which heads of a model retrieve and how much eviction hurts each layer.")
    command.add_model_arguments(parser)
    add_needle_arguments(parser, "identify", lengths=[1024, 2048], depths=[10, 50, 90])
    add_error_arguments(parser)
    parser.add_argument(
        "--output",
        help="where to write the profile; default: weights/profiles/MODEL.json; a name that ends in _head_idx.json gives"
        " the two files of the paper's release instead",
    )
    plots = "draw the head scores, layer errors and budgets into this folder"
    parser.add_argument("--plots", metavar="FOLDER", help=plots)
    parser.add_argument("--json", metavar="FILE", help="write a record of the run to this file as well")
    arguments = parser.parse_args()
    arguments.output = Path(arguments.output or command.default_profile_path(arguments.model))
    command.check_outputs(arguments, "output", "json")
    if arguments.plots and Path(arguments.plots).is_file():
        raise InputError(f"--plots {arguments.plots} is a file; a folder is needed")
    return arguments


def open_journal(output: Path, arguments, model, cases: list[NeedleCase]) -> Journal:
    """The journal beside the output. What decides a single run is in its settings; lengths and depths may be added."""
    settings = {
        "weights": fingerprint(model),
        "dtype": dtype_name(model),
        "device": model.device.type,
        **describe_runs(arguments, cases),
    }
    path = output.with_name(output.stem + ".runs.jsonl")
    journal = Journal(path, settings)
    if journal.done:
        print(f"going on from {path}, which holds {len(journal.done)} runs")
    return journal


def main() -> None:
    arguments, start = parse_arguments(), time.perf_counter()
    output = arguments.output
    model, tokenizer = load(arguments.model, arguments.device, arguments.dtype, arguments.plain)
    cases = needle_cases(arguments, model, tokenizer)
    sets = error_sets(arguments, tokenizer, cases)
    with open_journal(output, arguments, model, cases) as journal:
        found = identify(model, tokenizer, cases, arguments.max_answer_tokens, journal)
        ranks = rank_heads(found.semantic.mean(0))
        errors = measure_layers(model, tokenizer, sets, ranks, arguments.max_answer_tokens, journal)
        profile = make_profile(arguments, model, cases, found, errors)
        profile.save(output)
        journal.remove()
    seconds, drawn = time.perf_counter() - start, []
    if arguments.json:
        record = {"settings": profile.settings, "versions": profile.versions, "stability": profile.stability}
        write_json(arguments.json, {**record, "seconds": seconds, "profile": str(output)})
    if arguments.plots:
        from minikv.report.profile_plots import draw

        drawn = draw(profile, Path(arguments.plots))
    print(f"{summary(profile)}\n\nwritten to {output} after {seconds:.0f} s")
    if drawn:
        print("drawn: " + ", ".join(map(str, drawn)))


def summary(profile: Profile, count: int = 8) -> str:
    """How many runs counted, how stable the ranking is, the strongest heads and the layers that eviction hurts most."""
    lines = [f"the answer was found in {profile.settings['runs_counted']} of {profile.settings['runs']} runs"]
    for name, halves in profile.stability.items():
        if halves:
            agreement = (halves[measure] for measure in ("spearman", "top4_overlap"))
            correlation, overlap = ("-" if value is None else f"{value:.2f}" for value in agreement)
            lines.append(
                f"{name} ranking in two halves of these runs: rank correlation {correlation} over all heads,"
                f" overlap {overlap} of the top 4 a layer"
            )
    semantic, traditional = torch.tensor(profile.head_scores), torch.tensor(profile.traditional_scores)
    rows = [("head", "semantic score", "traditional score")]
    for layer, head in strongest(semantic)[:count]:
        rows.append((f"layer {layer} head {head}", f"{semantic[layer, head]:.3f}", f"{traditional[layer, head]:.3f}"))
    hurt = sorted(range(profile.layers), key=lambda layer: -profile.layer_scores[layer])[:count]
    worst = ", ".join(f"{layer} ({profile.layer_scores[layer]:.1%})" for layer in hurt)
    lines += ["", command.text_table(rows), "", f"layers that eviction hurts most (share of the error): {worst}"]
    return "\n".join(lines)


if __name__ == "__main__":
    command.run(main)
