import pytest
import torch

import minikv
from minikv.config import Config
from minikv.default_model import default_model_folder
from minikv.model import Llama
from minikv.policy import Full, SharedVote


def make_tiny_model(layers=4, heads=6, kv_heads=2, head_dim=8, seed=0, max_positions=2048) -> Llama:
    """A small Llama with random weights, in float32. Attention is made sharper than chance would have it."""
    config = Config(100, 48, 96, layers, heads, kv_heads, head_dim, max_positions, 1e-5, 10000.0, None, tied_head=False)
    torch.manual_seed(seed)
    model = Llama(config).requires_grad_(False)
    for block in model.blocks:
        block.self_attn.q_proj.weight *= 4
        block.self_attn.k_proj.weight *= 4
    return model


def make_prompt(length, batch=1, seed=0) -> torch.Tensor:
    return torch.randint(0, 100, (batch, length), generator=torch.Generator().manual_seed(seed))


def make_profile(model: Llama, layer_scores=None) -> minikv.Profile:
    """A profile with the heads of layer l ranked l, l + 1, ... and later layers more easily hurt."""
    layers, heads = model.config.layers, model.config.heads
    ranks = [[(layer + head) % heads for head in range(heads)] for layer in range(layers)]
    strengths = [[(layer + 1) * (heads - row.index(head)) for head in range(heads)] for layer, row in enumerate(ranks)]
    even = sum(range(1, layers + 1))
    return minikv.Profile(ranks, layer_scores or [(layer + 1) / even for layer in range(layers)], strengths)


def make_policy(method, budget, profile, **options):
    """A policy of any method, SharedVote with the window of the others, so that `prefill` keeps enough for it."""
    if method is Full:
        return Full()
    if method is SharedVote:
        options = {"window": 8} | options
    return method(budget, profile, **options) if "profile" in method.__dataclass_fields__ else method(budget, **options)


@pytest.fixture(scope="session")
def default_folder():
    """The default model's checkpoint folder, fetched and made if it is not there."""
    return default_model_folder()


@pytest.fixture(scope="session")
def default_model(default_folder):
    """The default model and its tokenizer, float32 on the CPU."""
    return minikv.load(default_folder, device="cpu", dtype="float32")
