"""Measure a model's profile, once: `python -m minikv.profile`.

Asks for needles hidden in essays, scores every head by what it attended to while the model answered, ranks the heads,
and then measures how much keeping only 32 entries would change each layer's output (CompressKV, sections 3.2 and 3.3).
"""

from __future__ import annotations

from pathlib import Path

import torch

from minikv import command, offline
from minikv.errors import InputError
from minikv.haystack import DATA, NeedlePrompt, hide, load_haystack, load_needles, recall
from minikv.srh import Profile, fingerprint, rank_heads
from minikv.weights import load

FOUND = 0.5  # a run counts when more than this share of the answer's words was found


def needle_prompts(arguments, tokenizer) -> list[tuple[str, NeedlePrompt]]:
    """The answer and the prompt of every needle, length and depth."""
    haystack, needles = load_haystack(arguments.haystack), load_needles(arguments.needles)
    cases = [(needle, length, depth) for length in arguments.lengths for needle in needles for depth in arguments.depths]
    with command.show_progress(len(cases), "building prompts") as bar:
        prompts = []
        for needle, length, depth in cases:
            prompts.append((needle.answer, hide(tokenizer, haystack, needle, length, depth / 100)))
            bar.update()
    return prompts


def identify(model, tokenizer, prompts, max_answer_tokens: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Mean semantic and traditional scores [layers, heads] over the runs whose answer was found, and their number.

    Raises InputError when no answer was found: such scores would say nothing.
    """
    shape = (model.config.layers, model.config.heads)
    semantic, traditional, counted = torch.zeros(shape), torch.zeros(shape), 0
    with command.show_progress(len(prompts), "scoring heads") as bar:
        for answer, prompt in prompts:
            run = offline.score_heads(model, prompt.ids, prompt.answer_positions, tokenizer.stop_ids, max_answer_tokens)
            if recall(answer, tokenizer.decode(run.answer)) > FOUND:
                semantic, traditional, counted = semantic + run.semantic, traditional + run.traditional, counted + 1
            bar.update()
    if counted == 0:
        raise InputError(
            f"in none of {len(prompts)} runs did the model find the needle, so no head can be scored;"
            " try shorter --lengths, or other --needles"
        )
    return semantic / counted, traditional / counted, counted


def measure_layers(model, tokenizer, prompts, ranks: list[list[int]], max_answer_tokens: int) -> list[float]:
    """Layer scores, summing to 1, from the same prompts."""
    errors = torch.zeros(model.config.layers, dtype=torch.float64)
    with command.show_progress(len(prompts), "measuring layers") as bar:
        for _, prompt in prompts:
            errors += offline.layer_errors(model, prompt.ids, ranks, tokenizer.stop_ids, max_answer_tokens)
            bar.update()
    if errors.sum() == 0:
        raise InputError("no answer was longer than one token, so no layer's error could be measured")
    return offline.layer_scores([errors])


def parse_arguments():
    parser = command.Parser("Measure which heads of a model retrieve and how much eviction hurts each layer.")
    command.add_model_arguments(parser)
    parser.add_argument("--haystack", default=DATA / "identify/essays", help="a text file, or a folder of .txt files")
    parser.add_argument("--needles", default=DATA / "identify/needles.jsonl", help="JSONL: needle, question, answer")
    parser.add_argument("--lengths", type=command.positive, nargs="+", default=[1024, 2048], help="prompt lengths in tokens")
    parser.add_argument("--depths", type=command.percent, nargs="+", default=[10, 50, 90], help="depths of the needle in percent")
    parser.add_argument("--max-answer-tokens", type=command.positive, default=50, help="longest answer, in tokens")
    parser.add_argument("--output", help="where to write the profile; default: weights/profiles/MODEL.json")
    parser.add_argument("--json", metavar="FILE", help="write a record of the run to this file as well")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    output = Path(arguments.output) if arguments.output else command.default_profile_path(arguments.model)
    model, tokenizer = load(arguments.model, arguments.device, arguments.dtype)
    prompts = needle_prompts(arguments, tokenizer)
    semantic, traditional, counted = identify(model, tokenizer, prompts, arguments.max_answer_tokens)
    print(f"the answer was found in {counted} of {len(prompts)} runs")
    ranks = rank_heads(semantic)
    layer_scores = measure_layers(model, tokenizer, prompts, ranks, arguments.max_answer_tokens)
    config = model.config
    profile = Profile(
        head_ranks=ranks,
        layer_scores=layer_scores,
        head_scores=semantic.tolist(),
        traditional_scores=traditional.tolist(),
        model={
            "name": Path(arguments.model).name,
            "layers": config.layers,
            "heads": config.heads,
            "kv_heads": config.kv_heads,
            "head_dim": config.head_dim,
            "weights": fingerprint(model),
        },
        settings={
            "haystack": Path(arguments.haystack).name,
            "needles": Path(arguments.needles).name,
            "lengths": arguments.lengths,
            "depths": arguments.depths,
            "max_answer_tokens": arguments.max_answer_tokens,
            "runs": len(prompts),
            "runs_counted": counted,
            "dtype": str(model.dtype).removeprefix("torch."),
        },
        versions=command.versions(),
    )
    profile.save(output)
    if arguments.json:
        command.write_json(arguments.json, {"settings": profile.settings, "versions": profile.versions, "profile": str(output)})
    print(strongest(semantic, layer_scores))
    print(f"\nwritten to {output}")


def strongest(semantic: torch.Tensor, layer_scores: list[float], count: int = 8) -> str:
    """The strongest heads of the whole model and the layers that eviction hurts most, as text."""
    heads = semantic.shape[1]
    best = semantic.flatten().sort(descending=True, stable=True).indices[:count].tolist()
    rows = [("head", "semantic score")]
    rows += [(f"layer {index // heads} head {index % heads}", f"{semantic.flatten()[index]:.3f}") for index in best]
    layers = sorted(range(len(layer_scores)), key=lambda layer: -layer_scores[layer])[:count]
    worst = ", ".join(f"{layer} ({layer_scores[layer]:.1%})" for layer in layers)
    return f"{command.text_table(rows)}\n\nlayers that eviction hurts most (share of the error): {worst}"


if __name__ == "__main__":
    command.run(main)
