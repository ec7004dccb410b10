"""The model and what it refuses to be."""

import math
import re
from dataclasses import replace

import pytest
import torch
from conftest import make_prompt, make_tiny_model

from minikv.config import Config, FrequencyFactors, LinearScaling, Llama3Scaling
from minikv.errors import InputError
from minikv.inference import check_prompt, prefill
from minikv.model import Llama, RMSNorm, rope_tables, rotate

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
    ({"hidden_act": None, "model_type": ["llama"]}, r"model_type \['llama'\]"),
    ({"mlp_bias": True}, "mlp_bias True"),
    ({"is_causal": False}, "is_causal False"),
    ({"model_type": "mistral", "attention_bias": True}, "attention_bias True"),
    ({"model_type": "qwen2", "attention_bias": False}, "attention_bias False"),
    ({"num_local_experts": 8}, "num_local_experts 8"),
    ({"num_experts": 60}, "num_experts 60"),
    ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantization_config {'quant_method': 'gptq'"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
    ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "rope_parameters: partial_rotary_f"),
    ({"model_type": "mistral", "sliding_window": 0}, "sliding_window is 0"),
    ({"model_type": "qwen2", "use_sliding_window": "yes"}, "use_sliding_window is 'yes'"),
    ({"layer_types": ["full_attention", "linear_attention"]}, "layer_types is .*linear_attention"),
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
    ({"rope_scaling": {"type": "dynamic", "factor": 2}}, "RoPE scaling 'dynamic'"),
    ({"rope_parameters": {"rope_type": "yarn", "factor": 2}}, "RoPE scaling 'yarn'"),
    ({"rope_scaling": {"type": "linear"}}, "'linear': factor is None"),
    ({"rope_scaling": {"type": "llama3", "factor": 8.0}}, "'llama3': low_freq_factor is None"),
    ({"rope_scaling": {"type": "llama3", **LLAMA3, "high_freq_factor": 1.0}}, "high_freq_factor 1.0; it has"),
    ({"rope_scaling": {"type": "llama3", **LLAMA3}, "original_max_position_embeddings": 64}, "original_max_.* 64"),
    ({"rope_scaling": {"type": "linear", "factor": 2}, "rope_parameters": {"rope_theta": 1e4}}, "two different things"),
    ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "rope_parameters {'full_attention'"),
    ({"rope_theta": 10**400}, "rope_theta is 1000"),
    ({"rope_theta": 10000.0, "rope_parameters": {"rope_theta": 500000.0}}, "rope_theta is given twice"),
])  # fmt: skip
def test_a_config_that_asks_for_something_else_is_refused_by_field_and_value(change, words):
    with pytest.raises(InputError, match="^some/config.json: ") as error:
        Config.from_dict({**GOOD, **change}, "some/config.json")
    assert re.search(words, str(error.value)) and len(str(error.value)) < 200


def test_each_family_has_its_biases_and_its_sliding_window():
    def of(family, **fields):
        config = Config.from_dict({**GOOD, "model_type": family, **fields})
        return config.qkv_bias, config.output_bias, config.sliding_window

    assert of("llama") == (False, False, None)
    assert of("llama", attention_bias=True, pretraining_tp=2) == (True, True, None)
    assert of("mistral") == (False, False, 4096)
    assert of("mistral", sliding_window=None) == (False, False, None)
    assert of("qwen2") == of("qwen2", sliding_window=64) == (True, False, None)
    assert of("qwen2", use_sliding_window=True) == (True, False, None)  # from the 28th layer on; there are 2
    assert of("qwen2", use_sliding_window=True, sliding_window=64, max_window_layers=1) == (True, False, 64)


@pytest.mark.parametrize("fields", [
    {"rope_theta": 500000.0, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
    {"rope_theta": 500000.0, "rope_scaling": {"type": "llama3", **LLAMA3}},
    {"rope_parameters": {"rope_theta": 500000.0, "rope_type": "llama3", **LLAMA3}},
])  # fmt: skip
def test_every_spelling_of_the_rotary_base_and_scaling_is_read(fields):
    config = Config.from_dict({**GOOD, **fields})
    assert config.rope_theta == 500000.0 and config.rope_scaling == Llama3Scaling(8.0, 1.0, 4.0, 8192)


@pytest.mark.parametrize("field", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("spelling", ["type", "rope_type"])
def test_linear_scaling_is_read_in_every_spelling(field, spelling):
    config = Config.from_dict({**GOOD, field: {spelling: "linear", "factor": 4}})
    assert config.rope_scaling == LinearScaling(4.0)


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


def test_linear_scaling_at_position_12_is_no_scaling_at_position_3():
    config = Config.from_dict(GOOD)
    scaled = replace(config, rope_scaling=LinearScaling(4.0))
    assert torch.allclose(rope_tables(scaled, torch.tensor([12]))[1], rope_tables(config, torch.tensor([3]))[1])


def test_frequency_factors_slow_each_pair_by_its_own():
    config = Config.from_dict(GOOD)
    scaled = replace(config, rope_scaling=FrequencyFactors((1.0, 2.0, 4.0, 8.0)))
    plain, slowed = (rope_tables(each, torch.tensor([1]))[1][0, :4].asin() for each in (config, scaled))
    assert torch.allclose(slowed, plain / torch.tensor([1.0, 2.0, 4.0, 8.0]))


def test_rotary_tables_are_computed_in_float32_far_out_and_only_then_rounded_to_the_models_dtype():
    model = make_tiny_model(max_positions=8192)
    exact = model.rope(8191, 1)
    cos, sin = model.bfloat16().rope(8191, 1)
    assert torch.equal(cos, exact[0].bfloat16()) and torch.equal(sin, exact[1].bfloat16())


def test_the_norm_does_not_overflow_in_float16():
    x = torch.full((1, 4), 300.0, dtype=torch.float16)
    assert torch.allclose(RMSNorm(4, 1e-5).half()(x), torch.ones(1, 4, dtype=torch.float16))


def test_biases_are_where_the_config_has_them():
    def biases(**fields):
        names = Llama(Config.from_dict({**GOOD, "num_hidden_layers": 1, **fields})).state_dict()
        return [name.removeprefix("model.layers.0.self_attn.") for name in names if name.endswith("bias")]

    assert biases() == biases(model_type="mistral") == []
    assert biases(model_type="qwen2") == ["q_proj.bias", "k_proj.bias", "v_proj.bias"]
    assert biases(attention_bias=True) == ["q_proj.bias", "k_proj.bias", "v_proj.bias", "o_proj.bias"]


def test_a_prompt_beyond_the_sliding_window_is_refused_before_the_work():
    model = Llama(replace(Config.from_dict(GOOD), sliding_window=10))
    check_prompt(model, make_prompt(10))
    check_prompt(model, make_prompt(6), new_tokens=4)
    with pytest.raises(InputError, match="6 tokens and 5 new tokens exceed the model's sliding window of 10"):
        check_prompt(model, make_prompt(6), new_tokens=5)
    with pytest.raises(InputError, match="the prompt's 11 tokens exceed the model's sliding window of 10"):
        prefill(model, make_prompt(11))


def test_an_untied_model_has_a_head_of_its_own_and_a_tied_one_none():
    untied = Llama(Config.from_dict(GOOD))
    assert "lm_head.weight" in untied.state_dict()
    assert "lm_head.weight" not in Llama(Config.from_dict({**GOOD, "tie_word_embeddings": True})).state_dict()
    assert untied(make_prompt(5)).shape == (1, 5, 100)
