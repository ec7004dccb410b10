"""Prefill, compression and decoding: whatever the way, the same numbers; and no prompt leaves a trace in the next."""

import pytest
import torch
import torch.nn.functional as F
from einops import repeat

import minikv
from conftest import make_policy, make_profile, make_prompt, make_tiny_model
from minikv.errors import InputError
from minikv.generate import generate
from minikv.inference import pick
from minikv.kernels import attend
from minikv.policy import METHODS, CompressKV, Full, SnapKV, StreamingLLM


def policy_named(name, model, budget=20):
    return make_policy(METHODS[name], budget, make_profile(model))


@pytest.mark.parametrize("chunk", [1, 7, 64, None])
def test_prefill_in_chunks_gives_the_same_logits_and_the_same_kept_set(chunk):
    model, tokens = make_tiny_model(), make_prompt(100)
    once, parts = minikv.prefill(model, tokens), minikv.prefill(model, tokens, chunk=chunk)
    assert (once.logits - parts.logits).abs().max() < 1e-4
    policy = CompressKV(20, make_profile(model))
    pairs = zip(minikv.compress(once, policy).layers, minikv.compress(parts, policy).layers)
    assert all(torch.equal(a.positions, b.positions) for a, b in pairs)


@pytest.mark.parametrize("name", list(METHODS))
def test_the_last_prompt_logits_are_those_of_full_attention_and_both_forms_agree(name):
    """Eviction happens after a layer has used its own keys, so the first answer token is every method's own."""
    model, tokens = make_tiny_model(), make_prompt(100)
    exact = model(tokens)[:, -1]
    policy = policy_named(name, model)
    logits, layered = minikv.prefill_layer_by_layer(model, tokens, policy)
    assert (logits - exact).abs().max() < 1e-4
    whole = minikv.compress(minikv.prefill(model, tokens, column_sums=True), policy)
    for a, b in zip(whole.layers, layered.layers):
        assert torch.equal(a.positions, b.positions) and torch.equal(a.keys, b.keys) and torch.equal(a.values, b.values)
        assert a.seen == b.seen == 100


@pytest.mark.parametrize("chunk", [3, None])
def test_a_prefill_keeps_the_rotated_queries_of_the_last_tokens(chunk):
    model, tokens = make_tiny_model(), make_prompt(40)
    queries, _, _ = model.blocks[0].project(model.embed(tokens), model.rope(0, 40))
    result = minikv.prefill(model, tokens, window=8, chunk=chunk)
    assert torch.allclose(result.queries[0], queries[:, :, 32:], atol=1e-5)
    assert torch.equal(result.last_queries(0, 3), result.queries[0][:, :, 5:])


def test_only_one_full_layer_is_alive_layer_by_layer():
    model, tokens, alive = make_tiny_model(), make_prompt(400), []
    original = type(model).new_layer_cache

    def count(self, batch, capacity):
        alive.append(capacity)
        return original(self, batch, capacity)

    type(model).new_layer_cache = count
    try:
        _, cache = minikv.prefill_layer_by_layer(model, tokens, SnapKV(20), reserve=10)
    finally:
        type(model).new_layer_cache = original
    assert alive == [400]
    assert cache.allocated_bytes == 4 * 30 * cache[0].entry_bytes


def test_new_tokens_attend_to_all_that_was_kept_and_causally_to_themselves():
    # torch's is_causal lines queries and keys up at the first, so a later chunk would see only the first keys.
    torch.manual_seed(0)
    queries, keys, values = torch.randn(1, 4, 3, 8), torch.randn(1, 2, 10, 8), torch.randn(1, 2, 10, 8)
    out = attend(queries, keys, values)
    full_keys, full_values = (repeat(x, "b kv s d -> b (kv g) s d", g=2) for x in (keys, values))
    for row, seen in enumerate((8, 9, 10)):
        expected = F.scaled_dot_product_attention(queries[:, :, row : row + 1], full_keys[:, :, :seen], full_values[:, :, :seen])
        assert torch.allclose(out[:, :, row : row + 1], expected, atol=1e-6)


def test_a_cache_without_one_entry_equals_full_attention_with_that_key_masked():
    """The unit form of wrong positions after eviction: all rows but one in the middle are kept."""
    model, tokens = make_tiny_model(layers=1), make_prompt(40)
    result = minikv.prefill(model, tokens)
    full, positions = result.cache[0], torch.tensor([i for i in range(40) if i != 17])
    cut = full.keep(repeat(positions, "kept -> 1 2 kept"), reserve=1)
    token = make_prompt(1, seed=5)
    after = model(token, minikv.inference.KVCache([cut]))[:, -1]
    # By hand: the same layer with the whole cache and a mask.
    block, x, rope = model.blocks[0], model.embed(token), model.rope(40, 1)
    queries, keys, values = block.project(x, rope)
    keys, values = torch.cat([full.keys, keys], 2), torch.cat([full.values, values], 2)
    mask = torch.arange(41) != 17
    heads = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask[None], enable_gqa=True)
    assert (model.logits(block.output(x, heads))[:, -1] - after).abs().max() < 1e-4


