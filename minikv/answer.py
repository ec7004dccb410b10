"""An answer as it is made: the text that streams, what was kept for it, and how long it took."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from minikv import command
from minikv.cache import KVCache
from minikv.errors import InputError
from minikv.inference import decode, pick
from minikv.model import Llama
from minikv.tokenizer import Prompt, Tokenizer


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
    prefill_seconds: float = 0.0  # selection included; of a question about a document that is there, only its own
    decode_tokens_per_second: float | None = None  # from the second token on; the first comes from the prefill

    def stream(
        self, model: Llama, tokenizer: Tokenizer, prompt: Prompt, prefill: Callable[[], tuple[Tensor, KVCache]], arguments
    ) -> Iterator[str]:
        """Generate, yielding the text as it becomes final. `prefill` gives the prompt's logits and compressed cache."""
        start = time.perf_counter()
        logits, cache = prefill()
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


def layer_progress(blocks: Iterable, what: str) -> Iterator:
    """The layers of a model, with a progress bar for the prefill of `what`."""
    with command.show_progress(len(blocks), f"{what}: prefill, layers") as bar:
        for block in blocks:
            yield block
            bar.update()


def table(answers: list[Answer]) -> str:
    """What each method kept and took, as text."""
    return command.text_table([("method", *FIGURES), *((answer.method, *figures(answer)) for answer in answers)])


FIGURES = ("entries kept", "of", "share", "KV MB", "prefill s", "decode tokens/s")


def figures(answer: Answer) -> tuple[str, ...]:
    """The FIGURES of an answer, as text."""
    speed = answer.decode_tokens_per_second
    return (
        f"{answer.entries_kept:,}",
        f"{answer.entries_of:,}",
        f"{answer.entries_kept / answer.entries_of:.1%}",
        f"{answer.kv_bytes / 1e6:.1f}",
        f"{answer.prefill_seconds:.2f}",
        "-" if speed is None else f"{speed:.1f}",
    )


def warm_up(model: Llama) -> None:
    """Run a few tokens, so that the first method's time is not that of the first call."""
    with torch.no_grad():
        model(torch.zeros(1, 16, dtype=torch.long, device=model.device))
