"""Bootstrap intervals over groups of values that depend on each other."""

from __future__ import annotations

import pytest
import torch

from minikv.evals.statistics import bootstrap


def test_the_mean_is_that_of_all_values_not_of_the_groups():
    mean, low, high = bootstrap({"a": [1.0, 1.0, 1.0], "b": [0.0]})
    assert mean == pytest.approx(0.75)
    assert low == 0 and high == 1  # draws of b alone and of a alone


def test_an_interval_covers_what_normal_theory_says():
    values = torch.randn(400, generator=torch.Generator().manual_seed(1)).double()
    mean, low, high = bootstrap({str(i): [value] for i, value in enumerate(values.tolist())})
    error = values.std().item() / 20
    assert mean == pytest.approx(values.mean().item())
    assert mean - low == pytest.approx(1.96 * error, rel=0.1)
    assert high - mean == pytest.approx(1.96 * error, rel=0.1)


def test_values_of_one_needle_count_as_one():
    """Fifteen equal values of each needle are no better than one of each."""
    needles = {str(i): [float(i % 2)] for i in range(20)}
    repeated = {name: values * 15 for name, values in needles.items()}
    apart = {f"{name} {i}": values for name, values in needles.items() for i in range(15)}
    assert bootstrap(repeated) == pytest.approx(bootstrap(needles))
    _, low, high = bootstrap(apart)  # as if they were independent: far too sure
    assert high - low < 0.4 * (bootstrap(repeated)[2] - bootstrap(repeated)[1])


def test_a_seed_makes_it_reproducible():
    groups = {str(i): [float(i)] for i in range(10)}
    assert bootstrap(groups, seed=3) == bootstrap(groups, seed=3) != bootstrap(groups, seed=4)


def test_one_group_has_no_width():
    assert bootstrap({"a": [0.25, 0.75]}) == (0.5, 0.5, 0.5)
