"""Which heads retrieve: the semantic and the traditional retrieval score, and the Profile that holds a model's.

Both scores are read from the attention rows of the queries that produced an answer's tokens, in runs that ask for a
needle hidden in a haystack (CompressKV, section 3.2).
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from minikv.config import Config
from minikv.errors import InputError


def semantic_score(rows: Tensor, token: int, prompt: Tensor, answer: Tensor) -> Tensor:
    """The credit [heads] of one decode step: attention to the whole answer span, if the token occurs in it.

    rows [heads, kept] are the attention rows of the query that produced `token`, over a full cache; prompt [seq] its
    token ids; answer [span] the positions of the answer in the prompt. A head that looks around the answer is
    credited too, not only one that looks at the very token.
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
    which compare across layers. model, settings, versions: what it was measured on, how, and with what.
    """

    head_ranks: list[list[int]]
    layer_scores: list[float]
    head_scores: list[list[float]] | None = None
    traditional_scores: list[list[float]] | None = None
    model: dict = field(default_factory=dict)
    settings: dict = field(default_factory=dict)
    versions: dict = field(default_factory=dict)

    def __post_init__(self):
        layers = _length("head_ranks", self.head_ranks)
        heads = _length("head_ranks, layer 0", self.head_ranks[0])
        for layer, ranks in enumerate(self.head_ranks):
            whole = isinstance(ranks, list) and all(type(head) is int for head in ranks)
            if not whole or sorted(ranks) != list(range(heads)):
                raise InputError(f"profile: head_ranks, layer {layer}, is not an order of the heads 0 to {heads - 1}")
        _check_numbers("layer_scores", self.layer_scores, layers)
        if min(self.layer_scores) < 0:
            raise InputError("profile: layer_scores has a negative number; errors are not negative")
        for name in ("head_scores", "traditional_scores"):
            rows = getattr(self, name)
            if rows is not None:
                if _length(name, rows) != layers:
                    raise InputError(f"profile: {name} has {len(rows)} layers, head_ranks {layers}")
                for layer, row in enumerate(rows):
                    _check_numbers(f"{name}, layer {layer}", row, heads)

    @property
    def layers(self) -> int:
        return len(self.head_ranks)

    @property
    def heads(self) -> int:
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
        expected, found = self.model.get("weights"), fingerprint(model)
        if expected is not None and expected != found:
            return f"the profile was measured on other weights ({expected}) than this model's ({found})"
        return None

    @staticmethod
    def load(path: str | os.PathLike) -> Profile:
        """Read a profile; InputError names the file and the field that is missing, of another kind, or NaN."""
        try:
            fields = json.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise InputError(f"profile {path}: {error.strerror}") from error
        except ValueError as error:
            raise InputError(f"profile {path} is not JSON: {error}") from error
        if not isinstance(fields, dict) or fields.pop("format", None) != FORMAT:
            raise InputError(f"profile {path}: the field format is not {FORMAT!r}")
        try:
            return Profile(**fields)
        except TypeError as error:
            problem = str(error).removeprefix("Profile.__init__() ")
            raise InputError(f"profile {path}: {problem}") from error
        except InputError as error:
            raise InputError(f"profile {path}: {str(error).removeprefix('profile: ')}") from error

    def save(self, path: str | os.PathLike) -> None:
        """Write the profile as JSON, beside and then into place, so that an interrupted run leaves no half file."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_name(path.name + ".part")
        beside.write_text(json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n", encoding="utf-8")
        os.replace(beside, path)


def _length(name: str, value) -> int:
    if not isinstance(value, list) or not value:
        raise InputError(f"profile: {name} is {str(value)[:40]!r}; a list that is not empty is needed")
    return len(value)


def _check_numbers(name: str, values, count: int) -> None:
    if _length(name, values) != count:
        raise InputError(f"profile: {name} has {len(values)} numbers, {count} are needed")
    for value in values:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise InputError(f"profile: {name} holds {value!r}; finite numbers are needed")
