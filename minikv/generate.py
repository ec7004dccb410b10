"""Answer a prompt with a compressed cache: `python -m minikv.generate`.

Without arguments it is a demonstration: a question about a long document, answered with the full cache and then with
CompressKV, and what each kept and took.
"""

from __future__ import annotations

from dataclasses import asdict
from functools import partial

import torch
from torch import Tensor

from minikv import command, questions
from minikv.answer import Answer, layer_progress, make_picker, table, warm_up
from minikv.budget import PromptShape, parse
from minikv.errors import InputError
from minikv.files import write_json
from minikv.inference import check_prompt, decode, prefill_layer_by_layer
from minikv.model import Llama
from minikv.policy import Full, Policy
from minikv.prompts import add_prompt_arguments, make_prompt, read_prompt
from minikv.tokenizer import Tokenizer
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


def parse_arguments():
    parser = command.Parser(
        "Answer a prompt with a compressed KV cache. Without --prompt or --file: a demonstration on a built-in document."
    )
    command.add_model_arguments(parser, compiles=True)
    add_prompt_arguments(parser, many_questions=True)
    command.add_policy_arguments(parser)
    parser.add_argument("--max-new-tokens", type=command.not_negative, default=128, help="longest answer, in tokens")
    parser.add_argument("--temperature", type=float, default=0.0, help="0: the most likely token; above: sampling")
    parser.add_argument("--top-p", type=float, default=1.0, help="sample from the likeliest tokens of this probability together")
    parser.add_argument("--seed", type=command.seed, default=0, help="seed of the sampling")
    parser.add_argument("--json", metavar="FILE", help="write settings, answers and figures to this file")
    arguments = parser.parse_args()
    command.check_outputs(arguments, "json", "save_prefill")
    if not 0 <= arguments.temperature < float("inf") or not 0 < arguments.top_p <= 1:
        raise InputError("accepted: --temperature 0 or more, --top-p above 0 and at most 1")
    questions.check_arguments(arguments)
    return arguments


def main() -> None:
    arguments = parse_arguments()
    several = questions.wanted(arguments)
    if not several:
        arguments.question = arguments.question[0] if arguments.question else None
    text, question = read_prompt(arguments) if arguments.load_prefill is None else (questions.read_saved_text(arguments), None)
    parse(arguments.budget)  # a slip here, or in the method, is told before the model is loaded
    command.read_spec(arguments.policy)
    model, tokenizer = load(arguments.model, arguments.device, arguments.dtype, arguments.plain, arguments.compile)
    profile = partial(command.load_profile, model, arguments.profile, arguments.model)
    policy = command.make_policy(arguments.policy, arguments, profile)
    if several:
        questions.answer_all(model, tokenizer, text, policy, arguments)
    else:
        answer_one(model, tokenizer, text, question, policy, arguments)


def answer_one(model: Llama, tokenizer: Tokenizer, text: str, question: str | None, policy: Policy, arguments) -> None:
    """Answer one prompt; the demonstration with the full cache, too, to compare with."""
    demonstration = arguments.prompt is None and arguments.file is None
    methods = {"full": Full(), arguments.policy: policy} if demonstration else {arguments.policy: policy}

    prompt = make_prompt(model, tokenizer, text, question, arguments)
    shape = PromptShape(model.config.layers, len(prompt.ids), model.new_layer_cache(1, 0).entry_bytes)
    policy.mean_entries(shape)  # a budget that is too small is told before the work
    if demonstration:
        print(f"A document of {len(tokenizer.encode(text)):,} tokens, and a question about it: {question}")

    answers, tokens = [], torch.tensor([prompt.ids], device=model.device)
    warm_up(model)
    for name, method in methods.items():
        print(f"\n[{name}] " if len(methods) > 1 else "", end="", flush=True)
        answers.append(Answer(name))
        progress = partial(layer_progress, what=name)
        prefill = partial(prefill_layer_by_layer, model, tokens, method, arguments.max_new_tokens, progress)
        for piece in answers[-1].stream(model, tokenizer, prompt, prefill, arguments):
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


if __name__ == "__main__":
    command.run(main)
