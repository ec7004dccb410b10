"""A needle in a haystack: a prompt of exactly the asked length whose answer span is known token by token."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
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
class Task:
    """A question, the needles that answer it, and other needles that are hidden as well."""

    question: str
    asked: tuple[Needle, ...]
    others: tuple[Needle, ...] = ()

    @property
    def answers(self) -> list[str]:
        return [needle.answer for needle in self.asked]


@dataclass(frozen=True)
class Family:
    """Needles of one form: `needle` and `question` with {key} and {value} to fill, `question_all` with {keys}."""

    needle: str
    question: str
    question_all: str
    entries: tuple[tuple[str, str], ...]

    def fill(self, entry: int) -> Needle:
        key, value = self.entries[entry]
        return Needle(self.needle.format(key=key, value=value), self.question.format(key=key), value)

    def ask_all(self, entries: list[int]) -> str:
        """The question for the values of two or more entries."""
        *first, last = [self.entries[entry][0] for entry in entries]
        return self.question_all.format(keys=f"{', '.join(first)} and {last}")


@dataclass(frozen=True)
class NeedlePrompt:
    """A prompt with hidden needles, and the positions of the answers' tokens among its token ids."""

    prompt: Prompt
    answer_positions: list[int]

    @property
    def ids(self) -> list[int]:
        return self.prompt.ids


def with_question(document: str, question: str) -> str:
    """The user's turn for a question about a document. The question comes last, where the window sees it."""
    return f"{document.rstrip()}\n\nBased on the text above, answer the question: {question}"


def load_needles(path: str | Path) -> list[Needle]:
    """Read needles from JSONL: needle, question, and answer (or real_needle, as the paper's release calls it).

    InputError names the file and line of what cannot be used.
    """
    needles: dict[Needle, str] = {}  # and where each was read
    for where, fields in read_jsonl(path):
        fields.setdefault("answer", fields.get("real_needle"))
        needle = Needle(*texts(where, fields, "needle", "question", "answer"))
        check_needle(where, needle)
        if needle in needles:
            raise InputError(f"{where} repeats {needles[needle]}; each needle is asked for once")
        needles[needle] = where
    if not needles:
        raise InputError(f"{path} holds no needles")
    return list(needles)


def load_families(path: str | Path) -> list[Family]:
    """Read families of needles from JSONL: needle, question, question_all, and entries as [[key, value], ...].

    InputError names the file and line of what cannot be used.
    """
    families = []
    for where, fields in read_jsonl(path):
        forms = texts(where, fields, "needle", "question", "question_all")
        entries = fields.get("entries")
        pairs = entries if isinstance(entries, list) else []
        if len(pairs) < 2 or not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
            raise InputError(f"{where}: entries is not a list of two or more [key, value]")
        for form, names in zip(forms, (("{key}", "{value}"), ("{key}",), ("{keys}",))):
            if sorted(re.findall("{.*?}", form)) != sorted(names):
                raise InputError(f"{where}: {form!r} must hold {' and '.join(names)} once, and no other braces")
        entries = tuple((str(key).strip(), str(value).strip()) for key, value in pairs)
        for _, value in entries:
            _check_answer(where, value)
        families.append(Family(*forms, entries))
    if not families:
        raise InputError(f"{path} holds no families of needles")
    return families


def texts(where: str, fields: dict, *names: str) -> list[str]:
    """The values of those fields, all of them texts that are not empty, without blanks around them."""
    values = [fields.get(name) for name in names]
    if not all(isinstance(value, str) and value.strip() for value in values):
        raise InputError(f"{where} lacks a text for {', '.join(names[:-1])} or {names[-1]}")
    return [value.strip() for value in values]


def check_needle(where: str, needle: Needle) -> None:
    """Refuse a needle that does not hold its answer, or whose answer cannot be scored."""
    if not _find(needle.answer, needle.needle):
        raise InputError(f"{where}: the answer {needle.answer!r} does not occur in the needle")
    _check_answer(where, needle.answer)


def _check_answer(where: str, answer: str) -> None:
    """Refuse an answer in which ROUGE sees no word: whatever a model said, its recall would be 0."""
    if recall(answer, answer) != 1:
        raise InputError(f"{where}: the answer {answer!r} cannot be scored; accepted: one with a letter a-z or a digit")


