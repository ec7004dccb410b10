"""What only a trained model can show: positions and sinks after eviction, and memory on a long prompt."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from einops import repeat

import minikv
from minikv.cache import KVCache
from minikv.haystack import DATA, load_haystack
from minikv.policy import METHODS, CompressKV, StreamingLLM
from minikv.srh import Profile

ROOT = Path(__file__).parent.parent
PROFILE = ROOT / "weights/profiles/smollm2-135m-instruct.json"


@pytest.fixture(scope="module")
def essay(default_model):
    """The prefill of 640 tokens of plain text, and the 120 tokens that follow."""
    model, tokenizer = default_model
    tokens = torch.tensor([tokenizer.encode(load_haystack(DATA / "evaluate/essays"))])
    return minikv.prefill(model, tokens[:, :640]), tokens[:, 640:760]


def keep(result, positions):
    """A cache with the same positions kept in every layer."""
    positions = repeat(torch.tensor(positions), "kept -> 1 3 kept")
    return KVCache([full.keep(positions, reserve=120) for full in result.cache.layers])


@torch.no_grad()
def nll(model, result, cache, following) -> float:
    """Mean negative log-likelihood, in nats, of the tokens that follow the prefill."""
    logits = torch.cat([result.logits[:, None], model(following[:, :-1], cache)], dim=1)
    return torch.nn.functional.cross_entropy(logits[0], following[0]).item()


def test_new_tokens_take_the_position_after_the_prompt_not_after_the_kept_entries(default_model, essay):
    model, (result, following) = default_model[0], essay
    positions = [*range(4), *range(516, 640)]
    right, wrong = keep(result, positions), keep(result, positions)
    for layer in wrong.layers:
        layer.seen = layer.kept  # the fault: one counter for storage and position
    assert nll(model, result, wrong, following) - nll(model, result, right, following) > 0.5


def test_losing_the_first_token_alone_costs_dearly(default_model, essay):
    model, (result, following) = default_model[0], essay
    full, without = keep(result, [*range(640)]), keep(result, [*range(1, 640)])
    assert nll(model, result, without, following) - nll(model, result, full, following) > 0.5


@pytest.mark.parametrize("budget", [64, 128])
def test_streamingllm_keeps_the_sinks_and_compresskv_may_not(default_model, essay, budget):
    """Only StreamingLLM guards the first tokens. What the others keep of them follows from their scores."""
    result, _ = essay
    for layer in minikv.compress(result, StreamingLLM(budget)).layers:
        assert layer.positions[0, :, :4].tolist() == [[0, 1, 2, 3]] * 3
    cache = minikv.compress(result, CompressKV(budget, Profile.load(PROFILE)))
    guarded = [layer.positions[0, 0, 0].item() == 0 for layer in cache.layers]
    print(f"budget {budget}: position 0 is kept in {sum(guarded)} of 30 layers")
    assert sum(cache.kept) == budget * 30


def test_decoding_one_token_at_a_time_equals_one_forward_pass(default_model, essay):
    model, (_, tokens) = default_model[0], essay
    with torch.no_grad():
        whole = model(tokens)
        cache = model.new_cache(1, 120)
        steps = torch.cat([model(tokens[:, i : i + 1], cache) for i in range(120)], dim=1)
    assert (whole - steps)[:, -1].abs().max() < 1e-4
    assert (whole - steps).abs().max() < 5e-4


def test_layer_by_layer_leaves_the_very_cache_that_compressing_a_whole_prefill_does(default_model):
    model, tokenizer = default_model
    tokens = torch.tensor([tokenizer.encode(load_haystack(DATA / "evaluate/essays"))[:640]])
    policy = CompressKV(64, Profile.load(PROFILE))
    logits, layered = minikv.prefill_layer_by_layer(model, tokens, policy)
    result = minikv.prefill(model, tokens)
    assert torch.equal(logits, result.logits)
    for a, b in zip(minikv.compress(result, policy).layers, layered.layers):
        assert torch.equal(a.positions, b.positions) and torch.equal(a.keys, b.keys) and torch.equal(a.values, b.values)


def test_cached_keys_have_the_kv_heads_of_the_model(essay):
    result, _ = essay
    assert result.cache[0].keys.shape == (1, 3, 640, 64)
    assert result.cache.nbytes == 640 * 46_080  # bytes of a token in all 30 layers, float32


MEMORY = """
import dataclasses, torch, minikv
from minikv.policy import *
from minikv.srh import Profile

def status(name):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(name)) / 1024  # MiB

model, tokenizer = minikv.load(device="cpu", dtype="float32")
open("/proc/self/clear_refs", "w").write("5")  # forget the peak so far
before = status("VmRSS")
tokens = torch.randint(17, 40000, (1, 8000))
result = minikv.prefill(model, tokens, window=32, chunk=1000)
profile = Profile.load("weights/profiles/smollm2-135m-instruct.json")
for name, method in METHODS.items():
    if name == "h2o":
        continue
    needs_profile = "profile" in method.__dataclass_fields__
    policy = method() if name == "full" else method(256, profile) if needs_profile else method(256)
    minikv.compress(result, policy)
    print(name)
del result
model.model.layers = model.model.layers[:1]  # all rows of attention take long, and no more memory in 30 layers
model.config = dataclasses.replace(model.config, layers=1)
minikv.compress(minikv.prefill(model, tokens, column_sums=True), H2O(256))
print("h2o")
print("growth", status("VmHWM") - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak memory from /proc")
def test_no_method_needs_a_whole_attention_matrix_or_all_logits_of_a_long_prompt(default_folder):
    result = subprocess.run([sys.executable, "-c", MEMORY], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr
    *lines, last = result.stdout.splitlines()
    assert len(lines) == len(METHODS)
    # The full cache is 369 MB, and "full" is a copy of it. One layer's attention matrix would be 2.3 GB.
    assert float(last.split()[1]) < 1000
