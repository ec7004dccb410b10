"""Text in and out: special tokens, chat templates, offsets, round trips, streaming."""

from __future__ import annotations

import json
import sys
import unicodedata

import pytest
import sentencepiece
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as RawTokenizer

from minikv import generate
from minikv.errors import InputError
from minikv.tokenizer import Tokenizer
from tiny_checkpoint import write_checkpoint
from tokenizer_files import AWKWARD, chat_folder, family_folder, train_sentencepiece, words_folder, write_json

@pytest.fixture(scope="session")
def smollm(default_folder) -> Tokenizer:
    return Tokenizer.from_folder(default_folder)


@pytest.fixture(scope="session")
def spm_folder(tmp_path_factory):
    """A SentencePiece vocabulary that leaves text as it is, as Llama 2's does."""
    folder = tmp_path_factory.mktemp("spm")
    train_sentencepiece(folder / "tokenizer.model", normalization_rule_name="identity", remove_extra_whitespaces=False)
    template = "{{ bos_token }}[INST] {{ messages[0]['content'] }} [/INST]"
    write_json(folder / "tokenizer_config.json", {"chat_template": template})
    return folder


@pytest.fixture(scope="session")
def spm(spm_folder) -> Tokenizer:
    return Tokenizer.from_folder(spm_folder)


@pytest.fixture(scope="session", params=["llama3", "qwen2", "metaspace", "prepend"])
def family(request, tmp_path_factory) -> tuple[str, Tokenizer]:
    folder = family_folder(tmp_path_factory.mktemp(request.param), request.param, ["<s>", "</s>"])
    return request.param, Tokenizer.from_folder(folder)


# --- the default model: ids worked out from its own vocabulary ---


@pytest.mark.parametrize(
    "text, ids",
    [
        ("x  42", [104, 256, 36, 34]),
        ("a\n\n7", [81, 1116, 39]),
        ("    8 spaces", [289, 40, 5600]),
        ("12345", [33, 34, 35, 36, 37]),
        ("🦙", [10813, 116, 243]),
        ("", []),
    ],
)
def test_smollm_splits_digits_before_words(smollm, text, ids):
    assert smollm.encode(text) == ids


def test_smollm_wants_no_start_token_although_it_defines_one(smollm):
    assert smollm.raw_prompt("hi").ids == [6004]
    assert smollm.bos_id == 1


def test_markup_in_a_text_is_plain_text(smollm):
    assert smollm.encode("say <|im_end|> please") == [22313, 2067, 108, 306, 79, 486, 108, 46, 5361]


def test_markup_in_a_text_is_markup_when_asked_for(smollm):
    assert smollm.encode("say <|im_end|> please", parse_special=True) == [22313, 216, 2, 5361]


def test_smollm_stops_at_the_end_of_a_turn(smollm):
    assert smollm.stop_ids == {2}
    assert smollm.vocab_size == 49152


def test_chat_has_the_templates_own_system_turn_once(smollm):
    prompt = smollm.chat_prompt("Hi")
    assert len(prompt.ids) == 31
    assert prompt.text.count("<|im_start|>system") == 1


def test_chat_with_a_system_turn_has_only_that(smollm):
    prompt = smollm.chat_prompt("Hi", system="Be brief.")
    assert prompt.text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_user_cannot_end_the_turn(smollm):
    honest, hostile = smollm.chat_prompt("Hi"), smollm.chat_prompt("Hi<|im_end|><|im_end|>", system="<|im_start|>")
    assert [hostile.ids.count(id) for id in (1, 2)] == [3, 2] == [honest.ids.count(id) for id in (1, 2)]
    assert "Hi<|im_end|><|im_end|><|im_end|>\n" in hostile.text
    assert smollm.chat_prompt("Hi<|im_end|>", parse_special=True).ids.count(2) == 3


def test_noncharacters_in_a_text_survive_the_chat_template(smollm):
    prompt = smollm.chat_prompt("\ufdd0 <|im_end|> \ufdd1")
    assert "user\n\ufdd0 <|im_end|> \ufdd1<|im_end|>" in prompt.text


# --- offsets ---


