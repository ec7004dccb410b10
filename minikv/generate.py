"""Answer a prompt with a compressed cache: `python -m minikv.generate`.

Without arguments it is a demonstration: a question about a long document, answered with the full cache and then with
CompressKV, and what each kept and took.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial

import torch
from torch import Tensor

from minikv import command
from minikv.budget import PromptShape, parse
from minikv.errors import InputError
from minikv.files import write_json
from minikv.haystack import DATA, read_text, with_question
from minikv.inference import check_prompt, decode, pick, prefill_layer_by_layer
from minikv.model import Llama
from minikv.policy import Full, Policy
from minikv.tokenizer import Prompt, Tokenizer
from minikv.weights import load


def generate(
    model: Llama,
    tokens: Tensor,
    policy: Policy,
    max_new_tokens: int,
    stop_ids: frozenset[int] = frozenset(),
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
) -> Tensor:
    """The answer's token ids [batch, new] to prompts of equal length, tokens [batch, seq].

    The prompt is compressed once, after its prefill, by `policy`. Greedy unless temperature > 0. Raises InputError
    when the prompt is empty or does not fit the model's context with max_new_tokens.
    """
    check_prompt(model, tokens, max_new_tokens)
    logits, cache = prefill_layer_by_layer(model, tokens, policy, reserve=max_new_tokens)
    picker = make_picker(model, temperature, top_p, seed)
    answer = list(decode(model, cache, logits, max_new_tokens, stop_ids, picker))
    return torch.stack(answer, 1) if answer else tokens.new_empty(tokens.shape[0], 0)


def make_picker(model: Llama, temperature: float, top_p: float, seed: int):
    """The function that picks the next token from logits, with a random generator of its own."""
    generator = torch.Generator(model.device).manual_seed(seed)
    return partial(pick, temperature=temperature, top_p=top_p, generator=generator)


@dataclass
class Answer:
    """One method's answer and what it took. Entries are counted over all layers, for one KV head each."""

    method: str
    text: str = ""
    new_tokens: int = 0
    entries_kept: int = 0  # when decoding starts
    entries_of: int = 0
    kept_each_layer: list[int] | None = None
    kv_bytes: int = 0  # when decoding starts
    entries_at_end: int = 0  # decoded tokens are appended, never evicted
    prefill_seconds: float = 0.0  # selection included
    decode_tokens_per_second: float | None = None  # from the second token on; the first comes from the prefill

    def stream(self, model: Llama, tokenizer: Tokenizer, prompt: Prompt, policy: Policy, arguments) -> Iterator[str]:
        """Generate, yielding the text as it becomes final."""
        tokens = torch.tensor([prompt.ids], device=model.device)
        start = time.perf_counter()
        progress = partial(_layer_progress, method=self.method)
        logits, cache = prefill_layer_by_layer(model, tokens, policy, arguments.max_new_tokens, progress)
        if logits.isnan().any():  # this waits for the device, too
            raise InputError(f"the model's output is NaN in {model.dtype}; its weights are broken, or try another --dtype")
        self.prefill_seconds = time.perf_counter() - start
        self.kept_each_layer, self.kv_bytes = cache.kept, cache.nbytes
        self.entries_kept, self.entries_of = sum(cache.kept), len(cache) * len(prompt.ids)

        picker = make_picker(model, arguments.temperature, arguments.top_p, arguments.seed)
        text_stream, times = tokenizer.stream(), []
        for token in decode(model, cache, logits, arguments.max_new_tokens, tokenizer.stop_ids, picker):
            piece = text_stream.put(token.item())
            times.append(time.perf_counter())
            self.text += piece
            yield piece
        rest = text_stream.end()
        self.text += rest
        yield rest
        self.new_tokens, self.entries_at_end = len(times), sum(cache.kept)
        if len(times) > 1:
            self.decode_tokens_per_second = (len(times) - 1) / (times[-1] - times[0])


def _layer_progress(blocks, method: str):
    with command.show_progress(len(blocks), f"{method}: prefill, layers") as bar:
        for block in blocks:
            yield block
            bar.update()


