"""Text to token ids and back: prompts, chat prompts, streaming.

Text and markup are kept apart. A special token, such as the end of a turn, is written by the chat template or
by the model, never by the words of a user: in a document, "<|im_end|>" is a few tokens of plain text.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from minikv.chat_template import read_chat_template, render
from minikv.errors import InputError
from minikv.files import read_json
from minikv.vocabulary import Control, SentencePieceVocabulary, Span, TokenizersVocabulary


@dataclass(frozen=True)
class Prompt:
    """What goes into the model, and where each id comes from.

    `text` is the whole prompt, markup included; id i spells text[start:end] for (start, end) = offsets[i]. The
    range is empty for an id that spells nothing in it: a start token that was added, SentencePiece's first space.
    Where a character takes several ids, each of them has the range of the whole character.
    """

    ids: list[int]
    text: str
    offsets: list[Span]

    def tail(self, count: int) -> str:
        """The text of the last `count` ids, markup included: what a window of that size sees."""
        return self.text[self.offsets[-count:][0][0] :] if count else ""


class Tokenizer:
    """The tokenizer of a checkpoint folder.

    `bos_id` is the start token that the checkpoint defines, if any (it is put before a prompt only where the
    checkpoint wants that); `stop_ids` are all ids that end a turn; `vocab_size` counts the ids.
    """

    def __init__(self, folder: Path, source: str | None = None):
        settings = read_json(folder / "tokenizer_config.json")
        # Older checkpoints name their special tokens in a file of its own.
        settings = read_json(folder / "special_tokens_map.json") | {k: v for k, v in settings.items() if v is not None}
        self.folder, self.source = folder, source or str(folder)
        self._template = read_chat_template(folder, settings)
        self._vocabulary = _open_vocabulary(folder, settings, self._template or "")
        self._controls = {control.text: control for control in self._vocabulary.controls}
        self._hidden = {control.id for control in self._vocabulary.controls if not control.visible}
        self._markup = _markup_pattern(self._vocabulary.controls)
        self._special_texts = _special_texts(settings)
        for name, id in (("bos_token", self._vocabulary.default_bos), ("eos_token", self._vocabulary.default_eos)):
            for control in self._vocabulary.controls:
                if control.id == id:
                    self._special_texts.setdefault(name, control.text)

        default = self._vocabulary.default_bos
        bos = self._id_of(self._special_texts.get("bos_token"))
        self.bos_id: int | None = default if bos is None else bos
        wanted = settings.get("add_bos_token")
        if wanted not in (True, False, None):
            raise InputError(f"{folder / 'tokenizer_config.json'}: add_bos_token is {wanted!r}; accepted: true or false")
        wanted = default is not None if wanted is None else wanted
        self._added_bos = self.bos_id if wanted else None
        self.stop_ids: frozenset[int] = self._read_stop_ids()
        self.vocab_size: int = self._vocabulary.size

    @staticmethod
    def from_folder(path: str | Path, source: str | None = None) -> Tokenizer:
        """Open tokenizer.json, else tokenizer.model; InputError where neither is there or a file is broken.

        `source` names the checkpoint in later errors, where it is not the folder.
        """
        return Tokenizer(Path(path), source)

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    def encode(self, text: str, parse_special: bool = False) -> list[int]:
        """Ids of `text`, without a start token; special tokens in it are plain text unless `parse_special`.

        Raises InputError where the text is not valid Unicode (a lone surrogate).
        """
        return self._encode(text, parse_special).ids

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`, special tokens left out; bytes that are not UTF-8 become U+FFFD."""
        stream = self.stream()
        return "".join([*map(stream.put, ids), stream.end()])

    def stream(self) -> TextStream:
        """For text that is shown while its ids are still coming."""
        return TextStream(self)

    def spell(self, id: int) -> bytes:
        """The bytes of text that `id` stands for: none for a special token, maybe only part of a character."""
        return b"" if id in self._hidden else self._vocabulary.spell(id)

    @property
    def drops_first_space(self) -> bool:
        """Whether encoding puts a space before a text, which decoding has to take away again."""
        return self._vocabulary.drops_first_space

    def raw_prompt(self, text: str, parse_special: bool = False) -> Prompt:
        """`text` as it is, after a start token where the checkpoint wants one."""
        return self._with_bos(self._encode(text, parse_special))

    def chat_prompt(self, text: str, system: str | None = None, parse_special: bool = False) -> Prompt:
        """`text` as the user's turn in the checkpoint's chat template, up to where the answer begins.

        Without `system` the template may write a system turn of its own. A start token that the template did not
        write is added where the checkpoint wants one. Raises InputError where there is no template or it fails.
        """
        if self._template is None:
            raise InputError(f"{self.source} has no chat template; give --no-chat to use the text as it is")
        disguise = {} if parse_special else self._disguise_for(text + (system or ""))
        turns = [("user", text)] if system is None else [("system", system), ("user", text)]
        messages = [{"role": role, "content": self._hide_markup(content, disguise)} for role, content in turns]
        rendered = render(self._template, messages, self._special_texts, self.source)
        return self._with_bos(self._encode_markup(rendered, disguise))

    # Markup in the words of a user goes through the template in disguise: its first character is replaced by a
    # noncharacter of Unicode, so that what is markup afterwards was written by the template. One character for
    # another, so that offsets stay right.

    def _disguise_for(self, text: str) -> dict[str, str]:
        """For each character that a special token begins with, a noncharacter that is not in `text`."""
        firsts = sorted({control[0] for control in self._controls})
        unused = [chr(code) for code in range(0xFDD0, 0xFDF0) if chr(code) not in text]
        if len(unused) < len(firsts):
            raise InputError("the text uses too many of the Unicode noncharacters U+FDD0 to U+FDEF")
        return dict(zip(firsts, unused))

    def _hide_markup(self, text: str, disguise: dict[str, str]) -> str:
        if not disguise:
            return text
        # The lookahead finds special tokens that overlap, too.
        begins = re.compile(f"(?={'|'.join(map(re.escape, self._controls))}).", re.DOTALL)
        return begins.sub(lambda match: disguise[match[0]], text)

    def _encode(self, text: str, parse_special: bool) -> Prompt:
        if parse_special:
            return self._encode_markup(text, {})
        ids, offsets = self._vocabulary.encode(_valid(text))
        return Prompt(ids, text, offsets)

    def _encode_markup(self, text: str, disguise: dict[str, str]) -> Prompt:
        """Special tokens in `text` to their ids, the stretches of plain text between them to theirs."""
        plain = _valid(text.translate({ord(hidden): first for first, hidden in disguise.items()}))
        ids: list[int] = []
        offsets: list[Span] = []
        position, at_start = 0, True
        for match in [*self._markup.finditer(text), None]:
            start = match.start() if match else len(text)
            if start > position:
                stretch_ids, spans = self._vocabulary.encode(plain[position:start], at_start)
                ids += stretch_ids
                offsets += [(position + begin, position + end) for begin, end in spans]
                at_start = False
            if match:
                control = self._controls[match[match.lastindex]]
                ids.append(control.id)
                offsets.append(match.span())
                position = match.end()
                at_start = at_start and self._vocabulary.starts_after_controls
        return Prompt(ids, plain, offsets)

    def _with_bos(self, prompt: Prompt) -> Prompt:
        bos = self._added_bos
        if bos is None or prompt.ids[:1] == [bos]:
            return prompt
        return Prompt([bos, *prompt.ids], prompt.text, [(0, 0), *prompt.offsets])

    def _id_of(self, special: str | None) -> int | None:
        return None if special is None else self._vocabulary.token_id(special)

    def _read_stop_ids(self) -> frozenset[int]:
        found = {self._id_of(self._special_texts.get("eos_token")), self._vocabulary.default_eos}
        for name in ("generation_config.json", "config.json"):
            ids = read_json(self.folder / name).get("eos_token_id")
            for id in ids if isinstance(ids, list) else [ids]:
                if id is not None and (type(id) is not int or not 0 <= id < self._vocabulary.size):
                    largest = self._vocabulary.size - 1
                    raise InputError(f"{self.folder / name}: eos_token_id holds {id!r}; ids from 0 to {largest} are needed")
                found.add(id)
        return frozenset(found - {None})


