"""A checkpoint folder small enough for any test: random weights, a tokenizer of the project's own essays, a template."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from minikv.config import Config
from minikv.haystack import DATA, load_haystack
from minikv.model import Llama
from minikv.srh import Profile

CONTROLS = ["<s>", "<|user|>", "<|end|>", "<|assistant|>"]
TEMPLATE = "{% for m in messages %}<|user|>{{ m.content }}<|end|>{% endfor %}<|assistant|>"
FIELDS = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}


def write_tokenizer(folder: Path, add_bos: bool = False) -> int:
    """Byte-level BPE of about a thousand tokens; the number of its ids."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=1000, initial_alphabet=alphabet, special_tokens=CONTROLS, show_progress=False)
    tokenizer.train_from_iterator([load_haystack(DATA / "evaluate/essays")], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "<|end|>", "add_bos_token": add_bos, "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return tokenizer.get_vocab_size()


def write_checkpoint(folder: Path, add_bos: bool = False) -> Path:
    """The folder, with model, tokenizer, and profile.json beside them."""
    fields = FIELDS | {"vocab_size": write_tokenizer(folder, add_bos)}
    (folder / "config.json").write_text(json.dumps(fields))
    torch.manual_seed(0)
    model = Llama(Config.from_dict(fields))
    weights = {name: torch.randn_like(weight) for name, weight in model.state_dict().items()}
    save_file(weights, folder / "model.safetensors")
    layers, heads = fields["num_hidden_layers"], fields["num_attention_heads"]
    ranks = [[(layer + head) % heads for head in range(heads)] for layer in range(layers)]
    head_scores = [[float(len(row) - row.index(head)) for head in range(len(row))] for row in ranks]
    Profile(ranks, [0.2, 0.3, 0.5], head_scores).save(folder / "profile.json")
    return folder
