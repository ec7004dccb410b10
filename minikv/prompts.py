"""The prompt on a command line: where its text comes from, and how a question is put to it."""

from __future__ import annotations

import json
import sys

import torch

from minikv import command
from minikv.errors import InputError
from minikv.haystack import DATA, read_text, with_question
from minikv.inference import check_prompt
from minikv.model import Llama
from minikv.tokenizer import Prompt, Tokenizer


def add_prompt_arguments(parser: command.Parser, many_questions: bool = False) -> None:
    """Where the prompt comes from: see read_prompt and make_prompt. With `many_questions` also what document.py offers."""
    source, asked = parser.add_mutually_exclusive_group(), parser.add_mutually_exclusive_group()
    source.add_argument("--prompt", help="the text to answer")
    source.add_argument("--file", help="a file with the text; - is standard input")
    about = "a question about the text, put after it"
    if many_questions:
        source.add_argument("--load-prefill", metavar="FILE", help="the text and its prefill, as --save-prefill wrote them")
        parser.add_argument("--save-prefill", metavar="FILE", help="write the text and its prefill to this file (safetensors)")
        asked.add_argument("--question", action="append", help=f"{about}; give it again to ask more, each on its own")
        asked.add_argument("--chat", action="store_true", help="read the questions from standard input, one a line")
    else:
        asked.add_argument("--question", help=about)
    parser.add_argument("--no-chat", action="store_true", help="give the text to the model as it is, without its chat template")
    parser.add_argument("--parse-special", action="store_true", help="let the text hold control tokens such as <|im_end|>")


def read_prompt(arguments) -> tuple[str, str | None]:
    """The text to answer, and for the demonstration (neither --prompt nor --file) the question about it."""
    if arguments.prompt is None and arguments.file is None:
        question = arguments.question or json.loads(read_text(DATA / "demonstration.json"))["question"]
        return read_text(DATA / "demonstration.txt"), question
    if arguments.file == "-":
        text = read_standard_input()
    else:
        text = arguments.prompt if arguments.file is None else read_text(arguments.file)
    if not text.strip():
        raise InputError("the prompt is empty; give text with --prompt or --file")
    return text, arguments.question


def read_standard_input() -> str:
    if sys.stdin is None:
        raise InputError("standard input is closed; give text with --prompt or --file")
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"standard input is not UTF-8 text: {error.reason} at byte {error.start}") from error


def make_prompt(model: Llama, tokenizer: Tokenizer, text: str, question: str | None, arguments) -> Prompt:
    """The prompt that asks the question about the text, as a chat or not; InputError where the model cannot take it."""
    content = with_question(text, question) if question else text
    make = tokenizer.raw_prompt if arguments.no_chat else tokenizer.chat_prompt
    prompt = make(content, parse_special=arguments.parse_special)
    check_prompt(model, torch.tensor([prompt.ids]), arguments.max_new_tokens)
    if max(prompt.ids) >= model.config.vocab_size:
        raise InputError(f"the tokenizer gives id {max(prompt.ids)}, the model knows {model.config.vocab_size}: they do not fit")
    return prompt