def read_jsonl(path: str | Path) -> Iterator[tuple[str, dict]]:
    """The JSON object of each line that is not blank, with its file and line for error messages."""
    for number, line in enumerate(read_text(path).split("\n"), 1):  # splitlines would cut at U+2028 in a string, too
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{where} is not JSON: {error}") from error
        if not isinstance(fields, dict):
            raise InputError(f"{where} is not a JSON object")
        try:
            json.dumps(fields, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise InputError(f"{where} holds a lone surrogate, half of a character: {error.object[error.start]!r}") from error
        yield where, fields


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
    return hide_all(tokenizer, haystack, Task(needle.question, (needle,)), length, depth)


def hide_all(tokenizer: Tokenizer, haystack: str, task: Task, length: int, depth: float) -> NeedlePrompt:
    """As `hide`, with all needles of a task: the first one asked at `depth`, the others at even distances from it.

    What goes beyond the end of the haystack goes on from its beginning.
    """
    needles = [*task.asked, *task.others]
    for needle in needles:
        if needle.needle in haystack:
            raise InputError(f"the haystack already holds the needle {needle.needle!r}")
    depths = [depth, *((depth + place / len(needles)) % 1 for place in range(1, len(needles)))]

    def build(text: str) -> Prompt:
        document = _insert(text, [(needle.needle, at) for needle, at in zip(needles, depths)])
        return tokenizer.chat_prompt(with_question(document, task.question))

    prompt = fit(tokenizer, haystack, build, length)
    for needle in needles:
        count = prompt.text.count(needle.needle)
        if count == 0:
            raise InputError(f"the model's chat template changes the needle {needle.needle!r}, so it cannot be found")
        if count > 1:
            raise InputError(f"the needle {needle.needle!r} is in the prompt {count} times, in the question or another needle, too")
    spans = [_answer_span(prompt.text, needle) for needle in task.asked]
    positions = [i for i, (a, b) in enumerate(prompt.offsets) if any(a < end and b > start for start, end in spans)]
    return NeedlePrompt(prompt, positions)


def _answer_span(text: str, needle: Needle) -> tuple[int, int]:
    """Where the answer of a hidden needle is in the prompt's text."""
    start, answer = text.index(needle.needle), _find(needle.answer, needle.needle)
    return start + answer.start(), start + answer.end()


def _find(answer: str, text: str) -> re.Match | None:
    """Where the answer occurs in a text, whatever its case: one of the paper's needles differs in a capital."""
    return re.search(re.escape(answer), text, re.IGNORECASE)


def _insert(haystack: str, needles: list[tuple[str, float]]) -> str:
    """Put each needle between two sentences, where the text is nearest to its depth (0: before it, 1: after it)."""
    ends = [0, *(match.end() for match in re.finditer(r"[.!?][\"')\]]*\s+", haystack)), len(haystack)]

    placed = [(min(ends, key=lambda end: abs(end - depth * len(haystack))), needle) for needle, depth in needles]
    for place, needle in sorted(placed, reverse=True):  # from the back, so that the places in front stay true
        before, after = haystack[:place], haystack[place:]
        gap = " " if before and not before[-1].isspace() else ""
        haystack = f"{before}{gap}{needle} {after}"
    return haystack


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


def fit(tokenizer: Tokenizer, haystack: str, build: Callable[[str], Prompt], length: int) -> Prompt:
    """The prompt build(part of the haystack) that has exactly `length` tokens; the haystack is repeated if need be.

    A long word at the end may take several tokens more with its last letter, so that no cut there is right: then the
    haystack begins a word later. Raises InputError when `length` has no room for what build adds to the haystack.
    """
    room = length - len(build("").ids)
    if room < 0:
        raise InputError(f"a prompt of {length} tokens has no room for what is asked: {-room} too few")
    haystack = _repeat_to(tokenizer, haystack, room)
    for start in [0, *(match.end() for match in re.finditer(r"\s+", haystack[:500]))]:
        prompt = _fit_at_end(haystack[start:], _token_ends(tokenizer, haystack[start:]), build, length, room)
        if prompt is not None:
            return prompt
    raise InputError(f"no cut of the haystack gives a prompt of exactly {length} tokens")


def _fit_at_end(haystack: str, ends: list[int], build: Callable[[str], Prompt], length: int, room: int) -> Prompt | None:
    """As fit, with a cut at one of the tokens' `ends`, or nearby between two; None where there is none.

    A cut can join tokens in another way, so their number is corrected until it is right.
    """
    ends, tokens, tried = [0, *ends], room, set()
    while tokens not in tried and 0 <= tokens < len(ends):
        tried.add(tokens)
        prompt = build(haystack[: ends[tokens]])
        if len(prompt.ids) == length:
            return prompt
        tokens += length - len(prompt.ids)
    around = ends[min(max(tried), len(ends) - 1)]
    nearby = range(max(0, around - 50), min(len(haystack), around + 50))
    prompts = (build(haystack[:end]) for end in sorted(nearby, key=lambda end: abs(end - around)))
    return next((prompt for prompt in prompts if len(prompt.ids) == length), None)


_rouge = RougeScorer(["rouge1"], use_stemmer=True)


def recall(answer: str, text: str) -> float:
    """The share of the answer's words that the text contains, word endings aside: ROUGE-1 recall with stemming.

    The order of words does not matter, and words before or after the answer cost nothing.
    """
    return _rouge.score(answer, text)["rouge1"].recall


def contains(answer: str, text: str) -> bool:
    """Whether the answer occurs in the text word for word; case, line breaks and runs of spaces aside."""
    words = r"\s+".join(map(re.escape, answer.split()))
    return re.search(rf"(?<!\w){words}(?!\w)", text, re.IGNORECASE) is not None
