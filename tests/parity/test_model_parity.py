"""The model against transformers: the same logits and the same greedy tokens from the same checkpoint folder."""

import json

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="the parity tests compare with transformers; pip install transformers")

from minikv.config import Config  # noqa: E402
from minikv.errors import InputError  # noqa: E402
from minikv.generate import generate  # noqa: E402
from minikv.haystack import DATA, load_haystack  # noqa: E402
from minikv.inference import check_prompt  # noqa: E402
from minikv.policy import Full  # noqa: E402
from minikv.weights import load_model  # noqa: E402

CPU = torch.device("cpu")
CLASSES = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,  # the prompts below are longer
}
LINEAR = {"rope_type": "linear", "factor": 4.0}
SIZES = {"vocab_size": 9, "hidden_size": 256, "intermediate_size": 8, "num_hidden_layers": 3, "num_attention_heads": 64}


def write_checkpoint(folder, family, heads=6, kv_heads=2, tied=False, rope=None, **fields):
    """A random model of transformers, saved in `folder`; it attends sharply, and no bias is zero."""
    make_config, make_model = CLASSES[family]
    config = make_config(
        vocab_size=120,
        hidden_size=72,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=1024,
        rms_norm_eps=1e-5,
        tie_word_embeddings=tied,
        rope_parameters={"rope_theta": 10000.0, **(rope or {"rope_type": "default"})},
        initializer_range=0.1,
        **fields,
    )
    torch.manual_seed(0)
    model = make_model(config).eval().requires_grad_(False)
    for name, weight in model.named_parameters():
        if "norm" in name:
            weight += torch.randn_like(weight) * 0.1
        elif name.endswith("bias"):
            weight.copy_(torch.randn_like(weight) * 0.1)
        elif "q_proj" in name or "k_proj" in name:
            weight *= 2
    model.save_pretrained(folder)
    return model


def random_tokens(length=200, batch=2):
    return torch.randint(0, 120, (batch, length), generator=torch.Generator().manual_seed(1))


