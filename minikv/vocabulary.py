"""The two file formats of a vocabulary: tokenizer.json (tokenizers) and tokenizer.model (SentencePiece).

Both classes offer the same to tokenizer.py, which knows no formats:

    controls                   the special tokens, which `encode` never makes out of text
    encode(text, at_start)     ids and, for each, its range of characters in the text
    spell(id)                  the bytes of text that an id stands for
    size                       one more than the largest id
    default_bos, default_eos   the id that the file itself puts before a text, that it ends a text with, or None
    drops_first_space          whether a space is put before a text, and so has to go again from what is decoded
    starts_after_controls      whether text is still at the start where only special tokens went before
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from minikv.errors import InputError
from minikv.files import read_json

Span = tuple[int, int]


@dataclass(frozen=True)
class Control:
    """A special token: its id, the text that templates write for it, and whether it swallows blanks beside it."""

    id: int
    text: str
    visible: bool = False  # decoded as its text, like <think>, which is markup but not the end of anything
    lstrip: bool = False
    rstrip: bool = False


class TokenizersVocabulary:
    """A tokenizer.json, read by the `tokenizers` package."""

    default_eos = None
    starts_after_controls = False

    def __init__(self, file: Path, special_texts: set[str], template: str):
        """`special_texts` are special whatever the file says, and so is what the chat template writes."""
        from tokenizers import Tokenizer

        self.added: dict[int, str] = {}
        self.controls: list[Control] = []
        fields = read_json(file)
        # What follows is for encoding one stretch of plain text: all of it, and nothing beside it.
        plain = fields | {"post_processor": None, "truncation": None, "padding": None}
        try:
            for token in plain.get("added_tokens") or []:
                special = token["special"] or token["content"] in special_texts
                self.added[token["id"]] = token["content"]
                if special or (token["content"].strip() and token["content"] in template):
                    strips = {side: bool(token.get(side)) for side in ("lstrip", "rstrip")}
                    self.controls.append(Control(token["id"], token["content"], visible=not special, **strips))
                    token["special"] = True
            self._first = self._later = Tokenizer.from_str(json.dumps(plain))
            later = _without_first_prefix(plain)
            if later != plain:
                self._later = Tokenizer.from_str(json.dumps(later))
            for id, text in self.added.items():
                if self._first.token_to_id(text) != id:
                    raise ValueError(f"the added token {text!r} has id {id}, and id {self._first.token_to_id(text)} as a token")
            self._first.encode_special_tokens = self._later.encode_special_tokens = True
            self.default_bos = None
            if fields.get("post_processor") is not None:
                with_post_processor = plain | {"post_processor": fields["post_processor"]}
                whole = Tokenizer.from_str(json.dumps(with_post_processor)).encode("a")
                self.default_bos = whole.ids[0] if whole.special_tokens_mask[:1] == [1] else None
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # the package raises bare Exceptions, and panics that are not even that
            raise InputError(f"{file} cannot be read by the tokenizers package: {error}") from error
        self._file = file
        self.size = max(self._first.get_vocab().values(), default=-1) + 1
        self._piece_bytes, self.drops_first_space = _read_decoder(fields.get("decoder"), file)

    def encode(self, text: str, at_start: bool = True) -> tuple[list[int], list[Span]]:
        try:
            encoding = (self._first if at_start else self._later).encode(text)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            raise InputError(f"{self._file} cannot encode the text: {error}") from error
        return encoding.ids, encoding.offsets

    def spell(self, id: int) -> bytes:
        if id in self.added:
            return self.added[id].encode()
        piece = self._first.id_to_token(id)
        return b"" if piece is None else self._piece_bytes(piece)

    def token_id(self, text: str) -> int | None:
        return self._first.token_to_id(text)


def _without_first_prefix(fields: dict) -> dict:
    """The same tokenizer.json for a text that does not begin the prompt: no space is put before it."""

    def rewrite(part):
        if isinstance(part, list):
            return [rewrite(child) for child in part]
        if not isinstance(part, dict):
            return part
        part = {name: rewrite(child) for name, child in part.items()}
        return part | {"prepend_scheme": "never"} if part.get("prepend_scheme") == "first" else part

    return fields | {"pre_tokenizer": rewrite(fields.get("pre_tokenizer"))}


def _read_decoder(decoder: dict | None, file: Path):
    """From the decoder in a tokenizer.json: piece to bytes, and whether a decoded text loses its first space.

    The package's own decoders turn ids into text all at once; bytes can be streamed.
    """
    if decoder is None:  # the package then joins whole words with spaces
        return lambda piece: b" " + piece.encode(), True
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = {step["type"]: step for step in steps}
    if set(kinds) == {"ByteLevel"}:
        return _byte_level_bytes, False
    if not set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}:
        raise InputError(
            f"{file}: decoder {' + '.join(kinds)} is not supported; accepted: ByteLevel, "
            "or SentencePiece's Replace, ByteFallback, Fuse, Strip, Metaspace"
        )
    for step in steps:
        if step["type"] == "Replace" and (step.get("pattern"), step.get("content")) != ({"String": "▁"}, " "):
            raise InputError(f"{file}: decoder Replace {step} is not supported; accepted: ▁ by a space")
    metaspace = kinds.get("Metaspace", {})
    prefixed = metaspace.get("prepend_scheme", "always" if metaspace.get("add_prefix_space") else "never")
    return _sentencepiece_bytes, "Strip" in kinds or prefixed != "never"


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's one printable character for each of the 256 bytes."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_alphabet()


def _byte_level_bytes(piece: str) -> bytes:
    try:
        return bytes(_BYTE_OF_CHARACTER[character] for character in piece)
    except KeyError:  # not spelled in the alphabet, so it stands for itself
        return piece.encode()


def _sentencepiece_bytes(piece: str) -> bytes:
    if re.fullmatch("<0x[0-9A-F]{2}>", piece):
        return bytes([int(piece[3:5], 16)])
    return piece.replace("▁", " ").encode()


class SentencePieceVocabulary:
    """A tokenizer.model, read by the `sentencepiece` package.

    A space is put before the text that begins a prompt, where the model was trained so, and before no other: text after
    a special token would come back with a space that was not there.
    """

    starts_after_controls = True

    def __init__(self, file: Path, added: list[Control]):
        """`added` are the tokens that other files of the checkpoint add to those in the model."""
        from sentencepiece import SentencePieceProcessor

        # A protobuf message is extended by appending to it: here normalizer_spec { add_dummy_prefix: false }.
        no_prefix = b"\x1a\x02\x18\x00"
        try:
            model = file.read_bytes()
            self._first = SentencePieceProcessor(model_proto=model)
            self._later = SentencePieceProcessor(model_proto=model + no_prefix)
        except (OSError, RuntimeError) as error:
            raise InputError(f"{file} is not a SentencePiece model: {error}") from error
        self.drops_first_space = self._first.encode("a") != self._later.encode("a")
        pieces = range(self._first.get_piece_size())
        self._hidden = {id for id in pieces if self._first.is_control(id) or self._first.is_unknown(id)}
        added = [control for control in added if control.id not in pieces]
        self._added = {control.id: control.text for control in added}
        self.controls = [Control(id, self._first.id_to_piece(id)) for id in pieces if self._first.is_control(id)]
        self.controls += added
        self.size = max([len(pieces) - 1, *self._added]) + 1
        bos, eos = self._first.bos_id(), self._first.eos_id()  # -1 where the model has none
        self.default_bos, self.default_eos = (None if id < 0 else id for id in (bos, eos))

    def encode(self, text: str, at_start: bool = True) -> tuple[list[int], list[Span]]:
        ids = (self._first if at_start else self._later).encode(text)
        return ids, _locate([self.spell(id) for id in ids], text)

    def spell(self, id: int) -> bytes:
        if id in self._added:
            return self._added[id].encode()
        if id in self._hidden or not 0 <= id < self._first.get_piece_size():
            return b""
        return _sentencepiece_bytes(self._first.id_to_piece(id))

    def token_id(self, text: str) -> int | None:
        return next((control.id for control in self.controls if control.text == text), None)


def _locate(pieces: list[bytes], text: str) -> list[Span]:
    """The range of characters in `text` that each piece spells; a piece that is part of a character gets all of it."""
    data = text.encode()
    character_of_byte = [i for i, character in enumerate(text) for _ in character.encode()] + [len(text)]
    spans, position = [], 0
    for piece in pieces:
        if piece.startswith(b" ") and not data.startswith(piece, position):
            piece = piece[1:]  # the space that was put before the text
        # A model that normalizes may spell a character in another way; look a little further for the next piece.
        found = data.find(piece, position, position + len(piece) + 32)
        if piece and found >= 0:
            position = found + len(piece)
            spans.append((character_of_byte[found], character_of_byte[position - 1] + 1))
        else:
            spans.append((character_of_byte[position],) * 2)
    return spans