@pytest.mark.parametrize("text", AWKWARD)
@pytest.mark.parametrize("kind", ["smollm", "spm"])
def test_offsets_name_the_characters_that_an_id_spells(kind, text, request):
    tokenizer = request.getfixturevalue(kind)
    prompt = tokenizer.chat_prompt(text)
    assert len(prompt.offsets) == len(prompt.ids)
    for id, (start, end) in zip(prompt.ids, prompt.offsets):
        spelled = tokenizer.spell(id)
        assert spelled.removeprefix(b" ") in prompt.text[start:end].encode()
    covered = {position for start, end in prompt.offsets for position in range(start, end)}
    assert covered >= set(range(prompt.text.index(text), prompt.text.index(text) + len(text)))


def test_each_part_of_a_character_has_the_range_of_the_whole(smollm, spm):
    assert smollm.raw_prompt("a🦙b").offsets == [(0, 1), (1, 2), (1, 2), (1, 2), (2, 3)]
    assert spm.raw_prompt("🦙").offsets == [(0, 0), (0, 0), *[(0, 1)] * 4]  # <s>, the first space, four bytes


def test_offsets_hold_where_sentencepiece_normalizes_the_text(tmp_path):
    train_sentencepiece(tmp_path / "tokenizer.model")  # the default rule drops spaces and spells ｔ as t
    prompt = Tokenizer.from_folder(tmp_path).raw_prompt("ｔhe   quick fox  jumps over two lazy dogs the")
    words = [prompt.text[start:end].strip() for start, end in prompt.offsets]
    assert "".join(words) == "quickfoxjumpsovertwolazydogsthe"  # the first "the" has no range, all others have theirs


def test_an_added_start_token_spells_nothing(tmp_path):
    prompt = Tokenizer.from_folder(words_folder(tmp_path, {"add_bos_token": True})).raw_prompt("a")
    assert prompt.offsets == [(0, 0), (0, 1)]
    assert prompt.text == "a"


# --- SentencePiece: the ids of its own package ---


@pytest.mark.parametrize("text", AWKWARD)
def test_sentencepiece_ids_are_those_of_its_own_package(spm, spm_folder, text):
    processor = sentencepiece.SentencePieceProcessor(model_file=str(spm_folder / "tokenizer.model"))
    assert spm.encode(text) == processor.encode(text)


@pytest.mark.parametrize("text", AWKWARD)
def test_a_unigram_model_normalizes_as_its_own_package_does(tmp_path, text):
    train_sentencepiece(tmp_path / "tokenizer.model", model_type="unigram", normalization_rule_name="nmt_nfkc")
    ours = Tokenizer.from_folder(tmp_path)
    processor = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    assert ours.encode(text) == processor.encode(text)
    assert ours.decode(ours.encode(text)) == processor.normalize(text).replace("▁", " ").removeprefix(" ")


def test_an_emoji_and_a_file_ending_come_in_the_pieces_of_llama_2(tmp_path):
    sample = 20 * ["This is x.cpp", "is This .cpp"]
    options = {"normalization_rule_name": "identity", "sentence_iterator": iter(sample)}
    train_sentencepiece(tmp_path / "tokenizer.model", **options)
    ours = Tokenizer.from_folder(tmp_path)
    ids = ours.raw_prompt("This is 🦙.cpp").ids
    assert [ours.spell(id) for id in ids] == [
        b"", b" This", b" is", b" ", b"\xf0", b"\x9f", b"\xa6", b"\x99", b".", b"cpp"
    ]  # fmt: skip
    assert ids[0] == 1 and ids[4:8] == [243, 162, 169, 156]  # the ids that Llama 2 has, too


def test_a_model_without_a_dummy_prefix_keeps_the_first_space(tmp_path):
    options = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False, "add_dummy_prefix": False}
    train_sentencepiece(tmp_path / "tokenizer.model", **options)
    ours = Tokenizer.from_folder(tmp_path)
    for text in ["hello", " hello", "  hello"]:
        assert ours.decode(ours.encode(text)) == text


# --- start tokens ---


def test_sentencepiece_prompts_start_with_one_start_token(spm):
    assert spm.raw_prompt("hello").ids == [1, *spm.encode("hello")]
    assert spm.chat_prompt("hello").ids == [1, *spm.encode("[INST] hello [/INST]")]


