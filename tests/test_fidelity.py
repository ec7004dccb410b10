"""Fidelity: how a compressed cache's next tokens differ from the full cache's."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import minikv
from conftest import make_profile, make_prompt, make_tiny_model
from minikv.errors import InputError
from minikv.evals.fidelity import attention_errors, compare, measure, next_logits, parse_arguments
from minikv.evals.fidelity_prompts import HIDDEN, ask
from minikv.evals.tasks import load_tasks
from minikv.evals.sweep import Pair
from minikv.policy import METHODS, CompressKV, Full, SnapKV, StreamingLLM
from tiny_checkpoint import write_checkpoint

ROOT = Path(__file__).parent.parent


class NoStops:
    stop_ids = frozenset()


def test_the_measures_by_hand():
    # Two positions, three tokens. At the first both caches say 1/2, 1/4, 1/4; at the second they disagree.
    exact = torch.tensor([[0.5, 0.25, 0.25], [0.5, 0.25, 0.25]]).log()
    other = torch.tensor([[0.5, 0.25, 0.25], [0.25, 0.5, 0.25]]).log()
    found = compare(exact, other, answer=torch.tensor([2, 0, 0]), error=[0.1, 0.3], kept=0.5)
    assert found.kl == pytest.approx((0 + 0.5 * math.log(2) + 0.25 * math.log(1 / 2)) / 2)
    assert found.agreement == 0.5
    assert found.nll == pytest.approx((math.log(2) + math.log(4)) / 2)
    assert found.attention_error == pytest.approx(0.2) and found.layer_errors == [0.1, 0.3]


def test_the_full_cache_alone_is_nothing_to_compare(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["fidelity", "--methods", "full"])
    with pytest.raises(InputError, match="--methods names only full"):
        parse_arguments()


def test_two_ranks_give_the_numbers_of_one_process(tmp_path):
    folder, records = write_checkpoint(tmp_path), []
    for name, launcher in (("one", []), ("two", ["torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m"])):
        command = [sys.executable, "-m", *launcher, "minikv.evals.fidelity", "--model", folder, "--device", "cpu"]
        command += ["--methods", "snapkv", "--lengths", "300", "--prompts", "3", "--budgets", "32", "--max-new-tokens", "6"]
        command += ["--results", tmp_path / name, "--json", tmp_path / f"{name}.json"]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}  # as torchrun has it: more threads add up in another order
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True, cwd=ROOT, timeout=300, env=env)
        assert done.returncode == 0 and done.stdout.count("3 prompts.") == 1, done.stderr
        records.append(json.loads((tmp_path / f"{name}.json").read_text()))
    assert records[0]["rows"] == records[1]["rows"]
    lines = [len((tmp_path / name).read_text().splitlines()) for name in ("one", "two", "two.rank1")]
    assert lines == [4, 3, 2]  # settings, and each rank's share


def test_keeping_everything_is_perfectly_faithful_and_less_is_not():
    model = make_tiny_model()
    pairs = [Pair("full", None, Full()), Pair("snapkv", "60", SnapKV(60)), Pair("snapkv", "12", SnapKV(12))]
    pairs += [Pair("compresskv", "12", CompressKV(12, make_profile(model)))]
    found = measure(model, NoStops, make_prompt(60)[0].tolist(), pairs, 10)
    for pair in pairs[:2]:
        assert found[pair.name]["kl"] == pytest.approx(0, abs=1e-5) and found[pair.name]["agreement"] == 1
        assert found[pair.name]["attention_error"] == 0 and found[pair.name]["kept"] == 1
    for pair in pairs[2:]:
        assert found[pair.name]["kl"] > 0.01 and found[pair.name]["attention_error"] > 0.01
        assert found[pair.name]["nll"] > found["full"]["nll"] and found[pair.name]["kept"] == pytest.approx(0.2)


def test_the_answer_fed_at_once_gives_the_logits_of_decoding_it():
    model, tokens = make_tiny_model(), make_prompt(60)
    result = minikv.prefill(model, tokens)
    policy = SnapKV(20)
    answer = torch.cat(list(minikv.decode(model, minikv.compress(result, policy), result.logits, 8)))
    logits = next_logits(model, minikv.compress(result, policy), answer)
    assert torch.equal(logits.argmax(-1), answer[1:])


def test_layer_errors_start_from_the_full_caches_hidden_states():
    model, result = make_tiny_model(), minikv.prefill(make_tiny_model(), make_prompt(60))
    answer = make_prompt(5, seed=3)[0]
    both = attention_errors(model, result, [StreamingLLM(20), Full()], answer)
    assert len(both[0]) == 4 and min(both[0]) > 0 and both[1] == [0.0] * 4
    assert attention_errors(model, result, [StreamingLLM(20)], answer) == both[:1]


def test_prompts_alternate_in_kind_and_have_exactly_the_asked_length(default_model):
    _, tokenizer = default_model
    prompts = list(ask(tokenizer, [1024, 2048], 9))
    assert [kind for kind, _, _ in prompts] == ["needle", "question", "summary"] * 3
    assert [name.split()[1].rstrip(",") for _, name, _ in prompts] == ["needle", "question", "summary"] * 3
    for number, (_, _, ids) in enumerate(prompts):
        assert len(ids) == [1024, 2048, 1024][number // 3]
    assert len({tuple(ids) for _, _, ids in prompts}) == 9


def test_prompts_that_hide_several_sentences_hold_them_all(default_model):
    _, tokenizer = default_model
    for kind, _, ids in ask(tokenizer, [1024], 8, ["several", "all", "distractors", "two-hop"]):
        hidden = next(task for task in load_tasks("1", kind, HIDDEN, 0))
        assert len(ids) == 1024 and len(hidden.asked) + len(hidden.others) == (2 if kind == "two-hop" else HIDDEN)


def test_the_program_goes_on_from_its_results_and_gives_the_same_table_json_and_picture(tmp_path):
    folder = write_checkpoint(tmp_path)
    results, record, picture = tmp_path / "results.jsonl", tmp_path / "record.json", tmp_path / "picture.png"
    command = [sys.executable, "-m", "minikv.evals.fidelity", "--model", folder, "--profile", folder / "profile.json"]
    command += ["--lengths", "300", "--prompts", "6", "--budgets", "32", "25%", "--heads", "2", "--max-new-tokens", "6"]
    command += ["--results", results, "--json", record, "--plot", picture]

    def run() -> tuple[str, dict]:
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True, cwd=ROOT, timeout=300)
        assert done.returncode == 0, done.stderr
        return done.stdout, json.loads(record.read_text())

    table, first = run()
    assert first["prompts"] == 6 and picture.read_bytes().startswith(b"\x89PNG")
    assert {row["method"] for row in first["rows"]} == {*METHODS} - {"full"}
    by_pair = {(row["method"], row["budget"]): row for row in first["rows"]}
    assert by_pair["compresskv", "25%"]["kept"]["mean"] == pytest.approx(75 / 300)
    assert len(by_pair["snapkv", "32"]["layer_errors"]) == 3
    interrupted = results.read_text()[:-40]  # in the middle of the last result
    results.write_text(interrupted)
    assert run() == (table, first)
    assert results.read_text().startswith(interrupted[: interrupted.rindex("\n") + 1])
