"""Bytes and operations counted from shapes, and the memory of random weights, on numbers that a reader can check."""

from dataclasses import replace

import pytest
import torch

from minikv.benchmark import roofline
from minikv.benchmark.random_weights import SHAPES, check_fit, even_profile, fields_of, needed, random_model
from minikv.config import Config
from minikv.errors import InputError
from minikv.inference import prefill_layer_by_layer
from minikv.policy import CompressKV

# vocabulary 10, hidden 4, MLP 6, 2 layers, 2 query heads on 1 KV head of 2 dimensions
SMALL = Config(10, 4, 6, 2, 2, 1, 2, 100, 1e-5, 10000.0, None, tied_head=True)


def test_weights_counted_by_hand():
    # A layer: queries 4 x 4, keys 4 x 2, values 4 x 2, output 4 x 4, and three matrices of 4 x 6.
    assert roofline.linear_weights(SMALL) == 2 * (16 + 8 + 8 + 16 + 3 * 24) == 240
    assert roofline.all_weights(SMALL) == 240 + (2 * 2 * 4 + 4) + 10 * 4 == 300
    assert roofline.all_weights(replace(SMALL, tied_head=False)) == 340
    # A step reads the layers, the norms, the head, and one row of the embeddings.
    assert roofline.weight_bytes_read(SMALL, 4) == (240 + 20 + 40 + 4) * 4


@pytest.mark.parametrize("config", [SMALL, replace(SMALL, tied_head=False, qkv_bias=True, output_bias=True)])
def test_weights_counted_are_those_of_the_model(config):
    model = random_model(config, torch.device("cpu"), torch.float32)
    assert roofline.all_weights(config) == sum(weight.numel() for weight in model.parameters())


def test_cache_bytes_by_hand():
    assert roofline.entry_bytes(SMALL, 2) == 2 * 1 * 2 * 2
    # Both layers keep 5: the three steps read 12, 14 and 16 entries.
    assert roofline.entries_read(10, layers=2, steps=3) == 14


def test_multiply_adds_of_a_prefill_by_hand():
    # Three tokens through 240 weights; 1 + 2 + 3 pairs, 2 heads of 2 dimensions, twice, 2 layers; one row of logits.
    assert roofline.prefill_multiply_adds(SMALL, 3) == 3 * 240 + 6 * 2 * 2 * 2 * 2 + 40


@pytest.mark.parametrize("shape, weights", [("smollm2-135m", 134_515_008), ("llama-3.2-1b", 1_235_814_400), ("llama-3.1-8b", 8_030_261_248)])
def test_listed_shapes_have_the_published_number_of_weights(shape, weights):
    assert roofline.all_weights(Config.from_dict(fields_of(shape, 1))) == weights


def test_needed_memory_is_weights_full_cache_and_work():
    # Two participants of 4 and 2 bytes hold weights; the cache and the work are those of the larger one.
    found = needed(SMALL, 10, ["float32", "bfloat16"])
    assert found == {"weights": 300 * 6, "full cache": 10 * 2 * 16, "working memory": 10 * ((18 + 12) * 4 + 2 * 2 * 4)}


def test_a_shape_that_does_not_fit_is_refused_with_the_arithmetic_and_the_largest_that_does():
    parts = "weights 16.1 GB . full cache 17.2 GB . working memory 14.6 GB = 47.9 GB; 20.0 GB are free"
    with pytest.raises(InputError, match=f"llama-3.1-8b at 131072 tokens in bfloat16 needs {parts}.*fits is llama-3.2-1b"):
        check_fit("llama-3.1-8b", 131072, ["bfloat16"], free=20_000_000_000)
    with pytest.raises(InputError, match="none of the listed shapes fits"):
        check_fit("smollm2-135m", 100, ["float32"], free=1_000_000)
    check_fit("llama-3.1-8b", 131072, ["bfloat16"], free=48_000_000_000)
    check_fit("llama-3.1-8b", 131072, ["bfloat16"], free=None)


def test_random_weights_take_more_positions_than_the_shape_was_trained_for():
    assert Config.from_dict(fields_of("smollm2-135m", 20000)).context == 20000
    assert list(SHAPES) == sorted(SHAPES, key=lambda name: roofline.all_weights(Config.from_dict(fields_of(name, 1))))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_random_model_runs_compressed(dtype):
    model = random_model(SMALL, torch.device("cpu"), dtype)
    policy = CompressKV(12, even_profile(SMALL), heads=2)
    logits, cache = prefill_layer_by_layer(model, torch.zeros(1, 20, dtype=torch.long), policy)
    assert logits.isfinite().all() and sum(cache.kept) == 24 and cache[0].keys.dtype == dtype
