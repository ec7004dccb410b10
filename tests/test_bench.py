"""The benchmark: turns, medians and ratios, participants that are missing or die, refusals, a real run."""

import json
import os
import re
import subprocess
import sys
from argparse import Namespace
from importlib.util import find_spec
from pathlib import Path

import pytest

from minikv import bench
from minikv.benchmark import summary, tables
from minikv.benchmark.entrants import PEERS, read_peers
from minikv.benchmark.participants import Failed, Participant, Run, take_turns, time_selections
from minikv.config import Config
from minikv.errors import InputError
from minikv.report.bench_plot import draw
from tiny_checkpoint import write_checkpoint

ROOT = Path(__file__).parent.parent
SMALL = Config(10, 4, 6, 2, 2, 1, 2, 100, 1e-5, 10000.0, None, tied_head=True)


class Fake:
    """A participant that answers at once, and writes down that it was asked."""

    def __init__(self, name, methods, asked, fails=None):
        self.name, self.dtype, self.methods, self.asked, self.fails = name, "float32", methods, asked, fails

    def ask(self, request):
        self.asked.append((self.name, request["method"], len(request["ids"])))
        if self.fails:
            raise self.fails
        return {"prefill_s": 1.0, "first_token_s": 1.0, "decode_s": 0.5, "peak_bytes": 1, "kv_bytes": 1, "kept_entries": 2, "ids": []}


def measurement(participant, method="full", round=0, prefill=1.0, decode=0.1, dtype="float32", **other):
    times = {"prefill_s": prefill, "first_token_s": prefill, "decode_s": decode}
    held = {"peak_bytes": 100 + round, "kv_bytes": 320, "kept_entries": 20}
    return {"participant": participant, "method": method, "dtype": dtype, "length": 10, "round": round, **times, **held, **other}


def test_all_take_turns_in_every_round():
    asked, run, rounds = [], Run(), []
    ours, peer = Fake("minikv float32", ["full", "compresskv"], asked), Fake("peer", ["full"], asked)
    take_turns([ours, peer], {2: [0, 0], 3: [0, 0, 0]}, 4, 2, run, after_round=lambda: rounds.append(len(asked)))
    one_round = [(name, method, length) for length in (2, 3) for name, method in
                 (("minikv float32", "full"), ("minikv float32", "compresskv"), ("peer", "full"))]
    assert asked == one_round * 2 and rounds == [6, 12]
    assert [found["round"] for found in run.measurements] == [0] * 6 + [1] * 6


def test_what_died_is_named_once_and_the_rest_goes_on(capsys):
    asked, run = [], Run()
    dead = Fake("peer", ["full"], asked, fails=Failed("it fell over", dead=True))
    take_turns([dead, Fake("minikv float32", ["full"], asked)], {2: [0, 0], 3: [0, 0, 0]}, 4, 3, run)
    assert [name for name, *_ in asked].count("peer") == 1 and len(run.measurements) == 6
    assert run.failures == [{"participant": "peer", "method": "full", "length": 2, "reason": "it fell over"}]
    assert "peer, full at 2 tokens is left out: it fell over" in capsys.readouterr().err


def test_what_cannot_do_one_thing_is_still_asked_for_others():
    asked, run = [], Run()
    take_turns([Fake("peer", ["full"], asked, fails=Failed("too long"))], {2: [0, 0], 3: [0, 0, 0]}, 4, 3, run)
    assert asked == [("peer", "full", 2), ("peer", "full", 3)] and len(run.failures) == 2


def test_an_interrupt_keeps_what_was_measured():
    run, asked = Run(), []
    with pytest.raises(KeyboardInterrupt):
        take_turns([Fake("minikv", ["full"], asked), Fake("peer", ["full"], asked, fails=KeyboardInterrupt())], {2: [0, 0]}, 4, 3, run)
    assert len(run.measurements) == 1


def test_median_and_spread():
    assert summary.spread([3.0, 1.0, None, 2.0]) == {"median": 2.0, "min": 1.0, "max": 3.0, "n": 3}
    assert summary.spread([None, None]) is None


