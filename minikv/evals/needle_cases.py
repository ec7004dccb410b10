"""The grid of needle prompts that is measured on: every needle at every length and depth, each in its own haystack."""

from __future__ import annotations

import random
from argparse import ArgumentParser
from dataclasses import dataclass
from pathlib import Path

import torch

from minikv import command
from minikv.evals.journal import digest
from minikv.haystack import DATA, Needle, NeedlePrompt, hide, load_haystack, load_needles
from minikv.inference import check_prompt
from minikv.model import Llama
from minikv.tokenizer import Tokenizer


@dataclass(frozen=True)
class NeedleCase:
    """One needle, one prompt length in tokens, one depth in percent; `haystack` is the needle's own."""

    needle: Needle
    length: int
    depth: float
    haystack: str

    @property
    def key(self) -> str:
        """The case's name in a journal."""
        needle = self.needle
        return f"{self.length} tokens, depth {self.depth:g} %, {needle.needle} {needle.question} {needle.answer}"

    def prompt(self, tokenizer: Tokenizer) -> NeedlePrompt:
        """Made when it is wanted: all prompts of a long run together would fill the memory."""
        return hide(tokenizer, self.haystack, self.needle, self.length, self.depth / 100)


def add_needle_arguments(parser: ArgumentParser, data: str, lengths: list[int], depths: list[int]) -> None:
    """The arguments of a grid of needle prompts; `data` is the folder below minikv/data that they come from."""
    parser.add_argument("--haystack", default=DATA / data / "essays", help="a text file, or a folder of .txt files")
    parser.add_argument("--needles", default=DATA / data / "needles.jsonl", help="JSONL: needle, question, answer")
    parser.add_argument("--lengths", type=command.positive, nargs="+", default=lengths, help="prompt lengths in tokens")
    parser.add_argument("--depths", type=command.percent, nargs="+", default=depths, help="depths of the needle in percent")
    parser.add_argument("--max-answer-tokens", type=command.positive, default=50, help="longest answer, in tokens")
    parser.add_argument("--seed", type=command.seed, default=0, help="of what is drawn: where each haystack begins, halves, intervals")


def needle_cases(arguments, model: Llama, tokenizer: Tokenizer) -> list[NeedleCase]:
    """All cases; InputError, before any long work, where one is too short for its needle or too long for the model."""
    check_prompt(model, torch.empty(1, max(arguments.lengths)), arguments.max_answer_tokens)
    needles, text = load_needles(arguments.needles), load_haystack(arguments.haystack)
    haystacks = {needle: begin_anywhere(text, f"{arguments.seed} {needle.needle}") for needle in needles}
    for needle in haystacks:
        hide(tokenizer, haystacks[needle], needle, min(arguments.lengths), 0)
    return [
        NeedleCase(needle, length, depth, haystacks[needle])
        for length in dict.fromkeys(arguments.lengths)
        for needle in haystacks
        for depth in dict.fromkeys(arguments.depths)
    ]


def begin_anywhere(text: str, seed: str) -> str:
    """The text from a paragraph that `seed` draws to its end, and then what came before: another haystack for each
    needle, so that heads are not judged by the beginning of one text."""
    paragraphs = text.split("\n\n")
    start = random.Random(seed).randrange(len(paragraphs))
    return "\n\n".join(paragraphs[start:] + paragraphs[:start])


def describe(arguments, cases: list[NeedleCase]) -> dict:
    """The settings of the grid for a record."""
    return {"lengths": arguments.lengths, "depths": arguments.depths, **describe_runs(arguments, cases)}


def describe_runs(arguments, cases: list[NeedleCase]) -> dict:
    """What a single run of the grid follows from: the texts by name, not where they lie, and by their digest."""
    return {
        "haystack": _name(arguments.haystack),
        "needles": _name(arguments.needles),
        "texts": digest(sorted({(str(case.needle), case.haystack) for case in cases})),
        "max_answer_tokens": arguments.max_answer_tokens,
        "seed": arguments.seed,
    }


def _name(path: str | Path) -> str:
    """The last two parts of a path: `identify/essays`."""
    return "/".join(Path(path).resolve().parts[-2:])
