"""Which heads retrieve: the semantic and the traditional retrieval score, and the Profile that holds a model's.

Both scores are read from the attention rows of the queries that produced an answer's tokens, in runs that ask for a
needle hidden in a haystack (CompressKV, section 3.2).
"""

from __future__ import annotations

import hashlib
import os
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from minikv import release_files
from minikv.config import Config
from minikv.errors import InputError
from minikv.files import read_json, write_json


def semantic_score(rows: Tensor, token: int, prompt: Tensor, answer: Tensor) -> Tensor:
    """The credit [heads] of one decode step: attention to the whole answer span, if the token occurs in it.

    rows [heads, kept] float32 are the attention rows of the query that produced `token`, over a full cache; prompt
    [seq] its token ids; answer [span] the positions of the answer in the prompt. A head that looks at another
    token of the answer is credited too, not only one that looks at the very token.
    """
    if token not in prompt[answer].tolist():
        return torch.zeros(rows.shape[0])
    return rows[:, answer].sum(-1)


def traditional_score(rows: Tensor, token: int, prompt: Tensor, answer: Tensor) -> Tensor:
    """The copying credit of Wu et al. 2024 (arXiv 2404.15574): 1 / |answer| if the most attended position lies in the
    answer and holds exactly the generated token. Arguments and result as in semantic_score."""
    best = rows.argmax(-1)
    copied = torch.isin(best, answer) & (prompt[best.clamp(max=len(prompt) - 1)] == token)
    return copied.float() / len(answer)


def rank_heads(scores: Tensor) -> list[list[int]]:
    """The heads of each layer, strongest first, from scores [layers, heads]; of equal ones the lower number first."""
    return scores.sort(dim=-1, descending=True, stable=True).indices.tolist()


def strongest(scores: Tensor) -> list[tuple[int, int]]:
    """All heads of the model as (layer, head), strongest first, from scores [layers, heads]."""
    order = scores.flatten().sort(descending=True, stable=True).indices.tolist()
    return [divmod(index, scores.shape[1]) for index in order]


