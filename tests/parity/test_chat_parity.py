"""The same chat prompts as transformers: the default model's template, and templates as the families write them."""

from __future__ import annotations

import pytest

from minikv.errors import InputError
from minikv.tokenizer import Tokenizer
from tokenizer_files import AWKWARD, family_folder

transformers = pytest.importorskip("transformers", reason="parity is checked against transformers")

TEXTS = ["hi", " [x] {y} ", *(text for text in AWKWARD if "<s>" not in text)]  # none holds a control token

# Blanks are trimmed, the start token and a date are written, what is not defined has a default, turns are checked.
LLAMA3 = """{{- bos_token }}
{%- if custom_tools is defined %}
    {%- set tools = custom_tools %}
{%- endif %}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%B %Y") %}
    {%- else %}
        {%- set date_string = "July 2024" %}
    {%- endif %}
{%- endif %}
{%- if not tools is defined %}
    {%- set tools = none %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if builtin_tools is defined or tools is not none %}
    {{- "Environment: ipython\\n" }}
{%- endif %}
{{- "Knowledge until: December 2023\\nToday: " + date_string + "\\n\\n" }}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {{- raise_exception("one tool call at a time") }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
LLAMA3_CONTROLS = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]

# The start token is written, roles have to alternate, the system turn becomes part of the last user turn.
MISTRAL = """{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- set ns = namespace() %}
{%- set ns.index = 0 %}
{%- for message in loop_messages %}
    {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
        {{- raise_exception("user and assistant have to alternate") }}
    {%- endif %}
    {%- set ns.index = ns.index + 1 %}
{%- endfor %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"] | trim + eos_token }}
    {%- endif %}
{%- endfor %}
"""
# The first of them: one line, markup that is plain text, no system turn.
MISTRAL_FIRST = (
    "{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}{% if message['role'] == 'user' %}"
    "{{ '[INST] ' + message['content'] + ' [/INST]' }}{% else %}{{ message['content'] + eos_token }}"
    "{% endif %}{% endfor %}"
)

# A system line of its own where there is none; tools as JSON.
QWEN = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "<|im_end|>\\n" }}
{%- else %}
    {%- if messages[0]['role'] == 'system' %}
        {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}
    {%- endif %}
{%- endif %}
{% for message in messages %}
    {% if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- generation %}
        {{- message.content + '<|im_end|>\\n' }}
        {%- endgeneration %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
FAMILIES = {
    "Llama 3": ("llama3", LLAMA3_CONTROLS, LLAMA3),
    "Mistral": ("metaspace", ["<s>", "[INST]", "[/INST]", "</s>"], MISTRAL),
    "Mistral, the first": ("prepend", ["<s>", "</s>"], MISTRAL_FIRST),
    "Qwen": ("qwen2", ["<|im_start|>", "<|endoftext|>", "<|im_end|>"], QWEN),
}


def expected_ids(theirs, text: str, system: str | None) -> list[int]:
    turns = [{"role": "user", "content": text}]
    turns = turns if system is None else [{"role": "system", "content": system}, *turns]
    return list(theirs.apply_chat_template(turns, add_generation_prompt=True, return_dict=False))


@pytest.mark.parametrize("system", [None, "", "Be brief."])
def test_same_chat_prompt(default_folder, system):
    theirs, ours = transformers.AutoTokenizer.from_pretrained(default_folder), Tokenizer.from_folder(default_folder)
    for text in TEXTS:
        assert ours.chat_prompt(text, system=system).ids == expected_ids(theirs, text, system)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("system", [None, "", " Be brief.\n"])
def test_same_chat_prompt_in_every_family(tmp_path, name, system):
    family, controls, template = FAMILIES[name]
    folder = family_folder(tmp_path, family, controls, chat_template=template)
    theirs, ours = transformers.AutoTokenizer.from_pretrained(folder), Tokenizer.from_folder(folder)
    if name == "Mistral, the first" and system is not None:
        with pytest.raises(InputError, match="roles must alternate"):
            ours.chat_prompt("a", system=system)
        return
    for text in TEXTS:
        ids = ours.chat_prompt(text, system=system).ids
        assert ids == expected_ids(theirs, text, system)
        assert family == "qwen2" or (ids[0], ids.count(0)) == (0, 1)  # one start token, where there is one


@pytest.mark.parametrize("name", FAMILIES)
def test_markup_in_the_words_of_a_user_gives_no_control_token(tmp_path, name):
    family, controls, template = FAMILIES[name]
    ours = Tokenizer.from_folder(family_folder(tmp_path, family, controls, chat_template=template))
    honest, hostile = ours.chat_prompt("hi").ids, ours.chat_prompt("hi" + "".join(controls)).ids
    assert [hostile.count(id) for id in range(len(controls))] == [honest.count(id) for id in range(len(controls))]
