"""The vocabularies of GGUF files: the same ids as the tokenizers that they were made of."""

from __future__ import annotations

import json

import pytest
import sentencepiece
import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from gguf_files import VOCABULARY, byte_level, train_merges, write_gguf
from minikv import tokenizer as ours
from minikv.errors import InputError
from minikv.gguf_checkpoint import convert, load_gguf
from test_tokenizer import AWKWARD, train_sentencepiece

NAMES = ["default", "gpt-2", "llama-bpe", "qwen2", "smollm"]
LINE = "IT'S 12345x  (y)\n\n z"
# The words of LINE that each pre-tokenizer hands to the merges.
WORDS = {
    "default": ["IT", "'", "S", " ", "123", "45", "x", "  ", "(", "y", ")", "\n\n", " z"],
    "gpt-2": ["IT", "'", "S", " 12345", "x", " ", " (", "y", ")", "\n\n", " z"],
    "llama-bpe": ["IT", "'S", " ", "123", "45", "x", " ", " (", "y", ")\n\n", " z"],
    "qwen2": ["IT", "'S", " ", *"12345", "x", " ", " (", "y", ")\n\n", " z"],
    "smollm": ["IT", "'", "S", " ", *"12345", "x", " ", " (", "y", ")", "\n\n", " z"],
}
TEXTS = [
    *AWKWARD,
    LINE,
    "I've we'll they'D can't IT'S",
    "x=1+2<3>4 ~a|b^c $5 #6 @7 €8 «9»",
    "1 12 123 1234 12345 1234567 ٣٤٥٦ ½²",
    "a\n\nb \n c\r\n\r\n\td   \n",
    "Crème brûlée, 家有一老，如有一宝。日本語 한국어",
    "def f(x):\n    return x**2  # 10%, 3.14e-5\n",
]


def open_gguf(folder, vocabulary, **fields) -> ours.Tokenizer:
    write_gguf(folder / "a.gguf", vocabulary=vocabulary, fields=fields)
    return load_gguf(folder / "a.gguf", torch.device("cpu"), torch.float32)[1]


# --- byte-level ---


def test_the_vocabulary_is_rebuilt_from_the_file(tmp_path):
    write_gguf(tmp_path / "a.gguf")
    convert(tmp_path / "a.gguf", tmp_path)
    merged, space, c = VOCABULARY.index("ab"), VOCABULARY.index("Ġ"), VOCABULARY.index("c")
    for tokenizer in (ours.Tokenizer.from_folder(tmp_path), open_gguf(tmp_path, byte_level())):
        assert tokenizer.raw_prompt("ab c").ids == [merged, space, c]
        assert tokenizer.encode("c<end>", parse_special=True) == [c, 0]
        assert tokenizer.encode("12") == [VOCABULARY.index("1"), VOCABULARY.index("2")]  # despite the merge
        assert tokenizer.stop_ids == {0}


