"""The page's data, and the page as text: what is on it is what was kept, and a document on it is text and nothing else."""

from __future__ import annotations

import base64
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from hashlib import sha256
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from conftest import make_policy, make_profile, make_prompt, make_tiny_model
from copying import COPIER, copying_model, prompt_with_answer
from tiny_checkpoint import write_checkpoint
from tokenizer_files import AWKWARD, chat_folder, family_folder, train_sentencepiece

import minikv
from minikv import explore, policy
from minikv.errors import InputError
from minikv.evals.sweep import Pair
from minikv.generate import generate
from minikv.inference import compress, prefill_for
from minikv.report.explore_page import render
from minikv.srh import Profile
from minikv.tokenizer import Prompt, Tokenizer

ROOT = Path(__file__).parent.parent
HOSTILE = "</script><script>alert(1)</script><!-- <script> --> {{ script }} \u2028 \"'&amp; <|end|> \x00 🦙"
STOP = frozenset({1})


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("tiny"), add_bos=True)


def all_pairs(model, budget=24) -> list[Pair]:
    pairs = []
    for name, method in policy.METHODS.items():
        pairs.append(Pair(name, None if name == "full" else "24", make_policy(method, budget, make_profile(model))))
    return pairs


def unpack(bitmap: str, length: int) -> list[int]:
    """The positions that a bitmap of the page names."""
    found = base64.b64decode(bitmap)
    assert len(found) == (length + 7) // 8
    return [position for position in range(8 * len(found)) if found[position // 8] >> position % 8 & 1]


# --- what was kept ---


@pytest.mark.parametrize("layers", [1, 3])
def test_the_kept_positions_are_those_of_compress_for_every_method(checkpoint, layers):
    model, tokenizer = make_tiny_model(layers=layers), Tokenizer.from_folder(checkpoint)
    ids = make_prompt(75)[0].tolist()
    prompt = Prompt(ids, "a" * 75, [(place, place + 1) for place in range(75)])
    pairs = all_pairs(model)
    data = explore.explore(model, tokenizer, prompt, pairs, max_new_tokens=3)
    prefilled = prefill_for(model, torch.tensor([ids]), [pair.policy for pair in pairs])
    differing = set()
    for pair, shown in zip(pairs, data["methods"], strict=True):
        cache = compress(prefilled, pair.policy)
        assert shown["entries"] == cache.kept and shown["bytes"] == cache.nbytes
        for layer, bitmaps in zip(cache.layers, shown["kept"], strict=True):
            by_head = [unpack(bitmap, 75) for bitmap in bitmaps]
            differing |= {pair.method} if len(by_head) > 1 else set()
            by_head = by_head * (1 if len(by_head) > 1 else model.config.kv_heads)
            assert by_head == layer.positions[0].tolist()
    assert differing == {"snapkv", "pyramidkv", "cake", "h2o"}  # those whose KV heads choose for themselves


def test_a_prompt_below_the_budget_is_kept_whole(checkpoint):
    model, tokenizer = make_tiny_model(), Tokenizer.from_folder(checkpoint)
    prompt = Prompt([5, 6, 7], "abc", [(0, 1), (1, 2), (2, 3)])
    data = explore.explore(model, tokenizer, prompt, [Pair("snapkv", "24", policy.SnapKV(24))], max_new_tokens=2)
    assert data["methods"][0]["entries"] == [3] * 4
    assert all(unpack(bitmap, 3) == [0, 1, 2] for layer in data["methods"][0]["kept"] for bitmap in layer)


def test_the_voters_are_those_of_the_profile(checkpoint):
    model = make_tiny_model()
    shown = policy.CompressKV(24, make_profile(model), heads=2)
    assert [shown.voters(layer) for layer in range(4)] == [[0, 1], [1, 2], [2, 3], [3, 4]]


def test_without_a_profile_or_its_scores_there_is_no_map_and_a_reason():
    assert explore.head_scores(None, 5) == {
        "head_scores": None, "without_scores": "None of these methods needs a profile.", "start_layer": 2,
    }  # fmt: skip
    ranks = Profile([[0, 1], [1, 0]], [0.5, 0.5])
    assert "ranks only" in explore.head_scores(ranks, 2)["without_scores"]
    scored = Profile([[0, 1], [1, 0]], [0.5, 0.5], head_scores=[[0.1, 0.0], [0.2, 1 / 3]])
    assert explore.head_scores(scored, 2) == {"head_scores": [[0.1, 0.0], [0.2, 0.3333]], "start_layer": 1}


# --- the answer, and what its tokens looked at ---


@pytest.mark.parametrize("new", [0, 1, 12])
def test_answers_are_those_of_generate(new):
    model, tokens = make_tiny_model(), make_prompt(90)
    pairs = all_pairs(model)
    prefilled = prefill_for(model, tokens, [pair.policy for pair in pairs])
    for pair in pairs:
        answer, seen = explore.decode_and_watch(model, prefilled, compress(prefilled, pair.policy), new, STOP)
        assert answer == generate(model, tokens, pair.policy, new, STOP)[0].tolist()
        assert len(seen) == len(answer) and all(len(rows) == 4 for rows in seen)


def watched(method):
    """What the tokens of the copied answer looked at in the copying head's layer, among its KV head's two heads."""
    ids, places, distance = prompt_with_answer()
    model = copying_model(distance)
    prefilled = prefill_for(model, torch.tensor([ids]), [method])
    answer, seen = explore.decode_and_watch(model, prefilled, compress(prefilled, method), 10, STOP)
    layer, head = COPIER
    rows = [step[layer][1 + head // model.config.group] for step in seen]
    return answer, [ids[place] for place in places], [dict(zip(row[::2], row[1::2])) for row in rows]


def test_each_token_names_the_positions_of_the_query_that_produced_it():
    answer, copied, looks = watched(policy.Full())
    assert answer == copied
    # One head looks at the token that is copied next, its neighbour at the one before it: half of the mean each.
    assert looks == [{40: 500, 39: 500}, {41: 500, 40: 500}, {42: 500, 41: 500}]


def test_what_was_evicted_is_seen_by_the_first_token_alone():
    _, _, looks = watched(policy.StreamingLLM(20))
    assert looks[0] == {40: 500, 39: 500}
    for later in looks[1:]:
        assert later and all(position < 4 or position >= 64 for position in later)


def test_weights_are_put_together_by_position_not_by_place_in_the_cache():
    """Two KV heads keep different positions; each key is its own token's direction, so each head sees one of them."""
    keys = torch.tensor([[[[0.0, 0], [60, 0]], [[60, 0], [0.0, 0]]]])  # [1, 2, 2, 2]
    positions = torch.tensor([[[3, 7], [5, 7]]])
    queries = torch.tensor([[[[1.0, 0]], [[0, 1.0]], [[1.0, 0]], [[1.0, 0]]]])  # the second head sees all alike
    both, first, second = explore.most_attended(queries, keys, positions)
    assert first == [7, 750, 3, 250]
    assert second == [5, 1000]
    assert both == [5, 500, 7, 375, 3, 125]


def test_only_the_strongest_positions_are_written_down_and_no_faint_ones():
    keys = torch.linspace(0, 3, 40)[None, None, :, None]
    rows = explore.most_attended(torch.ones(1, 1, 1, 1), keys, torch.arange(40)[None, None])
    assert rows[0][::2] == list(range(39, 29, -1))
    flat = torch.zeros(1, 1, 400, 1)  # 1 / 400 each
    assert explore.most_attended(torch.ones(1, 1, 1, 1), flat, torch.arange(400)[None, None]) == [[], []]


# --- text ---


@pytest.fixture(scope="module", params=["llama3", "qwen2", "metaspace", "prepend", "sentencepiece"])
def tokenizer(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "sentencepiece":
        train_sentencepiece(folder / "tokenizer.model")
        return Tokenizer.from_folder(folder)
    return Tokenizer.from_folder(family_folder(folder, request.param, ["<s>", "</s>"]))


@pytest.mark.parametrize("text", [*AWKWARD, HOSTILE, " ".join(AWKWARD)])
def test_pieces_join_to_the_prompt_and_account_for_every_id(tokenizer, text):
    prompt = tokenizer.raw_prompt(text)
    found = explore.pieces(prompt)
    assert "".join(piece for piece, _ in found) == prompt.text == text
    assert sum(ids for _, ids in found) == len(prompt.ids)


def test_ids_that_share_a_character_share_a_piece_and_lost_characters_have_none():
    # <s>, "a", two ids for the first half of an emoji pair, one that spells its end and the next one's beginning, "b"
    spans = [(0, 0), (0, 1), (1, 2), (1, 2), (1, 3), (2, 3), (4, 5)]
    expected = [("", 1), ("a", 1), ("🦙🦙", 4), ("?", 0), ("b", 1), ("!", 0)]
    assert explore.pieces(Prompt([0] * 7, "a🦙🦙?b!", spans)) == expected


def test_answer_tokens_show_a_character_where_it_is_whole(tmp_path):
    tokenizer = Tokenizer.from_folder(chat_folder(tmp_path, "{{ messages[0].content }}"))  # one id for each byte
    ids = tokenizer.encode("a🦙b")
    assert explore.answer_pieces(tokenizer, ids) == ["a", "", "", "", "🦙", "b"]
    assert explore.answer_pieces(tokenizer, ids[:3]) == ["a", "", "\ufffd"]
    assert explore.answer_pieces(tokenizer, []) == []


def test_a_method_is_described_by_its_class():
    assert explore.first_paragraph(policy.Full()) == "Keep everything."

    @dataclass(frozen=True)
    class Undescribed(policy.SnapKV):
        budget: int = 9

    assert explore.first_paragraph(Undescribed()) == ""


# --- the page as text ---


class Scripts(HTMLParser):
    """What a browser takes for scripts, and the page's policy."""

    def __init__(self, page: str):
        super().__init__()
        self.found, self.policy, self._inside = [], None, False
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        if tag == "meta" and ("http-equiv", "Content-Security-Policy") in attributes:
            self.policy = dict(attributes)["content"]
        if tag == "script":
            self.found.append((dict(attributes), ""))
        self._inside = tag == "script"

    def handle_data(self, text):
        if self._inside:
            attributes, before = self.found.pop()
            self.found.append((attributes, before + text))

    def handle_endtag(self, tag):
        self._inside = False


def test_a_document_cannot_end_the_script_that_holds_it():
    data = {"pieces": [[HOSTILE, 1]], HOSTILE: HOSTILE}
    scripts = Scripts(render(data))
    assert len(scripts.found) == 2
    attributes, text = scripts.found[0]
    assert attributes["type"] == "application/json" and "<" not in text and text.isascii()
    assert json.loads(text) == data


def test_the_policy_allows_this_script_and_this_style_alone():
    page = render({})
    scripts = Scripts(page)
    style = re.search("<style>(.*?)</style>", page, re.DOTALL)[1]
    for kind, text in (("script", scripts.found[1][1]), ("style", style)):
        wanted = base64.b64encode(sha256(text.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{wanted}'" in scripts.policy.split("; ")
    assert "default-src 'none'" in scripts.policy and "unsafe" not in scripts.policy


def test_the_page_names_no_other_place():
    page = render({}).replace("http://www.w3.org/2000/svg", "")  # a name in the standard, nothing that is fetched
    assert not re.search(r"https?:|\bsrc=|\bhref=|@import|url\(|fetch\(|XMLHttpRequest", page)


def test_a_page_of_8000_tokens_stays_small():
    """30 layers, 4 methods of which each KV head keeps its own, answers of 64 tokens, all rows as long as they can be."""
    length, layers, views = 8000, 30, 4
    chosen = torch.stack([torch.randperm(length)[:960] for _ in range(views - 1)])
    row = [number for place in range(explore.STRONGEST) for number in (length - place, 100)]
    method = {
        "kept": [explore.bitmaps(chosen, length)] * layers,
        "seen": [[[row] * views] * layers] * 64,
        "answer": [" answer"] * 64,
        "entries": [960] * layers,
    }
    size = len(render({"pieces": [[" letter", 1]] * length, "methods": [method] * 4}).encode())
    assert size < 12e6, size


# --- the program ---


def run(monkeypatch, *arguments) -> None:
    monkeypatch.setattr(sys, "argv", ["explore", *map(str, arguments)])
    explore.main()


def tiny(checkpoint, *more) -> list:
    return ["--model", checkpoint, "--profile", checkpoint / "profile.json", "--device", "cpu", *more]


TEXT = "The sea was grey and the boats lay on the sand. " * 12


def data_of(page: Path) -> dict:
    return json.loads(Scripts(page.read_text(encoding="utf-8")).found[0][1])


def test_the_program_writes_the_page_and_the_record(monkeypatch, checkpoint, tmp_path, capsys):
    page, record = tmp_path / "new folder/page.html", tmp_path / "record.json"
    words = ["--prompt", TEXT, "--question", "What lay on the sand?", "--max-new-tokens", 5]
    run(monkeypatch, *tiny(checkpoint, *words, "--html", page, "--json", record))
    data, written = data_of(page), json.loads(record.read_text())
    assert [method["spec"] for method in data["methods"]] == ["full", "compresskv", "snapkv", "streamingllm"]
    assert "".join(text for text, _ in data["pieces"]).count(TEXT.strip()) == 1
    assert data["pieces"][0] == ["", 1]  # the start token spells nothing
    assert data["settings"]["question"] == "What lay on the sand?" and data["versions"]["torch"] == torch.__version__
    assert written["settings"] == data["settings"]
    for shown, kept in zip(data["methods"], written["methods"], strict=True):
        assert kept == {name: shown[name] for name in kept}
        assert "".join(shown["answer"]) == shown["text"]
        assert sum(shown["entries"]) <= round(0.12 * data["prompt_tokens"]) * data["layers"] or shown["spec"] == "full"
    printed = capsys.readouterr().out
    assert str(page) in printed and "100.0%" in printed


def test_methods_have_changes_of_their_own_and_the_full_cache_stands_first_once(monkeypatch, checkpoint, tmp_path):
    page = tmp_path / "page.html"
    words = ["--methods", "h2o,full", "compresskv:window=4:heads=1", "--budget", 20, "--max-new-tokens", 2]
    run(monkeypatch, *tiny(checkpoint, "--prompt", TEXT, "--html", page, *words))
    full, h2o, compresskv = data_of(page)["methods"]
    assert (full["spec"], h2o["spec"]) == ("full", "h2o")
    assert compresskv["title"] == "CompressKV, window 4, heads 1"
    assert compresskv["window"] == 4 and [len(voters) for voters in compresskv["voters"]] == [1, 1, 1]
    assert h2o["voters"] is None and sum(h2o["entries"]) == 60


def test_methods_that_need_no_profile_run_without_one(monkeypatch, checkpoint, tmp_path):
    page = tmp_path / "page.html"
    words = ["--prompt", TEXT, "--methods", "streamingllm", "--max-new-tokens", 2, "--html", page]
    run(monkeypatch, "--model", checkpoint, *words)
    assert data_of(page)["head_scores"] is None


@pytest.mark.parametrize("budget", ["100%", "5000"])
def test_a_budget_above_the_prompt_keeps_everything(monkeypatch, checkpoint, tmp_path, budget):
    page = tmp_path / "page.html"
    run(monkeypatch, *tiny(checkpoint, "--prompt", TEXT, "--budget", budget, "--max-new-tokens", 2, "--html", page))
    data = data_of(page)
    assert all(method["entries"] == [data["prompt_tokens"]] * 3 for method in data["methods"])


@pytest.mark.parametrize("arguments, words", [
    (["--methods", "magic"], "method 'magic' is unknown; accepted: full, streamingllm"),
    (["--methods", ","], "--methods lists nothing"),
    (["--methods", "snapkv:sinks=3"], "snapkv has no option 'sinks'"),
    (["--budget", "lots"], "budget 'lots' is not understood"),
    (["--budget", "8"], "budget 8 is too small: it must be at least 9"),
    (["--html", "tests"], "--html tests is a folder"),
    (["--html", "/proc/no/such.html"], "--html /proc/no/such.html: "),
    (["--html", "a.html", "--json", "a.html"], "name the same file"),
    (["--prompt", " "], "the prompt is empty"),
    (["--prompt", "a", "--file", "b"], "not allowed with argument"),
    (["--file", "no/such.txt"], "no/such.txt: No such file"),
    (["--max-new-tokens", "-1"], "is not a whole number, 0 or more"),
    (["--max-new-tokens", "5000"], "5000 new tokens exceed the model's context of 4096"),
    (["--temperature", "1"], "unrecognized arguments: --temperature"),
])  # fmt: skip
def test_bad_input_is_refused_before_the_work(monkeypatch, checkpoint, tmp_path, arguments, words):
    page = tmp_path / "page.html"
    prompt = [] if {"--prompt", "--file"} & set(arguments) else ["--prompt", TEXT]
    with pytest.raises(InputError) as refused:
        run(monkeypatch, *tiny(checkpoint, "--html", page, *prompt, *arguments))
    assert words in str(refused.value)
    assert not page.exists()


def test_bad_input_is_one_line_and_exit_code_2():
    command = [sys.executable, "-m", "minikv.explore", "--budget", "lots"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert result.returncode == 2 and result.stdout == "" and len(result.stderr.splitlines()) == 1


def test_a_model_whose_output_is_nan_is_refused(checkpoint):
    model, tokenizer = minikv.load(checkpoint, device="cpu")
    model.model.norm.weight.fill_(float("nan"))
    with pytest.raises(InputError, match="NaN"):
        explore.explore(model, tokenizer, tokenizer.raw_prompt("a b c"), [Pair("full", None, policy.Full())], 2)


def test_a_page_that_cannot_be_moved_into_place_leaves_the_old_one(monkeypatch, checkpoint, tmp_path):
    page = tmp_path / "page.html"
    page.write_text("the old page")

    def fail(source, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(InputError, match=r"page\.html: No space left"):
        run(monkeypatch, *tiny(checkpoint, "--prompt", TEXT, "--max-new-tokens", 2, "--html", page))
    assert page.read_text() == "the old page" and os.listdir(tmp_path) == ["page.html"]
