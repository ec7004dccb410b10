"""transformers loads the same GGUF, and computes the same from it."""

from __future__ import annotations

import pytest
import torch
from gguf import GGMLQuantizationType

import minikv
from gguf_files import byte_level, train_merges, write_gguf
from minikv.haystack import DATA, load_haystack
from test_gguf_vocabulary import TEXTS, sentencepiece_fields, spm  # noqa: F401

transformers = pytest.importorskip("transformers", reason="parity is checked against transformers")


@pytest.mark.parametrize("arch, biases", [("llama", ""), ("qwen2", "qkv")])
@pytest.mark.parametrize("heads, kv_heads", [(8, 2), (6, 2), (4, 4)])
@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_same_logits(tmp_path, arch, biases, heads, kv_heads, kind):
    hidden = heads * 16
    shape = {"heads": heads, "kv_heads": kv_heads, "head_dim": 16, "hidden": hidden, "inner": 32, "biases": biases}
    write_gguf(tmp_path / "a.gguf", arch=arch, head=True, quantized=GGMLQuantizationType[kind], **shape)
    theirs = their_model(tmp_path)
    ours, _ = minikv.load(tmp_path / "a.gguf", device="cpu", dtype="float32")
    tokens = torch.randint(32, (1, 300), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        expected = theirs(tokens).logits
        torch.testing.assert_close(ours(tokens), expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item())


def their_model(folder):
    """What from_pretrained(folder, gguf_file=...) does, which wants another package, accelerate, only to begin."""
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    config = transformers.AutoConfig.from_pretrained(folder, gguf_file="a.gguf")
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    tensors = load_gguf_checkpoint(str(folder / "a.gguf"), return_tensors=True, model_to_load=model)["tensors"]
    model.load_state_dict({name: torch.as_tensor(weight) for name, weight in tensors.items()})
    return model


def their_tokenizer(folder):
    return transformers.AutoTokenizer.from_pretrained(folder, gguf_file="a.gguf")


@pytest.fixture(scope="module")
def merges() -> tuple[list[str], list[str]]:
    """Tokens and merges of the project's own essays."""
    return train_merges([load_haystack(DATA / "evaluate/essays")[:100_000], *TEXTS])


# transformers takes every name that it does not know for gpt-2, `default` and `smollm` among them, does not compose
# accents for qwen2, and forgets that Llama 3 takes a word that is a token whole (here none is without merges).
@pytest.mark.parametrize("name, arch", [("gpt-2", "llama"), ("llama-bpe", "llama"), ("qwen2", "qwen2")])
def test_same_byte_level_ids(tmp_path, merges, name, arch):
    write_gguf(tmp_path / "a.gguf", arch=arch, biases="qkv", vocabulary=byte_level(name, *merges))
    theirs, (_, ours) = their_tokenizer(tmp_path), minikv.load(tmp_path / "a.gguf", device="cpu")
    for text in TEXTS:
        if "e\u0301" not in text:
            assert ours.encode(text) == theirs(text, add_special_tokens=False)["input_ids"], text


def test_same_sentencepiece_ids(tmp_path, spm):  # noqa: F811
    write_gguf(tmp_path / "a.gguf", vocabulary=sentencepiece_fields(spm))
    theirs, (_, ours) = their_tokenizer(tmp_path), minikv.load(tmp_path / "a.gguf", device="cpu")
    for text in TEXTS:
        if text.startswith(" ") or "<s>" in text:
            continue  # transformers puts no other space there, as sentencepiece does; markup in a text is text to us
        assert ours.raw_prompt(text).ids == theirs(text)["input_ids"], text
