"""transformers loads the folder that is made of the GGUF, and computes the same from it."""

from __future__ import annotations

import pytest
import torch

from minikv.tokenizer import Tokenizer
from minikv.weights import load_model

transformers = pytest.importorskip("transformers", reason="parity is checked against transformers")


def test_same_logits_as_transformers(default_folder):
    tokens = torch.tensor([Tokenizer.from_folder(default_folder).chat_prompt("What is the capital of France?").ids])
    theirs = transformers.AutoModelForCausalLM.from_pretrained(default_folder, dtype=torch.float32)
    ours = load_model(default_folder, torch.device("cpu"), torch.float32)
    with torch.inference_mode():
        torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=1e-4, atol=1e-3)
