"""The picture of a masking experiment, from the record that minikv.evals.masking writes."""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from minikv.report.figure import LOOKS, save

LOOK = dict(zip(("random", "traditional", "semantic"), LOOKS))
TITLE = {"output": "output zeroed", "query": "query zeroed", "decode": "during decode", "run": "during the whole run"}


def draw(record: dict, path: str | Path) -> Path:
    """Recall against the number of silenced heads: what is zeroed in rows, when in columns, a line for each ranking."""
    points = record["curves"]
    parts = list(dict.fromkeys(point["zeroed"] for point in points))
    phases = list(dict.fromkeys(point["during"] for point in points))
    size = (1 + 3.4 * len(phases), 1.2 + 2.7 * len(parts))
    shape = {"figsize": size, "sharex": True, "sharey": True, "squeeze": False, "layout": "constrained"}
    figure, grid = plt.subplots(len(parts), len(phases), **shape)
    for part, row in zip(parts, grid):
        for phase, axes in zip(phases, row):
            _curves(axes, [point for point in points if (point["zeroed"], point["during"]) == (part, phase)])
            axes.set_title(f"{TITLE[part]}, {TITLE[phase]}", fontsize=9)
    handles, labels = grid[0, 0].get_legend_handles_labels()
    title = "silenced heads, chosen by"
    figure.legend(handles, labels, loc="outside upper center", ncols=3, fontsize=8, title=title, title_fontsize=8)
    figure.supxlabel("silenced heads of the whole model", fontsize=9)
    figure.supylabel("needle recall (ROUGE-1)", fontsize=9)
    names = "model needles lengths depths prompts random_seeds leave_out max_answer_tokens seed dtype"
    settings = {name: record["settings"].get(name) for name in names.split()}
    return save(figure, {**settings, "bars": "95 % over needles", "minikv": record["versions"]["minikv"]}, Path(path))


def _curves(axes: Axes, points: list[dict]) -> None:
    for place, (ranking, look) in enumerate(LOOK.items()):
        mine = [point for point in points if point["ranking"] == ranking]
        heads = [point["heads"] + 0.3 * (place - 1) for point in mine]  # side by side, so that no bar hides another
        means = [point["recall"][0] for point in mine]
        ends = [[abs(point["recall"][end] - point["recall"][0]) for point in mine] for end in (1, 2)]
        axes.errorbar(heads, means, ends, label=ranking, capsize=2, elinewidth=0.8, markersize=4, linewidth=1.2, **look)
    axes.set_xticks(sorted({point["heads"] for point in points}))
    axes.set_ylim(-0.03, 1.03)
    axes.grid(alpha=0.3)
