"""The offline stage: which heads are found, what eviction costs, how stable a ranking is."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from conftest import make_prompt, make_tiny_model
from copying import COPIER, NEIGHBOUR, copying_model, prompt_with_answer
from minikv import offline
from minikv.inference import compress, prefill
from minikv.policy import CompressKV, Full
from minikv.srh import Profile, rank_heads, strongest

STOP = frozenset({1})


# --- a model in which it is known which head retrieves (see copying.py) ---


def test_identification_finds_the_one_head_that_copies():
    ids, answer, distance = prompt_with_answer()
    run = offline.score_heads(copying_model(distance), ids, answer, STOP)
    assert run.answer == [ids[position] for position in answer]  # and then the stop
    assert strongest(run.semantic)[0] == COPIER
    assert strongest(run.traditional)[0] == COPIER
    # It attended to the answer with all its weight at each of three steps, and copied all three tokens.
    assert run.semantic[COPIER].item() == pytest.approx(3, abs=1e-4)
    assert run.traditional[COPIER].item() == pytest.approx(1)


def test_only_the_semantic_score_credits_a_head_that_looks_beside_the_copied_token():
    ids, answer, distance = prompt_with_answer()
    run = offline.score_heads(copying_model(distance), ids, answer, STOP)
    assert strongest(run.semantic)[1] == NEIGHBOUR
    assert run.semantic[NEIGHBOUR].item() == pytest.approx(2, abs=1e-4)  # the first of its three looks is before the answer
    assert run.traditional[NEIGHBOUR].item() == 0


def test_heads_that_look_everywhere_earn_their_even_share():
    ids, answer, distance = prompt_with_answer()
    run = offline.score_heads(copying_model(distance), ids, answer, STOP)
    even = sum(len(answer) / (len(ids) + step) for step in range(3))
    assert run.semantic[0, 0].item() == pytest.approx(even, abs=1e-5)
    assert run.traditional[0, 0].item() == 0


def test_the_stop_is_no_part_of_the_answer_and_earns_nothing():
    ids, answer, distance = prompt_with_answer()
    with_stop_in_the_answer = [*answer, answer[-1] + 1]
    run = offline.score_heads(copying_model(distance), ids, with_stop_in_the_answer, STOP)
    assert len(run.answer) == 3
    assert run.traditional[COPIER].item() == pytest.approx(3 / 4)


def test_the_longest_answer_is_kept_to():
    ids, answer, distance = prompt_with_answer()
    assert len(offline.score_heads(copying_model(distance), ids, answer, STOP, max_answer_tokens=2).answer) == 2


def test_the_first_token_is_scored_by_the_row_of_the_last_prompt_token():
    """An answer of one token has one row. It is compared with full attention over the prompt, by the textbook."""
    model = make_tiny_model()
    prompts = (make_prompt(40, seed=seed) for seed in range(100))
    prompt, token = next((p, t) for p in prompts if (t := model(p)[0, -1].argmax().item()) in p[0, 1:-1].tolist())
    place = prompt[0, 1:].tolist().index(token) + 1
    span = [place - 1, place, place + 1]
    run = offline.score_heads(model, prompt[0].tolist(), span, frozenset(), max_answer_tokens=1)
    assert run.answer == [token]
    expected = attention_of_last(model, prompt)[:, :, span].sum(-1)
    torch.testing.assert_close(run.semantic, expected, atol=1e-5, rtol=1e-4)


def attention_of_last(model, tokens) -> torch.Tensor:
    """The attention rows [layers, heads, seq] of the last token, by the textbook."""
    x, rope, rows = model.embed(tokens), model.rope(0, tokens.shape[1]), []
    for block in model.blocks:
        queries, keys, values = block.project(x, rope)
        group = model.config.group
        keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
        logits = queries @ keys.transpose(2, 3) / model.config.head_dim**0.5
        causal = torch.ones(logits.shape[2:], dtype=torch.bool).tril()
        weights = logits.masked_fill(~causal, float("-inf")).softmax(-1)
        rows.append(weights[0, :, -1])
        x = block.output(x, weights @ values)
    return torch.stack(rows)


# --- layer errors ---


def layer_errors_by_hand(model, ids, ranks, steps):
    """Section 3.3 of the paper, written down a second time: sums over the steps after the first token."""
    layers = model.config.layers
    result = prefill(model, torch.tensor([ids]), window=8)
    full = compress(result, Full())
    cut = compress(result, CompressKV(32, Profile(ranks, [1 / layers] * layers)))
    token, sums = result.logits.argmax(-1), torch.zeros(layers, dtype=torch.float64)
    for _ in range(steps):
        x, rope = model.embed(token[None]), model.rope(full.length, 1)
        for layer, block in enumerate(model.blocks):
            queries, keys, values = block.project(x, rope)
            outputs = []
            for cache in (full, cut):
                all_keys, all_values = cache[layer].append(keys, values)
                group = model.config.group
                k, v = all_keys.repeat_interleave(group, 1), all_values.repeat_interleave(group, 1)
                heads = (queries @ k.transpose(2, 3) / model.config.head_dim**0.5).softmax(-1) @ v
                outputs.append((block.self_attn.output(heads), heads))
            (exact, heads), (approximate, _) = outputs
            sums[layer] += ((approximate - exact).norm() / (exact.norm() + 1e-5)).item()
            x = block.output(x, heads)
        token = model.logits(x)[:, -1].argmax(-1)
    return sums


def test_layer_errors_are_the_papers_formula():
    model = make_tiny_model()
    ids, ranks = make_prompt(120)[0].tolist(), [[5, 4, 3, 2, 1, 0]] * 4
    errors = offline.layer_errors(model, ids, ranks, frozenset(), max_answer_tokens=4)
    torch.testing.assert_close(errors, layer_errors_by_hand(model, ids, ranks, steps=3), atol=1e-4, rtol=1e-4)
    assert (errors > 0).all()


def test_nothing_is_lost_where_nothing_is_evicted():
    model = make_tiny_model()
    errors = offline.layer_errors(model, make_prompt(30)[0].tolist(), [[0, 1, 2, 3, 4, 5]] * 4, frozenset(), 4)
    assert errors.tolist() == [0, 0, 0, 0]


def test_data_sets_count_alike_however_large_their_errors():
    small, large = torch.tensor([1.0, 3.0]), torch.tensor([5000.0, 5000.0])
    assert offline.layer_scores([small, large]) == pytest.approx([(0.25 + 0.5) / 2, (0.75 + 0.5) / 2])


# --- long prompts, threads ---


class LargestTensor(TorchDispatchMode):
    """Notes the most elements that any tensor has that is made meanwhile."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for value in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(value, torch.Tensor):
                self.elements = max(self.elements, value.numel())
        return result


