"""Other people's programs as participants. Each is imported only in its own process; none is a requirement."""

from __future__ import annotations

import os
from importlib import import_module, metadata

import torch

from minikv.benchmark.machine import now
from minikv.errors import InputError
from minikv.weights import choose_device, choose_dtype


class Transformers:
    """Hugging Face transformers with torch's attention: what its `generate` does greedily, without the overhead.

    Prefill with the logits of the last position, then one token at a time with a DynamicCache.
    """

    held = 0

    def __init__(self, settings: dict):
        self.device = choose_device(settings["device"])
        dtype = choose_dtype(settings["dtype"], self.device)
        library = import_module("transformers")
        library.logging.set_verbosity_error()
        options = {"dtype": dtype, "attn_implementation": "sdpa"}
        if settings["shape"] is None:
            model = library.AutoModelForCausalLM.from_pretrained(settings["folder"], local_files_only=True, **options)
        else:
            with torch.device(self.device):
                config = library.LlamaConfig(**settings["shape"])
                model = library.AutoModelForCausalLM.from_config(config, **options)
        self.model, self._new_cache = model.to(self.device).eval(), library.DynamicCache
        self.facts = {"version": library.__version__, "torch": torch.__version__}

    def prefill(self, tokens: torch.Tensor, cache) -> torch.Tensor:
        """Logits [batch, vocab] of the last of tokens [batch, seq], whose keys and values fill the cache."""
        return self.model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]

    @torch.no_grad()
    def run(self, ids: list[int], new_tokens: int, method: str) -> dict:
        """As Ours.run. Positions go on from the prompt's length, whatever the cache kept."""
        tokens, cache, answer = torch.tensor([ids], device=self.device), self._new_cache(), []
        start = now(self.device)
        logits = self.prefill(tokens, cache)
        prefilled = now(self.device)
        layers = [(layer.keys, layer.values) for layer in cache.layers]
        found = {
            "prefill_s": prefilled - start,
            "kept_entries": sum(keys.shape[2] for keys, _ in layers),
            "kv_bytes": sum(keys.nbytes + values.nbytes for keys, values in layers),
        }
        del layers  # else the first step could not free what it replaces
        if new_tokens > 0:
            answer.append(logits.argmax(-1).item())
        first = now(self.device)
        for step in range(new_tokens - 1):
            token = torch.tensor([answer[-1:]], device=self.device)
            position = torch.tensor([[len(ids) + step]], device=self.device)
            output = self.model(token, past_key_values=cache, position_ids=position, use_cache=True, logits_to_keep=1)
            answer.append(output.logits[:, -1].argmax(-1).item())
        done = now(self.device)
        return found | {
            "first_token_s": first - start if new_tokens > 0 else None,
            "decode_s": (done - first) / (new_tokens - 1) if new_tokens > 1 else None,
            "ids": answer,
        }


class KVPress(Transformers):
    """NVIDIA's kvpress: SnapKV with a window of 8 and a kernel of 5, in transformers' model. It keeps exactly the budget."""

    def __init__(self, settings: dict):
        self._press, self._budget = import_module("kvpress").SnapKVPress, settings["entries"]
        super().__init__(settings)
        own = {"version": metadata.version("kvpress"), "transformers": self.facts["version"]}
        self.facts = own | {"torch": torch.__version__}

    def prefill(self, tokens: torch.Tensor, cache) -> torch.Tensor:
        length = tokens.shape[1]
        budget = self._budget.get(str(length), length // 2)  # the warm-up's length has none of its own
        if budget >= length:
            return super().prefill(tokens, cache)
        # A quarter of an entry more, so that neither rounding down nor rounding to the nearest takes one away.
        press = self._press(compression_ratio=1 - (budget + 0.25) / length, window_size=8, kernel_size=5)
        with press(self.model):
            logits = super().prefill(tokens, cache)
        kept = {layer.keys.shape[2] for layer in cache.layers}
        if kept != {budget}:
            raise InputError(f"kvpress kept {sorted(kept)} entries a layer; {budget} were asked for")
        return logits


class LlamaCpp:
    """llama.cpp through llama-cpp-python, with its own quantized file, float16 cache and default batches; on the CPU."""

    device = torch.device("cpu")

    def __init__(self, settings: dict):
        self._library = import_module("llama_cpp")
        context = -(-settings["context"] // 256) * 256  # it rounds up so itself
        options = {"n_ctx": context, "n_threads": settings["threads"], "n_threads_batch": settings["threads"]}
        self._llama = self._library.Llama(settings["gguf"], logits_all=False, verbose=False, **options)
        self._values = settings["entry_values"]  # keys and values of a token in one layer
        self._layers = settings["layers"]
        self.held = context * self._layers * self._values * 2  # its cache is made, and cleared, while loading
        weights = self._library.llama_model_size(self._llama.model)
        kind = os.path.basename(settings["gguf"])
        self.facts = {"version": self._library.__version__, "weight_bytes": weights, "file": kind}

    def _next(self) -> int:
        import numpy as np

        logits = self._library.llama_get_logits_ith(self._llama.ctx, -1)
        return int(np.ctypeslib.as_array(logits, shape=(self._llama.n_vocab(),)).argmax())

    def run(self, ids: list[int], new_tokens: int, method: str) -> dict:
        """As Ours.run."""
        answer: list[int] = []
        self._llama.reset()
        start = now(self.device)
        self._llama.eval(ids)
        self._library.llama_synchronize(self._llama.ctx)
        prefilled = now(self.device)
        if new_tokens > 0:
            answer.append(self._next())
        first = now(self.device)
        for _ in range(new_tokens - 1):
            self._llama.eval(answer[-1:])
            answer.append(self._next())
        done = now(self.device)
        kept = self._layers * len(ids)
        return {
            "prefill_s": prefilled - start,
            "kept_entries": kept,
            "kv_bytes": kept * self._values * 2,
            "first_token_s": first - start if new_tokens > 0 else None,
            "decode_s": (done - first) / (new_tokens - 1) if new_tokens > 1 else None,
            "ids": answer,
        }


KINDS = {"transformers": Transformers, "kvpress": KVPress, "llama.cpp": LlamaCpp}
