"""The methods: which positions each keeps. Oracle cases, hand-made cases, and properties over random shapes."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

import minikv
from conftest import make_policy, make_profile, make_prompt, make_tiny_model
from minikv.budget import PromptShape, Share
from minikv.errors import InputError
from minikv.policy import H2O, METHODS, TOVA, Cake, CompressKV, Full, PyramidKV, SnapKV, StreamingLLM

FIXTURES = Path(__file__).parent / "fixtures"
CASES = json.loads((FIXTURES / "select_expected.json").read_text())
TENSORS = load_file(FIXTURES / "select_inputs.safetensors")


def compressing_methods():
    return [method for method in METHODS.values() if method is not Full]


@pytest.mark.parametrize("number", range(len(CASES)))
def test_kept_positions_equal_the_oracle(number):
    case = CASES[number]
    queries, keys = TENSORS[f"{number}.q_window"][None], TENSORS[f"{number}.k"][None]
    profile = minikv.Profile([case["srh_rank"]] * case["layers"], [1 / case["layers"]] * case["layers"])
    options = {"window": case["window"], "kernel": case["kernel"]}
    compresskv = CompressKV(case["budget"], profile, heads=case["top_k"], **options)
    for kept in compresskv.select(0, queries, keys, case["budget"])[0].tolist():
        assert kept == case["compresskv_kept"]
    snapkv = SnapKV(case["budget"], **options).select(0, queries, keys, case["budget"])
    assert snapkv[0].tolist() == case["snapkv_kept_per_kv_head"]


@pytest.mark.parametrize("number", range(len(CASES)))
def test_pyramid_schedule_equals_the_release_and_its_overspending_is_taken_back(number):
    case = CASES[number]
    schedule = minikv.budget.pyramid(case["budget"], case["layers"], case["length"], case["window"])
    assert schedule == case["pyramidkv_layer_lengths"]
    budgets = PyramidKV(case["budget"], case["window"]).budgets(PromptShape(case["layers"], case["length"], 1))
    assert sum(budgets) == case["budget"] * case["layers"] <= sum(schedule)
    assert budgets == sorted(budgets, reverse=True)


def test_pyramids_surplus_is_taken_from_the_largest_layers():
    # 24 chosen entries on average: 1 to 47 in steps of 15, and 8 of the window. 55 + 40 + 25 + 10 is 2 over 4 * 32.
    assert minikv.budget.pyramid(32, layers=4, seq=150, window=8) == [55, 40, 25, 10]
    assert PyramidKV(32).budgets(PromptShape(4, 150, 1)) == [54, 39, 25, 10]


def test_streamingllm_keeps_the_sinks_and_the_latest():
    keys = torch.zeros(1, 1, 20, 4)
    assert StreamingLLM(7).select(0, torch.zeros(1, 1, 0, 4), keys, 7)[0, 0].tolist() == [0, 1, 2, 3, 17, 18, 19]


def test_a_vote_counts_only_for_retrieval_heads():
    # Four heads of two groups, each looking at one position before a window of one: head h at position 2 + 2 h.
    keys, queries = torch.zeros(1, 2, 12, 4), torch.zeros(1, 4, 1, 4)
    for head in range(4):
        keys[0, head // 2, 2 + 2 * head, head] = queries[0, head, 0, head] = 10
    profile = minikv.Profile([[3, 2, 1, 0]], [1.0])
    strongest = CompressKV(2, profile, window=1, kernel=1, heads=1).select(0, queries, keys, 2)
    assert strongest[0].tolist() == [[8, 11], [8, 11]]  # head 3 alone, for both KV heads
    own_group = CompressKV(3, profile, window=1, kernel=1, heads=2).select(0, queries, keys, 3)
    assert own_group[0].tolist() == [[6, 8, 11]] * 2  # heads 3 and 2, both of KV head 1
    snapkv = SnapKV(3, window=1, kernel=1).select(0, queries, keys, 3)
    assert snapkv[0].tolist() == [[2, 4, 11], [6, 8, 11]]  # each KV head what its own two heads saw


def test_compresskv_with_traditional_heads_ranks_by_the_other_score():
    profile = minikv.Profile([[0, 1]], [1.0], traditional_scores=[[0.1, 0.9]])
    keys, queries = torch.zeros(1, 1, 6, 4), torch.zeros(1, 2, 1, 4)
    keys[0, 0, 1, 0] = queries[0, 0, 0, 0] = keys[0, 0, 3, 1] = queries[0, 1, 0, 1] = 10
    semantic = CompressKV(2, profile, window=1, kernel=1, heads=1)
    assert semantic.select(0, queries, keys, 2)[0, 0].tolist() == [1, 5]
    traditional = CompressKV(2, profile, window=1, kernel=1, heads=1, traditional=True)
    assert traditional.select(0, queries, keys, 2)[0, 0].tolist() == [3, 5]
    with pytest.raises(InputError, match="traditional_scores"):
        CompressKV(2, minikv.Profile([[0, 1]], [1.0]), 1, 1, 1, traditional=True).select(0, queries, keys, 2)


def test_cake_prefers_entries_whose_attention_shifts():
    # Positions 0 and 1 + 3 get the same attention over the window's two rows; that of 1 and of 3 changes between them.
    rows = torch.tensor([[0.5, 0.5, 0.0, 0.0, 0.0], [0.5, 0.0, 0.0, 0.5, 0.0]])
    queries = torch.cat([rows.clamp(min=1e-9).log(), torch.ones(2, 1)], dim=1)[None, None]
    keys = torch.zeros(1, 1, 7, 6)
    keys[0, 0, :5, :5] = torch.eye(5) * 6**0.5  # so that the attention to position i is rows[:, i]
    keys[0, 0, 5:, 5] = -30 * 6**0.5  # and none of it goes to the window
    assert Cake(4, window=2, kernel=1, gamma=200).select(0, queries, keys, 4)[0, 0].tolist() == [1, 3, 5, 6]
    assert Cake(3, window=2, kernel=1, gamma=0).select(0, queries, keys, 3)[0, 0].tolist() == [0, 5, 6]


class CakeWithPreferences(Cake):
    def preference(self, layer, prefill):
        return [6, 1, 6, 1][layer]


def test_cake_budgets_cascade_so_what_was_evicted_does_not_come_back():
    # 128 entries, shared among the layers done so far: 128 | 110, 18 | 60, 9, 59 | 55, 10, 54, 9. The third stage has
    # left layer 1 only 9, so the 10 of the last one are not to be had; 8 of the window come on top.
    result = minikv.prefill(make_tiny_model(), make_prompt(200))
    assert CakeWithPreferences(40).budgets(result) == [55 + 8, 9 + 8, 54 + 8, 9 + 8]
    assert minikv.compress(result, CakeWithPreferences(40)).kept == [63, 17, 62, 17]


def test_cake_spends_at_most_the_total():
    result = minikv.prefill(make_tiny_model(), make_prompt(200))
    budgets = Cake(40).budgets(result)
    assert sum(budgets) <= 40 * 4 and all(8 <= entries <= 200 for entries in budgets)
    assert len(set(budgets)) > 1  # the layers of this model differ


def test_tova_keeps_what_the_last_token_sees():
    keys, queries = torch.zeros(1, 1, 6, 4), torch.zeros(1, 2, 1, 4)
    keys[0, 0, 2, 0] = queries[0, 0, 0, 0] = queries[0, 1, 0, 0] = 10
    assert TOVA(2).select(0, queries, keys, 2)[0, 0].tolist() == [2, 5]


def test_h2o_halves_its_budget_between_heavy_hitters_and_the_latest():
    keys, queries = torch.zeros(1, 1, 10, 4), torch.zeros(1, 1, 10, 4)
    keys[0, 0, 3, 0] = 10
    queries[0, 0, :, 0] = 10  # every query from position 3 on looks at position 3
    assert H2O(4).select(0, queries, keys, 4)[0, 0].tolist() == [0, 3, 8, 9]  # row 0 sees nothing but itself


def test_h2o_from_column_sums_equals_h2o_from_queries():
    model, tokens = make_tiny_model(), make_prompt(90)
    _, layered = minikv.prefill_layer_by_layer(model, tokens, H2O(20))
    for chunk in (None, 32):
        whole = minikv.compress(minikv.prefill(model, tokens, chunk=chunk, column_sums=True), H2O(20))
        assert all(torch.equal(a.positions, b.positions) for a, b in zip(whole.layers, layered.layers))
    with pytest.raises(InputError, match="column_sums"):
        minikv.compress(minikv.prefill(model, tokens), H2O(20))


def test_a_short_prompt_does_not_change_what_a_later_long_one_gets():
    # The release computes PyramidKV's schedule once, from the first prompt; a short one turns the pyramid over.
    policy = PyramidKV(64)
    alone = policy.budgets(PromptShape(30, 2000, 1))
    policy.budgets(PromptShape(30, 70, 1))
    assert policy.budgets(PromptShape(30, 2000, 1)) == alone
    assert alone[0] > alone[-1]


@pytest.mark.parametrize("layers", [1, 2, 30])
@pytest.mark.parametrize("length", [70, 130, 200, 600])
@pytest.mark.parametrize("beta", [1, 2, 5, 20])
def test_layer_schedules_stay_in_bounds_and_spend_the_total(layers, length, beta):
    shape = PromptShape(layers, length, 1)
    one_at_one = minikv.Profile([[0]] * layers, [0.0] * (layers - 1) + [1.0])
    for policy in (PyramidKV(128, beta=beta), CompressKV(128, one_at_one, heads=1)):
        budgets = policy.budgets(shape)
        assert sum(budgets) == layers * min(128, length)
        assert all(8 <= entries <= length for entries in budgets)


@pytest.mark.parametrize("name", list(METHODS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_window_survives_ties(name, dtype):
    """One token repeated 600 times, and queries that cannot tell positions apart."""
    model = make_tiny_model().to(dtype)
    for block in model.blocks:
        block.self_attn.q_proj.weight.zero_()
    result = minikv.prefill(model, torch.full((1, 600), 7), column_sums=True)
    if name == "full":
        return
    policy = make_policy(METHODS[name], 64, make_profile(model))
    first, second = minikv.compress(result, policy), minikv.compress(result, policy)
    always = policy.window or 4
    for a, b in zip(first.layers, second.layers):
        assert torch.equal(a.positions, b.positions)
        assert a.positions[0, 0, -always:].tolist() == list(range(600 - always, 600))


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_selection_properties(data):
    """Positions are unique, ascending and in range, the window is kept, and exactly as many as the budget says."""
    kv_heads, group = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4))
    layers, batch = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 2))
    window, kernel = data.draw(st.integers(1, 6)), data.draw(st.sampled_from([1, 3, 7]))
    length = data.draw(st.integers(window + 1, 60))
    budget = data.draw(st.integers(window + 1, 70))
    model = make_tiny_model(layers, kv_heads * group, kv_heads, seed=data.draw(st.integers(0, 99)))
    profile = make_profile(model)
    options = {"window": window, "kernel": kernel}
    voters = data.draw(st.integers(1, kv_heads * group))
    policies = [SnapKV(budget, **options), PyramidKV(budget, **options), CompressKV(budget, profile, heads=voters, **options)]
    policies += [TOVA(budget), H2O(budget)] + ([Cake(budget, **options)] if batch == 1 and window > 1 else [])
    policies += [StreamingLLM(budget, sinks=min(4, budget - 1)), SnapKV(budget, **options, layer_scores=profile.layer_scores)]
    result = minikv.prefill(model, make_prompt(length, batch), window=window, column_sums=True)
    for policy in policies:
        budgets = policy.budgets(result)
        if isinstance(policy, Cake):
            assert sum(budgets) <= layers * min(budget, length) or budgets == [length] * layers
        else:
            assert sum(budgets) == layers * min(budget, length)
        cache = minikv.compress(result, policy)
        assert cache.kept == budgets
        for layer in cache.layers:
            steps = layer.positions.diff(dim=-1)
            assert (steps > 0).all() and layer.positions.min() >= 0 and layer.positions.max() == length - 1
            if policy.window:
                kept = layer.positions[..., -policy.window :]
                assert (kept == torch.arange(length - policy.window, length)).all()


@pytest.mark.parametrize("method", compressing_methods())
def test_a_budget_that_covers_the_prompt_keeps_everything(method):
    model = make_tiny_model()
    result = minikv.prefill(model, make_prompt(50), column_sums=True)
    for budget in (50, 1000, Share(1.0)):
        cache = minikv.compress(result, make_policy(method, budget, make_profile(model)))
        assert cache.kept == [50] * 4
        assert all((layer.positions == torch.arange(50)).all() for layer in cache.layers)


@pytest.mark.parametrize("method", [SnapKV, PyramidKV, H2O])
def test_permuting_the_kv_heads_permutes_what_is_kept(method):
    torch.manual_seed(1)
    queries, keys = torch.randn(1, 6, 8, 16), torch.randn(1, 3, 80, 16)
    if method is H2O:
        queries = torch.randn(1, 6, 80, 16)
    order, query_order = [2, 0, 1], [4, 5, 0, 1, 2, 3]
    kept = method(20).select(0, queries, keys, 20)
    assert torch.equal(method(20).select(0, queries[:, query_order], keys[:, order], 20), kept[:, order])


@pytest.mark.parametrize("method", [method for method in compressing_methods() if method is not Cake])
def test_a_batch_keeps_what_each_prompt_keeps_alone(method):
    model, tokens = make_tiny_model(), make_prompt(70, batch=2)
    policy = make_policy(method, 20, make_profile(model))
    together = minikv.compress(minikv.prefill(model, tokens, column_sums=True), policy)
    for row in range(2):
        alone = minikv.compress(minikv.prefill(model, tokens[row : row + 1], column_sums=True), policy)
        assert all(torch.equal(a.positions[row], b.positions[0]) for a, b in zip(together.layers, alone.layers))


def test_cake_refuses_a_batch_because_its_budgets_follow_the_prompt():
    with pytest.raises(InputError, match="one prompt at a time"):
        minikv.compress(minikv.prefill(make_tiny_model(), make_prompt(70, batch=2)), Cake(20))


@pytest.mark.parametrize("method", compressing_methods())
def test_degenerate_shapes(method):
    """A prompt one longer than the window, a budget of one more, one layer, one head, groups of one."""
    for layers, heads, kv_heads in ((1, 1, 1), (2, 4, 4)):
        model = make_tiny_model(layers, heads, kv_heads)
        profile = make_profile(model)
        options = {"heads": 1} if method is CompressKV else {}
        for length, kept in ((9, 9), (10, 9)):
            result = minikv.prefill(model, make_prompt(length), column_sums=True)
            cache = minikv.compress(result, make_policy(method, 9, profile, **options))
            if method is not Cake:  # it evicts nothing from a prompt of at most budget + window tokens
                assert sum(cache.kept) == kept * layers


@pytest.mark.parametrize("method", [method for method in compressing_methods() if method is not StreamingLLM])
def test_nan_scores_are_refused_with_the_layer(method):
    model = make_tiny_model()
    model.blocks[2].self_attn.k_proj.weight.fill_(float("nan"))
    result = minikv.prefill(model, make_prompt(50), column_sums=True)
    with pytest.raises(ValueError, match="layer 2"):
        minikv.compress(result, make_policy(method, 20, make_profile(model)))


@pytest.mark.parametrize("build", [lambda p: SnapKV(8), lambda p: CompressKV(8, p), lambda p: StreamingLLM(4), lambda p: TOVA(1)])
def test_a_budget_not_above_what_is_always_kept_is_refused(build):
    model = make_tiny_model()
    with pytest.raises(InputError, match="too small"):
        build(make_profile(model)).budgets(PromptShape(4, 100, 1))


@pytest.mark.parametrize("build", [lambda p: SnapKV(20, window=0), lambda p: SnapKV(20, kernel=4), lambda p: CompressKV(20, p, heads=7),
                                   lambda p: PyramidKV(20, beta=0), lambda p: Cake(20, tau1=0), lambda p: Cake(20, window=1), lambda p: StreamingLLM(20, sinks=-1)])  # fmt: skip
def test_impossible_hyperparameters_are_refused(build):
    with pytest.raises(InputError, match="accepted|at least"):
        build(make_profile(make_tiny_model()))


@pytest.mark.parametrize("window, budget", [(64, 70), (48, 72), (40, 60), (31, 40)])
def test_a_wide_window_is_within_the_budget_of_every_layer(window, budget):
    model = make_tiny_model()
    result = minikv.prefill(model, make_prompt(300), window=window)
    lopsided = minikv.Profile(make_profile(model).head_ranks, [0.0, 0.0, 0.1, 0.9])
    for policy in (CompressKV(budget, lopsided, window), SnapKV(budget, window, layer_scores=lopsided.layer_scores)):
        cache = minikv.compress(result, policy)
        assert cache.kept == policy.budgets(result) and sum(cache.kept) == 4 * budget and min(cache.kept) == window + 1


class EveryThird(StreamingLLM):
    """A method of one's own, with a mistake in it: it does not keep to its budget."""

    def select(self, layer, queries, keys, budget):
        return minikv.scores.all_positions(keys)[..., ::3]