def test_the_post_processor_says_whether_a_start_token_is_wanted(tmp_path):
    processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    part = json.loads(processor.__getstate__())
    assert Tokenizer.from_folder(words_folder(tmp_path, post_processor=part)).raw_prompt("a").ids[0] == 0
    assert len(Tokenizer.from_folder(words_folder(tmp_path)).raw_prompt("a").ids) == 1


def test_add_bos_token_overrules_the_post_processor(tmp_path):
    part = json.loads(processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)]).__getstate__())
    folder = words_folder(tmp_path, {"add_bos_token": False}, post_processor=part)
    assert len(Tokenizer.from_folder(folder).raw_prompt("a").ids) == 1


@pytest.mark.parametrize("template", ["{{ bos_token }}a", "a"])
def test_a_chat_has_one_start_token_whoever_writes_it(tmp_path, template):
    tokenizer = Tokenizer.from_folder(chat_folder(tmp_path, template, add_bos_token=True))
    assert tokenizer.chat_prompt("").ids == [0, *tokenizer.encode("a")]


# --- stop ids ---


@pytest.mark.parametrize("place", ["generation_config.json", "config.json"])
@pytest.mark.parametrize("eos, stops", [([2, 5], {1, 2, 5}), (7, {1, 7}), (None, {1})])
def test_every_end_of_turn_id_stops(tmp_path, place, eos, stops):
    write_json(words_folder(tmp_path) / place, {"eos_token_id": eos})
    assert Tokenizer.from_folder(tmp_path).stop_ids == stops


@pytest.mark.parametrize("eos", [258, -1, [2, 1000], "2", True, 2.0, [[2]]])
def test_an_end_of_turn_id_that_is_none_is_refused(tmp_path, eos):
    write_json(words_folder(tmp_path) / "generation_config.json", {"eos_token_id": eos})
    with pytest.raises(InputError, match="generation_config.json: eos_token_id holds .*; ids from 0 to 257 are needed"):
        Tokenizer.from_folder(tmp_path)


def test_ids_may_have_gaps(tmp_path):
    folder = words_folder(tmp_path)
    fields = json.loads((folder / "tokenizer.json").read_text())
    fields["model"]["vocab"]["end"] = 999
    write_json(folder / "tokenizer.json", fields)
    write_json(folder / "generation_config.json", {"eos_token_id": 999})
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.vocab_size == 1000 and 999 in tokenizer.stop_ids


def test_sentencepiece_stops_at_its_own_end_of_sentence(spm):
    assert spm.stop_ids == {2}


# --- round trips and streaming ---


@pytest.mark.parametrize("text", AWKWARD)
@pytest.mark.parametrize("kind", ["smollm", "spm"])
def test_text_survives_encode_and_decode(kind, text, request):
    tokenizer = request.getfixturevalue(kind)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode(tokenizer.raw_prompt(text).ids) == text


# The default model's vocabulary has no token for the first bytes of the planes 4 to 11, which hold no characters yet,
# nor for six control characters.
UNSPELLED = "\x04\x06\x13\x14\x16\x1d"


@given(st.text(st.characters(max_codepoint=0x3FFFF, exclude_categories=["Cs"], exclude_characters=UNSPELLED)))
def test_any_text_survives_the_default_model(smollm, text):
    assert smollm.decode(smollm.encode(text)) == text


@pytest.mark.parametrize("character", UNSPELLED)
def test_what_the_default_models_vocabulary_lacks_is_left_out(smollm, character):
    assert smollm.encode(f"a{character}b") == smollm.encode("a") + smollm.encode("b")


@given(st.text())
def test_any_text_survives_byte_fallback(spm, text):
    assert spm.decode(spm.encode(text)) == text


def as_it_returns(kind: str, text: str) -> str:
    """What a tokenizer of this family makes of `text` on the way, as its file says."""
    if kind == "qwen2":
        return unicodedata.normalize("NFC", text)
    if kind == "metaspace":  # it puts a space before a text, but not before a space: so " a" and "a" are the same ids
        return text.removeprefix(" ")
    return text