def test_one_process_compresses_every_prompt_and_repeats_itself():
    model = make_tiny_model()
    policy = CompressKV(32, make_profile(model))
    a, b = make_prompt(150, seed=1), make_prompt(220, seed=2)
    first, second, third = (generate(model, tokens, policy, 12) for tokens in (a, b, a))
    assert torch.equal(first, third)
    for tokens in (a, b, a):
        assert sum(minikv.prefill_layer_by_layer(model, tokens, policy)[1].kept) == 4 * 32
    assert torch.equal(second, generate(model, b, policy, 12))


@pytest.mark.parametrize("name", list(METHODS))
def test_a_budget_of_the_whole_prompt_answers_as_the_full_cache_does(name):
    model, tokens = make_tiny_model(), make_prompt(60)
    assert torch.equal(generate(model, tokens, policy_named(name, model, 60), 20), generate(model, tokens, Full(), 20))


def test_decoding_with_the_cache_equals_one_forward_pass():
    model, tokens = make_tiny_model(), make_prompt(40)
    whole = model(tokens)
    cache = model.new_cache(1, 40)
    steps = torch.cat([model(tokens[:, i : i + 1], cache) for i in range(40)], dim=1)
    assert (whole - steps).abs().max() < 1e-4


def test_decoding_reads_nothing_back_from_the_device():
    """On the meta device tensors have shapes but no values, so whatever would wait for a value raises."""
    model = make_tiny_model().to("meta")
    logits, cache = minikv.prefill_layer_by_layer(model, make_prompt(100).to("meta"), StreamingLLM(40))
    assert [token.shape for token in minikv.decode(model, cache, logits, 5)] == [(1,)] * 5
    with pytest.raises(RuntimeError, match="meta"):  # a stop id must be read: one flag a step
        next(minikv.decode(model, cache, logits, 5, frozenset({7})))


def test_a_batch_of_equal_lengths_answers_as_each_prompt_alone():
    model, tokens = make_tiny_model(), make_prompt(60, batch=2)
    policy = SnapKV(20)
    together = generate(model, tokens, policy, 10)
    assert torch.equal(together, torch.cat([generate(model, tokens[row : row + 1], policy, 10) for row in range(2)]))


def test_decoding_stops_at_any_of_the_stop_ids_and_does_not_yield_it():
    model, tokens = make_tiny_model(), make_prompt(30)
    answer = generate(model, tokens, Full(), 10)[0].tolist()
    stop = next(token for token in answer if token != answer[0])
    stopped = generate(model, tokens, Full(), 10, stop_ids=frozenset({stop, 99999}))[0].tolist()
    assert stopped == answer[: answer.index(stop)]


def test_a_finished_row_of_a_batch_is_filled_with_its_stop_id_while_the_other_goes_on():
    model, tokens = make_tiny_model(), make_prompt(30, batch=2)
    first, second = generate(model, tokens, Full(), 10).tolist()
    stop = next(token for place, token in enumerate(first) if place > 1 and token not in first[:place] + second)
    ended = first.index(stop)
    stopped = generate(model, tokens, Full(), 10, stop_ids=frozenset({stop})).tolist()
    assert stopped == [first[:ended] + [stop] * (10 - ended), second]


@pytest.mark.parametrize("new", [0, 1])
def test_no_new_tokens_or_one(new):
    assert generate(make_tiny_model(), make_prompt(30), Full(), new).shape == (1, new)


def test_sampling_follows_the_seed_and_top_p_leaves_only_likely_tokens():
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]]).expand(200, 4)

    def draw(**options):
        return pick(logits, generator=torch.Generator().manual_seed(3), **options)

    assert torch.equal(draw(temperature=1.0), draw(temperature=1.0))
    assert set(draw(temperature=1.0).tolist()) == {0, 1, 2, 3}
    assert set(draw(temperature=1.0, top_p=0.7).tolist()) == {0, 1}  # 0.64, then 0.24
    assert set(draw(temperature=1.0, top_p=0.1).tolist()) == {0}
    assert draw(temperature=0).tolist() == draw(temperature=1e-45).tolist() == [0] * 200


def test_a_prompt_and_answer_beyond_the_context_are_refused_with_both_lengths():
    model = make_tiny_model(max_positions=64)
    with pytest.raises(InputError, match="65 tokens exceed the model's context of 64"):
        minikv.prefill(model, make_prompt(65))
    with pytest.raises(InputError, match="60 tokens and 5 new tokens exceed the model's context of 64"):
        generate(model, make_prompt(60), Full(), 5)


def test_an_empty_prompt_or_tokens_of_another_shape_are_refused():
    model = make_tiny_model()
    with pytest.raises(InputError, match="empty"):
        minikv.prefill(model, make_prompt(0))
    with pytest.raises(InputError, match=r"\[batch, seq\]"):
        minikv.prefill(model, make_prompt(10)[0])


def test_a_policys_window_wider_than_the_prefills_is_refused_and_a_smaller_one_uses_the_last_queries():
    model, tokens = make_tiny_model(), make_prompt(60)
    with pytest.raises(ValueError, match="window of 16 exceeds the 8"):
        minikv.compress(minikv.prefill(model, tokens), SnapKV(20, window=16))
    wide, narrow = minikv.prefill(model, tokens, window=16), minikv.prefill(model, tokens, window=4)
    a, b = minikv.compress(wide, SnapKV(20, window=4)), minikv.compress(narrow, SnapKV(20, window=4))
    assert all(torch.equal(x.positions, y.positions) for x, y in zip(a.layers, b.layers))