def table(answers: list[Answer]) -> str:
    """What each method kept and took, as text."""
    rows = [("method", "entries kept", "of", "share", "KV MB", "prefill s", "decode tokens/s")]
    for answer in answers:
        speed = answer.decode_tokens_per_second
        rows.append(
            (
                answer.method,
                f"{answer.entries_kept:,}",
                f"{answer.entries_of:,}",
                f"{answer.entries_kept / answer.entries_of:.1%}",
                f"{answer.kv_bytes / 1e6:.1f}",
                f"{answer.prefill_seconds:.2f}",
                "-" if speed is None else f"{speed:.1f}",
            )
        )
    return command.text_table(rows)


def add_prompt_arguments(parser: command.Parser) -> None:
    """Where the prompt comes from: see read_prompt and make_prompt."""
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--prompt", help="the text to answer")
    source.add_argument("--file", help="a file with the text; - is standard input")
    parser.add_argument("--question", help="a question about the text, put after it")
    parser.add_argument("--no-chat", action="store_true", help="give the text to the model as it is, without its chat template")
    parser.add_argument("--parse-special", action="store_true", help="let the text hold control tokens such as <|im_end|>")


def parse_arguments():
    parser = command.Parser(
        "Answer a prompt with a compressed KV cache. Without --prompt or --file: a demonstration on a built-in document."
    )
    command.add_model_arguments(parser)
    add_prompt_arguments(parser)
    command.add_policy_arguments(parser)
    parser.add_argument("--max-new-tokens", type=command.not_negative, default=128, help="longest answer, in tokens")
    parser.add_argument("--temperature", type=float, default=0.0, help="0: the most likely token; above: sampling")
    parser.add_argument("--top-p", type=float, default=1.0, help="sample from the likeliest tokens of this probability together")
    parser.add_argument("--seed", type=command.seed, default=0, help="seed of the sampling")
    parser.add_argument("--json", metavar="FILE", help="write settings, answers and figures to this file")
    arguments = parser.parse_args()
    command.check_outputs(arguments, "json")
    if not 0 <= arguments.temperature < float("inf") or not 0 < arguments.top_p <= 1:
        raise InputError("accepted: --temperature 0 or more, --top-p above 0 and at most 1")
    return arguments


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


def main() -> None:
    arguments = parse_arguments()
    demonstration = arguments.prompt is None and arguments.file is None
    text, question = read_prompt(arguments)
    parse(arguments.budget)  # a slip here, or in the method, is told before the model is loaded
    command.read_spec(arguments.policy)
    model, tokenizer = load(arguments.model, arguments.device, arguments.dtype, arguments.plain)
    profile = partial(command.load_profile, model, arguments.profile, arguments.model)
    policy = command.make_policy(arguments.policy, arguments, profile)
    methods = {"full": Full(), arguments.policy: policy} if demonstration else {arguments.policy: policy}

    prompt = make_prompt(model, tokenizer, text, question, arguments)
    shape = PromptShape(model.config.layers, len(prompt.ids), model.new_layer_cache(1, 0).entry_bytes)
    policy.mean_entries(shape)  # a budget that is too small is told before the work
    if demonstration:
        print(f"A document of {len(tokenizer.encode(text)):,} tokens, and a question about it: {question}")

    answers = []
    warm_up(model)
    for name, method in methods.items():
        print(f"\n[{name}] " if len(methods) > 1 else "", end="", flush=True)
        answers.append(Answer(name))
        for piece in answers[-1].stream(model, tokenizer, prompt, method, arguments):
            print(piece, end="", flush=True)
        print()
    if arguments.json:
        settings = {key: value for key, value in vars(arguments).items() if key not in ("json", "debug")}
        settings["options"] = {name: command.options_of(method) for name, method in methods.items()}
        record = {"settings": settings, "versions": command.versions(), "prompt_tokens": len(prompt.ids)}
        write_json(arguments.json, {**record, "answers": [asdict(answer) for answer in answers]})
    print("\n" + table(answers))
    if policy.window and answers[-1].entries_kept < answers[-1].entries_of:
        seen = prompt.tail(policy.window)
        print(f"\nThe window of {policy.window} tokens that chose: {seen!r}. The first answer token is the full cache's own.")


def warm_up(model: Llama) -> None:
    """Run a few tokens, so that the first method's time is not that of the first call."""
    with torch.no_grad():
        model(torch.zeros(1, 16, dtype=torch.long, device=model.device))


if __name__ == "__main__":
    command.run(main)
