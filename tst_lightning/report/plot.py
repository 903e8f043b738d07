"""The picture: held-out loss against steps, and against the text read."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib.style
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from tst_lightning.report.groups import Group, mean_curve
from tst_lightning.report.runs import Run, Validation
from tst_lightning.text import count

# Okabe and Ito (2008), "Color Universal Design", without the yellow that is too pale for lines; black for baselines
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
_BASELINE = "#222222"
_STYLES = ("-", (0, (5, 1.5)), (0, (1.5, 1.5)), (0, (5, 1.5, 1, 1.5)))

_PANELS = (("optimiser steps", "step"), ("data tokens (text read)", "data_tokens"))


def draw(groups: Sequence[Group], path: Path) -> None:
    """Write a PNG for a README's width.

    Each arm has one colour; its seeds are thin lines under their mean. A dashed line marks the steps at which an
    arm's bag size changes. What is far above the losses of the last phases is cut off.
    """
    with matplotlib.style.context("default"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # of a directory's name
        looks = _looks(groups)
        rows = math.ceil(len(groups) / (columns := _legend_columns(groups)))
        height, legend = 3.6, 0.22 * rows + 0.15
        figure = Figure(figsize=(9, height + legend), dpi=150)
        FigureCanvasAgg(figure)
        axes = figure.subplots(1, 2, sharey=True)
        figure.subplots_adjust(
            left=0.075,
            right=0.985,
            top=1 - 0.12 / (height + legend),
            bottom=(legend + 0.5) / (height + legend),
            wspace=0.06,
        )
        for panel, (label, x) in zip(axes, _PANELS, strict=True):
            for group, (colour, style) in zip(groups, looks, strict=True):
                _draw_group(panel, group, x, colour, style)
            _mark_switches(panel, groups, looks, x)
            _dress(panel, groups, label)
        axes[0].set_ylabel("held-out loss (nats/token)")
        _add_legend(figure, groups, looks, columns)
        figure.savefig(path, format="png", metadata={"Software": None})


def _looks(groups: Sequence[Group]) -> list[tuple[str, Any]]:
    """A colour and a line style a group."""
    looks: list[tuple[str, Any]] = []
    plain = bagged = 0
    for group in groups:
        if all(run.bag_size == 1 for run in group.runs):
            looks.append((_BASELINE, _STYLES[plain % len(_STYLES)]))
            plain += 1
        else:
            looks.append((_COLOURS[bagged % len(_COLOURS)], _STYLES[bagged // len(_COLOURS) % len(_STYLES)]))
            bagged += 1
    return looks


def _draw_group(panel: Axes, group: Group, x: str, colour: str, style: Any) -> None:
    counted = [*group.by_seeds.values()]
    several = len(counted) > 1
    for run in group.runs:
        _line(panel, _finite(run.validations), x, colour, style, width=0.8 if several else 1.6, faint=several)
    mean = mean_curve(counted) if several else []
    if len(mean) > 1 or (several and all(len(run.validations) == 1 for run in counted)):
        _line(panel, mean, x, colour, style, width=2, faint=False)


def _line(
    panel: Axes, curve: Sequence[Validation], x: str, colour: str, style: Any, *, width: float, faint: bool
) -> None:
    panel.plot(
        [getattr(validation, x) for validation in curve],
        [validation.loss for validation in curve],
        color=colour,
        linestyle=style,
        linewidth=width,
        alpha=0.4 if faint else 1,
        marker="o" if len(curve) <= 15 and not (faint and len(curve) > 1) else None,
        markersize=3.5,
        zorder=2 if faint else 3,
    )


def _finite(curve: Sequence[Validation]) -> list[Validation]:
    return [validation for validation in curve if math.isfinite(validation.loss)]


def _mark_switches(panel: Axes, groups: Sequence[Group], looks: Sequence[tuple[str, Any]], x: str) -> None:
    marks: dict[float, tuple[str, str]] = {}  # by place: those of several arms at one step are marked once
    for group, (colour, _) in zip(groups, looks, strict=True):
        run = max(group.runs, key=lambda run: run.steps)
        if run.recipe is None:
            continue
        phases = run.recipe.schedule.phases
        for before, after in pairwise(phases):
            if after.start in run.switch_steps:
                place = float(after.start) if x == "step" else run.tokens_before(after.start)
                label = f"bag {before.bag_size} \N{RIGHTWARDS ARROW} {after.bag_size}"
                marks[place] = (colour, label) if place not in marks else ("#555555", "switch")
    for place, (colour, label) in marks.items():
        panel.axvline(place, color=colour, linestyle=(0, (4, 3)), linewidth=1, alpha=0.8, zorder=1)
        if len(marks) <= 4:
            panel.annotate(
                label,
                (place, 0.03),
                xycoords=panel.get_xaxis_transform(),
                xytext=(-3, 0),
                textcoords="offset points",
                rotation=90,
                ha="right",
                va="bottom",
                fontsize=7.5,
                color=colour,
            )


def _dress(panel: Axes, groups: Sequence[Group], label: str) -> None:
    panel.set_xlabel(label)
    panel.xaxis.set_major_formatter(lambda value, _: count(value))
    panel.grid(color="#dddddd", linewidth=0.6)
    panel.spines[["top", "right"]].set_visible(False)
    panel.set_xlim(left=0)
    runs = [run for group in groups for run in group.runs]
    limits = _limits(runs)
    if limits is None:
        panel.text(0.5, 0.5, "no validation yet", transform=panel.transAxes, ha="center", color="#555555")
        panel.set(xticks=[], yticks=[])
    else:
        panel.set_ylim(*limits)


def _limits(runs: Sequence[Run]) -> tuple[float, float] | None:
    """Losses to show: of each run those of its last phase, without the first fifth of its validations."""
    shown: list[float] = []
    for run in runs:
        curve = _finite(run.validations)
        switch = max(run.switch_steps, default=0)
        shown += [v.loss for v in curve[len(curve) // 5 :] if v.step > switch] or [v.loss for v in curve[-1:]]
    if not shown:
        return None
    low, high = min(shown), max(shown)
    margin = max(0.05 * (high - low), 0.05)
    return low - margin, high + margin


def _legend_columns(groups: Sequence[Group]) -> int:
    """As many as fit under the panels."""
    longest = max((len(_legend_label(group)) for group in groups), default=1)
    return max(1, min(len(groups), 4, 120 // (longest + 8)))


def _legend_label(group: Group) -> str:
    counted = len(group.by_seeds)
    if counted > 1:
        return f"{group.label} ({counted} runs and their mean)"
    return group.label if len(group.runs) == 1 else f"{group.label} ({len(group.runs)} runs)"


def _add_legend(figure: Figure, groups: Sequence[Group], looks: Sequence[tuple[str, Any]], columns: int) -> None:
    handles = [Line2D([], [], color=colour, linestyle=style, linewidth=2) for colour, style in looks]
    legend = figure.legend(
        handles, ["run"] * len(groups), loc="lower center", ncols=columns, frameon=False, fontsize=8.5, handlelength=3
    )
    for text, group in zip(legend.get_texts(), groups, strict=True):
        # a name as it is: matplotlib may leave out one that begins with _, and typesets what is between $
        text.set_parse_math(False)
        text.set_text(_legend_label(group))
