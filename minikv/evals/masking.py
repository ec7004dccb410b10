"""What retrieval loses without some heads: `python -m minikv.evals.masking` (CompressKV's head-masking ablation).

Silences the top n heads of the whole model, by semantic score, by traditional score or at random, and asks for hidden
needles. A head is silenced by zeroing its output, the clean ablation, or its query, as the paper's release does: that
head then averages all values, which is not silence but noise. During `decode` only, the last prompt token included, or
during the whole `run`, the prompt's own prefill included.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch

from minikv import command
from minikv.cache import KVCache
from minikv.errors import InputError
from minikv.evals.journal import Journal, digest
from minikv.evals.needle_cases import NeedleCase, add_needle_arguments, describe, describe_runs, needle_cases
from minikv.evals.silencing import PARTS, masked_answers, prefill_before_last, rankings, sounding_heads
from minikv.evals.statistics import bootstrap
from minikv.files import write_json
from minikv.haystack import contains, recall
from minikv.model import Llama
from minikv.srh import Profile, fingerprint
from minikv.tokenizer import Tokenizer
from minikv.weights import load

PHASES = ("decode", "run")
RANKINGS = ("semantic", "traditional", "random")


@dataclass(frozen=True)
class Masking:
    """One row of the experiment: whose order heads are silenced in, which part of them, and when."""

    ranking: str
    part: str
    phase: str

    def key(self, case: NeedleCase) -> str:
        return f"{self.ranking}, {self.part}, {self.phase}: {case.key}"


NOTHING = Masking("none", "output", "decode")  # no head silenced, so it does not matter how


class Experiment:
    """All maskings of all cases, one prefill a case, each result in the journal as soon as it is there."""

    def __init__(self, model: Llama, tokenizer: Tokenizer, profile: Profile, arguments):
        self.model, self.tokenizer, self.arguments = model, tokenizer, arguments
        self.results: dict[str, dict] = {}  # by Masking.key
        orders = rankings(profile, arguments.random_seeds, arguments.leave_out)
        self.sounding = {name: sounding_heads(order, arguments.heads, profile) for name, order in orders.items()}
        self.sounding[NOTHING.ranking] = torch.ones(1, profile.layers, profile.heads)
        self.maskings = [NOTHING] + [
            Masking(ranking, part, phase) for part in arguments.zero for phase in arguments.during for ranking in orders
        ]

    def run(self, cases: list[NeedleCase], journal: Journal) -> None:
        self.results = journal.done
        with command.show_progress(len(cases) * len(self.maskings), "masking") as bar:
            for case in cases:
                missing = [masking for masking in self.maskings if masking.key(case) not in self.results]
                bar.update(len(self.maskings) - len(missing))
                if missing:
                    ids = case.prompt(self.tokenizer).ids
                    before_last = prefill_before_last(self.model, ids)
                for masking in missing:
                    journal.add(masking.key(case), self.answers(case, ids, masking, before_last))
                    bar.update()

    def answers(self, case: NeedleCase, ids: list[int], masking: Masking, before_last: KVCache) -> dict:
        """The answers of one masking, for each number of heads, and what they are worth."""
        texts = [
            self.tokenizer.decode(answer)
            for answer in masked_answers(
                self.model,
                ids,
                self.sounding[masking.ranking],
                masking.part,
                before_last if masking.phase == "decode" else None,
                self.arguments.max_answer_tokens,
                self.tokenizer.stop_ids,
            )
        ]
        answer = case.needle.answer
        return {
            "answers": texts,
            "recall": [recall(answer, text) for text in texts],
            "contained": [float(contains(answer, text)) for text in texts],
        }

    def values(self, cases: list[NeedleCase], ranking: str, part: str, phase: str, heads: int, score: str) -> list[float]:
        """A score of each case with so many heads silenced; of random heads the mean over the seeds."""
        if heads == 0:
            maskings, row = [NOTHING], 0
        else:
            asked = (ranking, part, phase)
            maskings = [m for m in self.maskings if (m.ranking.split()[0], m.part, m.phase) == asked]
            row = self.arguments.heads.index(heads)
        each = [[self.results[masking.key(case)][score][row] for masking in maskings] for case in cases]
        return [sum(values) / len(values) for values in each]


def curves(experiment: Experiment, cases: list[NeedleCase]) -> list[dict]:
    """For each part, phase, ranking and number of heads both scores as [mean, low, high].

    The intervals are of 95 %, over the needles. `more_than_semantic` is the recall that is left above what the top
    semantic heads leave, prompt by prompt: where its interval is above 0, those hurt more.
    """
    arguments, points = experiment.arguments, []

    def interval(values: list[float]) -> list[float]:
        by_needle: dict[str, list[float]] = {}
        for case, value in zip(cases, values):
            by_needle.setdefault(case.needle.needle, []).append(value)
        return list(bootstrap(by_needle, seed=arguments.seed))

    for part, phase, ranking in itertools.product(arguments.zero, arguments.during, RANKINGS):
        for heads in [0, *arguments.heads]:
            point = {"zeroed": part, "during": phase, "ranking": ranking, "heads": heads}
            for score in ("recall", "contained"):
                point[score] = interval(experiment.values(cases, ranking, part, phase, heads, score))
            if heads and ranking != "semantic":
                mine = experiment.values(cases, ranking, part, phase, heads, "recall")
                semantic = experiment.values(cases, "semantic", part, phase, heads, "recall")
                point["more_than_semantic"] = interval([a - b for a, b in zip(mine, semantic)])
            points.append(point)
    return points


def table(points: list[dict]) -> str:
    """Recall with its interval for each number of heads, and how far the controls stay above the semantic heads."""

    def cell(values: list[float] | None) -> str:
        return "-" if values is None else "{:+.2f} [{:+.2f}, {:+.2f}]".format(*values)

    blocks = []
    for part, phase in dict.fromkeys((point["zeroed"], point["during"]) for point in points):
        here = {(p["ranking"], p["heads"]): p for p in points if (p["zeroed"], p["during"]) == (part, phase)}
        rows = [(f"{part} zeroed, {phase}", *RANKINGS, "random - semantic", "traditional - semantic")]
        for heads in dict.fromkeys(heads for _, heads in here):
            of = [here[ranking, heads] for ranking in RANKINGS]
            recalls = ["{:.2f} [{:.2f}, {:.2f}]".format(*point["recall"]) for point in of]
            differences = [cell(here[other, heads].get("more_than_semantic")) for other in ("random", "traditional")]
            rows.append((f"{heads} heads", *recalls, *differences))
        blocks.append(command.text_table(rows))
    return "\n\n".join(blocks)


def parse_arguments():
    parser = command.Parser("Silence the heads of a model that retrieve, and see what of its retrieval is left.")
    command.add_model_arguments(parser)
    add_needle_arguments(parser, "evaluate", lengths=[1024], depths=[10, 50, 90])
    parser.add_argument("--profile", help="the model's profile; default: weights/profiles/MODEL.json")
    how_many = "how many heads of the model to silence; 0 is always done"
    parser.add_argument("--heads", type=command.not_negative, nargs="+", default=[0, 5, 10, 20, 30], help=how_many)
    what = "a head's output, or its query, as the paper's release does"
    parser.add_argument("--zero", choices=PARTS, nargs="+", default=list(PARTS), help=what)
    when = "from the last prompt token on, or from the first"
    parser.add_argument("--during", choices=PHASES, nargs="+", default=list(PHASES), help=when)
    seeds = "a random choice of heads for each"
    parser.add_argument("--random-seeds", type=command.seed, nargs="+", default=[0, 1, 2], help=seeds)
    left_out = "the strongest heads, so many by either score, that are never drawn at random"
    parser.add_argument("--leave-out", type=command.not_negative, default=30, help=left_out)
    results = "JSONL: append each result as it is finished, and go on from there"
    parser.add_argument("--results", metavar="FILE", help=results)
    parser.add_argument("--json", metavar="FILE", help="write settings, curves and answers to this file")
    parser.add_argument("--plot", metavar="FILE", help="draw recall against the number of heads into this PNG file")
    arguments = parser.parse_args()
    command.check_outputs(arguments, "results", "json", "plot")
    for name in ("zero", "during", "random_seeds"):
        setattr(arguments, name, list(dict.fromkeys(getattr(arguments, name))))
    arguments.heads = sorted({*arguments.heads} - {0})
    if not arguments.heads:
        raise InputError("--heads names no number above 0; accepted: one or more, such as 5 10 20 30")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    model, tokenizer = load(arguments.model, arguments.device, arguments.dtype, arguments.plain)
    profile = command.load_profile(model, arguments.profile, arguments.model)
    cases = needle_cases(arguments, model, tokenizer)
    of_all = {
        "weights": fingerprint(model),
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": model.device.type,
        "profile": digest([profile.head_scores, profile.traditional_scores]),
        "leave_out": arguments.leave_out,
        "heads": arguments.heads,
    }
    experiment = Experiment(model, tokenizer, profile, arguments)
    with Journal(arguments.results, {**of_all, **describe_runs(arguments, cases)}) as journal:
        experiment.run(cases, journal)
    points = curves(experiment, cases)
    settings = {"model": arguments.model, "random_seeds": arguments.random_seeds}
    settings |= of_all | describe(arguments, cases)
    record = {"settings": {**settings, "prompts": len(cases)}, "versions": command.versions(), "curves": points}
    if arguments.json:
        write_json(arguments.json, {**record, "results": experiment.results})
    if arguments.plot:
        from minikv.report.masking_plot import draw

        draw(record, arguments.plot)
    needles = len({case.needle.needle for case in cases})
    print(f"needle recall of {len(cases)} prompts, 95 % intervals over {needles} needles\n\n{table(points)}")


if __name__ == "__main__":
    command.run(main)
