"""Decoding by compiled layers against the plain definitions: the same numbers up to rounding, whatever the cache holds."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import minikv
from conftest import make_policy, make_profile, make_prompt, make_tiny_model
from minikv.errors import InputError
from minikv.inference import compress, decode, prefill
from minikv.kernels import attend, attend_by_sums, linear_by_sums
from minikv.policy import METHODS, Full, SnapKV

HEADERS = Path(sysconfig.get_path("include"), "Python.h")
needs_compiler = pytest.mark.skipif(
    not (shutil.which("g++") and HEADERS.exists()), reason="torch.compile needs g++ and Python's headers (python3-dev)"
)


def test_a_linear_by_sums_adds_up_each_row_of_the_weight():
    x, weight, bias = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0], [5.0, 6.0], [0.0, 1.0]]), torch.ones(3)
    assert linear_by_sums(x, weight, None).tolist() == [[11, 17, 2]]
    assert linear_by_sums(x, weight, bias).tolist() == [[12, 18, 3]]


def test_a_linear_by_sums_adds_up_in_float32():
    """300 ones: in bfloat16 a sum stays at 256, since 257 cannot be told from it."""
    ones = torch.ones(1, 300, dtype=torch.bfloat16)
    assert linear_by_sums(ones, ones, None).item() == 300
    assert linear_by_sums(ones, ones, None).dtype == torch.bfloat16


def test_attention_by_sums_of_a_group_reads_its_own_kv_head():
    queries, keys = torch.randn(1, 4, 1, 2), torch.ones(1, 2, 1, 2)
    values = torch.tensor([[[[1.0, 2.0]], [[3.0, 4.0]]]])
    assert attend_by_sums(queries, keys, values)[0, :, 0].tolist() == [[1, 2], [1, 2], [3, 4], [3, 4]]


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 4), st.integers(1, 300))
def test_attention_by_sums_is_plain_attention(batch, kv_heads, group, kept):
    generator = torch.Generator().manual_seed(kept)
    shapes = (kv_heads * group, 1), (kv_heads, kept), (kv_heads, kept)
    inputs = [torch.randn(batch, heads, count, 8, generator=generator) for heads, count in shapes]
    torch.testing.assert_close(attend_by_sums(*inputs), attend(*inputs), atol=1e-5, rtol=0)


@pytest.fixture(scope="module")
def compiled():
    """The tiny model with compiled decoding, and whatever torch compiled for it forgotten at the end."""
    model = make_tiny_model()
    model.use_fastest_kernels(compiled=True)
    yield model
    torch.compiler.reset()


def answer(model, tokens, policy, count=30, reserve=60):
    """The tokens of an answer, and the cache after it."""
    prefilled = prefill(model, tokens)
    cache = compress(prefilled, policy, reserve)
    return torch.stack(list(decode(model, cache, prefilled.logits, count)), 1), cache


@needs_compiler
@pytest.mark.parametrize("name", ["full", "snapkv", "pyramidkv", "compresskv"])
def test_compiled_layers_answer_as_plain_ones_and_leave_the_same_cache(compiled, name):
    """Layers keep different numbers of entries here; positions and counts are as after plain decoding."""
    plain, tokens = make_tiny_model(), make_prompt(300)
    policy = make_policy(METHODS[name], 40, make_profile(plain))
    (expected, plain_cache), (found, cache) = (answer(model, tokens, policy) for model in (plain, compiled))
    assert torch.equal(found, expected)
    assert cache.kept == plain_cache.kept and cache.length == plain_cache.length == 329
    for layer, other in zip(cache.layers, plain_cache.layers, strict=True):
        assert torch.equal(layer.positions, other.positions)
        torch.testing.assert_close(layer.keys, other.keys, atol=1e-4, rtol=0)
        torch.testing.assert_close(layer.values, other.values, atol=1e-4, rtol=0)


@needs_compiler
def test_compiled_layers_answer_as_plain_ones_in_a_cache_that_must_grow(compiled):
    policy, tokens = SnapKV(40), make_prompt(100, seed=1)
    expected, _ = answer(make_tiny_model(), tokens, policy)
    found, cache = answer(compiled, tokens, policy, reserve=3)
    assert torch.equal(found, expected) and set(cache.kept) == {69}


@needs_compiler
def test_compiled_layers_answer_a_batch_as_plain_ones(compiled):
    tokens = make_prompt(60, batch=3, seed=2)
    expected, _ = answer(make_tiny_model(), tokens, Full())
    assert torch.equal(answer(compiled, tokens, Full())[0], expected)


@needs_compiler
def test_one_compiled_layer_serves_all_layers_and_lengths(compiled):
    """Nothing is compiled after loading: not for another layer, prompt, budget or method."""
    answer(compiled, make_prompt(64), SnapKV(20), 5)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for length, budget in ((64, 20), (300, 100), (700, 33)):
            answer(compiled, make_prompt(length), SnapKV(budget), 5)


@needs_compiler
@pytest.mark.parametrize("dtype, tolerance", [("float32", 1e-4), ("bfloat16", 1.5)])
def test_the_default_models_compiled_steps_give_the_plain_logits(default_folder, dtype, tolerance):
    """Fed the same text after the same cut cache. In bfloat16 both are rounded, the compiled sums less."""
    text = "The tower clock was repaired by Ingrid Halloran. " * 40
    logits = []
    for options in ({"plain": True}, {"compiled": True}):
        model, tokenizer = minikv.load(default_folder, "cpu", dtype, **options)
        tokens = torch.tensor([tokenizer.encode(text)])
        cache = compress(prefill(model, tokens[:, :-12]), SnapKV(100))
        with torch.no_grad():
            logits.append(torch.cat([model(token, cache)[:, -1] for token in tokens[:, -12:].split(1, 1)]).float())
    torch.compiler.reset()
    assert (logits[0] - logits[1]).abs().max() < tolerance
    assert (logits[0].argmax(-1) == logits[1].argmax(-1)).all()


def test_plain_and_compiled_kernels_exclude_each_other():
    with pytest.raises(InputError, match="plain and compiled .* accepted: one of them"):
        minikv.load("no such folder", plain=True, compiled=True)


def test_without_a_compiler_compiling_is_one_line(default_folder, tmp_path):
    command = [sys.executable, "-m", "minikv.generate", "--compile", "--prompt", "Hello", "--device", "cpu"]
    missing = {"CXX": str(tmp_path / "no-such-compiler"), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    run = subprocess.run(command, capture_output=True, text=True, env=os.environ | missing)
    assert run.returncode == 2 and run.stdout == ""
    assert run.stderr.count("\n") == 1 and "C++ compiler" in run.stderr
