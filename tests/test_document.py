"""One document, many questions: answers as if each were asked alone, and the document's cache as it was afterwards."""

import json
import signal
import subprocess
import sys
import time
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import minikv
from conftest import make_policy, make_profile, make_prompt, make_tiny_model
from minikv import document
from minikv.document import Document, common_prefix, reusable
from minikv.errors import InputError
from minikv.haystack import with_question
from minikv.policy import H2O, METHODS, Full, SnapKV
from test_generate import ROOT, refused, run
from tiny_checkpoint import write_checkpoint, write_tokenizer

TEXT = "The tower clock was repaired by Ingrid Halloran in the year 1931. The capital of France is Paris. " * 12
QUESTIONS = ["Who repaired the clock?", "1931 was the year of what?", "What is the capital of France?"]

TINY = make_tiny_model()
CACHED = make_prompt(120)[0].tolist()
FIRST, SECOND = CACHED + make_prompt(25, seed=1)[0].tolist(), CACHED + make_prompt(40, seed=2)[0].tolist()


def policy_named(name):
    return make_policy(METHODS[name], 30, make_profile(TINY))


def answer(prompt, logits, cache):
    """The answer's ids, and the positions that were kept of the prompt."""
    kept = [layer.positions.clone() for layer in cache.layers]
    return [token.item() for token in minikv.decode(TINY, cache, logits, 12)], kept


def alone(prompt, policy):
    return answer(prompt, *minikv.prefill_layer_by_layer(TINY, torch.tensor([prompt]), policy, 12))


def together(held, prompt, policy):
    return answer(prompt, *held.ask(prompt, policy, 12)[:2])


def same(first, second) -> bool:
    return first[0] == second[0] and all(map(torch.equal, first[1], second[1]))


def buffers(held):
    return [(layer._keys.data_ptr(), layer._values.data_ptr(), layer.kept, layer.seen) for layer in held.cache.layers]


@pytest.mark.parametrize("name", list(METHODS))
def test_no_question_sees_another_and_the_documents_cache_is_set_back_without_a_copy(name):
    policy = policy_named(name)
    held = Document.prefill(TINY, CACHED, column_sums=policy.window is None)
    before = buffers(held), [layer.keys.clone() for layer in held.cache.layers]
    for prompt in (FIRST, SECOND, FIRST):
        assert same(together(held, prompt, policy), alone(prompt, policy))
        assert buffers(held) == before[0] and held.cache.kept == [120] * 4
        assert all(map(torch.equal, (layer.keys for layer in held.cache.layers), before[1]))


@pytest.mark.parametrize("name", list(METHODS))
@pytest.mark.parametrize("prompt", [
    CACHED[:70] + FIRST[120:],  # the document's end is another one
    CACHED[:50],  # within the document
    SECOND[120:],  # nothing in common
    CACHED[:1] + [1],  # shorter than a window
], ids=["other end", "within", "other", "short"])  # fmt: skip
def test_a_prompt_that_shares_less_than_the_document_is_answered_right_and_so_is_the_next(name, prompt):
    policy = policy_named(name)
    held = Document.prefill(TINY, CACHED, column_sums=policy.window is None)
    for asked in (prompt, SECOND):
        assert same(together(held, asked, policy), alone(asked, policy))


def test_how_many_tokens_were_not_run_is_told():
    held = Document.prefill(TINY, CACHED)
    assert held.ask(FIRST, SnapKV(20, window=8))[2] == 120
    assert held.ask(FIRST, SnapKV(40, window=30))[2] == 145 - 30  # the window's queries have to be run
    assert held.ask(FIRST, Full())[2] == 115  # what was cut off is not there again
    summed = Document.prefill(TINY, CACHED, column_sums=True)
    assert summed.ask(FIRST, H2O(20))[2] == 120
    assert summed.ask(CACHED[:50] + [1], H2O(20))[2] == 0  # the document was run anew, for its sums
    assert summed.ask(CACHED[:50] + [1], H2O(20))[2] == 50