def test_a_policy_that_does_not_keep_to_its_budget_is_refused():
    model, tokens = make_tiny_model(), make_prompt(60)
    with pytest.raises(ValueError, match="layer 0: the policy chose 20 positions for a budget of 12"):
        minikv.compress(minikv.prefill(model, tokens), EveryThird(12))
    with pytest.raises(ValueError, match="layer 0: the policy chose 20 positions"):
        minikv.prefill_layer_by_layer(model, tokens, EveryThird(12))
    assert minikv.compress(minikv.prefill(model, tokens), EveryThird(20)).kept == [20] * 4


@pytest.mark.parametrize("budget", ["12%", 64.5, 0.12, None])
def test_a_budget_of_another_type_is_refused_with_what_is_accepted(budget):
    with pytest.raises(InputError, match=r"accepted: entries such as 256, Share\(0.03\)"):
        SnapKV(budget).budgets(PromptShape(4, 100, 1))


def test_a_budget_below_the_window_is_refused_where_positions_are_chosen():
    with pytest.raises(InputError, match="layer 3: a budget of 7 entries cannot hold the window of 8"):
        minikv.scores.keep_best_and_window(torch.ones(1, 1, 20), budget=7, window=8, layer=3)


def test_a_profile_of_another_shape_is_refused():
    result = minikv.prefill(make_tiny_model(), make_prompt(50))
    with pytest.raises(InputError, match="for 3 layers, the model has 4"):
        minikv.compress(result, CompressKV(20, make_profile(make_tiny_model(layers=3))))
    with pytest.raises(InputError, match="for 4 query heads a layer, the model has 6"):
        minikv.compress(result, CompressKV(20, make_profile(make_tiny_model(heads=4))))


def test_the_ablation_of_the_paper_is_a_few_lines():
    model = make_tiny_model()
    profile = make_profile(model)
    result = minikv.prefill(model, make_prompt(100))
    steps = [SnapKV(20), CompressKV(20, profile, layer_budgets=False), CompressKV(20, profile)]
    assert [minikv.compress(result, step).kept for step in steps][:2] == [[20] * 4] * 2
    assert sum(minikv.compress(result, steps[2]).kept) == 80 != 4 * minikv.compress(result, steps[2]).kept[0]