class TextStream:
    """Text out of ids one by one, in time that does not grow: only whole characters, none of them twice.

    Ids are turned into bytes and the bytes decoded as they come, because a character may be spread over
    several ids and a decoded piece alone would lose it.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._spell = tokenizer.spell
        self._drop_space = tokenizer.drops_first_space
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def put(self, id: int) -> str:
        """The text that became final with this id; "" while its last character is incomplete."""
        return self._finish(self._decoder.decode(self._spell(id)))

    def end(self) -> str:
        """What is left when no more ids come: U+FFFD for half a character, otherwise nothing."""
        return self._finish(self._decoder.decode(b"", final=True))

    def _finish(self, text: str) -> str:
        if self._drop_space and text:
            self._drop_space = False
            return text.removeprefix(" ")
        return text


def _open_vocabulary(folder: Path, settings: dict, template: str) -> TokenizersVocabulary | SentencePieceVocabulary:
    added = _added_controls(folder, settings)
    if (folder / "tokenizer.json").is_file():
        special = {control.text for control in added if not control.visible} | set(_special_texts(settings).values())
        return TokenizersVocabulary(folder / "tokenizer.json", special, template)
    if (folder / "tokenizer.model").is_file():
        return SentencePieceVocabulary(folder / "tokenizer.model", added)
    raise InputError(f"{folder} has no tokenizer; accepted: tokenizer.json or tokenizer.model (SentencePiece)")


def _added_controls(folder: Path, settings: dict) -> list[Control]:
    """The tokens that added_tokens.json and tokenizer_config.json add to the vocabulary."""
    try:
        older = {id: Control(id, text) for text, id in read_json(folder / "added_tokens.json").items()}
        newer = {
            int(id): Control(int(id), token["content"], visible=not token.get("special"))
            for id, token in (settings.get("added_tokens_decoder") or {}).items()
        }
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InputError(f"the added tokens of {folder} are malformed: {error!r}") from error
    for control in (added := list((older | newer).values())):
        if type(control.id) is not int or control.id < 0 or not isinstance(control.text, str) or not control.text:
            raise InputError(f"the added tokens of {folder} are malformed: {control.text!r} has id {control.id!r}")
    return added


def _special_texts(settings: dict) -> dict[str, str]:
    """bos_token, eos_token and the like of a tokenizer_config.json, each a string there or a dict around one."""
    texts = {}
    for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
        value = settings.get(name)
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str):
            texts[name] = _valid(value)
    return texts


def _markup_pattern(controls: list[Control]) -> re.Pattern:
    """Finds special tokens in a text, the longest where several begin, with the blanks that they swallow."""
    if not controls:
        return re.compile("(?!)")  # finds nothing
    alternatives = []
    for control in sorted(controls, key=lambda control: -len(control.text)):
        left = r"(?:(?<!\s)\s+)?" if control.lstrip else ""
        alternatives.append(f"{left}({re.escape(control.text)})" + (r"\s*" if control.rstrip else ""))
    return re.compile("|".join(alternatives))


def _valid(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"the text is not valid Unicode: {error}") from error
    return text
