"""LongBench: metrics equal to the benchmark's, prompts as its protocol says, records that cannot be used."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from tiny_checkpoint import CONTROLS, write_checkpoint

from minikv.errors import InputError
from minikv.evals import longbench, longbench_prompts, sweep
from minikv.evals.longbench_prompts import GROUPS, Protocol, Record, find_sets, make_prompt, read_protocols, read_records
from minikv.evals.metrics import METRICS
from minikv.tokenizer import Tokenizer

SHARED = Path(__file__).parent.parent / "../shared/data"
ASK = Protocol("Read.\n\n{context}\n\nQuestion: {input}\nAnswer:", 16)


def shared(name: str) -> Path:
    path = SHARED / name
    if not path.exists():
        pytest.skip(f"needs {name} of ../shared/data, which is not part of the project")
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("tiny"), add_bos=True)


@pytest.fixture(scope="module")
def tokenizer(folder):
    return Tokenizer.from_folder(folder)


# --- metrics ---


def test_metrics_equal_the_benchmarks_own():
    cases = json.loads(shared("oracle/longbench_metrics.json").read_text())
    assert len(cases) > 200
    for case in cases:
        points = longbench.score(case["dataset"], case["prediction"], case["answers"], case["all_classes"])
        close = 0.02 if case["dataset"] in ("lcc", "repobench-p") else 1e-6
        assert points == pytest.approx(case["score"], abs=close), case


@pytest.mark.parametrize(
    "dataset, said, right, points",
    [
        ("qasper", "The Cat, sat!", ["a cat sat"], 1),  # case, punctuation and articles aside
        ("qasper", "cat dog", ["cat"], 2 / 3),
        ("hotpotqa", "cat cat", ["cat dog"], 0.5),  # a word counts as often as both have it
        ("musique", "nothing", ["cat", "nothing"], 1),  # the best over the references
        ("narrativeqa", "", ["cat"], 0),
        ("triviaqa", "\n\ncat\nQuestion: more", ["cat"], 1),  # the first line only
        ("2wikimqa", "cat\ndog", ["cat"], 2 / 3),  # not here
        ("gov_report", "", ["A report."], 0),
        ("gov_report", "...", ["A report."], 0),
        ("multi_news", "one two three", ["one three"], 0.8),
        ("samsum", "one three\none three four", ["one three"], 1),
        ("passage_count", "There are 3, no, 4 of 4", ["4"], 2 / 3),
        ("passage_count", "none", ["4"], 0),
        ("passage_retrieval_en", "Paragraph 12, not 1", ["Paragraph 12"], 0.5),
        ("passage_retrieval_en", "Paragraph 120", ["Paragraph 12"], 0),
        ("lcc", "\n# comment\n`x`\nreturn a // b\nreturn a", ["return a"], 1),
        ("lcc", "ab", ["abcd"], 0.67),
        ("repobench-p", "# only a comment", ["x = 1"], 0),
    ],
)
def test_metrics_by_hand(dataset, said, right, points):
    assert longbench.score(dataset, said, right, None) == pytest.approx(points, abs=1e-6)


@pytest.mark.parametrize(
    "said, points",
    [
        ("Dog food", 1),  # neither Dog nor food counts
        ("Dog food, Cat", 0.5),
        ("Dog food, Cat, Rat", 1 / 3),
        ("Dog", 0),
        ("Cat\nDog food", 0),  # the first line only
        ("\nDog food\nCat", 1),
        ("dog food", 0),
        ("", 0),
    ],
)
def test_labels_count_unless_they_are_a_part_of_the_right_one(said, points):
    labels = ["Dog", "food", "Dog food", "Cat", "Rat"]
    assert longbench.score("trec", said, ["Dog food"], labels) == pytest.approx(points)


def test_a_long_answer_without_a_full_stop_is_scored():
    words, limit = " ".join(f"word{number}" for number in range(600)), sys.getrecursionlimit()
    assert longbench.score("gov_report", words, [words], None) == pytest.approx(1, abs=1e-6)
    assert sys.getrecursionlimit() == limit == 1000


@pytest.mark.parametrize(
    "dataset, answers, classes, message",
    [
        ("squad", ["a"], None, "'squad' is unknown; accepted: narrativeqa"),
        ("qasper", [], None, "no right answer"),
        ("trec", ["a"], None, "all_classes"),
        ("passage_retrieval_en", ["12"], None, "not of the form 'Paragraph 7'"),
    ],
)
def test_what_cannot_be_scored_is_refused(dataset, answers, classes, message):
    with pytest.raises(InputError, match=message):
        longbench.score(dataset, "a 1", answers, classes)


def test_the_groups_hold_each_of_the_sixteen_sets_once():
    members = [name for sets in GROUPS.values() for name in sets]
    assert sorted(members) == sorted(METRICS) and len(members) == 16
    assert read_protocols(None, members).keys() == set(members)


# --- records ---

GOOD = {"input": "What?", "context": "It is red.", "answers": ["red"], "all_classes": None}


def write_set(folder: Path, dataset: str, *lines) -> Path:
    text = "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
    (folder / f"{dataset}.jsonl").write_text(text, encoding="utf-8")
    return folder


def test_records_are_read_from_a_plain_jsonl_file(tmp_path):
    odd = GOOD | {"context": "a\u2028b \x85 {input} {0} 家", "input": ""}
    records = read_records(write_set(tmp_path, "qasper", GOOD, "", odd, GOOD | {"length": 3}), "qasper")
    assert [record.key for record in records] == ["qasper 1", "qasper 2", "qasper 3"]
    assert records[1] == Record("qasper", 2, odd["context"], "", ["red"], None)


def without(name: str) -> dict:
    return {key: value for key, value in GOOD.items() if key != name}


@pytest.mark.parametrize(
    "dataset, line, message",
    [
        ("qasper", without("context"), "lacks context"),
        ("qasper", without("input"), "lacks input"),
        ("qasper", without("answers"), "lacks answers"),
        ("qasper", GOOD | {"answers": []}, "lacks answers"),
        ("qasper", GOOD | {"answers": [""]}, "lacks answers"),
        ("qasper", GOOD | {"answers": "red"}, "lacks answers"),
        ("qasper", GOOD | {"context": " "}, "context is empty"),
        ("qasper", GOOD | {"context": 7}, "lacks context"),
        ("qasper", GOOD | {"input": "x"} | {"context": "\ud83d"}, "lone surrogate"),
        ("passage_retrieval_en", GOOD, "not of the form 'Paragraph 7'"),
        ("trec", GOOD, "lacks all_classes"),
        ("trec", GOOD | {"all_classes": []}, "lacks all_classes"),
        ("qasper", '{"input": "cut o', "is not JSON"),
        ("qasper", "[1]", "is not a JSON object"),
    ],
)
def test_a_record_that_cannot_be_used_is_named_by_file_and_line(tmp_path, dataset, line, message):
    first = GOOD | {"all_classes": ["red", "green"], "answers": ["Paragraph 1"]}
    with pytest.raises(InputError) as error:
        read_records(write_set(tmp_path, dataset, first, "", line), dataset)
    assert f"{dataset}.jsonl, line 3" in str(error.value) and message in str(error.value)


def test_the_sets_of_a_folder_are_found_in_the_benchmarks_order(tmp_path):
    for name in ("trec", "qasper", "lsht", "other"):
        write_set(tmp_path, name, GOOD)
    assert find_sets(tmp_path, None) == ["qasper", "trec"]
    assert find_sets(tmp_path, ["trec"]) == ["trec"]
    with pytest.raises(InputError, match="has no lcc.jsonl; it has qasper, trec"):
        find_sets(tmp_path, ["qasper", "lcc"])
    with pytest.raises(InputError, match="'lsht' is unknown"):
        find_sets(tmp_path, ["lsht"])
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(InputError, match="has none of the sets"):
        find_sets(empty, None)
    for nowhere in (tmp_path / "nowhere", tmp_path / "trec.jsonl"):
        with pytest.raises(InputError, match="there is no folder"):
            find_sets(nowhere, None)


# --- prompts ---


def write_config(folder: Path, prompts: dict, lengths: dict) -> Path:
    (folder / "dataset2prompt.json").write_text(json.dumps(prompts))
    (folder / "dataset2maxlen.json").write_text(json.dumps(lengths))
    return folder


def test_prompts_and_lengths_are_read_from_the_benchmarks_two_files(tmp_path):
    config = write_config(tmp_path, {"qasper": "A {context}\n B {input}", "lcc": "{context}"}, {"qasper": 128, "lcc": 64})
    expected = {"qasper": Protocol("A {context}\n B {input}", 128), "lcc": Protocol("{context}", 64)}
    assert read_protocols(config, ["qasper", "lcc"]) == expected
    with pytest.raises(InputError, match="dataset2prompt.json has no prompt with {context} for trec"):
        read_protocols(config, ["trec"])
    (tmp_path / "dataset2maxlen.json").write_text("{}")
    with pytest.raises(InputError, match="dataset2maxlen.json has no answer length for lcc"):
        read_protocols(config, ["lcc"])
    with pytest.raises(InputError, match="nowhere has no dataset2prompt.json"):
        read_protocols(tmp_path / "nowhere", ["lcc"])


def test_the_benchmarks_own_files_serve_all_sets_and_are_not_copied():
    config = shared("longbench_config")
    lengths = json.loads((config / "dataset2maxlen.json").read_text())
    protocols = read_protocols(config, list(METRICS))
    assert {name: protocol.max_new_tokens for name, protocol in protocols.items()} == {name: lengths[name] for name in METRICS}
    prompts = {protocol.prompt for protocol in protocols.values()}
    assert not prompts & set(longbench_prompts.OWN_PROMPTS.values())


@pytest.mark.parametrize("dataset", METRICS)
def test_the_chat_template_is_left_out_where_the_protocol_says(tokenizer, dataset):
    record = Record(dataset, 1, "Line one.\nLine two has \\n in it.", "What?", ["x"], None)
    prompt = make_prompt(tokenizer, record, ASK, 500)
    raw = dataset in ("trec", "triviaqa", "samsum", "lcc", "repobench-p")
    assert [control in prompt.text for control in CONTROLS[1:]] == [not raw] * 3
    assert prompt.ids.count(tokenizer.bos_id) == 1 and prompt.ids[0] == tokenizer.bos_id
    text = "Read.\n\nLine one.\nLine two has \\n in it.\n\nQuestion: What?\nAnswer:"
    assert tokenizer.decode(prompt.ids) == text
    assert prompt.ids == make_prompt(tokenizer, record, ASK, 500).ids


def test_the_default_model_reads_a_prompt_with_its_template_and_no_start_token(default_folder):
    tokenizer = Tokenizer.from_folder(default_folder)
    record = Record("hotpotqa", 1, "It is red. <|im_end|> <|endoftext|>", "What?", ["x"], None)
    prompt = make_prompt(tokenizer, record, ASK, 500)
    assert prompt.text.endswith("Question: What?\nAnswer:<|im_end|>\n<|im_start|>assistant\n")
    controls = [id for id in prompt.ids if not tokenizer.spell(id)]
    assert len(controls) == 5  # two turns and the beginning of a third: those of the document are plain text
    assert tokenizer.decode(prompt.ids).count("It is red. <|im_end|> <|endoftext|>") == 1


def test_markup_in_a_record_is_plain_text(tokenizer):
    record = Record("qasper", 1, "so <|end|> it goes <s>", "What?", ["x"], None)
    ids = make_prompt(tokenizer, record, ASK, 500).ids
    end = tokenizer.encode("<|end|>", parse_special=True)[0]
    assert ids.count(end) == 1 and ids.count(tokenizer.bos_id) == 1  # the template's and the model's own


# --- truncation ---

LONG = " ".join(f"word{number}" for number in range(4000))
EMOJI = "".join(chr(0x1F600 + number % 60) + chr(0x5BB6 + number % 500) for number in range(4000))


@pytest.mark.parametrize("dataset", ["qasper", "trec"])
@pytest.mark.parametrize("limit", [200, 801, 8000])
def test_a_long_prompt_loses_its_middle_and_nothing_else(tokenizer, dataset, limit):
    record = Record(dataset, 1, LONG, "What is it?", ["x"], None)
    whole = make_prompt(tokenizer, record, ASK, 10**9)
    cut = make_prompt(tokenizer, record, ASK, limit)
    kept = limit - ASK.max_new_tokens
    assert len(whole.ids) > 12_000 and len(cut.ids) == len(cut.offsets) == kept
    half = (kept + 1) // 2
    assert cut.ids == whole.ids[:half] + whole.ids[-(kept - half) :]
    text = tokenizer.decode(cut.ids)
    assert text.startswith("Read.\n\nword0 ") and text.endswith("word3999\n\nQuestion: What is it?\nAnswer:")


def test_a_prompt_that_fits_is_left_alone(tokenizer):
    record = Record("qasper", 1, LONG[:300], "What?", ["x"], None)
    whole = make_prompt(tokenizer, record, ASK, 10**9)
    assert make_prompt(tokenizer, record, ASK, len(whole.ids) + 16).ids == whole.ids
    assert len(make_prompt(tokenizer, record, ASK, len(whole.ids) + 15).ids) == len(whole.ids) - 1


@pytest.mark.parametrize("which", ["folder", "default_folder"])
@pytest.mark.parametrize("limit", range(300, 308))
def test_no_character_is_cut_in_two(request, which, limit):
    tokenizer = Tokenizer.from_folder(request.getfixturevalue(which))
    record = Record("qasper", 1, EMOJI, "What is it?", ["x"], None)
    prompt = make_prompt(tokenizer, record, ASK, limit)
    text = tokenizer.decode(prompt.ids)
    assert limit - 16 - 12 <= len(prompt.ids) <= limit - 16
    assert "\ufffd" not in text
    assert text.endswith("\n\nQuestion: What is it?\nAnswer:" + ("\nassistant\n" if which == "default_folder" else ""))
    assert EMOJI[:20] in text and EMOJI[-20:] in text


@pytest.mark.parametrize("length", [20, 150])
def test_a_long_question_stays_whole_at_the_cost_of_the_document(tokenizer, length):
    question = " ".join(f"question{number}" for number in range(length))
    template = Protocol("Read " + "carefully " * 30 + "{context}\nQuestion: {input}", 16)
    record = Record("qasper", 1, LONG, question, ["x"], None)
    bare = len(make_prompt(tokenizer, Record("qasper", 1, "x", question, ["x"], None), template, 10**9).ids)
    prompt = make_prompt(tokenizer, record, template, bare + 16 + 50)
    assert len(prompt.ids) == bare + 50
    text = tokenizer.decode(prompt.ids)
    assert text.startswith("Read " + "carefully " * 30) and text.endswith(f"\nQuestion: {question}")
    with pytest.raises(InputError, match="the prompt without its document has"):
        make_prompt(tokenizer, record, template, bare - 10)


def test_the_benchmarks_samples_fit_after_truncation(default_folder):
    tokenizer, folder, config = Tokenizer.from_folder(default_folder), shared("longbench"), shared("longbench_config")
    sets = find_sets(folder, None)
    protocols, cut = read_protocols(config, sets), 0
    for name in sets:
        for record in read_records(folder, name)[:4]:
            whole = make_prompt(tokenizer, record, protocols[name], 10**9).ids
            ids = make_prompt(tokenizer, record, protocols[name], 8192).ids
            room = 8192 - protocols[name].max_new_tokens
            assert len(ids) == len(whole) <= room or room - 4 <= len(ids) <= room
            cut += len(ids) < len(whole)
            assert tokenizer.decode(ids)[-50:] == tokenizer.decode(whole)[-50:]
    assert len(sets) == 8 and cut >= 8


# --- the program ---


@pytest.fixture
def data(tmp_path):
    """Three sets of three records each."""
    labels = {"all_classes": ["red", "green"]}
    for name in ("qasper", "trec", "samsum"):
        write_set(tmp_path, name, *(GOOD | labels | {"context": f"Number {n} is red. " * 20} for n in range(3)))
    return tmp_path


def run(monkeypatch, folder: Path, data: Path, *more: str) -> dict:
    model = ["--model", str(folder), "--profile", str(folder / "profile.json"), "--heads", "2", "--device", "cpu"]
    words = [str(data), *model, "--budgets", "24", "--json", str(data / "out.json"), *more]
    monkeypatch.setattr(sys, "argv", ["longbench", *words])
    longbench.main()
    return json.loads((data / "out.json").read_text())


def test_scores_add_up_to_sets_groups_and_a_mean(monkeypatch, folder, data, capsys):
    """Points are put in by hand: 1 for each first record, and half of all for a compressed cache."""
    true_evaluate = longbench.evaluate

    def evaluate(model, tokenizer, record, *rest):
        result = true_evaluate(model, tokenizer, record, *rest)
        for name, pair in result["pairs"].items():
            points = (record.number == 1) if record.dataset != "qasper" else 1
            pair["score"] = points * (1 if name == "full" else 0.5)
        return result

    monkeypatch.setattr(longbench, "evaluate", evaluate)
    record = run(monkeypatch, folder, data, "--methods", "full,snapkv", "--max-new-tokens", "3", "--plot", str(data / "bars.png"))
    full, snapkv = record["scores"]
    third = pytest.approx(100 / 3)
    assert full["sets"] == {"qasper": 100, "trec": third, "samsum": third}
    assert full["groups"] == {"single-doc QA": 100, "few-shot": third}
    assert full["mean"] == pytest.approx(500 / 9) == pytest.approx(2 * snapkv["mean"])  # of the sets, not of the groups
    assert record["examples"] == {"qasper": 3, "trec": 3, "samsum": 3} and not record["comparable"]
    printed = capsys.readouterr().out
    assert "qasper (3)" in printed and "few-shot" in printed and "50.0%" in printed
    assert longbench.NOT_COMPARABLE in printed and "The first token of each answer comes from full attention" in printed
    assert (data / "bars.png").read_bytes().startswith(b"\x89PNG")


def test_two_runs_are_equal_and_the_benchmarks_prompts_need_no_note(monkeypatch, folder, data, capsys):
    prompts = {name: "{context} {input}" for name in METRICS}
    config = ["--config", str(write_config(data, prompts, {name: 5 for name in METRICS}))]
    first = run(monkeypatch, folder, data, *config)
    assert longbench.NOT_COMPARABLE not in capsys.readouterr().out
    assert run(monkeypatch, folder, data, *config)["scores"] == first["scores"]
    assert [(row["method"], row["budget"]) for row in first["scores"]][:3] == [
        ("full", None),
        ("streamingllm", "24"),
        ("snapkv", "24"),
    ]


def test_a_limit_is_of_each_set_and_a_run_goes_on_from_its_results(monkeypatch, folder, data):
    more = ["--methods", "full", "--max-new-tokens", "3", "--limit", "2", "--results", str(data / "r.out")]
    first = run(monkeypatch, folder, data, *more)
    assert first["examples"] == {"qasper": 2, "trec": 2, "samsum": 2}
    monkeypatch.setattr(longbench, "evaluate", None)  # nothing is left to be done
    assert run(monkeypatch, folder, data, *more)["scores"] == first["scores"]
    write_set(data, "trec", *(GOOD | {"all_classes": ["red", "blue"]} for _ in range(3)))
    with pytest.raises(InputError, match="other settings: texts is"):
        run(monkeypatch, folder, data, *more)


@pytest.mark.parametrize("dataset, stops_at_line_end", [("samsum", True), ("trec", False), ("qasper", False)])
def test_samsum_stops_at_a_line_end_and_gives_at_least_one_token(monkeypatch, folder, data, dataset, stops_at_line_end):
    asked = {}

    def note(model, ids, policies, new, stop_ids, at_least_one):
        asked.update(new=new, stops=stop_ids, at_least_one=at_least_one)
        return sweep.Swept([[]], [1.0], {"prefill": 0.0})

    monkeypatch.setattr(sweep, "sweep", note)
    run(monkeypatch, folder, data, "--sets", dataset, "--limit", "1", "--methods", "full", "--max-new-tokens", "3")
    tokenizer = Tokenizer.from_folder(folder)
    assert asked["stops"] == tokenizer.stop_ids | ({tokenizer.encode("\n")[-1]} if stops_at_line_end else set())
    assert asked["at_least_one"] == stops_at_line_end and asked["new"] == 3


def test_answers_are_as_long_as_the_protocol_says(monkeypatch, folder, data):
    lengths = []
    true_sweep = sweep.sweep
    monkeypatch.setattr(sweep, "sweep", lambda *a, **k: lengths.append((len(a[1]), a[3])) or true_sweep(*a, **k))
    config = write_config(data, {"trec": "{context}{input}", "qasper": "{context}{input}"}, {"trec": 5, "qasper": 7})
    run(monkeypatch, folder, data, "--config", str(config), "--sets", "trec,qasper", "--methods", "full", "--max-length", "60")
    assert sorted(set(lengths)) == [(53, 7), (55, 5)]  # the prompt has what the answer leaves


def test_a_question_that_does_not_fit_is_told_with_its_line_before_any_prompt_is_run(monkeypatch, folder, data):
    write_set(data, "trec", GOOD | {"all_classes": ["red"]}, "", GOOD | {"all_classes": ["red"], "input": LONG[:900]})
    monkeypatch.setattr(longbench, "evaluate", lambda *_: pytest.fail("a prompt was run"))
    with pytest.raises(InputError, match="trec.jsonl, line 3: the prompt without its document has"):
        run(monkeypatch, folder, data, "--methods", "full", "--max-length", "300")


@pytest.mark.parametrize("sets", ["", ","])
def test_sets_that_list_nothing_are_refused(monkeypatch, folder, data, sets):
    with pytest.raises(InputError, match="--sets lists nothing"):
        run(monkeypatch, folder, data, "--sets", sets)


def test_a_length_beyond_the_models_context_is_refused(monkeypatch, folder, data):
    with pytest.raises(InputError, match="--max-length 5000 exceeds the model's context of 4096"):
        run(monkeypatch, folder, data, "--max-length", "5000")


def test_own_prompts_hold_every_record_whole():
    for name, protocol in read_protocols(None, list(METRICS)).items():
        assert protocol.prompt.count("{context}") == 1, name
        assert ("{input}" in protocol.prompt) == (name != "passage_count"), name
