"""The picture of what two heads of one layer look at: `python -m minikv.report.attention_rows FILE`.

One head streams: first token, latest tokens. The other retrieves. Each is drawn twice, as a policy sees it at the end
of the prompt, and at the moment when the answer is written, which is what the retrieval scores are made of.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from torch import Tensor

from minikv import command
from minikv.haystack import DATA, Needle, NeedlePrompt, hide, load_haystack, load_needles
from minikv.inference import compress, decode, prefill
from minikv.model import Llama
from minikv.policy import Full
from minikv.report.figure import LOOKS, save
from minikv.scores import window_attention
from minikv.tokenizer import Prompt, Tokenizer
from minikv.weights import DEFAULT_MODEL, load

LAYER, STREAMING, RETRIEVING = 18, 3, 6  # of the default model
LENGTH, DEPTH = 640, 0.4  # prompt length in tokens; where the needle goes in, from 0 (start) to 1 (end)
LABELLED = 2  # highest weights of a panel whose tokens are written beside them


def example_needle() -> Needle:
    """The needle about the vault of a bank, whose answer is a number of five digits."""
    return next(needle for needle in load_needles(DATA / "evaluate/needles.jsonl") if needle.answer == "58213")


def example_prompt(tokenizer: Tokenizer) -> NeedlePrompt:
    """That needle in an essay about elevators: the chat prompt that the tutorial goes through, 640 tokens long."""
    essay = load_haystack(DATA / "evaluate/essays/13-elevator.txt")
    return hide(tokenizer, essay, example_needle(), LENGTH, DEPTH)


def positions_of(prompt: Prompt, text: str) -> list[int]:
    """The positions of the tokens that spell the first occurrence of `text` in a prompt. ValueError: it has none."""
    start = prompt.text.index(text)
    end = start + len(text)
    return [position for position, (first, last) in enumerate(prompt.offsets) if first < end and last > start]


def before_the_answer(model: Llama, tokenizer: Tokenizer, ids: list[int], answer: str) -> list[int]:
    """The prompt `ids` and the model's own answer up to where it begins to write `answer`, its full cache intact.

    The query of the last of these tokens is the one that produces the answer's first token.
    """
    result = prefill(model, torch.tensor([ids], device=model.device))
    written: list[int] = []
    for token in decode(model, compress(result, Full()), result.logits, 50, tokenizer.stop_ids):
        if answer.startswith(tokenizer.decode([token.item()])):
            break
        written.append(token.item())
    return ids + written


def last_rows(model: Llama, ids: list[int], layer: int, window: int) -> Tensor:
    """Mean attention row of the last `window` tokens, for each head of a layer: [heads, seq] float32."""
    result = prefill(model, torch.tensor([ids], device=model.device), window)
    return window_attention(result.queries[layer], result.cache[layer].keys)[0].mean(1)


def draw(model: Llama, tokenizer: Tokenizer, path: Path) -> Path:
    """Two heads in rows; the window at the prompt's end and the token that writes the answer in columns."""
    needle, example = example_needle(), example_prompt(tokenizer)
    longer = before_the_answer(model, tokenizer, example.ids, needle.answer)
    hidden = positions_of(example.prompt, needle.needle)
    texts = [example.prompt.text[start:end] for start, end in example.prompt.offsets]
    texts += [tokenizer.decode([token]) for token in longer[len(example.ids) :]]
    columns = {
        "mean row of the last 8 prompt tokens": last_rows(model, example.ids, LAYER, window=8),
        f"row of the token that writes the answer's “{needle.answer[0]}”": last_rows(model, longer, LAYER, window=1),
    }
    shape = {"figsize": (10, 4.6), "sharex": True, "sharey": True, "layout": "constrained"}
    figure, grid = plt.subplots(2, 2, **shape)
    for axes_row, head, kind, look in zip(grid, (STREAMING, RETRIEVING), ("streaming", "retrieving"), LOOKS[1:]):
        for axes, (title, rows) in zip(axes_row, columns.items()):
            _panel(axes, rows[head], texts, hidden, look["color"])
            axes.set_title(f"layer {LAYER} head {head} ({kind})\n{title}", fontsize=8)
    figure.supxlabel("position (shaded: the needle; dotted: the prompt's end)", fontsize=9)
    figure.supylabel("attention weight", fontsize=9)
    settings = {"model": DEFAULT_MODEL, "prompt tokens": LENGTH, "depth of the needle": DEPTH}
    return save(figure, settings | {"minikv": command.versions()["minikv"]}, path)


def _panel(axes: Axes, row: Tensor, texts: list[str], hidden: list[int], colour: str) -> None:
    axes.axvspan(hidden[0] - 0.5, hidden[-1] + 0.5, color="#DDDDDD")
    axes.axvline(LENGTH - 0.5, color="grey", linewidth=0.7, linestyle=":")
    axes.vlines(range(len(row)), 0, row.tolist(), color=colour, linewidth=1.6)
    weights, positions = row.topk(LABELLED)
    for weight, position in zip(weights.tolist(), positions.tolist()):
        side = -1 if position > len(row) / 2 else 1
        label = f"{position}: {texts[position]!r}, {weight:.2f}"
        place = {"xytext": (5 * side, 2), "textcoords": "offset points", "ha": "left" if side > 0 else "right"}
        axes.annotate(label, (position, weight), fontsize=7, parse_math=False, **place)
    axes.set_ylim(0, 1.08)
    axes.tick_params(labelsize=7)
    axes.grid(axis="y", alpha=0.3)


def parse_arguments():
    parser = command.Parser("Draw what a streaming and a retrieving head of the default model look at.")
    parser.add_argument("file", metavar="FILE", type=Path, help="the PNG file to write")
    arguments = parser.parse_args()
    command.check_outputs(arguments, "file")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    model, tokenizer = load(device="cpu", dtype="float32")
    print(f"drawn: {draw(model, tokenizer, arguments.file)}")


if __name__ == "__main__":
    command.run(main)
