"""Several questions about one document on the command line: see document.py for how they share its prefill."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial

from minikv import command, document
from minikv.answer import FIGURES, Answer, figures, layer_progress, warm_up
from minikv.budget import PromptShape
from minikv.document import Document, common_prefix
from minikv.errors import InputError
from minikv.files import write_json
from minikv.model import Llama
from minikv.policy import Policy
from minikv.prompts import make_prompt
from minikv.tokenizer import Prompt, Tokenizer

PROBES = ("What", "1", "\n")  # questions that begin differently: what their prompts share, nearly all prompts share


def wanted(arguments) -> bool:
    """Whether the command line asks for more than one answer to one prompt."""
    several = len(arguments.question or []) > 1
    return several or arguments.chat or arguments.save_prefill is not None or arguments.load_prefill is not None


def check_arguments(arguments) -> None:
    """InputError for what does not go together, before anything is read."""
    if arguments.chat and arguments.file == "-":
        raise InputError("--chat and --file - both read standard input; give the text with --prompt or a file")
    if wanted(arguments) and not all(question.strip() for question in arguments.question or []):
        raise InputError("a --question is empty")
    if arguments.load_prefill is not None and not (arguments.question or arguments.chat):
        raise InputError("--load-prefill needs a --question, or --chat")


def read_saved_text(arguments) -> str:
    """The text in the file of --load-prefill; how prompts are made of it is set in the arguments as it was then."""
    metadata = document.read_text_of(arguments.load_prefill)
    for name in ("no_chat", "parse_special"):
        if metadata.get(name) not in ("True", "False") or "text" not in metadata:
            raise InputError(f"{arguments.load_prefill} is damaged: it does not say what text it is of, and how it was read")
        if getattr(arguments, name) and metadata[name] == "False":
            raise InputError(f"{arguments.load_prefill} was made without --{name.replace('_', '-')}")
        setattr(arguments, name, metadata[name] == "True")
    return metadata["text"]


def answer_all(model: Llama, tokenizer: Tokenizer, text: str, method: Policy, arguments) -> None:
    """Prefill or load the document, save it where asked to, and answer; what is done is reported when interrupted, too."""
    prompt = partial(make_prompt, model, tokenizer, text, arguments=arguments)
    probes = [prompt(probe) for probe in PROBES]
    for asked in [prompt(question) for question in arguments.question or []] or probes[:1]:
        check_budget(model, method, asked)  # before the work

    warm_up(model)
    start = time.perf_counter()
    held = open_document(model, [probe.ids for probe in probes], method.window is None, arguments)
    held.cache[-1].keys[0, 0, -1, 0].item()  # waits for the device
    seconds = time.perf_counter() - start
    loaded = arguments.load_prefill is not None
    done = f"read from {arguments.load_prefill}" if loaded else "prefilled once"
    print(f"The document's {len(held.ids):,} tokens were {done}, in {seconds:.2f} s.")
    if arguments.save_prefill:
        kinds = {name: str(getattr(arguments, name)) for name in ("no_chat", "parse_special")}
        document.save(held, arguments.save_prefill, {"text": text, **kinds})
        print(f"Its prefill is in {arguments.save_prefill}.")

    record = {"tokens": len(held.ids), "seconds": seconds, "loaded": loaded}
    answers: list[dict] = []
    try:
        for question in questions(arguments):
            ask(held, tokenizer, prompt, question, method, arguments, answers)
    finally:
        report(record, answers, method, arguments)


def check_budget(model: Llama, method: Policy, prompt: Prompt) -> None:
    """InputError where the budget is too small for the method."""
    method.mean_entries(PromptShape(model.config.layers, len(prompt.ids), model.new_layer_cache(1, 0).entry_bytes))


def open_document(model: Llama, probes: list[list[int]], column_sums: bool, arguments) -> Document:
    """The prefill of what the probes' ids have in common: from the file of --load-prefill, or made now."""
    ids = probes[0][: min(common_prefix(probes[0], other) for other in probes[1:])]
    if arguments.load_prefill is not None:
        return document.load(arguments.load_prefill, model, ids, column_sums)
    return Document.prefill(model, ids, column_sums, partial(layer_progress, what="document"))


def questions(arguments) -> Iterator[str]:
    """The questions of the command line, or with --chat the lines of standard input that are not empty."""
    if not arguments.chat:
        yield from arguments.question or []
        return
    if sys.stdin is None:
        raise InputError("standard input is closed; --chat reads its questions there")
    terminal = sys.stdin.isatty()
    while True:
        print("\n> " if terminal else "", end="", flush=True)
        line = sys.stdin.buffer.readline()
        if not line:
            print("\n" if terminal else "", end="")
            return
        question = line.decode("utf-8", errors="replace").rstrip("\r\n")
        if question.strip():
            yield question


def ask(held: Document, tokenizer: Tokenizer, prompt, question: str, method: Policy, arguments, answers: list[dict]) -> None:
    """Answer one question on the screen, and add it to `answers` when it is done. In a chat, bad input is only told."""
    try:
        asked = prompt(question)
        check_budget(held.model, method, asked)
    except InputError as error:
        if not arguments.chat:
            raise
        print("error: " + " ".join(str(error).split()), file=sys.stderr)
        return
    if not arguments.chat:
        print(f"\n[{question}] ", end="", flush=True)
    answer, reused = Answer(arguments.policy), 0

    def prefill():
        nonlocal reused
        logits, cache, reused = held.ask(asked.ids, method, arguments.max_new_tokens)
        return logits, cache

    for piece in answer.stream(held.model, tokenizer, asked, prefill, arguments):
        print(piece, end="", flush=True)
    print(flush=True)
    answers.append({"question": question, "prompt_tokens": len(asked.ids), "reused_tokens": reused, "answer": answer})


def report(record: dict, answers: list[dict], method: Policy, arguments) -> None:
    """The table and what sharing saved; settings, answers and figures to the file of --json."""
    reused = sum(answer["reused_tokens"] for answer in answers)
    saved = max(reused - (0 if record["loaded"] else record["tokens"]), 0)
    if arguments.json:
        settings = {key: value for key, value in vars(arguments).items() if key not in ("json", "debug")}
        settings["options"] = {arguments.policy: command.options_of(method)}
        flat = [{**answer, **asdict(answer["answer"])} for answer in answers]
        flat = [{key: value for key, value in answer.items() if key != "answer"} for answer in flat]
        document_record = {**record, "tokens_not_run_again": saved}
        fields = {"settings": settings, "versions": command.versions(), "document": document_record, "answers": flat}
        write_json(arguments.json, fields)
    if not answers:
        return
    head = ("question", "prompt tokens", "run for it", *FIGURES)
    rows = [(str(number), *counts(answer), *figures(answer["answer"])) for number, answer in enumerate(answers, 1)]
    print("\n" + command.text_table([head, *rows]))
    print(f"\n{saved:,} tokens of the document were not run again", end="")
    if record["loaded"]:
        print(": its prefill was read from the file.")
    else:
        print(f": about {saved * record['seconds'] / record['tokens']:.1f} s by the document's own prefill (an estimate).")


def counts(answer: dict) -> tuple[str, str]:
    """The tokens of a prompt, and those that had to be run."""
    return f"{answer['prompt_tokens']:,}", f"{answer['prompt_tokens'] - answer['reused_tokens']:,}"
