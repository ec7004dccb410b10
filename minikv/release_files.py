"""The files that the paper's release keeps for a model: its head ranks and its layer scores, read and written.

NAME_head_idx.json maps the number of each layer to its query heads, strongest first. NAME_layer_score.jsonl, one JSON
object despite its ending, maps each data set to one number a layer, and "avg_score" to their normalised mean. There
are no head scores in them, so heads can be ranked inside a layer only.
"""

from __future__ import annotations

from pathlib import Path

from minikv.errors import InputError
from minikv.files import read_json, write_json

HEADS, LAYERS, MEAN = "_head_idx.json", "_layer_score.jsonl", "avg_score"


def is_release_file(path: Path) -> bool:
    """Whether a path's name says that it is the release's file of head ranks."""
    return path.name.endswith(HEADS)


def layer_file(head_file: Path) -> Path:
    """The file of layer scores that belongs to a file of head ranks: beside it, with the same beginning."""
    return head_file.with_name(head_file.name.removesuffix(HEADS) + LAYERS)


def read(head_file: Path) -> dict:
    """The two files as fields of a Profile. InputError where one is missing or lacks a layer or the mean."""
    for file in (head_file, layer_file(head_file)):
        if not file.is_file():
            raise InputError(f"{file} is not there; the release's ranks {HEADS} and scores {LAYERS} go together")
    ranks, by_set = read_json(head_file), read_json(layer_file(head_file))
    missing = [layer for layer in map(str, range(len(ranks))) if layer not in ranks]
    if missing:
        raise InputError(f"{head_file}: layer {missing[0]} is missing from {len(ranks)} layers")
    if MEAN not in by_set:
        raise InputError(f"{layer_file(head_file)}: the field {MEAN} is missing")
    layer_scores = by_set.pop(MEAN)
    head_ranks = [ranks[str(layer)] for layer in range(len(ranks))]
    return {"head_ranks": head_ranks, "layer_scores": layer_scores, "layer_scores_by_set": by_set}


def write(head_file: Path, head_ranks: list[list[int]], layer_scores: list[float], by_set: dict) -> None:
    """Write both files; `by_set` are the layer scores of each data set, where they are known."""
    write_json(head_file, {str(layer): ranks for layer, ranks in enumerate(head_ranks)})
    write_json(layer_file(head_file), {**by_set, MEAN: layer_scores})
