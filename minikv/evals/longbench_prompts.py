"""LongBench's sets: their records, their prompts, and how a prompt that is too long loses its middle."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from minikv.errors import InputError
from minikv.evals.metrics import METRICS, PARAGRAPH
from minikv.files import read_json
from minikv.haystack import read_jsonl
from minikv.tokenizer import Prompt, Tokenizer

GROUPS = {
    "single-doc QA": ("narrativeqa", "qasper", "multifieldqa_en"),
    "multi-doc QA": ("hotpotqa", "2wikimqa", "musique"),
    "summarisation": ("gov_report", "qmsum", "multi_news"),
    "few-shot": ("trec", "triviaqa", "samsum"),
    "synthetic": ("passage_count", "passage_retrieval_en"),
    "code": ("lcc", "repobench-p"),
}
WITHOUT_TEMPLATE = ("trec", "triviaqa", "samsum", "lcc", "repobench-p")  # they show examples, or code, to go on with

# The project's own wording and answer lengths, for those who do not have the benchmark's two files.
OWN_PROMPTS = {
    "single-doc QA": "Text:\n{context}\n\nAnswer this question about the text in a few words: {input}\nAnswer:",
    "multi-doc QA": "Texts:\n{context}\n\nAnswer this question about the texts in a few words: {input}\nAnswer:",
    "summarisation": "{context}\n\nSummarize the text above. {input}\nSummary:",
    "few-shot": "Go on as in these examples.\n\n{context}\n{input}",
    "code": "Write the line that follows this code.\n{context}{input}\nThe line:\n",
    "passage_count": "{context}\n\nHow many different paragraphs are there above? Give the number only: ",
    "passage_retrieval_en": "{context}\n\nWhich paragraph is summarized here? {input}\n\nAnswer as in 'Paragraph 1': ",
}
OWN_LENGTHS = {"single-doc QA": 64, "multi-doc QA": 32, "summarisation": 256, "few-shot": 64, "synthetic": 16, "code": 48}


@dataclass(frozen=True)
class Record:
    """One example of a set; number 1 is the first of its file."""

    dataset: str
    number: int
    context: str
    input: str
    answers: list[str]
    all_classes: list[str] | None
    where: str = dataclasses.field(default="", compare=False)  # file and line

    @property
    def content(self) -> dict:
        """All but where it was read, which makes no other example of it."""
        return {name: value for name, value in dataclasses.asdict(self).items() if name != "where"}

    @property
    def key(self) -> str:
        """The example's name in a journal."""
        return f"{self.dataset} {self.number}"


@dataclass(frozen=True)
class Protocol:
    """How a set is asked: its prompt, with {context} and {input}, and the longest answer in tokens."""

    prompt: str
    max_new_tokens: int


def read_records(folder: Path, dataset: str) -> list[Record]:
    """The records of DATASET.jsonl; InputError names file and line of what cannot be scored."""
    records = []
    for number, (where, fields) in enumerate(read_jsonl(folder / f"{dataset}.jsonl"), 1):
        for name in ("context", "input"):
            if not isinstance(fields.get(name), str):
                raise InputError(f"{where} lacks {name}, a text")
        if not fields["context"].strip():
            raise InputError(f"{where}: its context is empty")
        answers, classes = fields.get("answers"), fields.get("all_classes")
        if not _texts(answers):
            raise InputError(f"{where} lacks answers, a list of texts that are not empty")
        if dataset == "trec" and not _texts(classes):
            raise InputError(f"{where} lacks all_classes, the labels to choose from")
        if dataset == "passage_retrieval_en":
            for answer in answers:
                if not PARAGRAPH.search(answer):
                    raise InputError(f"{where}: the right answer {answer!r} is not of the form 'Paragraph 7'")
        records.append(Record(dataset, number, fields["context"], fields["input"], answers, classes, where))
    if not records:
        raise InputError(f"{folder / dataset}.jsonl holds no records")
    return records


def _texts(value) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(text, str) and text.strip() for text in value)


def find_sets(folder: Path, asked: list[str] | None) -> list[str]:
    """The sets to run, in the benchmark's order: those asked for, or all that the folder has."""
    if not folder.is_dir():
        raise InputError(f"there is no folder {folder}")
    there = [dataset for dataset in METRICS if (folder / f"{dataset}.jsonl").is_file()]
    for dataset in asked or []:
        if dataset not in METRICS:
            raise InputError(f"the set {dataset!r} is unknown; accepted: {', '.join(METRICS)}")
        if dataset not in there:
            raise InputError(f"{folder} has no {dataset}.jsonl; it has {', '.join(there) or 'none of the sets'}")
    if not there:
        raise InputError(f"{folder} has none of the sets, NAME.jsonl for the names {', '.join(METRICS)}")
    return [dataset for dataset in there if not asked or dataset in asked]