def family_pipeline(name: str) -> Tokenizer:
    """The pipeline of the family's own tokenizer.json (for `default`: of llama.cpp), untrained."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=name == "llama-bpe"))

    def split(pattern: str):
        return pre_tokenizers.Split(Regex(pattern), "isolated")

    letters = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
    others = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    gpt2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
    steps = {
        "default": [split(r"[\p{P}$+<=>^~|]+"), split(gpt2), split(r"\p{N}+"), split("[0-9]{3}")],
        "gpt-2": [split(gpt2)],
        "llama-bpe": [split(letters + r"\p{N}{1,3}" + others)],
        "qwen2": [split(letters + r"\p{N}" + others)],
        "smollm": [split(r"\p{N}"), split(gpt2)],
    }
    if name == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    bytes_of_words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*steps[name], bytes_of_words])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


@pytest.fixture(scope="module")
def greedy_merges() -> tuple[list[str], list[str]]:
    """Tokens and merges that grow across any border between words, so that each split that is missing shows."""
    return train_merges(10 * [text[start:] for text in TEXTS for start in range(0, len(text), 3)])


@pytest.mark.parametrize("name", NAMES)
def test_ids_are_those_of_the_familys_own_pipeline(tmp_path, greedy_merges, name):
    tokens, merges = greedy_merges
    theirs = family_pipeline(name)
    vocabulary = {token: id for id, token in enumerate(tokens)}
    pairs = [tuple(merge.split(" ")) for merge in merges]
    theirs.model = models.BPE(vocabulary, pairs, ignore_merges=name == "llama-bpe")
    tokenizer = open_gguf(tmp_path, byte_level(name, tokens, merges))
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert ids == theirs.encode(text).ids, text
        if theirs.normalizer is None:
            assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("name", NAMES)
def test_words_are_split_as_the_family_does(tmp_path, name):
    letters = LINE.replace(" ", "Ġ").replace("\n", "Ċ")
    merges = [f"{letters[i:j]} {letters[j]}" for i in range(len(letters)) for j in range(i + 1, len(letters))]
    merges = list(dict.fromkeys(merges))  # every word of LINE becomes one token, from left to right
    tokens = dict.fromkeys(["<end>", *letters, *(merge.replace(" ", "") for merge in merges)])
    tokenizer = open_gguf(tmp_path, byte_level(name, tokens, merges))
    assert [tokenizer.spell(id).decode() for id in tokenizer.encode(LINE)] == WORDS[name]


def test_qwen2_composes_accents_as_the_model_was_trained(tmp_path, greedy_merges):
    tokenizer = open_gguf(tmp_path, byte_level("qwen2", *greedy_merges))
    assert tokenizer.decode(tokenizer.encode("e\u0301")) == "é"


@pytest.mark.parametrize("name, ids", [("llama-bpe", [3]), ("gpt-2", [1, 2])])
def test_llama_3_takes_a_word_that_is_a_token_as_it_is(tmp_path, name, ids):
    tokens = ["<end>", "a", "b", "ab", "aa"]  # no merge leads to ab
    assert open_gguf(tmp_path, byte_level(name, tokens, ["a a"])).encode("ab") == ids


def test_the_default_models_vocabulary_has_its_known_ids(default_folder, tmp_path):
    fields = json.loads((default_folder / "tokenizer.json").read_text())
    tokens = sorted(fields["model"]["vocab"], key=fields["model"]["vocab"].get)
    controls = {token["id"] for token in fields["added_tokens"]}
    types = [3 if id in controls else 1 for id in range(len(tokens))]
    merges = [" ".join(merge) for merge in fields["model"]["merges"]]
    tokenizer = open_gguf(tmp_path, byte_level("smollm", tokens, merges, types))
    assert tokenizer.encode("x  42") == [104, 256, 36, 34]
    assert tokenizer.encode("a\n\n7") == [81, 1116, 39]
    assert tokenizer.encode("    8 spaces") == [289, 40, 5600]
    assert tokenizer.encode("12345") == [33, 34, 35, 36, 37]


@pytest.mark.parametrize("name", ["deepseek-llm", "tekken", None])
def test_an_unknown_pre_tokenizer_is_refused_and_the_known_ones_are_named(tmp_path, name):
    with pytest.raises(InputError, match=f"{name or 'missing'}.*accepted: {', '.join(NAMES)}$"):
        open_gguf(tmp_path, byte_level(name))


@pytest.mark.parametrize("name, added", [("gpt-2", False), ("qwen2", False), ("smollm", False), ("llama-bpe", True)])
def test_a_start_token_is_added_where_the_file_or_else_the_family_wants_it(tmp_path, name, added):
    a, bos = VOCABULARY.index("a"), {"tokenizer.ggml.bos_token_id": 0}
    assert open_gguf(tmp_path, byte_level(name), **bos).raw_prompt("a").ids == [0, a] * added or [a]
    for wanted, ids in [(True, [0, a]), (False, [a])]:
        fields = bos | {"tokenizer.ggml.add_bos_token": wanted}
        assert open_gguf(tmp_path, byte_level(name), **fields).raw_prompt("a").ids == ids


def test_user_defined_tokens_are_found_in_text_and_control_tokens_are_not(tmp_path):
    tokens = ["<end>", "a", "<", ">", "t", "<t>", "e", "n", "d", "aa"]
    tokenizer = open_gguf(tmp_path, byte_level("gpt-2", tokens, ["a a"], [3, 1, 1, 1, 1, 4, 1, 1, 1, 1]))
    assert tokenizer.encode("a<t>a") == [1, 5, 1] and tokenizer.decode([1, 5, 1]) == "a<t>a"
    assert tokenizer.encode("a<end>") == [1, 2, 6, 7, 8, 3]


def test_all_ids_that_end_a_turn_stop(tmp_path):
    more = {
        "tokenizer.ggml.eot_token_id": 5,
        "tokenizer.ggml.eom_token_id": 6,
        "tokenizer.ggml.padding_token_id": 2**32 - 1,
    }
    assert open_gguf(tmp_path, byte_level(), **more).stop_ids == {0, 5, 6}


@pytest.mark.parametrize("fields, words", [
    ({"tokenizer.ggml.model": "bert"}, r"vocabulary model 'bert' is not supported; accepted: gpt2 \(.*\), llama"),
    ({"tokenizer.ggml.model": None}, "tokenizer.ggml.model is missing"),
    ({"tokenizer.ggml.tokens": None}, "tokenizer.ggml.tokens is missing"),
    ({"tokenizer.ggml.tokens": ["a", "b", "a"]}, "tokenizer.ggml.tokens lists 'a' twice"),
    ({"tokenizer.ggml.tokens": [1, 2]}, "tokenizer.ggml.tokens holds 1; a text is needed"),
    ({"tokenizer.ggml.token_type": [1, 1]}, "tokenizer.ggml.token_type has 2 elements; 32 are needed"),
    ({"tokenizer.ggml.token_type": [1] * 31 + [-1]}, "tokenizer.ggml.token_type holds -1; accepted: 1 to 6"),
    ({"tokenizer.ggml.merges": None}, "tokenizer.ggml.merges is missing"),
    ({"tokenizer.ggml.merges": ["a é"]}, "tokenizer.ggml.merges do not fit the tokens"),
    ({"tokenizer.ggml.merges": ["ab"]}, "tokenizer.ggml.merges holds 'ab'; two tokens are needed"),
    ({"tokenizer.ggml.eos_token_id": 32}, "tokenizer.ggml.eos_token_id is 32; an id from 0 to 31 is needed"),
    ({"tokenizer.ggml.add_bos_token": "yes"}, "tokenizer.ggml.add_bos_token is 'yes'; true or false is needed"),
    ({"tokenizer.chat_template": 7}, "tokenizer.chat_template is 7; a text is needed"),
])  # fmt: skip
def test_a_broken_vocabulary_is_one_line(tmp_path, fields, words):
    with pytest.raises(InputError, match=f"a.gguf: {words}") as error:
        open_gguf(tmp_path, byte_level(), **fields)
    assert "\n" not in str(error.value)


# --- SentencePiece ---


@pytest.fixture(scope="module")
def spm(tmp_path_factory) -> sentencepiece.SentencePieceProcessor:
    """As Llama 2's: BPE with byte fallback that leaves text as it is; <t> is user-defined."""
    file = tmp_path_factory.mktemp("spm") / "tokenizer.model"
    options = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
    train_sentencepiece(file, user_defined_symbols=["<t>"], **options)
    return sentencepiece.SentencePieceProcessor(model_file=str(file))


