"""The model against transformers: the same logits and the same greedy tokens from the same weights."""

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="the parity tests compare with transformers; pip install transformers")

from minikv.config import Config  # noqa: E402
from minikv.generate import generate  # noqa: E402
from minikv.haystack import DATA, load_haystack  # noqa: E402
from minikv.model import Llama  # noqa: E402
from minikv.policy import Full  # noqa: E402

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def make_pair(heads, kv_heads, head_dim, tied, rope):
    torch.manual_seed(0)
    shape = {
        "vocab_size": 120,
        "hidden_size": 72,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": tied,
        "rope_parameters": {"rope_theta": 10000.0, **(rope or {"rope_type": "default"})},
    }
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape)).eval()
    for name, weight in theirs.named_parameters():
        if "norm" in name:
            weight.data += torch.randn_like(weight) * 0.1
        elif "q_proj" in name or "k_proj" in name:
            weight.data *= 8
    ours = Llama(Config.from_dict({"model_type": "llama", **shape}))
    state = {name: weight for name, weight in theirs.state_dict().items() if not (tied and name == "lm_head.weight")}
    ours.load_state_dict(state)
    return ours.eval(), theirs


def their_answer(theirs, tokens):
    """64 greedy tokens. The mask is given, or each token 0 of the prompt would be taken for padding."""
    options = {"max_new_tokens": 64, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    return theirs.generate(tokens, attention_mask=torch.ones_like(tokens), **options)[:, tokens.shape[1] :]


@pytest.mark.parametrize("heads, kv_heads, head_dim, tied, rope", [
    (4, 4, 16, False, None),  # G = 1
    (9, 3, 8, True, None),
    (8, 2, 16, False, None),  # heads * head_dim is not the hidden size
    (8, 1, 8, True, LLAMA3),
    (6, 2, 16, False, LLAMA3),
])  # fmt: skip
def test_logits_and_greedy_tokens_of_small_random_models(heads, kv_heads, head_dim, tied, rope):
    ours, theirs = make_pair(heads, kv_heads, head_dim, tied, rope)
    tokens = torch.randint(0, 120, (2, 200), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert (ours(tokens) - theirs(tokens).logits).abs().max() < 1e-4
        assert torch.equal(generate(ours, tokens, Full(), 64), their_answer(theirs, tokens))


def test_logits_and_greedy_tokens_of_the_default_model(default_folder, default_model):
    model, tokenizer = default_model
    theirs = transformers.AutoModelForCausalLM.from_pretrained(default_folder, dtype=torch.float32).eval()
    tokens = torch.tensor([tokenizer.encode(load_haystack(DATA / "evaluate/essays"))[:600]])
    with torch.no_grad():
        assert (model(tokens) - theirs(tokens).logits).abs().max() < 1e-3
        assert torch.equal(generate(model, tokens, Full(), 64), their_answer(theirs, tokens))