def test_a_question_longer_than_the_room_left_makes_the_cache_grow():
    held, long = Document.prefill(TINY, CACHED), CACHED + make_prompt(document.QUESTION_ROOM + 90, seed=3)[0].tolist()
    assert same(together(held, long, SnapKV(30)), alone(long, SnapKV(30)))
    assert held.cache.kept == [120] * 4


def test_a_question_that_is_refused_leaves_the_document_as_it_was():
    held = Document.prefill(TINY, CACHED)
    with pytest.raises(InputError, match="too small"):
        held.ask(FIRST, SnapKV(3))
    with pytest.raises(InputError, match="column sums"):
        held.ask(FIRST, H2O(20))
    with pytest.raises(InputError, match="2129 tokens exceed the model's context of 2048"):
        held.ask(FIRST + [1] * 1984, SnapKV(20))
    assert held.cache.kept == [120] * 4 and same(together(held, FIRST, SnapKV(30)), alone(FIRST, SnapKV(30)))


def test_what_is_evicted_cannot_be_truncated():
    cache = minikv.compress(minikv.prefill(TINY, make_prompt(50)), SnapKV(20))
    with pytest.raises(AssertionError, match="evicted"):
        cache[0].truncate(10)


# --- which ids are reused ---


def test_the_common_prefix_ends_at_the_first_difference_and_leaves_the_window():
    assert [common_prefix([1, 2, 3], other) for other in ([1, 2, 3, 4], [1, 2, 9], [9, 2, 3], [])] == [3, 2, 0, 0]
    assert reusable([1, 2, 3], [1, 2, 3, 4, 5], window=2) == 3
    assert reusable([1, 2, 3], [1, 2, 3, 4, 5], window=3) == 2
    assert reusable([1, 2, 3], [1, 2, 3], window=0) == 2  # the last token gives the logits
    assert reusable([1, 2, 3], [1, 2], window=8) == 0


@given(st.lists(st.integers(0, 2)), st.lists(st.integers(0, 2), min_size=1), st.integers(0, 5))
def test_what_is_reused_is_the_same_in_both_and_the_longest_such(cached, prompt, window):
    length = reusable(cached, prompt, window)
    assert cached[:length] == prompt[:length] and 0 <= length < len(prompt)
    longer = length + 1
    differs = cached[:longer] != prompt[:longer] or longer > len(cached)
    assert differs or longer > len(prompt) - max(window, 1)


STARTS = st.sampled_from(["", " ", "  ", "\n", "\n\n", "\t ", "🦙", " 🦙", "é", "1", ":", "?", "<|end|>", "don't", "家"])


@settings(max_examples=60, deadline=None)
@given(start=STARTS, rest=st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=12))
def test_prompts_of_any_question_share_the_documents_ids_or_differ_late(tokenizer, start, rest):
    """The document's ids come from questions that begin with a letter, a digit and a line break: little is run again."""
    shared = cached_ids(tokenizer)
    prompt = tokenizer.chat_prompt(with_question(TEXT, start + rest)).ids
    assert reusable(shared, prompt, window=1) >= len(shared) - 2


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return minikv.weights.Tokenizer.from_folder(folder)


def cached_ids(tokenizer):
    from minikv.questions import PROBES

    first, *others = [tokenizer.chat_prompt(with_question(TEXT, probe)).ids for probe in PROBES]
    return first[: min(common_prefix(first, other) for other in others)]


# --- saved and loaded ---


@pytest.mark.parametrize("name", list(METHODS))
def test_a_saved_prefill_answers_as_the_one_that_was_made(name, tmp_path):
    policy = policy_named(name)
    held = Document.prefill(TINY, CACHED, column_sums=policy.window is None)
    document.save(held, tmp_path / "prefill", {"text": "words"})
    loaded = document.load(tmp_path / "prefill", TINY, CACHED + [5], column_sums=policy.window is None)
    assert loaded.ids == CACHED and document.read_text_of(tmp_path / "prefill")["text"] == "words"
    assert [file.name for file in tmp_path.iterdir()] == ["prefill"]
    before = buffers(loaded)
    for prompt in (FIRST, SECOND, FIRST):
        assert same(together(loaded, prompt, policy), together(held, prompt, policy))
    assert buffers(loaded) == before


