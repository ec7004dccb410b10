"""Pictures of needle and LongBench scores, from the records that those programs write.

Methods differ in colour, marker, line and hatching, so that the pictures can be printed in grey.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from minikv.policy import METHODS
from minikv.report.figure import save
from minikv.report.titles import title

# Of each method: one of Okabe and Ito's colours (and a grey), a marker, a line, the hatching of a bar.
_COLOURS = ("#000000", "#999999", "#E69F00", "#009E73", "#CC79A7", "#F0E442", "#56B4E9", "#D55E00", "#0072B2")
_LINES = ("-", ":", "--", "-.", (0, (5, 1)), (0, (1, 1)), (0, (3, 1, 1, 1)), "-", "-")
LOOK = {
    method: {"color": colour, "marker": marker, "linestyle": line}
    for method, colour, marker, line in zip(METHODS, _COLOURS, "sXv^Dpho*", _LINES)
}
HATCH = dict(zip(METHODS, ("", "..", "//", "\\\\", "xx", "++", "oo", "--", "**")))


def looks(rows: list[dict]) -> dict[str, str]:
    """For the method of each row the one whose look it has: its own, or with changed options one that no other has."""
    specs = list(dict.fromkeys(row["method"] for row in rows))
    free = itertools.cycle([name for name in LOOK if name not in specs] or LOOK)
    return {spec: spec if spec in LOOK else next(free) for spec in specs}


def draw_niah(record: dict, path: str | Path) -> list[Path]:
    """The map of each method and budget into `path`, score against budget into the file beside it, NAME-budget.png."""
    path = Path(path)
    maps, curves = _niah_maps(record), _niah_budgets(record)
    settings = _settings(record, "mode", "needles", "max_new_tokens", "window", "kernel", "heads", "limit")
    beside = path.with_name(f"{path.stem}-budget{path.suffix}")
    return [save(maps, settings, path), save(curves, settings, beside)]


def _settings(record: dict, *names: str) -> dict:
    """What stands in the corner."""
    names = ("model", *names, "seed", "dtype")
    return {**{name: record["settings"][name] for name in names}, "minikv": record["versions"]["minikv"]}


def _niah_maps(record: dict) -> Figure:
    """Length x depth, one map for each method in columns and each budget in rows; the full cache's once."""
    scores = record["scores"]
    methods = list(dict.fromkeys(row["method"] for row in scores))
    budgets = list(dict.fromkeys(row["budget"] for row in scores if row["budget"])) or [None]
    size = (1.5 + 1.9 * len(methods), 1.3 + 2.1 * len(budgets))
    figure, grid = plt.subplots(len(budgets), len(methods), figsize=size, squeeze=False, layout="constrained")
    for axes_row, budget in zip(grid, budgets):
        for axes, method in zip(axes_row, methods):
            found = [row for row in scores if row["method"] == method and row["budget"] in (budget, None)]
            if method == "full" and budget != budgets[0]:
                axes.set_axis_off()
                continue
            image = _map(axes, found[0])
        next(axes for axes in axes_row if axes.axison).set_ylabel("depth of the needle (%)", fontsize=8)
    figure.colorbar(image, ax=grid, label="recall of the answer's words (ROUGE-1)", shrink=0.8, aspect=30)
    figure.supxlabel("prompt length (tokens)", fontsize=8)
    return figure


def _map(axes: Axes, row: dict):
    """One method's map, with each cell's value written in it."""
    lengths, depths = list(row["by_length"]), list(row["by_depth"])
    cells = [[float("nan") if value is None else value for value in row["by_depth"][depth]] for depth in depths]
    image = axes.imshow(cells, vmin=0, vmax=1, cmap="cividis", aspect="auto")
    axes.set_xticks(range(len(lengths)), [_thousands(length) for length in lengths])
    axes.set_yticks(range(len(depths)), depths)
    axes.tick_params(labelsize=7)
    for y, values in enumerate(cells):
        for x, value in enumerate(values):
            if value == value:
                shade = "black" if value > 0.5 else "white"
                axes.text(x, y, f"{value:.2f}", ha="center", va="center", fontsize=6, color=shade)
    budget = f", {row['budget']}" if row["budget"] else ""
    axes.set_title(f"{title(row['method'])}{budget}\nmean {row['recall']:.3f}, keeps {row['kept']:.1%}", fontsize=8)
    return image


def _thousands(length: str) -> str:
    return f"{int(length) // 1024}k" if int(length) % 1024 == 0 else length


def _niah_budgets(record: dict) -> Figure:
    """Recall against what was kept, a line for each method, the full cache as a level."""
    figure, axes = plt.subplots(figsize=(6.5, 4.2), layout="constrained")
    methods = looks(record["scores"])
    for place, (method, name) in enumerate(methods.items()):
        rows = sorted((row for row in record["scores"] if row["method"] == method), key=lambda row: row["kept"])
        look = LOOK[name]
        if method == "full":
            axes.axhline(rows[0]["recall"], label=f"{title(method)} (100 % kept)", color=look["color"], linewidth=1.5)
            continue
        apart = 1.012 ** (place - len(methods) / 2)  # so that the intervals of equal budgets do not hide each other
        shares, recalls = [100 * row["kept"] * apart for row in rows], [row["recall"] for row in rows]
        ends = [[abs(row["recall_interval"][end] - row["recall"]) for row in rows] for end in (0, 1)]
        axes.errorbar(shares, recalls, ends, label=title(method), capsize=2, elinewidth=0.7, markersize=5, **look)
    _share_axis(axes, _mean_shares(record["scores"]))
    axes.set_ylabel("recall of the answer's words (ROUGE-1)")
    axes.set_ylim(-0.03, 1.03)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    axes.set_title(f"mean of {record['scores'][0]['n']} prompts; bars, drawn apart: 95 % interval over needles", fontsize=9)
    return figure


