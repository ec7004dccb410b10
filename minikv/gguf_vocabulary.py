"""The vocabulary of a GGUF file, written out as the small files of an ordinary checkpoint folder.

A GGUF lists tokens, what kind each is, and either merges (byte-level BPE, called gpt2 there) or scores
(SentencePiece, called llama there). How words are split before they are merged is only given as a name.
"""

from __future__ import annotations

import json
import math
import struct
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from sentencepiece import SentencePieceProcessor
from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers
from tokenizers import Tokenizer as RawTokenizer
from tokenizers.models import BPE

from minikv.errors import InputError
from minikv.gguf_file import GGUFFile
from minikv.tokenizer import Tokenizer

CONTROL, USER_DEFINED, BYTE = 3, 4, 6  # of the token types, which are SentencePiece's
VOCABULARIES = {"gpt2": "byte-level BPE", "llama": "SentencePiece"}


@dataclass(frozen=True)
class Family:
    """How a family of models with byte-level vocabularies prepares a text for its merges."""

    pre_tokenizers: list
    normalizer: normalizers.Normalizer | None = None
    ignore_merges: bool = False  # a word that is a token as a whole is taken as it is
    adds_bos: bool = False  # where the file does not say


GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# As Llama 3 and Qwen 2 split: contractions in any case, a word with one sign before it, up to so many digits.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _splits(*patterns: str) -> list:
    """One pattern after another, each on the pieces that those before it made."""
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    return [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]


_GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
# By the name in tokenizer.ggml.pre. The patterns are those of the models' own tokenizer.json files; `default`, what
# llama.cpp does for a file of which it knows no better, is in its src/llama-vocab.cpp only.
FAMILIES = {
    "default": Family(_splits(r"[\p{P}\$\+<=>\^~\|]+", GPT2_WORDS, r"\p{N}+", "[0-9][0-9][0-9]")),
    "gpt-2": Family([_GPT2]),
    "llama-bpe": Family(_splits(WORDS % "{1,3}"), ignore_merges=True, adds_bos=True),
    "qwen2": Family(_splits(WORDS % ""), normalizer=normalizers.NFC()),
    # Every digit is a token of its own, then GPT-2's rule splits words.
    "smollm": Family([pre_tokenizers.Digits(individual_digits=True), _GPT2]),
}


def open_tokenizer(gguf: GGUFFile) -> Tokenizer:
    """The tokenizer of the file, chat template and stop ids included. Raises InputError where it is not supported."""
    with tempfile.TemporaryDirectory(prefix="minikv-") as folder:
        write_tokenizer(gguf, Path(folder))
        return Tokenizer.from_folder(folder, source=gguf.source)


def write_tokenizer(gguf: GGUFFile, folder: Path) -> None:
    """tokenizer.json or tokenizer.model, tokenizer_config.json and generation_config.json, into `folder`."""
    model = gguf.needed("tokenizer.ggml.model", str)
    if model not in VOCABULARIES:
        known = ", ".join(f"{name} ({what})" for name, what in VOCABULARIES.items())
        raise InputError(f"{gguf.source}: vocabulary model {model!r} is not supported; accepted: {known}")
    tokens = read_tokens(gguf)
    if model == "gpt2":
        family = _family(gguf)
        _byte_level(gguf, tokens, family).save(str(folder / "tokenizer.json"))
        tokenizer_class, adds_bos = "PreTrainedTokenizerFast", family.adds_bos
    else:
        (folder / "tokenizer.model").write_bytes(_sentencepiece_model(gguf, tokens))
        tokenizer_class, adds_bos = "LlamaTokenizer", True
    settings = {
        "tokenizer_class": tokenizer_class,
        "add_bos_token": gguf.value("tokenizer.ggml.add_bos_token", bool, adds_bos),
        "clean_up_tokenization_spaces": False,  # the clean-up would drop spaces that were in the text
        "model_max_length": gguf.value(f"{gguf.needed('general.architecture', str)}.context_length", int),
    }
    ids = special_ids(gguf, len(tokens))
    settings |= {f"{name}_token": tokens[ids[name]] for name in ("bos", "eos", "pad", "unk") if name in ids}
    template = gguf.value("tokenizer.chat_template", str)
    if template is not None:
        settings["chat_template"] = template
    write_settings(folder / "tokenizer_config.json", settings)
    write_settings(folder / "generation_config.json", model_token_ids(gguf, len(tokens)))