def test_no_attention_matrix_of_the_whole_prompt_is_made():
    model, length = make_tiny_model(), 1024
    ids = make_prompt(length)[0].tolist()
    with LargestTensor() as largest:
        offline.score_heads(model, ids, [3, 4], frozenset(), max_answer_tokens=2)
        offline.layer_errors(model, ids, [[0, 1, 2, 3, 4, 5]] * 4, frozenset(), max_answer_tokens=2)
    assert 0 < largest.elements < length * length / 4


def test_the_number_of_threads_does_not_change_the_ranking():
    model, ids = make_tiny_model(), make_prompt(400)[0].tolist()
    span, rankings, before = list(range(100, 200)), [], torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            run = offline.score_heads(model, ids, span, frozenset(), max_answer_tokens=12)
            assert (run.semantic > 0).all()
            rankings.append((rank_heads(run.semantic), strongest(run.semantic)))
    finally:
        torch.set_num_threads(before)
    assert rankings[0] == rankings[1]


# --- stability ---


def test_halves_keep_the_runs_of_a_needle_together():
    needles = ["a", "b", "c", "d"] * 3
    first, second = offline.halves(needles, seed=0)
    assert sorted(first + second) == list(range(12))
    assert len(first) == len(second) == 6
    assert not {needles[run] for run in first} & {needles[run] for run in second}


def test_halves_are_those_of_their_seed():
    needles = [f"needle {number}" for number in range(20)]
    assert offline.halves(needles, 3) == offline.halves(needles, 3)
    assert offline.halves(needles, 3) != offline.halves(needles, 4)


def test_rank_correlation_is_spearmans():
    first = torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert offline.rank_correlation(first, torch.tensor([10.0, 20.0, 30.0, 400.0])) == pytest.approx(1)
    assert offline.rank_correlation(first, -first) == pytest.approx(-1)
    assert offline.rank_correlation(first, torch.tensor([2.0, 1.0, 3.0, 4.0])) == pytest.approx(0.8)  # 1 - 6 * 2 / 60
    # equal values share the mean of their ranks: 1, 2.5, 2.5, 4 against 1, 2, 3, 4
    assert offline.rank_correlation(first, torch.tensor([0.0, 5.0, 5.0, 9.0])) == pytest.approx(4.5 / (4.5 * 5) ** 0.5)
    assert offline.rank_correlation(first, torch.ones(4)) is None


def test_overlap_of_the_top_heads_leaves_out_layers_without_a_ranking():
    first = torch.tensor([[4.0, 3.0, 2.0, 1.0], [1.0, 0.0, 0.0, 0.0]])
    second = torch.tensor([[4.0, 1.0, 2.0, 3.0], [1.0, 0.0, 0.0, 0.0]])
    assert offline.top_overlap(first, second, count=2) == pytest.approx(0.5)
    assert offline.top_overlap(first[1:], second[1:], count=2) is None
    assert offline.top_overlap(first[:1], second[:1]) == 1  # 4 of 4 heads


def test_stability_tells_signal_from_chance():
    generator = torch.Generator().manual_seed(0)
    noise = torch.rand(24, 6, 12, generator=generator)
    signal = torch.arange(72.0).reshape(6, 12)[None] + noise
    needles = [f"needle {run % 6}" for run in range(24)]
    assert offline.stability(signal, needles, 0) == {"runs": [12, 12], "spearman": pytest.approx(1), "top4_overlap": 1}
    chance = offline.stability(noise, needles, 0)
    assert abs(chance["spearman"]) < 0.35 and chance["top4_overlap"] < 0.6
    assert offline.stability(signal[:1], needles[:1], 0) == {}
