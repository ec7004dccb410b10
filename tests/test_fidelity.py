"""Fidelity: how a compressed cache's next tokens differ from the full cache's."""

import math

import pytest
import torch

import minikv
from conftest import make_profile, make_prompt, make_tiny_model
from minikv.evals.fidelity import attention_errors, compare, measure, next_logits
from minikv.evals.fidelity_prompts import ask
from minikv.evals.sweep import Pair
from minikv.policy import CompressKV, Full, SnapKV, StreamingLLM


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
    assert found.attention_error == pytest.approx(0.2)


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
    logits = next_logits(model, result, policy, answer)
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
    assert [key.split()[1].rstrip(",") for key, _ in prompts] == ["needle", "question", "summary"] * 3
    for number, (_, ids) in enumerate(prompts):
        assert len(ids) == [1024, 2048, 1024][number // 3]
    assert len({tuple(ids) for _, ids in prompts}) == 9