def write_settings(file: Path, fields: dict) -> None:
    file.write_text(json.dumps(fields, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def read_tokens(gguf: GGUFFile) -> list[str]:
    tokens = gguf.array("tokenizer.ggml.tokens", str)
    if len(set(tokens)) != len(tokens):
        twice = Counter(tokens).most_common(1)[0][0]
        raise InputError(f"{gguf.source}: tokenizer.ggml.tokens lists {twice!r:.60} twice")
    return tokens


def special_ids(gguf: GGUFFile, vocab_size: int) -> dict[str, int]:
    """The ids of the tokens with a role: bos, eos, eot (end of turn), eom (end of message), pad, unk, where given."""
    ids = {}
    for name in ("bos", "eos", "eot", "eom", "padding", "unknown"):
        id = gguf.value(f"tokenizer.ggml.{name}_token_id", int)
        if id is None:
            continue
        if 0 <= id < vocab_size:
            ids[{"padding": "pad", "unknown": "unk"}.get(name, name)] = id
        elif name not in ("padding", "unknown"):  # of no use here, and in some files a number that means none
            largest = vocab_size - 1
            raise InputError(
                f"{gguf.source}: tokenizer.ggml.{name}_token_id is {id}; an id from 0 to {largest} is needed"
            )
    return ids


def model_token_ids(gguf: GGUFFile, vocab_size: int) -> dict[str, int | list[int]]:
    """bos_token_id, eos_token_id and pad_token_id of a config; all that end a turn are in eos_token_id."""
    ids = special_ids(gguf, vocab_size)
    stops = list(dict.fromkeys(ids[name] for name in ("eos", "eot", "eom") if name in ids))
    fields = {"bos_token_id": ids.get("bos"), "eos_token_id": stops[0] if len(stops) == 1 else stops or None}
    fields["pad_token_id"] = ids.get("pad")
    return {name: value for name, value in fields.items() if value is not None}


def _family(gguf: GGUFFile) -> Family:
    name = gguf.value("tokenizer.ggml.pre", str)
    if name not in FAMILIES:
        found = "tokenizer.ggml.pre is missing" if name is None else f"pre-tokenizer {name!r} is not supported"
        raise InputError(f"{gguf.source}: {found}; accepted: {', '.join(FAMILIES)}")
    return FAMILIES[name]


def _token_types(gguf: GGUFFile, tokens: list[str]) -> list[int]:
    types = gguf.array("tokenizer.ggml.token_type", int, len(tokens))
    if not set(types) <= set(range(1, 7)):  # normal, unknown, control, user-defined, unused, byte
        wrong = next(kind for kind in types if not 1 <= kind <= 6)
        raise InputError(f"{gguf.source}: tokenizer.ggml.token_type holds {wrong}; accepted: 1 to 6")
    return types


def _byte_level(gguf: GGUFFile, tokens: list[str], family: Family) -> RawTokenizer:
    types = _token_types(gguf, tokens)
    merges = [tuple(merge.split(" ")) for merge in gguf.array("tokenizer.ggml.merges", str)]
    for merge in merges:
        if len(merge) != 2:
            raise InputError(f"{gguf.source}: tokenizer.ggml.merges holds {' '.join(merge)!r}; two tokens are needed")
    vocabulary = {token: id for id, token in enumerate(tokens)}
    try:
        tokenizer = RawTokenizer(BPE(vocabulary, merges, ignore_merges=family.ignore_merges))
    except Exception as error:  # tokenizers raises bare Exception
        raise InputError(f"{gguf.source}: tokenizer.ggml.merges do not fit the tokens: {error}") from error
    if family.normalizer is not None:
        tokenizer.normalizer = family.normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(family.pre_tokenizers)
    tokenizer.decoder = decoders.ByteLevel()
    for token, kind in zip(tokens, types):
        if kind in (CONTROL, USER_DEFINED):
            tokenizer.add_tokens([AddedToken(token, special=kind == CONTROL, normalized=False)])
    return tokenizer


def _sentencepiece_model(gguf: GGUFFile, tokens: list[str]) -> bytes:
    """A SentencePiece BPE model that leaves text as it is: a ModelProto of sentencepiece_model.proto, serialized."""
    scores = gguf.array("tokenizer.ggml.scores", float, len(tokens))
    types = _token_types(gguf, tokens)
    if not all(map(math.isfinite, scores)):
        raise InputError(f"{gguf.source}: tokenizer.ggml.scores holds a NaN or infinity; finite numbers are needed")
    pieces = []
    for token, score, kind in zip(tokens, scores, types):
        piece = token.replace(" ", "▁") if kind == USER_DEFINED else token  # llama.cpp writes these with spaces
        pieces.append(_field(1, _field(1, piece.encode()) + _field(2, score) + _field(3, kind)))
    ids = special_ids(gguf, len(tokens))
    trainer = _field(3, 2) + _field(35, BYTE in types)  # model_type BPE, byte_fallback
    for name, number in (("unk", 45), ("bos", 46), ("eos", 47)):
        if name in ids:
            trainer += _field(number, tokens[ids[name]].encode())
    prefix = gguf.value("tokenizer.ggml.add_space_prefix", bool, True)
    normalizer = _field(1, b"identity") + _field(3, prefix) + _field(4, False)  # extra whitespace is not removed
    model = b"".join(pieces) + _field(2, trainer) + _field(3, normalizer)
    try:
        SentencePieceProcessor(model_proto=model)
    except RuntimeError as error:
        raise InputError(f"{gguf.source}: the tokens are no SentencePiece vocabulary: {error}") from error
    return model


def _field(number: int, value: bytes | float) -> bytes:
    """One field of a protobuf message: text or a message, a float, or a whole number or bool."""
    if isinstance(value, bytes):
        return _varint(number << 3 | 2) + _varint(len(value)) + value
    if isinstance(value, float):
        return _varint(number << 3 | 5) + struct.pack("<f", value)
    return _varint(number << 3) + _varint(value)


def _varint(value: int) -> bytes:
    """Seven bits a byte, the lowest first; the eighth bit says that more follow."""
    low, rest = value & 0x7F, value >> 7
    return bytes([low | 0x80]) + _varint(rest) if rest else bytes([low])
