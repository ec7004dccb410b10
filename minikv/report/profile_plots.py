"""Pictures of a profile: `python -m minikv.report.profile_plots PROFILE FOLDER`.

head_scores.png: both scores of every head, side by side, as in the paper's figure. layer_budgets.png: what eviction
costs each layer, and the entries that it is given for that at several budgets.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes

from minikv import command
from minikv.budget import PromptShape
from minikv.policy import CompressKV
from minikv.report.figure import LOOKS, save
from minikv.srh import Profile, strongest

BUDGETS = (64, 128, 256, 512)  # mean entries a layer
PROMPT = 8192  # tokens, long enough that no layer's budget reaches the whole prompt
MARKED = 10  # strongest heads of each map


def draw(profile: Profile, folder: Path) -> list[Path]:
    """Write the pictures that the profile has numbers for."""
    drawn = []
    if profile.head_scores is not None and profile.traditional_scores is not None:
        drawn.append(draw_head_scores(profile, folder / "head_scores.png"))
    drawn.append(draw_layer_budgets(profile, folder / "layer_budgets.png"))
    return drawn


def draw_head_scores(profile: Profile, path: Path) -> Path:
    """Layers x heads, semantic score left, traditional right, each on a scale of its own."""
    height = 1.6 + 0.14 * profile.layers
    figure, axes = plt.subplots(1, 2, figsize=(3.4 + 0.26 * profile.heads, height), sharey=True, layout="constrained")
    _map(figure, axes[0], torch.tensor(profile.head_scores), "semantic retrieval score", "attention to the answer, a run")
    _map(figure, axes[1], torch.tensor(profile.traditional_scores), "traditional retrieval score", "share copied, a run")
    axes[0].set_ylabel("layer")
    return save(figure, _settings(profile) | {"ringed": f"the {MARKED} strongest heads"}, path)


def _map(figure, axes: Axes, scores: torch.Tensor, title: str, unit: str) -> None:
    image = axes.imshow(scores.numpy(), cmap="cividis", vmin=0, aspect="auto", interpolation="nearest")
    for layer, head in strongest(scores)[:MARKED]:
        axes.plot(head, layer, "o", markersize=7, fillstyle="none", color="#D55E00")
    layers, heads = scores.shape
    axes.set_xticks(range(0, heads, 1 + heads // 16))
    axes.set_yticks(range(0, layers, 1 + layers // 16))
    axes.tick_params(labelsize=7)
    axes.set_xlabel("query head")
    axes.set_title(title, fontsize=9)
    bar = figure.colorbar(image, ax=axes, shrink=0.6)
    bar.set_label(unit, fontsize=7)
    bar.ax.tick_params(labelsize=7)


def draw_layer_budgets(profile: Profile, path: Path) -> Path:
    """Left the layer scores, of each data set and together; right the budgets they give."""
    figure, (scores, budgets) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    layers = range(profile.layers)
    scores.bar(layers, profile.layer_scores, color="#BBBBBB", label="layer score")
    by_set = profile.layer_scores_by_set if len(profile.layer_scores_by_set) > 1 else {}
    for name, values in by_set.items():
        few = len(by_set) <= len(LOOKS) - 1
        look = LOOKS[1 + list(by_set).index(name)] if few else {"color": "#0072B2", "alpha": 0.35}
        scores.plot(layers, values, markersize=3, linewidth=0.9, label=name if few else "_a data set", **look)
    if len(by_set) > len(LOOKS) - 1:
        scores.plot([], [], color="#0072B2", alpha=0.35, label=f"each of {len(by_set)} data sets")
    scores.axhline(1 / profile.layers, color="black", linewidth=0.8, linestyle=":", label="all layers alike")
    scores.set_ylabel("share of the error, 32 entries kept")
    for look, budget in zip(LOOKS, BUDGETS):
        policy = CompressKV(budget, profile, heads=1)  # how many heads vote changes no budget
        entries = policy.budgets(PromptShape(profile.layers, PROMPT, entry_bytes=1))
        budgets.plot(layers, entries, markersize=3, linewidth=1.2, label=f"mean {budget}", **look)
        budgets.axhline(budget, color=look["color"], linewidth=0.5, alpha=0.6)
    budgets.set_ylabel("entries kept (log scale)")
    budgets.set_yscale("log", base=2)
    budgets.yaxis.set_major_formatter(lambda entries, _: f"{entries:g}")
    for axes in (scores, budgets):
        axes.set_xlabel("layer")
        axes.grid(axis="y", alpha=0.3)
        legend = axes.legend(fontsize=7, loc="lower center", bbox_to_anchor=(0.5, 1), ncols=4, frameon=False)
        for text in legend.get_texts():
            text.set_parse_math(False)  # data sets bear the names of files
    return save(figure, _settings(profile), path)


def _settings(profile: Profile) -> dict:
    """What the corner of a picture says of where the profile comes from."""
    names = ("needles", "lengths", "depths", "runs", "runs_counted", "error_prompts", "seed", "dtype")
    known = {name: profile.settings.get(name) for name in names}
    return {"model": profile.model.get("name"), **known, "minikv": profile.versions.get("minikv")}


def main() -> None:
    parser = command.Parser("Draw the pictures of a profile that is already measured.")
    parser.add_argument("profile", metavar="PROFILE", help="the profile, or the release's NAME_head_idx.json")
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="where the PNG files go")
    arguments = parser.parse_args()
    print("drawn: " + ", ".join(map(str, draw(Profile.load(arguments.profile), arguments.folder))))


if __name__ == "__main__":
    command.run(main)
