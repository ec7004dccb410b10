"""What all pictures have in common: colours that colour-blind readers can tell apart, settings in the corner."""

from __future__ import annotations

import textwrap
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # files only: no display is needed
import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from minikv.errors import InputError

# Okabe and Ito's colours, darkest first, each with a marker and a line of its own for prints in grey
LOOKS = [
    {"color": "#000000", "marker": "o", "linestyle": "-"},
    {"color": "#0072B2", "marker": "s", "linestyle": "--"},
    {"color": "#D55E00", "marker": "^", "linestyle": "-."},
    {"color": "#009E73", "marker": "D", "linestyle": ":"},
    {"color": "#CC79A7", "marker": "v", "linestyle": "-"},
    {"color": "#E69F00", "marker": "P", "linestyle": "--"},
]


def save(figure: Figure, settings: dict, path: Path) -> Path:
    """Write the figure as a PNG file with the settings in its corner."""
    text = ", ".join(f"{name.replace('_', ' ')} {_plain(value)}" for name, value in settings.items() if value is not None)
    wrapped = textwrap.fill(text, int(figure.get_figwidth() * 18))
    figure.text(0.005, -0.005, wrapped, fontsize=6, va="top", color="#444444", parse_math=False)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format="png", dpi=200, bbox_inches="tight")
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from error
    finally:
        plt.close(figure)
    return path


def _plain(value) -> str:
    """A setting as people write it: 10, not 10.0; the items of a list with blanks between them."""
    if isinstance(value, list):
        return " ".join(map(_plain, value))
    return f"{value:g}" if isinstance(value, float) else str(value)
