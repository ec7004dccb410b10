"""The prompts on which layer errors are measured (CompressKV, section 3.3), in data sets that count alike."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from minikv.errors import InputError
from minikv.evals.longbench_prompts import find_sets, make_prompt, read_protocols, read_records
from minikv.evals.needle_cases import NeedleCase
from minikv.haystack import NeedlePrompt, read_text
from minikv.tokenizer import Prompt, Tokenizer

NEEDLES = "needles"


@dataclass(frozen=True)
class ErrorPrompt:
    """A prompt by its name in the journal, and the function that makes it when it is wanted."""

    key: str
    make: Callable[[], Prompt | NeedlePrompt]


def add_error_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--error-prompts",
        nargs="+",
        metavar="SET",
        default=[NEEDLES],
        help="where layer errors are measured, each a data set that counts alike: needles (the prompts above), a plain"
        " text file, or a folder of LongBench .jsonl files, each of them a data set",
    )
    config = "for LongBench: the folder of dataset2prompt.json and dataset2maxlen.json; without it the project's own wording"
    parser.add_argument("--longbench-config", metavar="FOLDER", help=config)


def error_sets(arguments, tokenizer: Tokenizer, cases: list[NeedleCase]) -> dict[str, list[ErrorPrompt]]:
    """The data sets by name. No prompt is longer than the longest of --lengths, so that they take a like time."""
    sets: dict[str, list[ErrorPrompt]] = {}
    limit = max(arguments.lengths)
    for source in dict.fromkeys(arguments.error_prompts):
        path = Path(source)
        if source == NEEDLES:
            found = {NEEDLES: [ErrorPrompt(case.key, partial(case.prompt, tokenizer)) for case in cases]}
        elif path.is_dir():
            found = longbench_sets(path, arguments.longbench_config, tokenizer, limit)
        else:
            found = {path.name: text_pieces(read_text(path), tokenizer, limit)}
        for name, prompts in found.items():
            if name in sets:
                raise InputError(f"--error-prompts names two data sets {name!r}; each needs a name of its own")
            sets[name] = prompts
    return sets


def text_pieces(text: str, tokenizer: Tokenizer, limit: int) -> list[ErrorPrompt]:
    """A text as prompts of `limit` tokens, which the model goes on writing; a text that is shorter is one prompt."""
    whole = tokenizer.raw_prompt(text)
    if not whole.ids:
        raise InputError("--error-prompts names a text file that is empty")
    pieces = []
    for start in range(0, max(len(whole.ids) - limit, 0) + 1, limit):
        end = start + limit
        piece = Prompt(whole.ids[start:end], whole.text, whole.offsets[start:end])
        pieces.append(ErrorPrompt(f"tokens from {start}", lambda piece=piece: piece))
    return pieces


def longbench_sets(folder: Path, config: str | None, tokenizer: Tokenizer, limit: int) -> dict[str, list[ErrorPrompt]]:
    """Each LongBench set of a folder; a prompt of more than `limit` tokens loses its middle, as the benchmark has it."""
    protocols = read_protocols(Path(config) if config else None, find_sets(folder, None))
    return {
        name: [
            ErrorPrompt(record.key, partial(make_prompt, tokenizer, record, protocol, limit + protocol.max_new_tokens))
            for record in read_records(folder, name)
        ]
        for name, protocol in protocols.items()
    }
