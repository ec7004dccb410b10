"""The same ids as transformers, for the default model's folder and for other chat templates."""

from __future__ import annotations

import json
import shutil

import pytest

from minikv.tokenizer import Tokenizer

transformers = pytest.importorskip("transformers", reason="parity is checked against transformers")

TEXTS = [
    "",
    " ",
    "hi",
    "Crème brûlée, naïve façade",
    "家有一老，如有一宝。日本語テキスト 한국어",
    "👩‍👩‍👧‍👦 🏳️‍🌈 🦙",
    "12345 3.14159 1e-5 ٣ ½ ²",
    "a  b   c    d" + " " * 40,
    "\t\tx\n\n\n\ny\r\n",
    "def f(x: int) -> str:\n    return f'{x!r}'  # don't\n",
    "مرحبا بالعالم, שלום עולם",
    "\x00\x01\x1b[0m\x7f\u200b\ufeff",
    "I've we'll they'd can't IT'S",
]
# As Llama 3.1 and Mistral write them: blanks trimmed, start token by the template, a turn loop with checks.
LLAMA_STYLE = (
    "{{- bos_token }}\n{%- if not date_string is defined %}{%- set date_string = '26 Jul 2024' %}{%- endif %}\n"
    "{%- if messages[0]['role'] == 'system' %}\n    {%- set system = messages[0]['content']|trim %}\n"
    "    {%- set messages = messages[1:] %}\n{%- else %}\n    {%- set system = '' %}\n{%- endif %}\n"
    "{{- '<|im_start|>system\\n\\n' + date_string + system + '<|im_end|>' }}\n"
    "{%- for message in messages %}\n    {%- if message['role'] not in ['user', 'assistant'] %}\n"
    "        {{- raise_exception('unknown role') }}\n    {%- endif %}\n"
    "    {{- '<|im_start|>' + message['role'] + '\\n\\n' + message['content'] | trim + '<|im_end|>' }}\n"
    "{%- endfor %}\n{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n\\n' }}{%- endif %}"
)


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


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("system", [None, "", "Be brief."])
def test_same_chat_prompt(ours, theirs, text, system):
    turns = [{"role": "user", "content": text}]
    turns = turns if system is None else [{"role": "system", "content": system}, *turns]
    expected = theirs.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
    assert ours.chat_prompt(text, system=system).ids == list(expected)


def test_same_chat_prompt_where_the_template_trims_and_writes_a_start_token(default_folder, tmp_path):
    shutil.copy(default_folder / "tokenizer.json", tmp_path)
    settings = json.loads((default_folder / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": LLAMA_STYLE}))
    theirs, ours = transformers.AutoTokenizer.from_pretrained(tmp_path), Tokenizer.from_folder(tmp_path)
    for text in TEXTS:
        turns = [{"role": "system", "content": " x "}, {"role": "user", "content": text}]
        expected = theirs.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
        assert ours.chat_prompt(text, system=" x ").ids == list(expected)


def test_special_tokens_in_a_text_are_markup_to_both_when_asked_for(ours, theirs):
    text = "say <|im_end|> please <|im_start|><|endoftext|>x"
    assert ours.encode(text, parse_special=True) == theirs(text)["input_ids"]
    assert ours.raw_prompt(text, parse_special=True).offsets == [
        tuple(span) for span in theirs(text, return_offsets_mapping=True)["offset_mapping"]
    ]


def test_invalid_bytes_decode_alike(ours, theirs):
    for ids in ([116], [10813, 116], [116, 243, 104], [10813, 10813, 116, 243]):
        assert ours.decode(ids) == theirs.decode(ids)