def test_a_prefill_of_another_model_dtype_text_or_shape_is_refused(tmp_path):
    file, profile = tmp_path / "prefill", {"text": "words"}
    document.save(Document.prefill(TINY, CACHED), file, profile)

    def refuses(words, model=TINY, ids=CACHED, **options):
        with pytest.raises(InputError, match=words):
            document.load(file, model, ids, **options)

    refuses("the model's weights", make_tiny_model(seed=1))
    refuses("the model's dtype 'float32'; of this model it is 'bfloat16'", make_tiny_model().bfloat16())
    refuses("the model's settings", make_tiny_model(max_positions=512))
    refuses("ids are not those of its text", ids=[*CACHED[:-1], CACHED[-1] + 1])
    refuses("ids are not those of its text", ids=CACHED[:-1])
    refuses("no column sums of attention, which h2o needs; save it with --policy h2o", column_sums=True)

    metadata, tensors = document.read_text_of(file), load_file(file)
    changes = {
        r"keys.1 is torch.float32 \[1, 2, 119, 8\]; needed: torch.float32 \[1, 2, 120, 8\]": ("keys.1", lambda x: x[:, :, 1:]),
        "values.3 is torch.float64": ("values.3", torch.Tensor.double),
        "values.2 holds NaN or infinity": ("values.2", lambda x: x / 0),
        "ids are not those": ("ids", lambda x: x[:0]),
        "its format is 'other'": ("format", None),
    }
    for words, (name, change) in changes.items():
        changed = {key: change(value).contiguous() if key == name else value for key, value in tensors.items()}
        save_file(changed, file, metadata | ({"format": "other"} if change is None else {}))
        refuses(words)
    save_file({key: value for key, value in tensors.items() if key != "keys.2"}, file, metadata)
    refuses("holds no keys.2")


@pytest.mark.parametrize("content", [b"", b"pickle", b"\x80\x04\x95" * 50, None])
def test_a_damaged_file_is_refused(content, tmp_path):
    file = tmp_path / "prefill"
    document.save(Document.prefill(TINY, CACHED), file, {})
    file.write_bytes(file.read_bytes()[:5000] if content is None else content)
    for read in (document.read_text_of, lambda file: document.load(file, TINY, CACHED)):
        with pytest.raises(InputError, match="is no prefill, or damaged"):
            read(file)
    with pytest.raises(InputError, match="none"):
        document.read_text_of(tmp_path / "none")


# --- on the command line ---


def record_of(tmp_path, *arguments, stdin=None):
    file = tmp_path / "record.json"
    result = run(*arguments, "--json", file, stdin=stdin)
    assert result.returncode == 0, result.stderr
    return json.loads(file.read_text()), result


def asked(*questions):
    return [part for question in questions for part in ("--question", question)]


@pytest.fixture(scope="module")
def answers_alone(default_folder, tmp_path_factory):
    """What each question is answered when it is asked alone."""
    folder = tmp_path_factory.mktemp("alone")
    options = ["--prompt", TEXT, "--budget", "64", "--max-new-tokens", "12"]
    records = [record_of(folder, *options, "--question", question)[0] for question in QUESTIONS[:2]]
    return [record["answers"][0] for record in records]


def check_answers(record, answers_alone):
    for told, expected in zip(record["answers"], answers_alone, strict=True):
        assert all(told[name] == expected[name] for name in ("text", "kept_each_layer", "new_tokens", "entries_at_end"))


OPTIONS = ["--budget", "64", "--max-new-tokens", "12"]


