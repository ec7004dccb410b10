"""Pages whose code is run: fenced Python and shell blocks, with what they print in the `text` block right below.

    python tests/documents.py PAGE

runs a page's blocks in order and writes what they print into the text blocks that are already there.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"^```(python|sh)\n(.*?)^```\n(?:\s*^```text\n(.*?)^```$)?", re.MULTILINE | re.DOTALL)
DECIMAL = re.compile(r"-?\d[\d,]*\.\d+")


@dataclass(frozen=True)
class Block:
    """A block of code, what the page says that it prints (None: nothing is said), and where both stand in the page."""

    language: str
    code: str
    output: str | None
    line: int  # of the code's first line, from 1
    output_span: tuple[int, int]  # of the output, in characters


def blocks(page: str) -> list[Block]:
    """The Python and shell blocks of a page in their order."""
    return [
        Block(match[1], match[2], match[3], page.count("\n", 0, match.start(2)) + 1, match.span(3))
        for match in BLOCK.finditer(page)
    ]


def run(page: Path) -> Iterator[tuple[Block, str]]:
    """Each block of a page that is run, with what it prints: Python in one namespace, shell if its output is shown.

    Python runs where the caller is, shell commands in an empty folder, so that they leave nothing in the checkout.
    """
    namespace = {"__name__": "__main__"}
    for block in blocks(page.read_text(encoding="utf-8")):
        if block.language == "python":
            yield block, run_python(block, namespace, page)
        elif block.output is not None:
            yield block, run_shell(block.code)


def run_python(block: Block, namespace: dict, page: Path) -> str:
    """What a block prints; a traceback names the page and the line in it."""
    printed = io.StringIO()
    code = compile("\n" * (block.line - 1) + block.code, str(page), "exec", dont_inherit=True)
    with contextlib.redirect_stdout(printed):
        exec(code, namespace)
    return printed.getvalue()


def run_shell(code: str) -> str:
    """What a block of commands prints, standard error included."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = os.environ | {"PATH": path, "PYTHONPATH": str(ROOT)}
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(code, shell=True, cwd=folder, env=environment, capture_output=True, text=True)
    return done.stdout + done.stderr


def same(shown: str, printed: str) -> bool:
    """Whether two outputs agree. A number with decimals may differ by one in its last place: machines round apart."""
    shown, printed = (re.sub(r"[ \t]+$", "", text.strip(), flags=re.MULTILINE) for text in (shown, printed))
    if DECIMAL.sub("#", shown) != DECIMAL.sub("#", printed):
        return False
    pairs = zip(DECIMAL.findall(shown), DECIMAL.findall(printed))
    return all(_close(first, second) for first, second in pairs)


def _close(first: str, second: str) -> bool:
    places = [len(number.partition(".")[2]) for number in (first, second)]
    values = [float(number.replace(",", "")) for number in (first, second)]
    return places[0] == places[1] and abs(values[0] - values[1]) < 1.5 * 10 ** -places[0]


def commands(page: str) -> list[tuple[str, str]]:
    """Each `python -m minikv...` that a page shows outside its Python blocks: the module and its arguments."""
    page = re.sub(r"^```python\n.*?^```", "", page, flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"python -m (minikv[\w.]*)((?: [^`\n&#|]*)?)", page)


def missing_name(name: str, file: str) -> str | None:
    """What a link such as [`scores.pool`](minikv/scores.py) names that is not there; None where all is."""
    if not (ROOT / file).is_file():
        return file
    module = file.removesuffix(".py").replace("/", ".")
    found, parts = importlib.import_module(module), name.split(".")
    if parts[0] == module.rpartition(".")[2]:
        parts = parts[1:]
    for part in parts:
        if part not in getattr(found, "__dataclass_fields__", {}) and not hasattr(found, part):
            return f"{name} in {file}"
        found = getattr(found, part, None)
    return None


def missing_links(page: str) -> list[str]:
    """What a page's links lead to that is not there: files, headings of the page, names in modules."""
    without_code = _without_code(page)
    missing = [missing_name(*link) for link in re.findall(r"\[`([\w.]+)`\]\(([\w/]+\.py)\)", without_code)]
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code):
        file, _, anchor = target.partition("#")
        if "://" in target:
            continue
        there = not file or (ROOT / file).exists()
        text = (ROOT / file).read_text(encoding="utf-8") if there and file and anchor else page
        if not there or (anchor and anchor not in _anchors(text)):
            missing.append(target)
    return [what for what in missing if what]


def _without_code(page: str) -> str:
    """A page without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", page, flags=re.MULTILINE | re.DOTALL)


def _anchors(page: str) -> set[str]:
    """The anchors that GitHub gives a page's headings."""
    headings = re.findall(r"^#+ (.*)$", _without_code(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def rewrite(page: Path) -> None:
    """Run the page and put what its blocks print where it shows their output."""
    found = list(run(page))
    text = page.read_text(encoding="utf-8")
    for block, printed in reversed(found):  # from the back, so that the places in front stay true
        if block.output is not None:
            start, end = block.output_span
            text = text[:start] + printed.rstrip() + "\n" + text[end:]
    page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    os.chdir(ROOT)
    sys.path[:0] = [str(ROOT)]
    rewrite(Path(sys.argv[1]).resolve())