def group_of(dataset: str) -> str:
    return next(group for group, sets in GROUPS.items() if dataset in sets)


def read_protocols(config: Path | None, sets: list[str]) -> dict[str, Protocol]:
    """Prompt and answer length of each set: the benchmark's own, from its two files in `config`, or this project's."""
    if config is None:
        return {name: Protocol(_own_prompt(name), OWN_LENGTHS[group_of(name)]) for name in sets}
    prompts, lengths = _config(config, "dataset2prompt.json"), _config(config, "dataset2maxlen.json")
    protocols = {}
    for name in sets:
        prompt, length = prompts.get(name), lengths.get(name)
        if not isinstance(prompt, str) or "{context}" not in prompt:
            raise InputError(f"{config / 'dataset2prompt.json'} has no prompt with {{context}} for {name}")
        if not isinstance(length, int) or length < 1:
            raise InputError(f"{config / 'dataset2maxlen.json'} has no answer length for {name}")
        protocols[name] = Protocol(prompt, length)
    return protocols


def _own_prompt(dataset: str) -> str:
    return OWN_PROMPTS.get(dataset) or OWN_PROMPTS[group_of(dataset)]


def _config(folder: Path, name: str) -> dict:
    if not (folder / name).is_file():
        raise InputError(f"{folder} has no {name}; the benchmark's config folder has it and a second file")
    return read_json(folder / name)


def check_room(tokenizer: Tokenizer, record: Record, protocol: Protocol, max_length: int) -> None:
    """InputError, with file and line, where the prompt cannot be made, or is too long even without its document.

    That is told from a prompt with next to no document; a whole one is made only where that takes half of the room.
    """
    try:
        bare = make_prompt(tokenizer, dataclasses.replace(record, context="x"), protocol, 10**9)
        if 2 * len(bare.ids) > max_length - protocol.max_new_tokens:
            make_prompt(tokenizer, record, protocol, max_length)
    except InputError as error:
        raise InputError(f"{record.where}: {error}") from error


def make_prompt(tokenizer: Tokenizer, record: Record, protocol: Protocol, max_length: int) -> Prompt:
    """The prompt of a record, at most max_length - max_new_tokens ids long, with the start token once if any.

    The chat template is used where the protocol and the model have one.
    """
    before, after = (part.replace("{input}", record.input) for part in protocol.prompt.split("{context}", 1))
    text = before + record.context + after
    chat = record.dataset not in WITHOUT_TEMPLATE and tokenizer.has_chat_template
    prompt = tokenizer.chat_prompt(text) if chat else tokenizer.raw_prompt(text)
    start = prompt.text.find(text.strip())  # a template may strip the turn
    if start < 0:
        raise InputError(f"{record.key}: the model's chat template changes the text, so its middle cannot be found")
    start += len(before) - (len(text) - len(text.lstrip()))
    return cut_middle(prompt, start, start + len(record.context), max_length - protocol.max_new_tokens)


def cut_middle(prompt: Prompt, start: int, end: int, limit: int) -> Prompt:
    """The prompt without the middle of its ids, so that at most `limit` are left, half of them from each end.

    Only ids that spell nothing but text[start:end], the document, are taken: the template and the question stay
    whole. Ids are cut, not text, which could come to more ids again; a character that lies on the cut goes whole.
    """
    excess = len(prompt.ids) - limit
    if excess <= 0:
        return prompt
    document = [index for index, (a, b) in enumerate(prompt.offsets) if start <= a < b <= end]
    if excess > len(document):
        left = len(prompt.ids) - len(document)
        raise InputError(f"the prompt without its document has {left} tokens; at most {limit} are allowed")
    first = min(max((limit + 1) // 2, document[0]), document[-1] + 1 - excess)
    last = first + excess  # the first id that is kept again
    while first > document[0] and _share_a_character(prompt, first):
        first -= 1
    while last <= document[-1] and _share_a_character(prompt, last):
        last += 1
    return Prompt(prompt.ids[:first] + prompt.ids[last:], prompt.text, prompt.offsets[:first] + prompt.offsets[last:])


def _share_a_character(prompt: Prompt, index: int) -> bool:
    """Whether the id at `index` goes on with a character that the id before it began."""
    return prompt.offsets[index - 1][1] > prompt.offsets[index][0]