def test_two_questions_are_answered_as_in_two_runs(answers_alone, tmp_path):
    record, result = record_of(tmp_path, "--prompt", TEXT, *OPTIONS, *asked(*QUESTIONS[:2]))
    check_answers(record, answers_alone)
    assert record["document"]["tokens_not_run_again"] == record["document"]["tokens"]
    assert [answer["question"] for answer in record["answers"]] == QUESTIONS[:2]
    assert "were prefilled once" in result.stdout and "not run again: about" in result.stdout


def test_a_chat_reads_questions_from_lines_and_goes_on_after_one_that_is_too_long(answers_alone, tmp_path):
    lines = f"{QUESTIONS[0]}\n\n  \n{'word ' * 8000}\n{QUESTIONS[1]}"
    record, result = record_of(tmp_path, "--prompt", TEXT, *OPTIONS, "--chat", stdin=lines)
    check_answers(record, answers_alone)
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith("error: the prompt's 8") and "context of 8192" in line
    assert "> " not in result.stdout  # no terminal is there to be prompted


def test_a_saved_document_is_asked_without_its_text(answers_alone, tmp_path):
    saved = tmp_path / "saved" / "prefill.safetensors"
    result = run("--prompt", TEXT, "--save-prefill", saved, *OPTIONS)
    assert result.returncode == 0 and "Its prefill is in" in result.stdout, result
    record, _ = record_of(tmp_path, "--load-prefill", saved, *OPTIONS, *asked(*QUESTIONS[:2]))
    check_answers(record, answers_alone)
    assert "its format is" in refused("--load-prefill", ROOT / "weights/smollm2-135m-instruct/model.safetensors", *asked("a"))
    assert "no column sums" in run("--load-prefill", saved, "--policy", "h2o", *asked("a")).stderr
    assert "was made without --no-chat" in refused("--load-prefill", saved, "--no-chat", *asked("a"))
    assert "dtype 'float32'" in run("--load-prefill", saved, "--dtype", "bfloat16", *asked("a")).stderr


@pytest.mark.parametrize("arguments, words", [
    (["--chat", "--file", "-"], "both read standard input"),
    (["--chat", "--question", "a"], "not allowed with argument"),
    (["--load-prefill", "x", "--prompt", "a"], "not allowed with argument"),
    (["--load-prefill", "x"], "--load-prefill needs a --question"),
    (["--load-prefill", "no/such", "--chat"], "no/such"),
    (["--load-prefill", "tests", "--chat"], "tests"),
    (["--load-prefill", "README.md", "--chat"], "README.md is no prefill, or damaged"),
    (["--question", "a", "--question", " "], "a --question is empty"),
    (["--save-prefill", "tests"], "--save-prefill tests is a folder"),
    (["--save-prefill", "x", "--json", "x"], "name the same file"),
])  # fmt: skip
def test_what_does_not_go_together_is_refused_before_the_model_is_loaded(arguments, words):
    assert words in refused("--model", "no/such/model", *arguments)


def test_an_interrupted_chat_keeps_the_answers_that_were_made(tmp_path):
    model, file = write_checkpoint(tmp_path), tmp_path / "record.json"
    command = [sys.executable, "-u", "-m", "minikv.generate", "--model", model, "--policy", "snapkv", *OPTIONS]
    command += ["--prompt", TEXT, "--chat", "--json", file]
    default = partial(signal.signal, signal.SIGINT, signal.default_int_handler)  # where the tests run in the background
    with subprocess.Popen(command, cwd=ROOT, stdin=-1, stdout=-1, stderr=-1, preexec_fn=default) as process:
        process.stdin.write(b"Who?\n")
        process.stdin.flush()
        process.stdout.readline()  # the document
        process.stdout.readline()  # the answer's first line
        time.sleep(2)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130 and b"Traceback" not in errors, errors
    (told,) = json.loads(file.read_text())["answers"]
    assert told["question"] == "Who?"
