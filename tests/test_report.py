"""Pictures: that they are written, and that what they show are the profile's numbers."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import pytest
import torch

from minikv import command
from minikv.errors import InputError
from minikv.report import eval_plots, masking_plot, profile_plots
from minikv.report import figure as figures
from minikv.srh import Profile, rank_heads

FIXTURES = Path(__file__).parent / "fixtures"
SEMANTIC = torch.tensor([[0.1, 0.9, 0.2], [0.8, 0.3, 0.0]])
TRADITIONAL = torch.tensor([[0.7, 0.0, 0.1], [0.0, 0.0, 0.6]])


@pytest.fixture
def profile() -> Profile:
    return Profile(
        rank_heads(SEMANTIC),
        [0.25, 0.75],
        SEMANTIC.tolist(),
        TRADITIONAL.tolist(),
        model={"name": "two-layers"},
        settings={"lengths": [1024], "depths": [10.0, 50.0], "runs": 12, "runs_counted": 11},
        layer_scores_by_set={"needles": [0.2, 0.8], "essays": [0.3, 0.7]},
    )


@pytest.fixture
def drawn(monkeypatch):
    """The figures that are drawn, with their settings, instead of files."""
    drawn = {}

    def keep(figure, settings, path):
        drawn[path.name] = (figure, settings)
        return path

    for module in (profile_plots, masking_plot):
        monkeypatch.setattr(module, "save", keep)
    yield drawn
    plt.close("all")


def is_png(path: Path) -> bool:
    return path.read_bytes().startswith(b"\x89PNG")


def test_the_maps_show_both_scores_side_by_side(profile, drawn):
    profile_plots.draw_head_scores(profile, Path("heads.png"))
    figure, settings = drawn["heads.png"]
    left, right = figure.axes[:2]
    assert left.images[0].get_array().tolist() == SEMANTIC.tolist()
    assert right.images[0].get_array().tolist() == TRADITIONAL.tolist()
    assert (left.get_xlabel(), left.get_ylabel()) == ("query head", "layer")
    assert left.get_title() != right.get_title()
    assert left.images[0].get_cmap().name == "cividis"  # for colour-blind readers
    assert settings["model"] == "two-layers" and settings["runs_counted"] == 11


def test_budgets_are_drawn_for_several_totals_and_spend_them(profile, drawn):
    profile_plots.draw_layer_budgets(profile, Path("layers.png"))
    scores, budgets = drawn["layers.png"][0].axes
    assert [bar.get_height() for bar in scores.patches] == [0.25, 0.75]
    lines = [line for line in budgets.get_lines() if line.get_label().startswith("mean")]
    for line, mean in zip(lines, profile_plots.BUDGETS, strict=True):
        entries = list(line.get_ydata())
        assert sum(entries) == 2 * mean and entries[1] > entries[0]
    labels = [line.get_label() for line in scores.get_lines()]
    assert "needles" in labels and "essays" in labels
    assert budgets.get_ylabel() and budgets.get_xlabel() == "layer"


def test_the_program_draws_an_existing_profile(profile, tmp_path, monkeypatch, capsys):
    profile.save(tmp_path / "p.json")
    monkeypatch.setattr(sys, "argv", ["profile_plots", str(tmp_path / "p.json"), str(tmp_path / "plots")])
    command.run(profile_plots.main)
    assert is_png(tmp_path / "plots/head_scores.png") and is_png(tmp_path / "plots/layer_budgets.png")
    assert "head_scores.png" in capsys.readouterr().out


def test_the_papers_files_have_layer_scores_to_draw_and_no_head_scores(tmp_path):
    written = profile_plots.draw(Profile.load(FIXTURES / "tiny_head_idx.json"), tmp_path)
    assert [path.name for path in written] == ["layer_budgets.png"] and is_png(written[0])


def test_many_data_sets_share_one_entry_of_the_legend(profile, drawn):
    many = {f"set {number}": [0.2, 0.8] for number in range(16)}
    profile_plots.draw_layer_budgets(Profile(**vars(profile) | {"layer_scores_by_set": many}), Path("layers.png"))
    scores = drawn["layers.png"][0].axes[0]
    _, labels = scores.get_legend_handles_labels()
    assert "each of 16 data sets" in labels and "set 0" not in labels
    assert len([line for line in scores.get_lines() if list(line.get_ydata()) == [0.2, 0.8]]) == 16


def masking_record() -> dict:
    points = [
        {"zeroed": part, "during": phase, "ranking": ranking, "heads": heads, "recall": [0.5, 0.4, 0.8]}
        for part in ("output", "query")
        for phase in ("decode", "run")
        for ranking in ("semantic", "traditional", "random")
        for heads in (0, 10)
    ]
    return {"settings": {"model": "two-layers", "prompts": 28}, "versions": {"minikv": "abc"}, "curves": points}


def test_masking_has_a_panel_for_each_part_and_phase_and_a_line_for_each_ranking(drawn):
    masking_plot.draw(masking_record(), Path("masking.png"))
    figure, settings = drawn["masking.png"]
    assert len(figure.axes) == 4 and len({axes.get_title() for axes in figure.axes}) == 4
    for axes in figure.axes:
        handles, labels = axes.get_legend_handles_labels()
        assert sorted(labels) == ["random", "semantic", "traditional"]
        for handle in handles:
            assert handle.lines[0].get_ydata().tolist() == [0.5, 0.5]
            lower, upper = handle.lines[2][0].get_segments()[0][:, 1]
            assert (lower, upper) == pytest.approx((0.4, 0.8))
    assert settings["prompts"] == 28 and settings["minikv"] == "abc"


def test_masking_is_written_as_png(tmp_path):
    assert is_png(masking_plot.draw(masking_record(), tmp_path / "new folder/masking.png"))


def test_settings_stand_in_the_corner(tmp_path):
    figure = plt.figure()
    figures.save(figure, {"depths": [10.0, 50.0], "seed": None, "runs_counted": 3}, tmp_path / "a.png")
    assert figure.texts[0].get_text() == "depths 10 50, runs counted 3"


def test_a_dollar_in_a_name_is_no_formula(profile, tmp_path):
    odd = r"cost $\frac$ of"
    by_set = {odd: [0.2, 0.8], "essays": [0.3, 0.7]}
    named = Profile(**vars(profile) | {"model": {"name": odd}, "layer_scores_by_set": by_set})
    assert all(map(is_png, profile_plots.draw(named, tmp_path)))


def test_a_picture_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="file"):
        figures.save(plt.figure(), {}, tmp_path / "file/a.png")


def test_lines_differ_in_more_than_colour():
    looks = figures.LOOKS
    assert len({look["color"] for look in looks}) == len({look["marker"] for look in looks}) == len(looks)
    assert len({json.dumps([look["marker"], look["linestyle"]]) for look in looks}) == len(looks)


def test_a_method_with_changes_has_a_title_and_a_look_of_its_own():
    specs = ["full", "snapkv", "compresskv", "compresskv:window=16", "compresskv:window=16:layer_budgets=false"]
    looks = eval_plots.looks([{"method": spec} for spec in specs])
    assert [looks[spec] for spec in specs[:3]] == specs[:3]
    assert len(set(looks.values())) == len(specs)
    assert eval_plots.title(specs[-1]) == "CompressKV, window 16, layer budgets false"
