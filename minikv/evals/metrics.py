"""LongBench's metrics: what an answer is worth, 0 to 1, against the right ones.

Equal to the benchmark's published scores, for they are compared with them: rouge and difflib are used as it uses them.
"""

from __future__ import annotations

import re
import string
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from difflib import SequenceMatcher

from rouge import Rouge

from minikv.errors import InputError

FIRST_LINE_ONLY = ("trec", "triviaqa", "samsum")  # few-shot sets: models go on with further examples

PARAGRAPH = re.compile(r"Paragraph (\d+)")

_rouge = Rouge(metrics=["rouge-l"])


def score(dataset: str, prediction: str, answers: list[str], all_classes: list[str] | None) -> float:
    """What `prediction` is worth, 0 to 1: the best over the set's right answers.

    all_classes are the labels of trec, None elsewhere. Raises InputError for a set that is not one of the 16 English
    ones, and where answers or classes are missing.
    """
    if dataset not in METRICS:
        raise InputError(f"the set {dataset!r} is unknown; accepted: {', '.join(METRICS)}")
    if not answers:
        raise InputError(f"{dataset}: there is no right answer to compare with")
    if dataset in FIRST_LINE_ONLY:
        prediction = prediction.lstrip("\n").split("\n")[0]
    if dataset == "trec":
        if not all_classes:
            raise InputError(f"{dataset}: all_classes, the labels to choose from, is missing")
        return max(label_match(prediction, answer, all_classes) for answer in answers)
    return max(METRICS[dataset](prediction, answer) for answer in answers)


def normalized_words(text: str) -> list[str]:
    """The words in lower case, without ASCII punctuation and articles."""
    text = text.lower().translate(str.maketrans("", "", string.punctuation))
    return re.sub(r"\b(a|an|the)\b", " ", text).split()


def token_f1(prediction: str, answer: str) -> float:
    """Harmonic mean of the share of the prediction's words that are right and of the answer's that are there."""
    said, right = normalized_words(prediction), normalized_words(answer)
    common = sum((Counter(said) & Counter(right)).values())
    if common == 0:
        return 0.0
    precision, recall = common / len(said), common / len(right)
    return 2 * precision * recall / (precision + recall)


def rouge_l(prediction: str, answer: str) -> float:
    """ROUGE-L F over sentences that end in full stops, of the `rouge` package; 0 where one of the two has no words."""
    if not prediction.replace(".", "").strip() or not answer.replace(".", "").strip():
        return 0.0
    with _recursion_for(prediction, answer):
        return _rouge.get_scores([prediction], [answer])[0]["rouge-l"]["f"]


@contextmanager
def _recursion_for(*texts: str) -> Iterator[None]:
    """Lets the rouge package recurse once a word: a long answer without a full stop would end in an error."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(limit + sum(len(text.split()) for text in texts))
    try:
        yield
    finally:
        sys.setrecursionlimit(limit)


def label_match(prediction: str, answer: str, labels: list[str]) -> float:
    """1 / the number of labels that occur in the prediction, if the right one is among them.

    A label that is a part of the right one, as "city" of "city name", is not counted.
    """
    found = [label for label in labels if label in prediction and (label == answer or label not in answer)]
    return 1 / len(found) if answer in found else 0.0


def _share_of_numbers(prediction: str, right: str) -> float:
    numbers = re.findall(r"\d+", prediction)
    return numbers.count(right) / len(numbers) if numbers else 0.0


def passage_count(prediction: str, answer: str) -> float:
    """Of all numbers in the prediction, the share that is the right one."""
    return _share_of_numbers(prediction, str(answer))


def passage_number(prediction: str, answer: str) -> float:
    """As passage_count, for an answer such as "Paragraph 7"."""
    right = PARAGRAPH.search(answer)
    if right is None:
        raise InputError(f"the right answer {answer!r} is not of the form 'Paragraph 7'")
    return _share_of_numbers(prediction, right[1])


def edit_similarity(prediction: str, answer: str) -> float:
    """How alike the answer and the prediction's first line of code are, in whole hundredths: 2 * matches / lengths."""
    lines = prediction.lstrip("\n").split("\n")
    code = next((line for line in lines if not any(mark in line for mark in ("`", "#", "//"))), "")
    return round(100 * SequenceMatcher(None, code, answer).ratio()) / 100


METRICS = {
    "narrativeqa": token_f1,
    "qasper": token_f1,
    "multifieldqa_en": token_f1,
    "hotpotqa": token_f1,
    "2wikimqa": token_f1,
    "musique": token_f1,
    "gov_report": rouge_l,
    "qmsum": rouge_l,
    "multi_news": rouge_l,
    "trec": label_match,
    "triviaqa": token_f1,
    "samsum": rouge_l,
    "passage_count": passage_count,
    "passage_retrieval_en": passage_number,
    "lcc": edit_similarity,
    "repobench-p": edit_similarity,
}