def _share_axis(axes: Axes, marks: list[float]) -> None:
    """What is kept of the prompt, in percent, as the axis from left to right."""
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(FixedLocator(marks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{share:.3g}"))
    axes.set_xlabel("entries of the prompt that are kept (%, log scale)")


def _mean_shares(scores: list[dict]) -> list[float]:
    """What each budget comes to on average over the methods, in percent of the prompt."""
    shares: dict[str, list[float]] = {}
    for row in scores:
        if row["budget"]:
            shares.setdefault(row["budget"], []).append(100 * row["kept"])
    return [sum(values) / len(values) for values in shares.values()]


def draw_longbench(record: dict, path: str | Path) -> list[Path]:
    """Bars of each group of sets and their mean, one row of bars for each budget."""
    scores = record["scores"]
    budgets = list(dict.fromkeys(row["budget"] for row in scores if row["budget"])) or [None]
    figure, grid = plt.subplots(len(budgets), 1, figsize=(9, 1.2 + 2.2 * len(budgets)), squeeze=False, layout="constrained")
    for axes, budget in zip(grid[:, 0], budgets):
        _bars(axes, [row for row in scores if row["budget"] in (budget, None)])
        axes.set_title(f"budget {budget}" if budget else title("full"), fontsize=9)
    handles, labels = grid[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(labels), fontsize=8)
    wording = "the benchmark's own" if record["comparable"] else "not the benchmark's own, not comparable"
    settings = _settings(record, "max_length", "window", "kernel", "heads", "limit")
    return [save(figure, {**settings, "prompts": wording}, Path(path))]


def _bars(axes: Axes, rows: list[dict]) -> None:
    """The groups and the mean of some methods side by side."""
    names = [*rows[0]["groups"], "mean"]
    width = 0.85 / len(rows)
    methods = looks(rows)
    for place, row in enumerate(rows):
        values = [*row["groups"].values(), row["mean"]]
        left = [group + (place - (len(rows) - 1) / 2) * width for group in range(len(names))]
        name = methods[row["method"]]
        look = {"facecolor": LOOK[name]["color"], "hatch": HATCH[name], "edgecolor": "white", "linewidth": 0.3}
        axes.bar(left, values, width, label=title(row["method"]), **look)
        for x, value in zip(left, values):
            axes.text(x, value, f"{value:.0f}", ha="center", va="bottom", fontsize=5.5)
    axes.axvline(len(names) - 1.5, color="grey", linewidth=0.8)
    axes.set_xticks(range(len(names)), names, fontsize=8)
    axes.set_ylabel("score (0 to 100)", fontsize=8)
    axes.tick_params(axis="y", labelsize=7)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)


def draw_fidelity(record: dict, path: str | Path) -> list[Path]:
    """KL divergence and top-1 agreement against what was kept, and each layer's error at the middle budget."""
    figure, (kl, agreement, layers) = plt.subplots(1, 3, figsize=(14, 4), layout="constrained")
    _fidelity_curves(kl, record["rows"], "kl", "KL divergence from the full cache (nats a token)")
    _fidelity_curves(agreement, record["rows"], "agreement", "top-1 agreement with the full cache")
    budgets = list(dict.fromkeys(row["budget"] for row in record["rows"]))
    middle = budgets[len(budgets) // 2]
    methods = looks(record["rows"])
    for row in record["rows"]:
        if row["budget"] == middle:
            layers.plot(row["layer_errors"], label=title(row["method"]), markersize=3, **LOOK[methods[row["method"]]])
    layers.set_xlabel("layer")
    layers.set_ylabel(f"relative error of the attention output, budget {middle}")
    layers.grid(alpha=0.3)
    layers.legend(fontsize=8)
    figure.suptitle(f"mean of {record['prompts']} prompts; bars: 95 % interval over prompts", fontsize=9)
    return [save(figure, _settings(record, "lengths", "max_new_tokens", "window", "kernel", "heads"), Path(path))]


def _fidelity_curves(axes: Axes, rows: list[dict], measure: str, label: str) -> None:
    """One measure with its intervals, a line for each method."""
    for method, name in looks(rows).items():
        own = [row for row in rows if row["method"] == method]
        shares, means = [100 * row["kept"]["mean"] for row in own], [row[measure]["mean"] for row in own]
        ends = [[abs(row[measure][end] - row[measure]["mean"]) for row in own] for end in ("low", "high")]
        axes.errorbar(shares, means, ends, label=title(method), capsize=2, elinewidth=0.7, markersize=5, **LOOK[name])
    _share_axis(axes, [1, 3, 6, 12, 25, 50, 100])
    axes.set_ylabel(label)
    axes.grid(alpha=0.3)