def their_answer(theirs, tokens):
    """64 greedy tokens. The mask is given, or each token 0 of the prompt would be taken for padding."""
    options = {"max_new_tokens": 64, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    return theirs.generate(tokens, attention_mask=torch.ones_like(tokens), **options)[:, tokens.shape[1] :]


@pytest.mark.parametrize("family, fields", [
    ("llama", {"heads": 4, "kv_heads": 4}),  # G = 1
    ("llama", {"heads": 9, "kv_heads": 3, "tied": True}),
    ("llama", {"heads": 8, "kv_heads": 2, "head_dim": 16, "attention_bias": True}),  # heads * head_dim: not 72
    ("llama", {"heads": 9, "kv_heads": 9, "rope": LINEAR, "head_dim": 16}),
    ("llama", {"heads": 8, "kv_heads": 1, "rope": LLAMA3, "head_dim": 16, "tied": True}),
    ("mistral", {"heads": 8, "kv_heads": 2, "head_dim": 16, "sliding_window": None}),
    ("mistral", {"heads": 9, "kv_heads": 3, "sliding_window": 300, "tied": True}),
    ("mistral", {"heads": 4, "kv_heads": 1, "head_dim": None, "rope": LINEAR}),
    ("qwen2", {"heads": 6, "kv_heads": 6}),
    ("qwen2", {"heads": 9, "kv_heads": 3, "head_dim": 16, "tied": True}),
    ("qwen2", {"heads": 4, "kv_heads": 1, "rope": LLAMA3}),
])  # fmt: skip
def test_logits_and_greedy_tokens_of_small_random_models(tmp_path, family, fields):
    theirs = write_checkpoint(tmp_path, family, **fields)
    ours = load_model(tmp_path, CPU, torch.float32)
    tokens = random_tokens()
    logits, answer = theirs(tokens).logits, their_answer(theirs, tokens)
    assert (ours(tokens) - logits).abs().max() < 1e-4
    assert torch.equal(generate(ours, tokens, Full(), 64), answer)
    assert logits.std() > 0.5 and all(len(row.unique()) > 15 for row in answer)  # nothing that any model would give


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("family, fields", [("llama", {"rope": LLAMA3}), ("mistral", {}), ("qwen2", {"tied": True})])
def test_half_precision_costs_no_more_than_it_costs_transformers(tmp_path, family, fields, dtype):
    exact = write_checkpoint(tmp_path, family, head_dim=16, **fields)(random_tokens()).logits
    with torch.no_grad():
        theirs = CLASSES[family][1].from_pretrained(tmp_path, dtype=dtype).eval()(random_tokens()).logits
    ours = load_model(tmp_path, CPU, dtype)(random_tokens())
    our_error, their_error = (ours.float() - exact).abs(), (theirs.float() - exact).abs()
    assert our_error.mean() <= 1.1 * their_error.mean() + 1e-5
    assert our_error.max() <= 1.5 * their_error.max() + 1e-5


@pytest.mark.parametrize("rope", [{"rope_type": "default"}, LINEAR, LLAMA3], ids=lambda rope: rope["rope_type"])
@pytest.mark.parametrize("spelling", ["type", "rope_type"])
def test_the_old_form_of_a_config_gives_the_same_logits_as_the_new_one(tmp_path, rope, spelling):
    write_checkpoint(tmp_path, "llama", rope=rope)
    fields = json.loads((tmp_path / "config.json").read_text())
    new = load_model(tmp_path, CPU, torch.float32)(random_tokens())
    scaling = fields.pop("rope_parameters")
    fields |= {"rope_theta": scaling.pop("rope_theta"), "torch_dtype": fields.pop("dtype")}
    scaling[spelling] = scaling.pop("rope_type")
    fields["rope_scaling"] = None if rope["rope_type"] == "default" else scaling
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert torch.equal(load_model(tmp_path, CPU, torch.float32)(random_tokens()), new)


@pytest.mark.parametrize("family, fields", [
    ("mistral", {"sliding_window": 32}),
    ("qwen2", {"sliding_window": 32, "use_sliding_window": True, "max_window_layers": 1}),
])  # fmt: skip
def test_a_prompt_that_fills_the_sliding_window_is_exact_and_a_longer_one_is_refused(tmp_path, family, fields):
    theirs = write_checkpoint(tmp_path, family, **fields)
    ours = load_model(tmp_path, CPU, torch.float32)
    longer = random_tokens(33)
    differences = (ours(longer) - theirs(longer).logits).abs().amax((0, 2))  # [33]
    assert differences[:32].max() < 1e-4 < 1e-2 < differences[32]  # the 33rd token no longer sees the first
    check_prompt(ours, longer[:, :32])
    check_prompt(ours, longer[:, :20], new_tokens=12)
    for length, new_tokens in ((33, 0), (20, 13)):
        with pytest.raises(InputError, match=f"{length} tokens.*exceed the model's sliding window of 32"):
            check_prompt(ours, longer[:, :length], new_tokens)


@pytest.mark.parametrize("family", CLASSES)
def test_a_field_that_a_config_leaves_out_means_what_it_means_to_transformers(family):
    theirs = CLASSES[family][0](**SIZES)
    ours = Config.from_dict({"model_type": family, **SIZES})
    assert (ours.kv_heads, ours.head_dim) == (theirs.num_key_value_heads, theirs.head_dim if family != "qwen2" else 4)
    assert (ours.max_positions, ours.norm_eps) == (theirs.max_position_embeddings, theirs.rms_norm_eps)
    assert theirs.rope_parameters == {"rope_theta": ours.rope_theta, "rope_type": "default"}
    assert ours.tied_head == theirs.tie_word_embeddings
    assert ours.sliding_window == getattr(theirs, "sliding_window", None)
    assert (theirs.hidden_act, ours.rope_scaling) == ("silu", None)
    assert ours.output_bias == getattr(theirs, "attention_bias", False)
    assert ours == Config.from_dict(theirs.to_dict())


@pytest.mark.parametrize("family", ["llama", "qwen2"])  # transformers' Mistral refuses it
def test_key_value_heads_that_are_null_are_as_many_as_query_heads(family):
    fields = SIZES | {"num_key_value_heads": None}
    assert Config.from_dict({"model_type": family, **fields}).kv_heads == 64
    assert CLASSES[family][0](**fields).num_key_value_heads == 64


@pytest.mark.parametrize("fields", [
    {},
    {"use_sliding_window": True},
    {"use_sliding_window": True, "max_window_layers": 3},
    {"use_sliding_window": True, "max_window_layers": 2, "sliding_window": 64},
    {"use_sliding_window": True, "max_window_layers": 0, "sliding_window": None},
    {"use_sliding_window": True, "max_window_layers": 0, "layer_types": ["full_attention"] * 3},
])  # fmt: skip
def test_qwen2_has_a_sliding_window_where_transformers_gives_a_layer_one(fields):
    theirs = transformers.Qwen2Config(**SIZES, **fields)
    window = theirs.sliding_window if "sliding_attention" in theirs.layer_types else None
    for written in (fields, theirs.to_dict()):
        assert Config.from_dict({"model_type": "qwen2", **SIZES, **written}).sliding_window == window


def test_logits_and_greedy_tokens_of_the_default_model(default_folder, default_model):
    model, tokenizer = default_model
    theirs = transformers.AutoModelForCausalLM.from_pretrained(default_folder, dtype=torch.float32).eval()
    tokens = torch.tensor([tokenizer.encode(load_haystack(DATA / "evaluate/essays"))[:600]])
    with torch.no_grad():
        assert (model(tokens) - theirs(tokens).logits).abs().max() < 1e-3
        assert torch.equal(generate(model, tokens, Full(), 64), their_answer(theirs, tokens))