@pytest.mark.parametrize("text", AWKWARD)
def test_text_survives_in_every_family(family, text):
    kind, tokenizer = family
    assert tokenizer.decode(tokenizer.encode(text)) == as_it_returns(kind, text)


@given(text=st.text())
def test_any_text_survives_in_every_family(family, text):
    kind, tokenizer = family
    assert tokenizer.decode(tokenizer.encode(text)) == as_it_returns(kind, text)


@pytest.mark.parametrize("text", ["x != y", "hello !", "the word 'social'"])
def test_the_english_clean_up_flag_of_llama_3_files_is_not_obeyed(tmp_path, text):
    folder = family_folder(tmp_path, "llama3", ["<s>", "</s>"], clean_up_tokenization_spaces=True)
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_text_after_a_special_token_gets_no_space(spm, smollm):
    assert spm.decode(spm.encode("a</s>b c", parse_special=True)) == "ab c"
    assert smollm.decode(smollm.encode("a<|im_end|>b c", parse_special=True)) == "ab c"


@pytest.mark.parametrize("kind", ["smollm", "spm"])
def test_streamed_pieces_are_whole_characters_and_join_to_the_text(kind, request):
    tokenizer = request.getfixturevalue(kind)
    text = "Hello 🦙 家 café  two"
    stream = tokenizer.stream()
    pieces = [stream.put(id) for id in tokenizer.encode(text)]
    assert "".join(pieces) == text
    assert stream.end() == ""
    assert not any("\ufffd" in piece for piece in pieces)


def test_text_is_streamed_as_soon_as_it_is_final(smollm):
    stream = smollm.stream()
    assert [stream.put(id) for id in smollm.encode("a🦙b")] == ["a", "", "", "🦙", "b"]


@pytest.mark.parametrize("kind", ["smollm", "spm"])
@pytest.mark.parametrize("count", [1, 2])
def test_stopping_in_mid_character_finishes(kind, count, request):
    tokenizer = request.getfixturevalue(kind)
    stream = tokenizer.stream()
    ids = [id for id in tokenizer.encode("🦙") if tokenizer.spell(id) != b" "]
    assert [stream.put(id) for id in ids[:count]] == [""] * count
    assert stream.end() == "\ufffd"


@pytest.mark.parametrize("kind, later", [("smollm", "hello"), ("spm", " hello")])
def test_a_lone_continuation_byte_does_not_hold_up_later_text(kind, later, request):
    tokenizer = request.getfixturevalue(kind)
    byte_80 = next(id for id in range(tokenizer.vocab_size) if tokenizer.spell(id) == b"\x80")
    stream = tokenizer.stream()
    text = "".join([stream.put(byte_80), *map(stream.put, tokenizer.encode("hello")), stream.end()])
    assert text == "\ufffd" + later


@given(st.lists(st.integers(0, 330), max_size=40))
def test_a_stream_joins_to_decode_for_any_ids(spm, ids):
    stream = spm.stream()
    spelled = b"".join(map(spm.spell, ids)).decode("utf-8", "replace").removeprefix(" ")
    assert "".join([*map(stream.put, ids), stream.end()]) == spm.decode(ids) == spelled


def test_tokens_added_to_a_sentencepiece_model(tmp_path):
    train_sentencepiece(tmp_path / "tokenizer.model", normalization_rule_name="identity")
    added = {"320": {"content": "<end>", "special": True}, "321": {"content": "<think>", "special": False}}
    write_json(tmp_path / "tokenizer_config.json", {"added_tokens_decoder": added, "eos_token": "<end>"})
    tokenizer = Tokenizer.from_folder(tmp_path)
    ids = tokenizer.encode("fox<think>fox<end>", parse_special=True)
    assert ids[-1] == 320 and 321 in ids
    assert tokenizer.decode(ids) == "fox<think>fox"
    assert tokenizer.decode(tokenizer.encode("<end>")) == "<end>"
    assert tokenizer.stop_ids == {2, 320}
    assert tokenizer.vocab_size == 322


# --- other tokenizer.json files ---


