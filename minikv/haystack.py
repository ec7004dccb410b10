"""A needle in a haystack: a prompt of exactly the asked length whose answer span is known token by token."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from rouge_score.rouge_scorer import RougeScorer

from minikv.errors import InputError
from minikv.tokenizer import Prompt, Tokenizer

DATA = Path(__file__).parent / "data"


@dataclass(frozen=True)
class Needle:
    """A sentence to hide, the question that asks for it, and the part of the sentence that answers."""

    needle: str
    question: str
    answer: str


@dataclass(frozen=True)
class NeedlePrompt:
    """A prompt with a hidden needle: its token ids, and the positions among them of the answer's tokens."""

    ids: list[int]
    answer_positions: list[int]


def with_question(document: str, question: str) -> str:
    """The user's turn for a question about a document. The question comes last, where the window sees it."""
    return f"{document.rstrip()}\n\nBased on the text above, answer the question: {question}"


def load_needles(path: str | Path) -> list[Needle]:
    """Read needles from JSONL: needle, question, and answer (or real_needle, as the paper's release calls it).

    InputError names the file and line of what cannot be used.
    """
    needles = []
    for number, line in enumerate(read_text(path).splitlines(), 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            fields = json.loads(line)
        except ValueError as error:
            raise InputError(f"{where} is not JSON: {error}") from error
        if not isinstance(fields, dict):
            raise InputError(f"{where} is not a JSON object with needle, question and answer")
        fields.setdefault("answer", fields.get("real_needle"))
        values = [fields.get(name) for name in ("needle", "question", "answer")]
        if not all(isinstance(value, str) and value.strip() for value in values):
            raise InputError(f"{where} lacks a text for needle, question or answer")
        needle = Needle(*values)
        if not _find(needle.answer, needle.needle):
            raise InputError(f"{where}: the answer {needle.answer!r} does not occur in the needle")
        needles.append(needle)
    if not needles:
        raise InputError(f"{path} holds no needles")
    return needles


def load_haystack(path: str | Path) -> str:
    """Read a text file, or all .txt files of a folder in the order of their names."""
    path = Path(path)
    if not path.is_dir():
        return read_text(path)
    files = sorted(path.glob("*.txt"))
    if not files:
        raise InputError(f"the folder {path} holds no .txt file")
    return "\n\n".join(read_text(file).strip() for file in files)


def read_text(path: str | Path) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from error


def hide(tokenizer: Tokenizer, haystack: str, needle: Needle, length: int, depth: float) -> NeedlePrompt:
    """A chat prompt of exactly `length` tokens, template included, with the needle at `depth` (0 to 1).

    The needle goes in at the end of the sentence nearest to that depth of the haystack, which is repeated when it is
    too short. Raises InputError when `length` has no room for the needle, or the haystack holds it already.
    """

    def build(characters: int) -> Prompt:
        document = _insert(haystack[:characters], needle.needle, depth)
        return tokenizer.chat_prompt(with_question(document, needle.question))

    room = length - len(build(0).ids)
    if room < 0:
        raise InputError(f"a prompt of {length} tokens has no room for the needle and its question: {-room} too few")
    haystack = _repeat_to(tokenizer, haystack, room)
    prompt = build(_cut_for_length(tokenizer, haystack, build, length, room))
    if prompt.text.count(needle.needle) != 1:
        raise InputError(f"the haystack already holds the needle {needle.needle!r}")
    start = prompt.text.index(needle.needle)
    answer = _find(needle.answer, needle.needle)
    first, end = start + answer.start(), start + answer.end()
    positions = [index for index, (a, b) in enumerate(prompt.offsets) if a < end and b > first]
    return NeedlePrompt(prompt.ids, positions)


def _find(answer: str, text: str) -> re.Match | None:
    """Where the answer occurs in a text, whatever its case: one of the paper's needles differs in a capital."""
    return re.search(re.escape(answer), text, re.IGNORECASE)


def _insert(haystack: str, needle: str, depth: float) -> str:
    """Put the needle between two sentences, where the text is nearest to `depth` (0: before it, 1: after it)."""
    ends = [match.end() for match in re.finditer(r"[.!?][\"')\]]*\s+", haystack)]
    place = min([0, *ends, len(haystack)], key=lambda end: abs(end - depth * len(haystack)))
    before, after = haystack[:place], haystack[place:]
    gap = " " if before and not before[-1].isspace() else ""
    return f"{before}{gap}{needle} {after}"


def _repeat_to(tokenizer: Tokenizer, haystack: str, tokens: int) -> str:
    """The haystack, repeated until it has a good deal more than `tokens` tokens."""
    if not haystack.strip():
        raise InputError("the haystack is empty")
    haystack = haystack.strip() + "\n\n"
    wanted = tokens + tokens // 4 + 64
    return haystack * (1 + wanted // len(_token_ends(tokenizer, haystack)))


@lru_cache(maxsize=8)
def _token_ends(tokenizer: Tokenizer, text: str) -> list[int]:
    """Where each token of a text ends, in characters."""
    return [end for _, end in tokenizer.raw_prompt(text).offsets]


def _cut_for_length(tokenizer, haystack: str, build, length: int, room: int) -> int:
    """The number of haystack characters with which build(characters) has exactly `length` tokens.

    The haystack is cut at a token's end; a cut there can still join tokens in another way, so the count is
    corrected until it is exact, and where no token's end is, the next characters are tried one by one.
    """
    ends = [0, *_token_ends(tokenizer, haystack)]
    tokens, tried = room, set()
    while tokens not in tried and 0 <= tokens < len(ends):
        tried.add(tokens)
        off = length - len(build(ends[tokens]).ids)
        if off == 0:
            return ends[tokens]
        tokens += off
    around = ends[min(max(tried), len(ends) - 1)]
    for characters in sorted(range(max(0, around - 400), min(len(haystack), around + 400)), key=lambda c: abs(c - around)):
        if len(build(characters).ids) == length:
            return characters
    raise InputError(f"no cut of the haystack gives a prompt of exactly {length} tokens")


_rouge = RougeScorer(["rouge1"], use_stemmer=True)


def recall(answer: str, text: str) -> float:
    """The share of the answer's words that the text contains, word endings aside: ROUGE-1 recall with stemming.

    The order of words does not matter, and words before or after the answer cost nothing.
    """
    return _rouge.score(answer, text)["rouge1"].recall
