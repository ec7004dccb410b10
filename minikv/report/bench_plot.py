"""The picture of a benchmark, from the record that minikv.bench writes."""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from minikv.report.figure import LOOKS, save
from minikv.report.titles import title

FIGURES = [("prefill", 1, "prefill, s"), ("decode", 1e3, "decode, ms a token")]


def draw(record: dict, path: str | Path) -> Path:
    """Prefill and decode times against the prompt's length, dtypes side by side, above what bounds them.

    A participant with weights of its own form, such as llama.cpp's quantized file, is shown beside each dtype.
    """
    rows = record["rows"]
    dtypes = list(dict.fromkeys(row["dtype"] for row in rows if row["dtype"] != "quantized")) or ["quantized"]
    looks = dict(zip(dict.fromkeys(_label(row) for row in rows), _looks()))
    size = (1.5 + 4 * len(dtypes), 6.8)
    figure, grid = plt.subplots(2, len(dtypes), figsize=size, sharex=True, sharey="row", squeeze=False, layout="constrained")
    for (name, scale, what), line in zip(FIGURES, grid):
        for dtype, axes in zip(dtypes, line):
            _curves(axes, [row for row in rows if row["dtype"] in (dtype, "quantized")], name, scale, looks)
            axes.set_title(dtype, fontsize=9)
        line[0].set_ylabel(what, fontsize=9)
    for axes in grid[1]:
        axes.set_xlabel("prompt, tokens", fontsize=9)
    shown = {label: handle for axes in grid.flat for handle, label in zip(*axes.get_legend_handles_labels())}
    figure.legend(shown.values(), shown.keys(), loc="outside upper center", ncols=3, fontsize=8)
    settings = {name: record["settings"][name] for name in ("model", "budget", "new_tokens", "repeats")}
    machine = {name: record["machine"][name] for name in ("processor", "threads")} | {"gpu": record["machine"].get("gpu")}
    bars = {"bars": "least to greatest of the rounds", "minikv": record["versions"]["minikv"]}
    return save(figure, {**settings, **machine, **bars}, Path(path))


def _label(row: dict) -> str:
    """A participant and its method, without the dtype, which the column says."""
    return f"{row['participant'].removesuffix(' ' + row['dtype'])}, {title(row['method'])}"


def _looks() -> list[dict]:
    """The figures' looks, and the same with hollow markers for more participants than those."""
    return LOOKS + [{**look, "markerfacecolor": "white"} for look in LOOKS]


def _curves(axes: Axes, rows: list[dict], name: str, scale: float, looks: dict[str, dict]) -> None:
    by_label: dict[str, list[dict]] = {}
    for row in rows:
        if row[f"{name}_s"]:
            by_label.setdefault(_label(row), []).append(row)
    for label, mine in by_label.items():
        lengths, found = [row["length"] for row in mine], [row[f"{name}_s"] for row in mine]
        middles = [value["median"] * scale for value in found]
        ends = [[abs(value["median"] - value[end]) * scale for value in found] for end in ("min", "max")]
        axes.errorbar(lengths, middles, ends, label=label, capsize=2, elinewidth=0.8, markersize=4, linewidth=1.2, **looks[label])
    for label, mine in by_label.items():
        if label.startswith("minikv"):  # a peer's bound is that of our method with the same cache
            _bound(axes, mine, name, scale, looks[label]["color"], label)
    axes.set_xticks(sorted({row["length"] for row in rows}))
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)


def _bound(axes: Axes, rows: list[dict], name: str, scale: float, color: str, label: str) -> None:
    """A thin line at the least time that the machine allows; the prefill's is the same for all methods."""
    method = label.removeprefix("minikv, ")
    if name == "prefill" and method != title("full"):
        return
    points = [(row["length"], row[f"{name}_bound_s"] * scale) for row in rows if row[f"{name}_bound_s"]]
    if points:
        what = f"bound: {'arithmetic' if name == 'prefill' else 'memory, ' + method}"
        style = {"color": "#777777" if name == "prefill" else color, "marker": "_", "linewidth": 0.8}
        axes.plot(*zip(*points), linestyle=(0, (1, 2)), label=what, **style)