def test_a_row_has_medians_rates_and_the_first_rounds_memory():
    found = [measurement("minikv float32", "compresskv", number, prefill, 0.1) for number, prefill in enumerate((4.0, 2.0, 5.0))]
    row, = summary.summarize(found, {("minikv float32", "compresskv", 10): [1.0, 1.0]})
    assert row["n"] == 3 and row["prefill_s"]["median"] == 4 and row["prefill_tokens_s"] == 10 / 4
    assert row["decode_tokens_s"] == pytest.approx(10) and row["peak_bytes"] == 100
    assert row["selection_share"] == 1 / 4


def test_ratios_are_those_of_the_same_round_and_dtype():
    # In round 1 everything took twice as long: the ratio stays.
    found = [measurement("minikv float32", "full", number, 2.0 * slow, 0.1 * slow) for number, slow in enumerate((1, 2))]
    found += [measurement("transformers float32", "full", number, 3.0 * slow, 0.2 * slow) for number, slow in enumerate((1, 2))]
    found += [measurement("transformers bfloat16", dtype="bfloat16"), measurement("llama.cpp", dtype="quantized", prefill=4.0)]
    rows = {row["peer"]: row for row in summary.ratios(found)}
    assert set(rows) == {"transformers float32", "llama.cpp"}
    assert rows["transformers float32"]["prefill_s"] == {"median": 1.5, "min": 1.5, "max": 1.5, "n": 2}
    assert rows["transformers float32"]["decode_s"]["median"] == pytest.approx(2)
    assert rows["llama.cpp"]["prefill_s"] == {"median": 2.0, "min": 2.0, "max": 2.0, "n": 1}


def test_bounds_and_their_share_by_hand():
    rows = summary.summarize([measurement("minikv float32"), measurement("llama.cpp", dtype="quantized")], {})
    rates = Namespace(bytes_per_second=1000.0, multiply_adds_per_second={"float32": 1000.0})
    summary.add_bounds(rows, SMALL, rates, new_tokens=4, weight_bytes={"llama.cpp": 500})
    # Weights 1216 bytes (see test_roofline), cache (20 + 2 * 2) entries of 16 bytes.
    assert rows[0]["decode_bound_s"] == pytest.approx((1216 + 384) / 1000)
    assert rows[0]["decode_share_of_bound"] == pytest.approx(16)
    assert rows[0]["prefill_bound_s"] == pytest.approx((10 * 240 + 55 * 16 + 40) / 1000)
    assert rows[1]["decode_bound_s"] == pytest.approx((500 + 24 * 8) / 1000) and rows[1]["prefill_bound_s"] is None


@pytest.mark.parametrize("full, words", [(20, "hardly any gain can be expected, at most 1.00x"), (2000, ": at most 20.80x")])
def test_remarks_follow_from_the_counted_bytes(full, words):
    found = [measurement("minikv float32", kept_entries=full, decode=0.3), measurement("minikv float32", "snapkv", prefill=1.5)]
    rows = summary.summarize(found, {("minikv float32", "snapkv", 10): [0.3]})
    rates = Namespace(bytes_per_second=1.0, multiply_adds_per_second={"float32": 1.0})
    summary.add_bounds(rows, SMALL, rates, new_tokens=4, weight_bytes={"minikv float32": 1216})
    decode, prefill, busy = summary.remarks(rows)
    assert words in decode and "measured 3.00x" in decode
    assert "1.50x its time, its selection alone 20.0% of it" in prefill
    assert "Shares above 100%" in busy  # at one byte a second


def python_that(tmp_path, does):
    """An executable that takes the place of Python, and does something else with a worker's requests."""
    script = tmp_path / "python"
    script.write_text(f"#!{sys.executable}\nimport json, os, sys\n{does}\n")
    script.chmod(0o755)
    return str(script)


SETTINGS = {"kind": "transformers", "name": "transformers float32", "dtype": "float32", "methods": ["full"], "device": "cpu", "threads": 1}


def test_a_worker_that_dies_is_named_with_its_last_words(tmp_path):
    python = python_that(tmp_path, "input(); print('{\"ready\": {}}', flush=True); input(); sys.exit('out of luck')")
    participant = Participant(SETTINGS, python)
    with pytest.raises(Failed, match="its process ended with exit code 1: out of luck") as failure:
        participant.ask({"ids": [1]})
    assert failure.value.dead
    participant.close()