def sentencepiece_fields(spm) -> dict:
    """The fields of the vocabulary as llama.cpp's converter writes them."""
    ids = range(spm.get_piece_size())
    kinds = {2: spm.is_unknown, 3: spm.is_control, 5: spm.is_unused, 6: spm.is_byte}
    types = [next((kind for kind, holds in kinds.items() if holds(id)), 1) for id in ids]
    types[spm.piece_to_id("<t>")] = 4
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [spm.id_to_piece(id) for id in ids],
        "tokenizer.ggml.scores": [spm.get_score(id) for id in ids],
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": spm.bos_id(),
        "tokenizer.ggml.eos_token_id": spm.eos_id(),
        "tokenizer.ggml.unknown_token_id": spm.unk_id(),
    }


@pytest.mark.parametrize("text", [*TEXTS, "the<t>quick <t> fox"])
def test_sentencepiece_ids_are_its_own_and_text_survives(tmp_path, spm, text):
    tokenizer = open_gguf(tmp_path, sentencepiece_fields(spm))
    assert tokenizer.encode(text) == spm.encode(text)
    assert tokenizer.raw_prompt(text).ids == [spm.bos_id(), *spm.encode(text)]  # a start token unless the file says no
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_sentencepiece_merges_by_score_and_brings_its_own_start_and_end(tmp_path, spm):
    tokenizer = open_gguf(tmp_path, sentencepiece_fields(spm))
    assert [tokenizer.spell(id).decode() for id in tokenizer.encode("the quick")] == [" the", " ", "qu", "ick"]
    assert tokenizer.stop_ids == {spm.eos_id()} and tokenizer.bos_id == spm.bos_id()
    assert tokenizer.vocab_size == spm.get_piece_size()


def test_a_file_may_say_that_no_space_goes_before_the_text(tmp_path, spm):
    fields = {"tokenizer.ggml.add_space_prefix": False, "tokenizer.ggml.add_bos_token": False}
    tokenizer = open_gguf(tmp_path, sentencepiece_fields(spm), **fields)
    assert tokenizer.spell(tokenizer.raw_prompt("the").ids[0])[:1] == b"t"
    for text in ("the", " the", "  two"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_user_defined_tokens_with_spaces_are_found(tmp_path, spm):
    fields = sentencepiece_fields(spm)
    id = fields["tokenizer.ggml.tokens"].index("<t>")
    fields["tokenizer.ggml.tokens"][id] = "<a b>"
    tokenizer = open_gguf(tmp_path, fields)
    assert (
        id in tokenizer.encode("the <a b>fox") and tokenizer.decode(tokenizer.encode("the <a b>fox")) == "the <a b>fox"
    )


@pytest.mark.parametrize("fields, words", [
    ({"tokenizer.ggml.scores": None}, "tokenizer.ggml.scores is missing; an array is needed"),
    ({"tokenizer.ggml.scores": [float("nan")] * 320}, "tokenizer.ggml.scores holds a NaN"),
    ({"tokenizer.ggml.token_type": [1] * 320}, "the tokens are no SentencePiece vocabulary: .*unk"),
])  # fmt: skip
def test_a_broken_sentencepiece_vocabulary_is_one_line(tmp_path, spm, fields, words):
    with pytest.raises(InputError, match=f"a.gguf.* {words}") as error:
        open_gguf(tmp_path, sentencepiece_fields(spm), **fields)
    assert "\n" not in str(error.value)
