"""Prompts of three kinds over the evaluation essays: a hidden needle, a question about an essay, a summary."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial

from minikv.haystack import DATA, fit, hide, load_needles, read_text, with_question
from minikv.tokenizer import Tokenizer

EVALUATE = DATA / "evaluate"
SUMMARY = "Summarize the text above in three sentences."
DEPTHS = [0.1, 0.3, 0.5, 0.7, 0.9]


def ask(tokenizer: Tokenizer, lengths: list[int], count: int) -> Iterator[tuple[str, list[int]]]:
    """`count` prompts: what each is, and its token ids. Kinds alternate, lengths follow in turn, essays rotate."""
    essays = [(path.name, read_text(path).strip()) for path in sorted((EVALUATE / "essays").glob("*.txt"))]
    needles = load_needles(EVALUATE / "needles.jsonl")
    questions = [json.loads(line) for line in read_text(EVALUATE / "questions.jsonl").splitlines()]
    names = [name for name, _ in essays]
    for number in range(count):
        turn, length = number // 3, lengths[number // 3 % len(lengths)]
        if number % 3 == 0:
            needle = needles[turn * 5 % len(needles)]
            text, depth = begin_at(essays, turn), DEPTHS[turn % len(DEPTHS)]
            yield f"{number} needle, {length} tokens: {needle.question}", hide(tokenizer, text, needle, length, depth).ids
        elif number % 3 == 1:
            asked = questions[turn * 3 % len(questions)]
            text = begin_at(essays, names.index(asked["essay"]) - 1)  # the essay asked about comes second
            build = partial(with_question, question=asked["question"])
            yield f"{number} question, {length} tokens: {asked['question']}", exact(tokenizer, text, build, length)
        else:
            text = begin_at(essays, turn * 2)
            yield f"{number} summary, {length} tokens", exact(tokenizer, text, lambda document: f"{document}\n\n{SUMMARY}", length)


def begin_at(essays: list[tuple[str, str]], first: int) -> str:
    """All essays in one text, beginning with number `first` and going round."""
    first %= len(essays)
    return "\n\n".join(text for _, text in essays[first:] + essays[:first])


def exact(tokenizer: Tokenizer, document: str, finish: Callable[[str], str], length: int) -> list[int]:
    """A chat prompt of exactly `length` tokens: the document's beginning, with what `finish` puts after it."""
    return fit(tokenizer, document, lambda text: tokenizer.chat_prompt(finish(text)), length).ids