def test_a_package_that_is_missing_is_named(tmp_path, monkeypatch):
    (tmp_path / "transformers.py").write_text("raise ModuleNotFoundError('no', name='transformers')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(Failed, match="the package transformers is not installed"):
        Participant(SETTINGS)
    with pytest.raises(Failed, match="No such file"):
        Participant(SETTINGS, str(tmp_path / "none"))


def test_selections_are_asked_of_ours_that_are_still_there():
    class Ours(Fake):
        def ask(self, request):
            return {"selection_s": {"compresskv": [1.0] * request["selections"]}}

    run = Run([measurement("minikv float32")], [])
    participants = [Ours("minikv float32", ["compresskv"], []), Ours("minikv bfloat16", ["compresskv"], []), Fake("peer", ["full"], [])]
    assert time_selections(participants, {3: [0, 0, 0]}, 2, run) == {("minikv float32", "compresskv", 3): [1.0, 1.0]}


def test_peers_may_have_a_python_of_their_own():
    assert read_peers("transformers,kvpress=/opt/python") == {"transformers": sys.executable, "kvpress": "/opt/python"}
    assert read_peers("") == {}
    with pytest.raises(InputError, match=f"'vllm' is unknown; accepted: some of {','.join(PEERS)}"):
        read_peers("transformers,vllm")


def run_bench(*arguments, **environment):
    command = [sys.executable, "-m", "minikv.bench", "--device", "cpu", *map(str, arguments)]
    env = os.environ | {"OMP_NUM_THREADS": "1"} | environment
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300, env=env)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("tiny"))


def small(folder, *more):
    """Arguments of a short run on the tiny checkpoint."""
    where = ("--model", folder, "--profile", folder / "profile.json", "--dtypes", "float32", "--budget", 32)
    return (*where, "--heads", 2, "--repeats", 1, *more)


@pytest.mark.parametrize("new_tokens, measured", [(0, (False, False)), (1, (True, False))])
def test_what_so_few_tokens_cannot_tell_is_null(tiny, tmp_path, new_tokens, measured):
    done = run_bench(*small(tiny, "--lengths", 64, "--new-tokens", new_tokens, "--json", tmp_path / "b.json", "--plot", tmp_path / "b.png"))
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "b.json").read_text())
    assert [row["method"] for row in record["rows"]] == ["full", "compresskv"]
    for row in record["rows"]:
        assert (row["first_token_s"] is not None, row["decode_s"] is not None) == measured
        assert row["prefill_s"]["n"] == 1 and row["prefill_tokens_s"] > 0
    assert [len(found["ids"]) for found in record["measurements"]] == [new_tokens] * 2
    assert (tmp_path / "b.png").read_bytes().startswith(b"\x89PNG")


def test_the_table_leaves_a_dash_for_what_was_not_measured():
    rows = summary.summarize([measurement("minikv float32", decode=None, peak_bytes=None)], {})
    summary.add_bounds(rows, SMALL, Namespace(bytes_per_second=1.0, multiply_adds_per_second={"float32": 1e6}), 1, {})
    cells = re.split(r"\s{2,}", tables.figures(rows).splitlines()[2])
    assert cells == ["minikv float32", "full cache", "10", "1", "10", "1", "1", "-", "-", "-", "-", "0.0", "0%", "-"]


def test_the_record_counts_entries_and_bytes(tiny, tmp_path):
    done = run_bench(*small(tiny, "--lengths", 100, "64", "--new-tokens", 3, "--json", tmp_path / "b.json"))
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "b.json").read_text())
    kept = {(row["method"], row["length"]): (row["kept_entries"], row["kv_bytes"]) for row in record["rows"]}
    # 3 layers; an entry is 2 KV heads of 8 dimensions, keys and values, 4 bytes
    assert kept == {("full", 64): (192, 192 * 128), ("full", 100): (300, 300 * 128),
                    ("compresskv", 64): (96, 96 * 128), ("compresskv", 100): (96, 96 * 128)}
    assert record["machine"]["threads"] == 1 and record["rates"]["bytes_per_second"] > 1e8
    assert all(row["selection_s"]["n"] == 1 for row in record["rows"] if row["method"] == "compresskv")
    assert "Command: python -m minikv.bench --device cpu" in done.stdout and len(record["remarks"]) >= 4


