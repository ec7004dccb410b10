"""What the methods are called where people read of them."""

from __future__ import annotations

TITLE = {
    "full": "full cache",
    "streamingllm": "StreamingLLM",
    "snapkv": "SnapKV",
    "pyramidkv": "PyramidKV",
    "cake": "CAKE",
    "tova": "TOVA",
    "h2o": "H2O",
    "compresskv": "CompressKV",
    "sharedvote": "shared vote",
}


def title(spec: str) -> str:
    """`compresskv:window=16` as people read it. A method that is not the project's own keeps its name."""
    name, *changes = spec.split(":")
    changed = (change.replace("=", " ").replace("_", " ") for change in changes)
    return ", ".join([TITLE.get(name, name), *changed])