def fingerprint(model: nn.Module) -> str:
    """A short hash of a model's weights that is the same in every dtype the model is loaded in.

    Every tensor takes part with its name, its shape and up to 64 of its values, rounded to bfloat16.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        flat = tensor.flatten()
        sample = flat[:: max(1, flat.numel() // 64)][:64].float().bfloat16()
        digest.update(f"{name} {list(tensor.shape)}".encode())
        digest.update(sample.cpu().view(torch.int16).numpy().tobytes())
    return digest.hexdigest()[:16]


FORMAT = "minikv profile 1"


@dataclass(frozen=True)
class Profile:
    """What is measured once for a model: the ranks of its heads in each layer and how much eviction hurts each layer.

    head_ranks: for each layer all query heads, strongest semantic retrieval head first. layer_scores: for each layer
    its share of the error, summing to 1. head_scores and traditional_scores: the scores [layers][heads] themselves,
    which compare across layers. model, settings, versions: what it was measured on, how, and with what. stability:
    how well two halves of the runs agree (see offline.stability). layer_scores_by_set: the layer scores of each data
    set alone. Raises InputError, naming the field, for lists that do not fit together or numbers that are not finite.
    """

    head_ranks: list[list[int]]
    layer_scores: list[float]
    head_scores: list[list[float]] | None = None
    traditional_scores: list[list[float]] | None = None
    model: dict = field(default_factory=dict)
    settings: dict = field(default_factory=dict)
    versions: dict = field(default_factory=dict)
    stability: dict = field(default_factory=dict)
    layer_scores_by_set: dict[str, list[float]] = field(default_factory=dict)

    def __post_init__(self):
        self._check_ranks()
        self._check_layer_scores("layer_scores", self.layer_scores)
        for name in ("head_scores", "traditional_scores"):
            rows = getattr(self, name)
            if rows is not None:
                if _length(name, rows) != self.layers:
                    raise InputError(f"profile: {name} has {len(rows)} layers, head_ranks {self.layers}")
                for layer, row in enumerate(rows):
                    _check_numbers(f"{name}, layer {layer}", row, self.heads)
        for name in ("model", "settings", "versions", "stability", "layer_scores_by_set"):
            if not isinstance(getattr(self, name), dict):
                raise InputError(f"profile: {name} is {str(getattr(self, name))[:40]!r}; a JSON object is needed")
        for name, values in self.layer_scores_by_set.items():
            self._check_layer_scores(f"layer_scores_by_set, {name}", values)
        for name in ("layers", "heads"):
            if self.model.get(name, getattr(self, name)) != getattr(self, name):
                raise InputError(f"profile: model says {self.model[name]!r} {name}, head_ranks has {getattr(self, name)}")

    def _check_ranks(self) -> None:
        _length("head_ranks", self.head_ranks)
        heads = _length("head_ranks, layer 0", self.head_ranks[0])
        for layer, ranks in enumerate(self.head_ranks):
            whole = isinstance(ranks, list) and all(type(head) is int for head in ranks)
            if not whole or sorted(ranks) != list(range(heads)):
                raise InputError(f"profile: head_ranks, layer {layer}, is not an order of the heads 0 to {heads - 1}")

    def _check_layer_scores(self, name: str, values) -> None:
        _check_numbers(name, values, self.layers)
        if min(values) < 0:
            raise InputError(f"profile: {name} has a negative number; errors are not negative")

    @property
    def layers(self) -> int:
        """Layers of the model that was measured."""
        return len(self.head_ranks)

    @property
    def heads(self) -> int:
        """Query heads of a layer."""
        return len(self.head_ranks[0])

    @property
    def traditional_ranks(self) -> list[list[int]]:
        """The heads of each layer, strongest traditional retrieval head first."""
        if self.traditional_scores is None:
            raise InputError("the profile has no traditional_scores, so its heads cannot be ranked by them")
        return rank_heads(torch.tensor(self.traditional_scores))

    def check_shape(self, layers: int, heads: int) -> None:
        """Refuse a model of another shape: head numbers of one model mean nothing in another."""
        if (self.layers, self.heads) != (layers, heads):
            raise InputError(
                f"the profile is for {self.layers} layers of {self.heads} query heads, the model has {layers} of {heads}"
            )

    def check_model(self, model: nn.Module, config: Config) -> str | None:
        """Refuse a model of another shape; return a warning when the weights are others than were profiled."""
        self.check_shape(config.layers, config.heads)
        for name in ("kv_heads", "head_dim"):
            if self.model.get(name, getattr(config, name)) != getattr(config, name):
                raise InputError(f"the profile is for {self.model[name]} {name}, the model has {getattr(config, name)}")
        expected, found = self.model.get("weights"), fingerprint(model)
        if expected is not None and expected != found:
            return f"the profile was measured on other weights ({expected}) than this model's ({found})"
        return None

    @staticmethod
    def load(path: str | os.PathLike) -> Profile:
        """Read a profile, or the release's NAME_head_idx.json with the NAME_layer_score.jsonl beside it.

        InputError names the file and the field that is missing, of another kind, or NaN.
        """
        path = Path(path)
        fields = release_files.read(path) if release_files.is_release_file(path) else _read(path)
        try:
            return Profile(**fields)
        except TypeError as error:
            problem = str(error).removeprefix("Profile.__init__() ")
            raise InputError(f"profile {path}: {problem}") from error
        except InputError as error:
            raise InputError(f"profile {path}: {str(error).removeprefix('profile: ')}") from error

    def save(self, path: str | os.PathLike) -> None:
        """Write the profile as JSON; to a path that ends in _head_idx.json as the release's two files instead.

        Those two hold the ranks and the layer scores, nothing else.
        """
        path = Path(path)
        if release_files.is_release_file(path):
            release_files.write(path, self.head_ranks, self.layer_scores, self.layer_scores_by_set)
        else:
            write_json(path, {"format": FORMAT, **asdict(self)})


def _read(path: Path) -> dict:
    """The fields of a profile's file."""
    if not path.is_file():
        raise InputError(f"profile {path}: there is no such file")
    fields = read_json(path)
    if fields.pop("format", None) != FORMAT:
        raise InputError(f"profile {path}: the field format is not {FORMAT!r}")
    return fields


def _length(name: str, value) -> int:
    if not isinstance(value, list) or not value:
        raise InputError(f"profile: {name} is {str(value)[:40]!r}; a list that is not empty is needed")
    return len(value)


def _check_numbers(name: str, values, count: int) -> None:
    if _length(name, values) != count:
        raise InputError(f"profile: {name} has {len(values)} numbers, {count} are needed")
    for value in values:
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not abs(value) <= sys.float_info.max:  # False for NaN, infinity, and huge whole numbers
            raise InputError(f"profile: {name} holds {str(value)[:40]}; finite numbers are needed")