def test_a_peer_that_is_missing_or_dies_is_left_out_by_name(tiny, tmp_path):
    (tmp_path / "transformers.py").write_text("raise ModuleNotFoundError('no', name='transformers')")
    dies = python_that(tmp_path, "sys.exit('out of luck')")
    arguments = small(tiny, "--lengths", 64, "--new-tokens", 2, "--json", tmp_path / "b.json", "--against", f"transformers,kvpress={dies}")
    done = run_bench(*arguments, PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stderr
    reasons = {failure["participant"]: failure["reason"] for failure in json.loads((tmp_path / "b.json").read_text())["left_out"]}
    assert reasons == {"transformers float32": "the package transformers is not installed",
                       "kvpress float32": "its process ended with exit code 1: out of luck"}
    assert "kvpress float32 is left out" in done.stderr and "left out: kvpress float32" in done.stdout


@pytest.mark.parametrize("arguments, words", [
    (("--lengths", "9000"), "9000 tokens and 32 new tokens exceed the model's context of 4096"),
    (("--methods", "magic"), "method 'magic' is unknown"),
    (("--budget", "4"), "budget 4 is too small"),
    (("--lengths", "0"), "'0' is not a whole number above 0"),
    (("--against", "vllm"), "--against 'vllm' is unknown"),
    (("--against", "llama.cpp"), "name it with --llama-gguf FILE"),
    (("--random-weights", "smollm2-135m", "--against", "llama.cpp", "--lengths", "64"), "--random-weights and --against llama.cpp cannot"),
    (("--random-weights", "llama-3.1-8b", "--lengths", "100000000"), "full cache 26214.4 GB"),
    (("--model", "nowhere"), "no model 'nowhere'"),
    (("--json", "x", "--plot", "x"), "name the same file"),
])
def test_refusals_are_one_line(tiny, tmp_path, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["bench", "--device", "cpu", *map(str, small(tiny, "--lengths", 64)), *arguments])
    with pytest.raises(InputError, match=re.escape(words)):
        bench.main()


def test_the_default_model_beside_transformers(default_folder, tmp_path):
    peers = ",".join(name for name in ("transformers",) if find_spec(name))
    arguments = ["--lengths", 64, "--repeats", 1, "--new-tokens", 6, "--budget", 32, "--methods", "full,snapkv", "--dtypes", "float32"]
    done = run_bench(*arguments, "--against", peers, "--json", tmp_path / "b.json")
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "b.json").read_text())
    full, snapkv = (row for row in record["rows"] if row["participant"] == "minikv float32")
    assert full["kv_bytes"] == 64 * 46080 and snapkv["kv_bytes"] == 32 * 46080
    if not peers:
        pytest.skip("transformers is not installed: only ours was measured")
    answers = {found["participant"]: found["ids"] for found in record["measurements"] if found["method"] == "full"}
    assert answers["minikv float32"] == answers["transformers float32"] and len(answers["minikv float32"]) == 6
    assert {ratio["peer"] for ratio in record["ratios"]} == {"transformers float32"}


def test_the_picture_shows_each_participant_once_and_the_bounds(tmp_path, monkeypatch):
    shown = []
    monkeypatch.setattr("minikv.report.bench_plot.save", lambda figure, settings, path: shown.append((figure, settings)))
    found = [measurement(f"{name} {dtype}", dtype=dtype) for dtype in ("float32", "bfloat16") for name in ("minikv", "transformers")]
    rows = summary.summarize([*found, measurement("llama.cpp", dtype="quantized")], {})
    rates = Namespace(bytes_per_second=1.0, multiply_adds_per_second={"float32": 1.0, "bfloat16": 1.0})
    summary.add_bounds(rows, SMALL, rates, 4, {})
    settings = {"model": "m", "budget": "256", "new_tokens": 4, "repeats": 1}
    record = {"rows": rows, "settings": settings, "machine": {"processor": "p", "threads": 1}, "versions": {"minikv": "v"}}
    draw(record, tmp_path / "b.png")
    figure, settings = shown[0]
    labels = {text.get_text() for text in figure.legends[0].get_texts()}
    assert labels == {"minikv, full cache", "transformers, full cache", "llama.cpp, full cache", "bound: arithmetic", "bound: memory, full cache"}
    assert len(figure.axes) == 4 and settings["processor"] == "p"