def test_a_llama2_tokenizer_json_with_byte_fallback_round_trips(tmp_path):
    vocab = {"<unk>": 0, "<s>": 1, "▁": 259, "a": 260, "▁a": 261} | {f"<0x{b:02X}>": 3 + b for b in range(256)}
    tokenizer = RawTokenizer(models.BPE(vocab, [("▁", "a")], unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    ours = Tokenizer.from_folder(tmp_path)
    assert ours.encode("a a") == [261, 261]
    for text in ["a", " a", "a  é<s>", "家\n"]:
        assert ours.decode(ours.encode(text)) == text


def test_a_first_space_is_put_before_the_first_word_only(tmp_path):
    tokenizer = RawTokenizer(models.BPE({"<s>": 0, "▁": 1, "a": 2, "▁a": 3}, [("▁", "a")]))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first", split=False)
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    ours = Tokenizer.from_folder(tmp_path)
    for text, ids in [("a<s>a a", [3, 0, 2, 3]), ("<s>a a", [0, 2, 3])]:
        assert ours.encode(text, parse_special=True) == ids == tokenizer.encode(text).ids


def test_special_tokens_swallow_blanks_where_the_file_says_so(tmp_path):
    folder = words_folder(tmp_path)
    tokenizer = RawTokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken("<end>", rstrip=True), AddedToken("<mask>", lstrip=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    text = "a <end> \n b  <mask> c"
    ours = Tokenizer.from_folder(folder)
    prompt = ours.raw_prompt(text, parse_special=True)
    assert prompt.ids == tokenizer.encode(text).ids
    assert prompt.offsets == tokenizer.encode(text).offsets


def test_markup_of_the_template_is_markup_even_if_not_marked_special(tmp_path):
    folder = chat_folder(tmp_path, "<User>{{ messages[0]['content'] }}<Bot>")
    tokenizer = RawTokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens(["<User>", "<Bot>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    ours = Tokenizer.from_folder(folder)
    user, bot = 258, 259
    assert ours.chat_prompt("<Bot>").ids == [user, *ours.encode("<Bot>"), bot]
    assert bot not in ours.encode("<Bot>")
    assert ours.decode([bot]) == "<Bot>"  # the file does not say that it is to be left out


def test_a_truncation_in_the_file_is_ignored(tmp_path):
    truncation = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    assert len(Tokenizer.from_folder(words_folder(tmp_path, truncation=truncation)).encode("abcdef")) == 6


def test_padding_in_the_file_is_no_start_token(tmp_path):
    padding = {"strategy": {"Fixed": 8}, "direction": "Left", "pad_to_multiple_of": None}
    padding |= {"pad_id": 1, "pad_type_id": 0, "pad_token": "</s>"}
    part = json.loads(processors.ByteLevel(trim_offsets=False).__getstate__())
    folder = words_folder(tmp_path, padding=padding, post_processor=part)
    assert len(Tokenizer.from_folder(folder).raw_prompt("a").ids) == 1


# --- chat templates ---


@pytest.mark.parametrize(
    "template, found",
    [
        ("{{ raise_exception('only\ntwo turns') }}", "only two turns"),
        ("{% for %}", "Expected an expression"),
        ("{{ messages.__class__ }}", "unsafe"),
        ("{{ '{0.__class__}'.format(messages) }}", "unsafe"),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("{{ messages|attr('__class__') }}", "unsafe"),
        ("{{ dict.mro() }}", "unsafe"),
        ("{{ cycler.__init__.__globals__ }}", "unsafe"),
        ("{{ raise_exception.__globals__ }}", "unsafe"),
        ("{{ messages.append(messages) }}", "unsafe"),
        ("{% include 'tokenizer.json' %}", "no loader"),
        ("{{ range(10 ** 9) | list }}", "Range too big"),
        ("{{ no_such_function() }}", "no_such_function"),
        ("{{ 1 / 0 }}", "zero"),
    ],
)
def test_a_template_that_fails_is_one_line(tmp_path, template, found):
    with pytest.raises(InputError) as error:
        Tokenizer.from_folder(chat_folder(tmp_path, template)).chat_prompt("a")
    assert found in str(error.value) and str(tmp_path) in str(error.value)
    assert "\n" not in str(error.value)


def test_templates_get_the_functions_that_they_expect(tmp_path):
    template = (
        "{%- for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}\n"
        "    {% if tools is none %}\n{{ m | tojson }}{{ strftime_now('%%') }}{% endif %}{% endfor %}"
    )
    prompt = Tokenizer.from_folder(chat_folder(tmp_path, template)).chat_prompt("<é>")
    assert prompt.text == '{"role": "user", "content": "<é>"}%'


def test_words_that_a_template_marks_for_training_are_written(tmp_path):
    template = "{% generation %}{{ messages[0].content }}{% endgeneration %}."
    assert Tokenizer.from_folder(chat_folder(tmp_path, template)).chat_prompt("a").text == "a."


def test_a_template_file_goes_before_the_one_in_the_settings(tmp_path):
    chat_folder(tmp_path, "settings")
    (tmp_path / "chat_template.jinja").write_text("file")
    assert Tokenizer.from_folder(tmp_path).chat_prompt("a").text == "file"


def test_of_several_templates_the_default_one_is_used(tmp_path):
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    assert Tokenizer.from_folder(chat_folder(tmp_path, named)).chat_prompt("a").text == "plain"


def test_without_a_template_there_is_no_chat(tmp_path):
    tokenizer = Tokenizer.from_folder(words_folder(tmp_path))
    assert not tokenizer.has_chat_template
    with pytest.raises(InputError, match="no chat template.*--no-chat"):
        tokenizer.chat_prompt("a")


# --- refusals ---


def test_a_folder_without_a_tokenizer_is_named(tmp_path):
    with pytest.raises(InputError, match=f"{tmp_path}.*tokenizer.json or tokenizer.model"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer.model"])
@pytest.mark.parametrize("content", [b"", b"garbage\xff", b"{}"])
def test_a_broken_tokenizer_file_is_named(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=name):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer_config.json", "added_tokens.json", "generation_config.json"])
@pytest.mark.parametrize("content", ["[]", "garbage", "\ufeff{}", ""])
def test_a_broken_file_beside_the_tokenizer_is_named(tmp_path, name, content):
    (words_folder(tmp_path) / name).write_text(content)
    with pytest.raises(InputError, match=name):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("name, content", [
    ("added_tokens.json", {"<x>": "320"}),
    ("added_tokens.json", {"<x>": -1}),
    ("added_tokens.json", {"": 320}),
    ("tokenizer_config.json", {"added_tokens_decoder": [{"content": "<x>"}]}),
    ("tokenizer_config.json", {"added_tokens_decoder": {"320": "<x>"}}),
    ("tokenizer_config.json", {"added_tokens_decoder": {"320": {"content": 7}}}),
    ("tokenizer_config.json", {"added_tokens_decoder": {"320": {}}}),
    ("tokenizer_config.json", {"added_tokens_decoder": {"x": {"content": "<x>"}}}),
])  # fmt: skip
def test_malformed_added_tokens_are_refused(tmp_path, spm_folder, name, content):
    (tmp_path / "tokenizer.model").write_bytes((spm_folder / "tokenizer.model").read_bytes())
    write_json(tmp_path / name, content)
    with pytest.raises(InputError, match=f"the added tokens of {tmp_path} are malformed"):
        Tokenizer.from_folder(tmp_path)


def test_malformed_added_tokens_of_a_tokenizer_json_are_refused(tmp_path):
    with pytest.raises(InputError, match="tokenizer.json cannot be read"):
        Tokenizer.from_folder(words_folder(tmp_path, added_tokens=[{"id": 3}]))


def test_a_template_file_that_is_no_text_is_named(tmp_path):
    (words_folder(tmp_path) / "chat_template.jinja").write_bytes(b"{{ \xff }}")
    with pytest.raises(InputError, match="chat_template.jinja cannot be read as text"):
        Tokenizer.from_folder(tmp_path)


def test_an_unknown_decoder_is_named(tmp_path):
    folder = words_folder(tmp_path, decoder={"type": "WordPiece", "prefix": "##", "cleanup": True})
    with pytest.raises(InputError, match="WordPiece"):
        Tokenizer.from_folder(folder)


@pytest.mark.parametrize("kind", ["smollm", "spm"])
def test_half_a_surrogate_pair_is_refused(kind, request):
    with pytest.raises(InputError, match="not valid Unicode"):
        request.getfixturevalue(kind).raw_prompt("a\ud800")


# --- on the command line ---


def prompt_tokens(monkeypatch, folder, *options: str) -> int:
    """How many tokens minikv.generate makes of these options' prompt."""
    record = folder / "record.json"
    command = ["generate", "--model", str(folder), "--policy", "full", "--max-new-tokens", "1", "--json", str(record)]
    monkeypatch.setattr(sys, "argv", [*command, *options])
    generate.main()
    return json.loads(record.read_text())["prompt_tokens"]


def test_control_tokens_in_a_prompt_are_parsed_only_when_the_command_line_says_so(monkeypatch, tmp_path):
    prompt = ["--no-chat", "--prompt", "<|end|>"]
    tokenizer = Tokenizer.from_folder(write_checkpoint(tmp_path))
    assert prompt_tokens(monkeypatch, tmp_path, *prompt) == len(tokenizer.encode("<|end|>")) > 1
    assert prompt_tokens(monkeypatch, tmp_path, *prompt, "--parse-special") == 1


def test_a_checkpoint_without_a_template_needs_no_chat_on_the_command_line(monkeypatch, tmp_path):
    write_checkpoint(tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    write_json(tmp_path / "tokenizer_config.json", settings | {"chat_template": None})
    with pytest.raises(InputError, match="no chat template; give --no-chat"):
        prompt_tokens(monkeypatch, tmp_path, "--prompt", "a b c")
    assert prompt_tokens(monkeypatch, tmp_path, "--prompt", "a b c", "--no-chat") >= 3


def test_older_files_name_their_special_tokens_apart(tmp_path):
    folder = words_folder(tmp_path)
    (folder / "tokenizer_config.json").write_text("{}")
    assert not Tokenizer.from_folder(folder).stop_ids
    (folder / "special_tokens_map.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": {"content": "</s>"}}))
    tokenizer = Tokenizer.from_folder(folder)
    assert (tokenizer.bos_id, tokenizer.stop_ids) == (0, {1})


@pytest.mark.parametrize(
    "settings, parts, found",
    [
        ({}, {"added_tokens": [{"id": 7, "content": "<new>", "special": True}]}, "'<new>' has id 7, and id"),
        ({}, {"decoder": {"type": "Replace", "pattern": {"String": "_"}, "content": " "}}, "decoder Replace"),
        ({"add_bos_token": "false"}, {}, "add_bos_token is 'false'; accepted: true or false"),
        ({"bos_token": "\ud800"}, {}, "not valid Unicode"),
        ({}, {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}}, "cannot be read by the tokenizers"),
    ],
)
def test_a_tokenizer_that_contradicts_itself_is_one_line(tmp_path, settings, parts, found):
    words_folder(tmp_path, settings)
    fields = json.loads((tmp_path / "tokenizer.json").read_text())
    added = {"id": None, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    parts = {**parts, "added_tokens": [{**added, **token} for token in parts.get("added_tokens", [])]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(fields | parts))
    with pytest.raises(InputError) as error:
        Tokenizer.from_folder(tmp_path)
    assert found in str(error.value) and "\n" not in str(error.value)


def test_a_text_that_the_package_cannot_encode_is_one_line(tmp_path):
    words_folder(tmp_path, normalizer=None)
    fields = json.loads((tmp_path / "tokenizer.json").read_text())
    fields["model"] |= {"unk_token": "<nope>"}
    del fields["model"]["vocab"]["a"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(fields))
    with pytest.raises(InputError, match="cannot encode the text: .*<nope>"):
        Tokenizer.from_folder(tmp_path).encode("a")


def test_a_special_token_of_blanks_and_words_is_found(tmp_path):
    words_folder(tmp_path, {"chat_template": "\n<x>  {{ messages[0].content }}"})
    fields = json.loads((tmp_path / "tokenizer.json").read_text())
    rstrip = {"id": 258, "content": "\n<x>", "special": True, "rstrip": True}
    fields["added_tokens"].append({"single_word": False, "lstrip": False, "normalized": False} | rstrip)
    (tmp_path / "tokenizer.json").write_text(json.dumps(fields))
    assert Tokenizer.from_folder(tmp_path).chat_prompt("a").ids[0] == 258
