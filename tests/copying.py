"""A Llama whose weights are set by hand: one head copies from a known distance. It answers needle questions.

How the head looks back. A key is the same vector k for every token, so after RoPE it tells only its position n: each
pair of its dimensions has the angle n * frequency. The query at position m has the angle (m - distance) * frequency.
The two agree in all pairs only where n = m - distance. So at each decode step the head looks one token further, and
reads the answer out from its first token to its last.

How it copies. A token's hidden state has a 1 at the token's own place, and the values carry that part of it. The
output projection adds 8 at the place of the token that was looked at, and the head of the model, tied to the
embeddings, picks the largest: the copied token.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, pre_tokenizers

from minikv.config import Config
from minikv.haystack import hide, load_needles
from minikv.model import Llama
from minikv.tokenizer import Tokenizer

VOCAB = 258  # <s>, </s> and the 256 bytes
FIELDS = {
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": VOCAB + 1,  # a place for each token, and one that is 1 for all of them
    "intermediate_size": 1,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": VOCAB,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}
CONSTANT = VOCAB  # the hidden dimension that is 1 for every token
NORM = math.sqrt((VOCAB + 1) / 2)  # what RMSNorm makes of a 1 in a state that holds two of them
COPIER = (1, 2)  # layer, head
NEIGHBOUR = (1, 3)  # of the same KV head; looks one token further back, and copies nothing
SHARPNESS = 200.0

WORDS = "The road to the mill was dry and the grass beside it pale. A dog slept in the shade of a cart."
ESSAYS = "\n\n".join(f"{WORDS} Nobody was about on day {day}." for day in ("one", "two", "six", "ten"))


def copying_model(distance: int) -> Llama:
    """The model whose copier looks `distance` tokens back."""
    model = Llama(Config.from_dict(FIELDS)).requires_grad_(False)
    for name, weight in model.named_parameters():
        weight.fill_(1.0 if "norm" in name else 0.0)
    model.model.embed_tokens.weight.copy_(torch.eye(VOCAB, VOCAB + 1))
    model.model.embed_tokens.weight[:, CONSTANT] = 1
    look_back(model, *COPIER, distance)
    look_back(model, *NEIGHBOUR, distance + 1)
    copy(model, *COPIER)
    return model


def look_back(model: Llama, layer: int, head: int, distance: int) -> None:
    """Let a head attend to the token `distance` before the one in hand, and to nothing else."""
    dim = model.config.head_dim
    angles = distance * model.config.rope_theta ** (-torch.arange(0, dim, 2) / dim)
    attention, kv_head = model.blocks[layer].self_attn, head // model.config.group
    query = SHARPNESS * torch.cat([angles.cos(), -angles.sin()])  # turned back by `distance`
    key = torch.cat([torch.ones(dim // 2), torch.zeros(dim // 2)])
    attention.q_proj.weight[head * dim : (head + 1) * dim, CONSTANT] = query / NORM
    attention.k_proj.weight[kv_head * dim : (kv_head + 1) * dim, CONSTANT] = key / NORM


def copy(model: Llama, layer: int, head: int) -> None:
    """Let a head write the token that it attends to."""
    dim, attention, kv_head = model.config.head_dim, model.blocks[layer].self_attn, head // model.config.group
    attention.v_proj.weight[kv_head * dim : (kv_head + 1) * dim, :VOCAB] = torch.eye(VOCAB) / NORM
    attention.o_proj.weight[:VOCAB, head * dim : (head + 1) * dim] = 8 * torch.eye(VOCAB)


def prompt_with_answer() -> tuple[list[int], list[int], int]:
    """Token ids, the positions of an answer of three tokens with a stop after it, and the distance to look back."""
    ids = list(range(10, 90))
    answer = [40, 41, 42]
    ids[43] = 1  # </s>: copied, too, it ends the answer
    return ids, answer, len(ids) - 1 - answer[0]


def write_needles(file: Path) -> Path:
    """Needles of one length, so that at the end of the haystack all answers are at one distance from the prompt's end."""
    with open(file, "w") as lines:
        for name, tons in (("Arvo", 27), ("Bela", 45), ("Cleo", 38)):
            needle = {"needle": f"The cart of {name} weighs {tons} tons.", "question": f"What does {name}'s cart weigh?"}
            lines.write(json.dumps({**needle, "answer": f"{tons} tons"}) + "\n")
    return file


def write_essays(file: Path) -> Path:
    file.write_text(ESSAYS)
    return file


def write_checkpoint(folder: Path, needles: Path) -> Path:
    """The model as a checkpoint, with a tokenizer of single bytes; it finds those needles at depth 100, nowhere else."""
    folder.mkdir()
    alphabet = {char: 2 + i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = RawTokenizer(models.BPE({"<s>": 0, "</s>": 1, **alphabet}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": "{{ messages[0]['content'] }}"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps(FIELDS))
    prompt = hide(Tokenizer.from_folder(folder), ESSAYS, load_needles(needles)[0], 256, depth=1)
    model = copying_model(distance=len(prompt.ids) - 1 - prompt.answer_positions[0])
    save_file(model.state_dict(), folder / "model.safetensors")
    return folder
