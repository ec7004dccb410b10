"""Chat templates: the Jinja program of a checkpoint that writes out a conversation as its model was trained on.

A template comes with the checkpoint, so it is somebody else's program: it runs in Jinja's sandbox, with the
few functions that Hugging Face gives it, and whatever goes wrong in it is reported as bad input.
"""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path

from jinja2 import TemplateError
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError

from minikv.errors import InputError


def read_chat_template(folder: Path, tokenizer_config: dict) -> str | None:
    """The template in chat_template.jinja, else the one in tokenizer_config.json, else None."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise InputError(f"{file} cannot be read as text: {error}") from error
    template = tokenizer_config.get("chat_template")
    if isinstance(template, list):  # several by name, as in [{"name": "default", "template": "..."}, ...]
        named = [entry.get("template") for entry in template if isinstance(entry, dict) and entry.get("name") == "default"]
        template = named[0] if named else None
    return template if isinstance(template, str) else None


def render(template: str, messages: list[dict[str, str]], special_tokens: dict[str, str], source: str) -> str:
    """The text of `messages` ({"role": ..., "content": ...}) up to where the assistant's answer begins.

    `special_tokens` are the names that templates use (bos_token, eos_token); `source` names the template in errors.
    Raises InputError where the template is malformed, refuses the messages, or reaches for Python internals.
    """
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    try:
        return environment.from_string(template).render(
            messages=messages, tools=None, documents=None, add_generation_prompt=True, **special_tokens
        )
    except Exception as error:  # the template is a program: it can raise anything
        reason = " ".join(str(error).split()) or type(error).__name__
        raise InputError(f"the chat template of {source} failed: {reason}; --no-chat does without it") from error


class _Sandbox(ImmutableSandboxedEnvironment):
    def unsafe_undefined(self, obj, attribute):
        # Jinja's own answer is a value that prints as nothing; a template that tries this is better not used.
        raise SecurityError(f"it reaches for {attribute!r} of a {type(obj).__name__}, which is unsafe")


class _Generation(Extension):
    """The tag by which templates mark the assistant's own words for training; here it is just what is inside."""

    tags = {"generation"}

    def parse(self, parser):
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    # Jinja's own filter escapes HTML characters, which no model was trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)
