"""SnapKV's scores against those of NVIDIA's kvpress, recorded by tests/fixtures/make_kvpress_snapkv.py."""

from pathlib import Path

import pytest
from safetensors.torch import load_file

from minikv.policy import SnapKV

RECORDED = load_file(Path(__file__).parent / "fixtures" / "kvpress_snapkv.safetensors")


@pytest.mark.parametrize("number", range(3))
def test_snapkv_scores_equal_kvpress(number):
    queries, keys, expected = (RECORDED[f"{number}.{name}"] for name in ("queries", "keys", "scores"))
    scores = SnapKV(20, window=8, kernel=5).score(0, queries, keys)
    # kvpress takes the mean over the window's 8 rows where SnapKV's own code, and minikv, take the sum.
    assert (scores / 8 - expected).abs().max() < 1e-6
    assert expected.max() > 0.02 and expected.std() > 1e-3  # the recorded attention does prefer something
