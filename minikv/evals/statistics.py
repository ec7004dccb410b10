"""How sure a mean is: bootstrap intervals over the independent parts of a sample."""

from __future__ import annotations

import torch


def bootstrap(groups: dict[str, list[float]], resamples: int = 2000, seed: int = 0) -> tuple[float, float, float]:
    """The mean of all values and its 95 % interval, resampling whole groups (the prompts of one needle, say).

    Values of a group depend on each other, so drawing them one by one would make the interval too narrow.
    """
    values = torch.tensor([sum(group) for group in groups.values()], dtype=torch.float64)
    counts = torch.tensor([len(group) for group in groups.values()], dtype=torch.float64)
    draws = torch.randint(len(values), (resamples, len(values)), generator=torch.Generator().manual_seed(seed))
    means = values[draws].sum(1) / counts[draws].sum(1)
    low, high = means.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return (values.sum() / counts.sum()).item(), low, high
