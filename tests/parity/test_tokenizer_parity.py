"""The same ids as transformers: the default model's tokenizer, and small ones of each family's shape."""

from __future__ import annotations

import json

import pytest
import sentencepiece

from minikv.tokenizer import Tokenizer
from tokenizer_files import AWKWARD, family_folder, train_sentencepiece

transformers = pytest.importorskip("transformers", reason="parity is checked against transformers")

# Text that holds no control tokens: those are plain text to minikv and markup to transformers, which is intended.
TEXTS = ["hi", *(text for text in AWKWARD if "<s>" not in text)]
CONTROLS = ["<s>", "<|end|>", "</s>"]


@pytest.fixture(scope="module")
def theirs(default_folder):
    return transformers.AutoTokenizer.from_pretrained(default_folder)


@pytest.fixture(scope="module")
def ours(default_folder) -> Tokenizer:
    return Tokenizer.from_folder(default_folder)


@pytest.mark.parametrize("text", TEXTS)
def test_same_ids_and_text(ours, theirs, text):
    ids = theirs(text)["input_ids"]
    assert ours.raw_prompt(text).ids == ids
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True) == text


def test_what_the_vocabulary_lacks_is_left_out_by_both(ours, theirs):
    text = "a\x04b\U00040000c"
    ids = theirs(text)["input_ids"]
    assert ours.encode(text) == ids
    assert ours.decode(ids) == theirs.decode(ids)


def test_special_tokens_in_a_text_are_markup_to_both_when_asked_for(ours, theirs):
    text = "say <|im_end|> please <|im_start|><|endoftext|>x"
    assert ours.encode(text, parse_special=True) == theirs(text)["input_ids"]
    assert ours.raw_prompt(text, parse_special=True).offsets == [
        tuple(span) for span in theirs(text, return_offsets_mapping=True)["offset_mapping"]
    ]


def test_invalid_bytes_decode_alike(ours, theirs):
    for ids in ([116], [10813, 116], [116, 243, 104], [10813, 10813, 116, 243]):
        assert ours.decode(ids) == theirs.decode(ids)


@pytest.mark.parametrize("family", ["llama3", "qwen2", "metaspace", "prepend"])
def test_same_ids_and_text_in_every_family(tmp_path, family):
    folder = family_folder(tmp_path, family, CONTROLS)
    theirs, ours = transformers.AutoTokenizer.from_pretrained(folder), Tokenizer.from_folder(folder)
    for text in TEXTS:
        ids = theirs(text)["input_ids"]
        assert ours.raw_prompt(text).ids == ids
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    for text in ["a<|end|>b c", "<|end|> b", "<|end|>the fox</s>the fox", "the <|end|> fox "]:
        assert ours.raw_prompt(text, parse_special=True).ids == theirs(text)["input_ids"]


def test_same_ids_as_the_qwen2_tokenizer_class(tmp_path):
    model = json.loads((family_folder(tmp_path, "qwen2", CONTROLS) / "tokenizer.json").read_text())["model"]
    merges = [tuple(merge) for merge in model["merges"]]
    ends = {"unk_token": "</s>", "eos_token": "</s>", "pad_token": "</s>"}
    theirs = transformers.Qwen2Tokenizer(vocab=model["vocab"], merges=merges, **ends)
    ours = Tokenizer.from_folder(tmp_path)
    theirs.save_pretrained(tmp_path / "saved")
    saved = Tokenizer.from_folder(tmp_path / "saved")
    for text in TEXTS:
        assert ours.raw_prompt(text).ids == saved.raw_prompt(text).ids == theirs(text)["input_ids"]


@pytest.mark.parametrize("legacy", [True, False])
def test_same_ids_as_the_llama_tokenizer_class_for_a_sentencepiece_model(tmp_path, legacy):
    from transformers.convert_slow_tokenizer import generate_merges

    file = tmp_path / "tokenizer.model"
    train_sentencepiece(file, normalization_rule_name="identity", remove_extra_whitespaces=False)
    processor = sentencepiece.SentencePieceProcessor(model_file=str(file))
    pieces = range(processor.get_piece_size())
    vocabulary = {processor.id_to_piece(id): id for id in pieces}
    scores = {processor.id_to_piece(id): processor.get_score(id) for id in pieces}
    theirs = transformers.LlamaTokenizer(
        vocab=vocabulary, merges=generate_merges(vocabulary, scores), legacy=legacy, add_bos_token=True
    )
    ours = Tokenizer.from_folder(tmp_path)
    for text in TEXTS:
        if not text.startswith(" "):
            assert ours.raw_prompt(text).ids == theirs(text)["input_ids"]
        else:  # transformers puts no second space there; SentencePiece, with which the models were trained, does
            assert ours.encode(text) == processor.encode(text)
    theirs.save_pretrained(tmp_path / "saved")
    saved = Tokenizer.from_folder(tmp_path / "saved")
    for text in TEXTS:
        assert saved.raw_prompt(text).ids == theirs(text)["input_ids"]
