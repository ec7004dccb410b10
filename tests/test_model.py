"""The model and what it refuses to be."""

import math

import pytest
import torch

from conftest import make_prompt, make_tiny_model
from minikv.config import Config, Llama3Scaling
from minikv.errors import InputError
from minikv.model import RMSNorm, rope_tables, rotate

GOOD = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def test_defaults_of_a_config():
    config = Config.from_dict(GOOD)
    assert (config.head_dim, config.group, config.rope_theta, config.tied_head) == (8, 3, 10000.0, False)


@pytest.mark.parametrize("change, words", [
    ({"model_type": "mamba"}, "model_type 'mamba'"),
    ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
    ({"attention_bias": True}, "attention_bias True"),
    ({"num_key_value_heads": 4}, "6 is not a multiple of num_key_value_heads 4"),
    ({"num_attention_heads": 5, "num_key_value_heads": 5}, "48 is not a multiple of num_attention_heads 5"),
    ({"head_dim": 7}, "head_dim 7 is odd"),
    ({"vocab_size": None}, "vocab_size is None"),
    ({"num_hidden_layers": -1}, "num_hidden_layers is -1"),
    ({"num_hidden_layers": 2.5}, "num_hidden_layers is 2.5"),
    ({"hidden_size": 48.0}, "hidden_size is 48.0"),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
    ({"rope_theta": 0}, "rope_theta is 0"),
    ({"rope_theta": "abc"}, "rope_theta is 'abc'"),
    ({"rope_scaling": "linear"}, "rope_scaling is 'linear'"),
    ({"rope_parameters": [1]}, r"rope_parameters is \[1\]"),
    ({"tie_word_embeddings": "false"}, "tie_word_embeddings is 'false'"),
    ({"hidden_size": "48"}, "hidden_size is '48'"),
    ({"rope_scaling": {"rope_type": "longrope", "factor": 2}}, "RoPE scaling 'longrope'"),
    ({"rope_scaling": {"type": "llama3", "factor": 8.0}}, "lacks low_freq_factor"),
    ({"rope_theta": 10000.0, "rope_parameters": {"rope_theta": 500000.0}}, "rope_theta is given twice"),
])  # fmt: skip
def test_a_config_that_asks_for_something_else_is_refused_by_field_and_value(change, words):
    with pytest.raises(InputError, match=words):
        Config.from_dict({**GOOD, **change}, "some/config.json")


@pytest.mark.parametrize("fields", [
    {"rope_theta": 500000.0, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
    {"rope_theta": 500000.0, "rope_scaling": {"type": "llama3", **LLAMA3}},
    {"rope_parameters": {"rope_theta": 500000.0, "rope_type": "llama3", **LLAMA3}},
])  # fmt: skip
def test_every_spelling_of_the_rotary_base_and_scaling_is_read(fields):
    config = Config.from_dict({**GOOD, **fields})
    assert config.rope_theta == 500000.0 and config.rope_scaling == Llama3Scaling(8.0, 1.0, 4.0, 8192)


def test_rope_turns_a_pair_by_the_position():
    config = Config.from_dict({**GOOD, "num_attention_heads": 24, "num_key_value_heads": 24})  # head_dim 2: one pair
    cos, sin = rope_tables(config, torch.tensor([3]))
    turned = rotate(torch.tensor([[[[1.0, 0.0]]]]), cos, sin)
    assert torch.allclose(turned, torch.tensor([math.cos(3), math.sin(3)]))


def test_llama3_scaling_slows_low_frequencies_and_keeps_high_ones():
    plain = Config.from_dict({**GOOD, "hidden_size": 768, "rope_theta": 500000.0})
    scaled = Config.from_dict({**GOOD, "hidden_size": 768, "rope_theta": 500000.0, "rope_scaling": {"rope_type": "llama3", **LLAMA3}})
    one = torch.tensor([1])
    before, after = (rope_tables(config, one)[1][0, :64].asin() for config in (plain, scaled))
    assert torch.allclose(after[1:8], before[1:8], rtol=1e-3)
    assert torch.allclose(after[-8:], before[-8:] / 8, rtol=1e-3)


def test_rotary_tables_are_float32_far_out_whatever_the_models_dtype():
    model = make_tiny_model(max_positions=8192)
    exact = model.rope(8191, 1)
    cos, sin = model.bfloat16().rope(8191, 1)
    assert cos.dtype == torch.float32 and torch.equal(cos, exact[0]) and torch.equal(sin, exact[1])


def test_the_norm_does_not_overflow_in_float16():
    x = torch.full((1, 4), 300.0, dtype=torch.float16)
    assert torch.allclose(RMSNorm(4, 1e-5).half()(x), torch.ones(1, 4, dtype=torch.float16))


def test_an_untied_model_has_a_head_of_its_own_and_a_tied_one_none():
    from minikv.model import Llama

    untied = Llama(Config.from_dict(GOOD))
    assert "lm_head.weight" in untied.state_dict()
    assert "lm_head.weight" not in Llama(Config.from_dict({**GOOD, "tie_word_embeddings": True})).state_dict()
    assert untied(make_prompt(5)).shape == (1, 5, 100)
