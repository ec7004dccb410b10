"""Small tokenizers of the shapes that the model families have, written as checkpoint folders have them."""

from __future__ import annotations

import io
import json
from pathlib import Path

import sentencepiece
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

AWKWARD = [
    "",
    " ",
    " hello",
    "  two  spaces\n\tx",
    "    8 spaces",
    "x != y, hello ! and the word 'social'",
    "Hello 🦙 家 café  two",
    "👩‍👩‍👧‍👦 🏳️‍🌈 e\u0301 \u200d",
    "def f(x):\n\treturn x**2  # 10%\r\n\n\n",
    "مرحبا بالعالم שלום",
    "\x00\x01\x1b[0m\x7f\u200b\ufeff",
    "12345 3.14 1e-5 ٣ ½ ²",
    "say <|im_end|> and <s> please</s>",
    "\ufdd0 \ufffd \uffff",
    "Crème brûlée, naïve façade",
    "家有一老，如有一宝。日本語テキスト 한국어",
    "a  b   c    d" + " " * 40,
    "\t\tx\n\n\n\ny\r\n",
    "I've we'll they'd can't IT'S",
]
SAMPLE = 20 * ["the quick brown fox  jumps over the lazy dog", "hello world this is two  spaces", "she sells shells"]

# What splits a text before the byte pairs are merged, as the two families publish it.
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_PATTERN = LLAMA3_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}")


def write_json(file: Path, fields: dict | list) -> None:
    file.write_text(json.dumps(fields))


def train_sentencepiece(file: Path, **options) -> None:
    """A tiny SentencePiece vocabulary: unk 0, bos 1, eos 2, 256 bytes, and pieces up to 320 ids."""
    model = io.BytesIO()
    options = {"model_type": "bpe", "sentence_iterator": iter(SAMPLE)} | options
    sentencepiece.SentencePieceTrainer.train(
        model_writer=model, vocab_size=320, byte_fallback=True, minloglevel=2, hard_vocab_limit=False, **options
    )
    file.write_bytes(model.getvalue())


def words_folder(folder: Path, settings: dict | None = None, **json_parts) -> Path:
    """A tokenizer.json that knows <s> = 0, </s> = 1 and the 256 bytes; `json_parts` replace parts of it."""
    alphabet = {char: 2 + i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE({"<s>": 0, "</s>": 1, **alphabet}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    folder.mkdir(exist_ok=True)
    write_json(folder / "tokenizer.json", json.loads(tokenizer.to_str()) | json_parts)
    write_json(folder / "tokenizer_config.json", {"bos_token": "<s>", "eos_token": "</s>"} | (settings or {}))
    return folder


def chat_folder(folder: Path, template: str | list, **settings) -> Path:
    return words_folder(folder, {"chat_template": template, **settings})


def family_folder(folder: Path, family: str, controls: list[str], **settings) -> Path:
    """A trained tokenizer.json of the shape that `family` publishes: llama3, qwen2, metaspace or prepend.

    `controls` are its special tokens, ids from 0 on; the first of them is put before a text, but not in qwen2.
    metaspace and prepend are the two shapes in which Llama 2 and Mistral come: SentencePiece's merges, and bytes
    for what no piece spells.
    """
    make = {"llama3": _byte_level, "qwen2": _byte_level, "metaspace": _byte_fallback, "prepend": _byte_fallback}
    tokenizer = make[family](family, controls)
    tokenizer.add_special_tokens([AddedToken(control, special=True) for control in controls])
    if family != "qwen2":
        start = processors.TemplateProcessing(single=f"{controls[0]} $A", special_tokens=[(controls[0], 0)])
        tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), start])
    fields = json.loads(tokenizer.to_str())
    fields["model"]["ignore_merges"] = family == "llama3"
    write_json(folder / "tokenizer.json", fields)
    tokens = {} if family == "qwen2" else {"bos_token": controls[0]}
    kind = {"tokenizer_class": "PreTrainedTokenizerFast"}
    write_json(folder / "tokenizer_config.json", tokens | kind | {"eos_token": controls[-1]} | settings)
    return folder


def _byte_level(family: str, controls: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    pattern = {"llama3": LLAMA3_PATTERN, "qwen2": QWEN2_PATTERN}[family]
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    if family == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=alphabet, special_tokens=controls, show_progress=False
    )
    tokenizer.train_from_iterator(SAMPLE + AWKWARD, trainer)
    return tokenizer


def _byte_fallback(family: str, controls: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=True)
    all_bytes = [f"<0x{byte:02X}>" for byte in range(256)]
    special = [*controls, "<unk>", *all_bytes]
    tokenizer.train_from_iterator(
        SAMPLE, trainers.BpeTrainer(vocab_size=len(special) + 100, special_tokens=special, show_progress=False)
    )
    # The trainer makes the bytes special tokens; in such a file they are plain pieces.
    model = json.loads(tokenizer.to_str())["model"]
    merges = [tuple(merge) for merge in model["merges"]]
    tokenizer = Tokenizer(models.BPE(model["vocab"], merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    if family == "metaspace":
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    else:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return tokenizer
