"""The fast kernels against the plain ones: the same numbers up to rounding, on every shape."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import minikv
from conftest import make_policy, make_profile, make_prompt, make_tiny_model
from minikv import kernels
from minikv.inference import decode, prefill_layer_by_layer
from minikv.kernels import PLAIN, Kernels, attend, attend_by_rows, attend_grouped, widened
from minikv.model import ROWS
from minikv.policy import METHODS
from minikv.srh import fingerprint

FORMS = {
    "grouped decode": Kernels(fast=True),
    "prefill by rows": Kernels(fast=True, attend_prompt=attend_by_rows),
    "packed weights": Kernels(packed=True, fast=True),
    "float32 products": Kernels(widened=True, attend_prompt=widened(attend), fast=True),
    "everything": Kernels(packed=True, widened=True, attend_prompt=widened(attend_by_rows), fast=True),
}


def make_inputs(batch, kv_heads, group, new, kept, dim=8, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = (kv_heads * group, new), (kv_heads, kept + new), (kv_heads, kept + new)
    return [torch.randn(batch, heads, count, dim, generator=generator) for heads, count in shapes]


def test_the_heads_of_a_group_read_their_own_kv_head():
    """Two KV heads that hold one token each: every query head returns the value of its own, whatever it asks."""
    queries, keys = torch.randn(1, 4, 1, 2), torch.ones(1, 2, 1, 2)
    values = torch.tensor([[[[1.0, 2.0]], [[3.0, 4.0]]]])
    expected = [[1, 2], [1, 2], [3, 4], [3, 4]]
    for form in (attend, attend_grouped, attend_by_rows):
        assert form(queries, keys, values)[0, :, 0].tolist() == expected


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 2), st.integers(1, 3), st.integers(1, 4), st.integers(1, 300), st.integers(0, 200))
def test_attention_by_rows_is_plain_attention(batch, kv_heads, group, new, kept):
    inputs = make_inputs(batch, kv_heads, group, new, kept)
    torch.testing.assert_close(attend_by_rows(*inputs), attend(*inputs), atol=1e-5, rtol=0)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 4), st.integers(0, 300))
def test_grouped_decode_attention_is_plain_attention(batch, kv_heads, group, kept):
    inputs = make_inputs(batch, kv_heads, group, 1, kept)
    torch.testing.assert_close(attend_grouped(*inputs), attend(*inputs), atol=1e-5, rtol=0)


def test_fast_attention_reads_a_cache_with_room_left():
    """Buffers are longer than what is kept, so keys and values come as slices that are not contiguous."""
    cache = minikv.cache.LayerCache(1, 2, 8, 100, torch.float32, torch.device("cpu"))
    queries, keys, values = make_inputs(1, 2, 3, 40, 0)
    held = cache.append(keys, values)
    for new in (1, 7, 40):
        part = queries[:, :, -new:]
        expected = attend(part, keys, values)
        for form in FORMS.values():
            torch.testing.assert_close(form.attend(part, *held), expected, atol=1e-5, rtol=0)


def test_bfloat16_attention_in_float32_is_closer_to_the_truth_than_in_bfloat16():
    inputs = make_inputs(1, 2, 3, 200, 0, dim=64)
    exact, rounded = attend(*inputs), [tensor.bfloat16() for tensor in inputs]
    wide = widened(attend)(*rounded)
    assert wide.dtype == torch.bfloat16
    assert (wide.float() - exact).abs().max() < 0.02


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 63, 64, 200])
def test_linears_of_every_form_agree(dtype, rows):
    x, weight, bias = torch.randn(1, rows, 48), torch.randn(96, 48), torch.randn(96)
    x, weight, bias = x.to(dtype), weight.to(dtype), bias.to(dtype)
    expected = F.linear(x, weight, bias)
    tolerance = 1e-4 if dtype == torch.float32 else 0.2  # one step of bfloat16 at 16 to 32 is 0.125
    for form in FORMS.values():
        found = form.linear(x, kernels.pack(weight) if form.packed else weight, bias)
        assert found.dtype == dtype
        torch.testing.assert_close(found, expected, atol=tolerance, rtol=0)


def test_a_packed_weight_can_be_read_back_exactly():
    weight = torch.randn(96, 48)
    packed = kernels.pack(weight)
    assert packed.is_mkldnn and torch.equal(kernels.dense(packed), weight)


def test_a_packed_model_has_the_state_and_the_hash_of_the_plain_one():
    plain, packed = make_tiny_model(), make_tiny_model()
    packed.use(FORMS["everything"])
    assert all(torch.equal(tensor, packed.state_dict()[name]) for name, tensor in plain.state_dict().items())
    assert fingerprint(packed) == fingerprint(plain)


@pytest.mark.parametrize("form", FORMS)
def test_logits_of_the_fast_forms_are_the_plain_ones(form):
    model, tokens = make_tiny_model(), make_prompt(300, batch=2)
    expected = model(tokens)
    model.use(FORMS[form])
    torch.testing.assert_close(model(tokens), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_every_method_keeps_and_answers_the_same_with_fast_kernels(method):
    model, tokens = make_tiny_model(), make_prompt(300)
    policy = make_policy(method, 40, make_profile(model))
    answers = []
    for form in (PLAIN, FORMS["prefill by rows"], FORMS["packed weights"]):
        model = make_tiny_model()
        model.use(form)
        logits, cache = prefill_layer_by_layer(model, tokens, policy)
        kept = [layer.positions.tolist() for layer in cache.layers]
        answers.append((kept, torch.stack(list(decode(model, cache, logits, 12))).tolist()))
    assert answers[0] == answers[1] == answers[2]


def test_a_layer_projects_and_puts_out_long_prompts_in_parts_with_the_same_result():
    block, model = make_tiny_model().blocks[0], make_tiny_model()
    x, rope = torch.randn(1, ROWS + 100, 48), model.rope(0, ROWS + 100)
    queries, keys, values = block.project(x, rope)
    whole = block.self_attn.project(block.input_layernorm(x), rope)
    for part, expected in zip((queries, keys, values), whole, strict=True):
        torch.testing.assert_close(part, expected, atol=1e-5, rtol=0)
    heads = torch.randn_like(queries)
    torch.testing.assert_close(block.output(x, heads), block._output(x, heads), atol=1e-5, rtol=0)


def test_what_is_not_a_cpu_stays_plain():
    weight = torch.empty(96, 48, device="meta")
    assert kernels.choose([weight], 6, 2, 8) == PLAIN


def test_weights_are_not_packed_where_torch_cannot(monkeypatch):
    def refuse(weight):
        raise NotImplementedError("no such operator here")

    monkeypatch.setattr(kernels, "pack", refuse)
    assert not kernels.choose([torch.randn(96, 48)], 6, 2, 8).packed


def test_a_form_is_taken_only_where_it_is_clearly_faster(monkeypatch):
    """Each form is timed in turn; where all take as long, the plain ones stay."""
    monkeypatch.setattr(kernels, "_seconds", lambda work: 1.0)
    chosen = kernels.choose([torch.randn(96, 48).bfloat16()], 6, 2, 8)
    assert (chosen.packed, chosen.widened, chosen.attend_prompt) == (False, False, attend)


@pytest.mark.parametrize("dtype, tolerance", [("float32", 1e-4), ("bfloat16", 1.5)])
def test_the_default_models_logits_are_those_of_the_plain_kernels(default_folder, dtype, tolerance):
    plain, tokenizer = minikv.load(default_folder, "cpu", dtype, plain=True)
    fast, _ = minikv.load(default_folder, "cpu", dtype)
    assert plain.blocks[0].mlp.gate_proj.kernels is PLAIN and fast.blocks[0].mlp.gate_proj.kernels.fast
    prompt = torch.tensor([tokenizer.encode("The tower clock was repaired by Ingrid Halloran. " * 40)])
    expected = plain(prompt)[:, -1].float()
    for form in (fast.blocks[0].mlp.gate_proj.kernels, *FORMS.values()):
        fast = minikv.load(default_folder, "cpu", dtype, plain=True)[0]
        fast.use(form)
        found = fast(prompt)[:, -1].float()
        assert (found - expected).abs().max() < tolerance
        assert (found.argmax(-1) == expected.argmax(-1)).all()
