"""Who takes part: the settings of each participant's process, from the command line."""

from __future__ import annotations

import sys
from argparse import Namespace

from minikv import command
from minikv.benchmark import sources
from minikv.benchmark.participants import Failed, Participant, Run
from minikv.benchmark.random_weights import even_profile
from minikv.benchmark.roofline import ELEMENT_BYTES, entry_bytes
from minikv.benchmark.sources import Source
from minikv.benchmark.worker import WARM_UP_TOKENS
from minikv.budget import PromptShape, mean_entries, parse
from minikv.default_model import DEFAULT_MODEL
from minikv.errors import InputError
from minikv.policy import SnapKV

PEERS = ("transformers", "kvpress", "llama.cpp")


def read_peers(text: str) -> dict[str, str]:
    """The peers of `transformers,kvpress=PYTHON,llama.cpp`, each with the Python that runs it."""
    peers = {}
    for item in filter(None, text.split(",")):
        name, _, python = item.partition("=")
        if name not in PEERS:
            accepted = f"some of {','.join(PEERS)}, each with =PYTHON if need be"
            raise InputError(f"--against {name!r} is unknown; accepted: {accepted}")
        peers[name] = python or sys.executable
    return peers


def check_methods(arguments: Namespace, config) -> None:
    """InputError, before any weights are read, for a method or a budget that makes no sense at one of the lengths."""
    for dtype in arguments.dtypes:
        for length in arguments.lengths:
            shape = PromptShape(config.layers, length, entry_bytes(config, ELEMENT_BYTES[dtype]))
            for spec in arguments.methods:
                command.make_policy(spec, arguments, lambda: even_profile(config)).mean_entries(shape)


def all_settings(arguments: Namespace, source: Source, prompts: dict[int, list[int]], threads: int) -> list[dict]:
    """The settings of each process: ours and the peers', dtype by dtype."""
    selection = {name: getattr(arguments, name) for name in ("budget", "window", "kernel", "heads", "profile")}
    common = {
        "model": arguments.model,
        "shape": source.shape,
        "device": arguments.device,
        "threads": threads,
        "warm_up": prompts[max(prompts)][:WARM_UP_TOKENS],
    }
    found = []
    for dtype in arguments.dtypes:
        ours = {"kind": "minikv", "methods": arguments.methods, "selection": selection}
        ours |= {"plain": arguments.plain, "compile": arguments.compile}
        kinds = [ours]
        if "transformers" in arguments.against:
            kinds.append({"kind": "transformers", "methods": ["full"], "folder": source.folder})
        if "kvpress" in arguments.against:
            size = entry_bytes(source.config, ELEMENT_BYTES[dtype])
            shapes = {length: PromptShape(source.config.layers, length, size) for length in prompts}
            budget, least = parse(arguments.budget), SnapKV.window + 1
            entries = {length: mean_entries(budget, shape, least) for length, shape in shapes.items()}
            kinds.append({"kind": "kvpress", "methods": ["snapkv"], "folder": source.folder, "entries": entries})
        found += [{**common, **kind, "dtype": dtype, "name": f"{kind['kind']} {dtype}"} for kind in kinds]
    if "llama.cpp" in arguments.against:
        own = {"kind": "llama.cpp", "methods": ["full"], "dtype": "quantized", "name": "llama.cpp"}
        own |= {"gguf": arguments.llama_gguf, "context": max(prompts) + arguments.new_tokens + 1}
        own |= {"layers": source.config.layers, "entry_values": entry_bytes(source.config, 1)}
        found.append(common | own)
    return found


def find_gguf(arguments: Namespace, source: Source) -> str | None:
    """The file for llama.cpp, or None where it does not take part. Raises InputError where there is none."""
    if "llama.cpp" not in arguments.against:
        return None
    if source.shape is not None:
        raise InputError("--random-weights and --against llama.cpp cannot go together: it needs a GGUF file with weights")
    if arguments.llama_gguf or source.gguf:
        return arguments.llama_gguf or source.gguf
    if arguments.model != DEFAULT_MODEL:
        raise InputError(f"--against llama.cpp needs a GGUF file of {arguments.model}; name it with --llama-gguf FILE")
    return sources.default_gguf()


def enter(settings: list[dict], pythons: dict[str, str], run: Run, participants: list[Participant]) -> None:
    """Load one after the other, and add to `participants` those that are ready; the others are left out by name."""
    for own in settings:
        if own["kind"] != "minikv" and own.get("folder", own.get("gguf")) is None and own["shape"] is None:
            run.fail(own["name"], "it reads checkpoint folders, and the model is a GGUF file")
            continue
        try:
            participants.append(Participant(own, pythons.get(own["kind"], sys.executable)))
        except Failed as failure:
            run.fail(own["name"], str(failure))
