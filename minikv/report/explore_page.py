"""The page of `python -m minikv.explore`: template, style, scripts and data put together into one HTML file.

What the page shows comes from documents that nobody has checked. It goes in as JSON and is only ever shown as text;
and the page's own policy lets a browser run this script and no other, and load nothing from anywhere.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from pathlib import Path

FOLDER = Path(__file__).parent / "explore"
SCRIPTS = ("data.js", "prompt.js", "answer.js", "layers.js", "main.js")  # in the order in which they build on each other


def render(data: dict) -> str:
    """The page as HTML. `data` is what explore.py gathers; report/explore/data.js says what is in it."""
    style = _read("page.css")
    script = "\n".join(map(_read, SCRIPTS))
    parts = {
        "policy": "; ".join([
            "default-src 'none'",
            "base-uri 'none'",
            "form-action 'none'",
            f"style-src {_hash(style)}",
            f"script-src {_hash(script)}",
        ]),
        "style": style,
        "script": script,
        "data": _json(data),
    }
    # All at once, so that a document which holds the name of a part is left alone.
    return re.sub(r"\{\{ (\w+) \}\}", lambda match: parts[match[1]], _read("page.html"))


def _read(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    """How a content security policy names a text that it allows."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _json(data: dict) -> str:
    """JSON that nothing in a page can take for its own markup: ASCII, and without the character that begins a tag."""
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
