"""The main program, run as people run it: what it prints, and how it refuses."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from conftest import make_profile, make_tiny_model
from minikv.haystack import DATA
from minikv.srh import Profile

ROOT = Path(__file__).parent.parent
SHORT = ["--prompt", "The capital of France is Paris. " * 30, "--question", "What is the capital of France?"]


def run(*arguments, stdin=None):
    command = [sys.executable, "-m", "minikv.generate", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, input=stdin)


def refused(*arguments, stdin=None) -> str:
    """Run with bad input: nothing on stdout, exit code 2 and one line on stderr, which is returned."""
    result = run(*arguments, stdin=stdin)
    assert result.returncode == 2 and result.stdout == "", result
    assert len(result.stderr.strip().splitlines()) == 1 and "Traceback" not in result.stderr, result.stderr
    return result.stderr


@pytest.mark.parametrize("arguments, words", [
    (["--file", "no/such/file.txt"], "no/such/file.txt: No such file or directory"),
    (["--file", "tests"], "tests: Is a directory"),
    (["--prompt", ""], "the prompt is empty"),
    (["--prompt", "  \n "], "the prompt is empty"),
    (["--policy", "magic"], "method 'magic' is unknown; accepted: full, streamingllm, snapkv"),
    (["--device", "tpu"], "tpu"),
    (["--dtype", "int8"], "int8"),
    (["--budget", "lots"], "budget 'lots' is not understood"),
    (["--budget", "0%"], "above 0"),
    (["--budget", "8"], "budget 8 is too small: it must be at least 9"),
    (["--window", "0"], "argument --window: '0' is not a whole number above 0"),
    (["--kernel", "4"], "kernel is 4; accepted: an odd number"),
    (["--heads", "10"], "heads is 10; accepted: 1 to the model's 9"),
    (["--temperature", "-1"], "--temperature 0 or more"),
    (["--temperature", "nan"], "--temperature 0 or more"),
    (["--seed", "9" * 30], "is beyond 2^63 - 1"),
    (["--seed", "-1"], "is not a whole number, 0 or more"),
    (["--json", "tests"], "--json tests is a folder"),
    (["--json", "/proc/no/such.json"], "--json /proc/no/such.json: "),
    (["--top-p", "0"], "--top-p above 0"),
    (["--no-such-option"], "unrecognized arguments: --no-such-option"),
    (["--prompt", "a", "--file", "b"], "not allowed with argument"),
    (["--max-new-tokens", "9000", *SHORT], "tokens and 9000 new tokens exceed the model's context of 8192"),
    (["--profile", "no/profile.json"], "profile no/profile.json: "),
    (["--model", "no/such/folder"], "no/such/folder"),
    (["--model", "tests"], "config.json"),
])  # fmt: skip
def test_bad_input_is_one_line(default_folder, arguments, words):
    assert words in refused(*arguments)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here, so it is not refused")
def test_cuda_without_a_gpu_is_one_line():
    assert "cuda" in refused("--device", "cuda").lower()


def test_a_prompt_beyond_the_context_is_refused_with_both_lengths(default_folder):
    message = refused("--file", "-", stdin="word " * 9000)
    assert "exceed the model's context of 8192" in message and "90" in message.split(" tokens")[0]


def test_a_profile_of_another_model_is_refused_with_both_shapes(default_folder, tmp_path):
    make_profile(make_tiny_model()).save(tmp_path / "other.json")
    message = refused("--profile", tmp_path / "other.json", *SHORT)
    assert "4 layers of 6 query heads, the model has 30 of 9" in message


def test_a_profile_that_is_empty_or_holds_nan_is_refused(default_folder, tmp_path):
    broken = tmp_path / "broken.json"
    broken.write_text("")
    assert "cannot be read as JSON" in refused("--profile", broken, *SHORT)
    make_profile(make_tiny_model()).save(broken)
    broken.write_text(broken.read_text().replace("0.1", "NaN", 1))
    assert "layer_scores holds nan" in refused("--profile", broken, *SHORT)


def test_standard_input_that_is_not_text_is_refused(default_folder):
    command = [sys.executable, "-m", "minikv.generate", "--file", "-"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, input=b"caf\xe9", timeout=300)
    assert result.returncode == 2 and b"standard input is not UTF-8" in result.stderr and b"Traceback" not in result.stderr


def test_a_reader_that_goes_away_ends_the_program_quietly(default_folder):
    command = f"{sys.executable} -u -m minikv.generate --prompt hello --max-new-tokens 30 | head -c 1"
    result = subprocess.run(["bash", "-o", "pipefail", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert result.returncode == 141 and result.stderr == ""


def test_a_truncated_checkpoint_is_refused(default_folder, tmp_path):
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((default_folder / name).read_bytes())
    (tmp_path / "model.safetensors").write_bytes((default_folder / "model.safetensors").read_bytes()[:100_000])
    assert "model.safetensors" in refused("--model", tmp_path, "--policy", "full", *SHORT)


def test_an_answer_its_table_and_its_record(default_folder, tmp_path):
    record_file = tmp_path / "record.json"
    result = run(*SHORT, "--budget", "64", "--max-new-tokens", "12", "--json", record_file)
    assert result.returncode == 0, result.stderr
    assert "Paris" in result.stdout and "compresskv" in result.stdout
    record = json.loads(record_file.read_text())
    (answer,) = record["answers"]
    assert answer["text"].strip() in result.stdout
    expected = {"window": 8, "kernel": 5, "heads": 4, "layer_budgets": True, "traditional": False}
    assert record["settings"]["options"]["compresskv"] == expected  # not given: the method's own
    assert answer["entries_kept"] == 64 * 30 == sum(answer["kept_each_layer"])
    assert answer["entries_of"] == 30 * record["prompt_tokens"]
    assert answer["kv_bytes"] == 2 * 64 * 30 * 3 * 64 * 4
    fed_back = answer["entries_at_end"] // 30 - 64
    assert fed_back in (answer["new_tokens"], answer["new_tokens"] - 1)  # the last one of a full-length answer is not


@pytest.mark.parametrize("new", ["0", "1"])
def test_no_new_tokens_or_one_do_not_divide_by_zero(default_folder, new):
    result = run(*SHORT, "--max-new-tokens", new)
    assert result.returncode == 0, result.stderr


def test_a_short_prompt_is_kept_whole_where_the_budget_covers_it(default_folder):
    result = run("--prompt", "Say hello.", "--budget", "256", "--max-new-tokens", "5")
    assert result.returncode == 0 and "100.0%" in result.stdout, result


def test_text_comes_from_standard_input_and_sampling_follows_the_seed(default_folder):
    options = ["--file", "-", "--no-chat", "--temperature", "1", "--max-new-tokens", "12", "--budget", "100%"]
    first, second, other = (run(*options, "--seed", seed, stdin="Once upon a time") for seed in (7, 7, 8))
    assert first.returncode == 0, first.stderr
    assert first.stdout.split("method")[0] == second.stdout.split("method")[0] != other.stdout.split("method")[0]


def test_the_demonstration_finds_the_fact_with_the_full_cache_and_with_an_eighth_of_it(default_folder, tmp_path):
    result = run("--json", tmp_path / "demonstration.json")
    assert result.returncode == 0, result.stderr
    fact = json.loads((DATA / "demonstration.json").read_text())["answer"]
    full, compressed = json.loads((tmp_path / "demonstration.json").read_text())["answers"]
    assert (full["method"], compressed["method"]) == ("full", "compresskv")
    assert fact in full["text"] and fact in compressed["text"]
    assert compressed["entries_kept"] <= 0.12 * compressed["entries_of"]
    assert full["entries_kept"] == full["entries_of"] > 30 * 3000


def test_help_names_every_option_with_its_default():
    text = run("--help").stdout
    for option in ("--model", "--budget", "--window", "--kernel", "--heads", "--profile", "--seed", "--json"):
        assert option in text
    assert "default: 12%" in text and "is kept" in text


def test_the_committed_profile_is_the_default_models(default_model):
    model, _ = default_model
    profile = Profile.load(ROOT / "weights/profiles/smollm2-135m-instruct.json")
    assert profile.check_model(model, model.config) is None
