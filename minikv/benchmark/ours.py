"""minikv as a participant: what `python -m minikv.generate` does with a prompt, timed."""

from __future__ import annotations

from argparse import Namespace

import torch

from minikv import command
from minikv.benchmark.machine import now
from minikv.benchmark.random_weights import even_profile, random_model
from minikv.config import Config
from minikv.inference import decode, prefill_for, prefill_layer_by_layer
from minikv.policy import Full
from minikv.weights import choose_device, choose_dtype, load


class Ours:
    """One dtype of our model, with each of the methods to be measured."""

    held = 0  # the cache is made by each run

    def __init__(self, settings: dict):
        self.device = choose_device(settings["device"])
        dtype = choose_dtype(settings["dtype"], self.device)
        if settings["shape"] is None:
            forms = {"plain": settings["plain"], "compiled": settings["compile"]}
            self.model, _ = load(settings["model"], settings["device"], settings["dtype"], **forms)
        else:
            self.model = random_model(Config.from_dict(settings["shape"]), self.device, dtype)
            if not settings["plain"]:
                self.model.use_fastest_kernels(settings["compile"])
        selection = Namespace(**settings["selection"])

        def profile():
            if settings["shape"] is not None:
                return even_profile(self.model.config)
            return command.load_profile(self.model, selection.profile, settings["model"])

        specs = settings["methods"]
        self.policies = {"full": Full()} | {spec: command.make_policy(spec, selection, profile) for spec in specs}
        self.facts = {"version": command.versions()["minikv"], "torch": torch.__version__}

    @torch.no_grad()
    def run(self, ids: list[int], new_tokens: int, method: str) -> dict:
        """Seconds of a prefill and of the decode steps after it, and what the cache holds in between.

        With n new tokens there are n - 1 steps: the first token comes from the prefill.
        """
        tokens = torch.tensor([ids], device=self.device)
        start = now(self.device)
        logits, cache = prefill_layer_by_layer(self.model, tokens, self.policies[method], reserve=max(new_tokens, 1))
        prefilled = now(self.device)
        found = {"prefill_s": prefilled - start, "kept_entries": sum(cache.kept), "kv_bytes": cache.nbytes}
        answer = decode(self.model, cache, logits, new_tokens)
        chosen = [next(answer).item()] if new_tokens > 0 else []
        first = now(self.device)
        chosen += [token.item() for token in answer]
        done = now(self.device)
        return found | {
            "first_token_s": first - start if new_tokens > 0 else None,
            "decode_s": (done - first) / (new_tokens - 1) if new_tokens > 1 else None,
            "ids": chosen,
        }

    @torch.no_grad()
    def selections(self, ids: list[int], repeats: int) -> dict[str, list[float]]:
        """Seconds of each method's choice for all layers, from one prefill's queries and keys; a warm-up comes first."""
        policies = {spec: policy for spec, policy in self.policies.items() if not isinstance(policy, Full)}
        if not policies:
            return {}
        prefilled = prefill_for(self.model, torch.tensor([ids], device=self.device), list(policies.values()))
        seconds: dict[str, list[float]] = {}
        for spec, policy in policies.items():
            times = []
            for _ in range(repeats + 1):
                start = now(self.device)
                policy.choose(prefilled)
                times.append(now(self.device) - start)
            seconds[spec] = times[1:]
        return seconds
