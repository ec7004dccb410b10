"""The cache says what it holds: positions, rows and bytes."""

import pytest
import torch

import minikv
from conftest import make_policy, make_profile, make_prompt, make_tiny_model
from minikv.policy import METHODS, CompressKV, Full, SnapKV


def test_entries_are_cached_per_kv_head_and_counted_in_bytes():
    model = make_tiny_model(layers=4, heads=6, kv_heads=2, head_dim=8)
    cache = minikv.compress(minikv.prefill(model, make_prompt(50)), SnapKV(20), reserve=12)
    assert cache[0].keys.shape == (1, 2, 20, 8)
    assert cache.nbytes == 2 * (4 * 20) * 2 * 8 * 4  # keys and values, rows, KV heads, head size, float32
    assert cache.allocated_bytes == 2 * (4 * 32) * 2 * 8 * 4
    assert model.bfloat16().new_cache(1, 10).allocated_bytes == 2 * (4 * 10) * 2 * 8 * 2


def test_a_kept_entry_is_the_one_of_its_position():
    model = make_tiny_model()
    result = minikv.prefill(model, make_prompt(50))
    cache = minikv.compress(result, SnapKV(20))
    for full, cut in zip(result.cache.layers, cache.layers):
        for head in range(2):
            positions = cut.positions[0, head]
            assert torch.equal(cut.keys[0, head], full.keys[0, head, positions])
            assert torch.equal(cut.values[0, head], full.values[0, head, positions])


@pytest.mark.parametrize("name", list(METHODS))
def test_the_next_position_is_the_prompts_length_at_every_budget(name):
    model, method = make_tiny_model(), METHODS[name]
    result = minikv.prefill(model, make_prompt(60), column_sums=True)
    cache = minikv.compress(result, make_policy(method, 20, make_profile(model)))
    assert cache.length == 60
    model(make_prompt(3), cache)
    assert cache.length == 63
    for layer in cache.layers:
        assert layer.positions[0, 0, -3:].tolist() == [60, 61, 62]


def test_rows_are_those_kept_and_those_fed_back_and_the_cache_grows_past_its_reserve():
    model = make_tiny_model()
    result = minikv.prefill(model, make_prompt(300))
    cache = minikv.compress(result, CompressKV(64, make_profile(model)), reserve=5)
    kept = cache.kept
    answer = list(minikv.decode(model, cache, result.logits, 200))
    assert len(answer) == 200
    assert cache.kept == [rows + 199 for rows in kept]  # the last token is not fed back
    roomy = minikv.compress(result, CompressKV(64, make_profile(model)), reserve=300)
    assert torch.equal(torch.stack(answer), torch.stack(list(minikv.decode(model, roomy, result.logits, 200))))


def test_compressing_and_decoding_leave_the_prefill_as_it_was():
    model = make_tiny_model()
    result = minikv.prefill(model, make_prompt(50))
    before = [layer.keys.clone() for layer in result.cache.layers]
    for policy in (Full(), SnapKV(20)):
        list(minikv.decode(model, minikv.compress(result, policy), result.logits, 10))
    assert result.cache.kept == [50] * 4
    assert all(torch.equal(layer.keys, keys) for layer, keys in zip(result.cache.layers, before))
