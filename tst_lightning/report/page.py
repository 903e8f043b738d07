"""The report as plain text, as Markdown and as JSON."""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tst_lightning import __version__
from tst_lightning.report.compare import Comparison
from tst_lightning.report.groups import Group
from tst_lightning.report.runs import Run
from tst_lightning.report.words import sentences, title
from tst_lightning.text import count

FORMAT = 1
"""The format of ``report.json``."""

PICTURE = "loss.png"


@dataclass(frozen=True)
class Report:
    """All that is said of the runs.

    Attributes:
        runs: in the order that they are shown in.
        groups: the same runs by arm.
        comparisons: arms against baselines.
        notes: what the reader should know of runs that are not compared, or not alike.
        problems: what could not be read.
        command: the words after ``tst-lightning`` that make the report again.
    """

    runs: tuple[Run, ...]
    groups: tuple[Group, ...]
    comparisons: tuple[Comparison, ...]
    notes: tuple[str, ...]
    problems: tuple[str, ...]
    command: tuple[str, ...]


def plain(report: Report) -> str:
    """The table and the comparisons, for a terminal."""
    header, *rows = _table(report.runs)
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    lines = [
        "  ".join(
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in (header, ["-" * width for width in widths], *rows)
    ]
    for comparison in report.comparisons:
        lines += ["", f"{title(comparison)}:", *(f"  {sentence}" for sentence in sentences(comparison))]
    if report.notes:
        lines += ["", *(f"note: {note}" for note in report.notes)]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def markdown(report: Report) -> str:
    """``report.md``: the same bytes from the same runs and command."""
    header, *rows = _table(report.runs)
    blocks = [
        "# Runs side by side",
        f"![Held-out loss against steps and against data tokens]({PICTURE})",
        _markdown_table(header, rows),
    ]
    if report.comparisons:
        blocks.append("## Comparisons")
    for comparison in report.comparisons:
        blocks.append(f"### {_escaped(title(comparison))}")
        blocks.append("\n".join(f"- {_escaped(sentence)}" for sentence in sentences(comparison)))
        if comparison.pairs:
            assert comparison.baseline is not None
            blocks.append(
                _markdown_table(
                    ["seed", comparison.arm.label, comparison.baseline.label, "difference (nats/token)"],
                    [
                        [
                            str(pair.seeds),
                            f"{pair.arm.final_loss:.4f}",
                            f"{pair.baseline.final_loss:.4f}",
                            f"{pair.difference:+.4f}",
                        ]
                        for pair in comparison.pairs
                    ],
                )
            )
    for heading, lines in (("Notes", report.notes), ("Problems", report.problems)):
        if lines:
            blocks += [f"## {heading}", "\n".join(f"- {_escaped(line)}" for line in lines)]
    fence = "`" * (3 + max((len(word) for word in report.command if set(word) == {"`"}), default=0))
    command = shlex.join(("tst-lightning", *report.command))
    blocks += ["## How to read this", _HOW_TO_READ, "This page is made by", f"{fence}bash\n{command}\n{fence}"]
    return "\n\n".join(blocks) + "\n"


_HOW_TO_READ = """\
- **Held-out loss** is plain next-token loss on text that no run was trained on, in nats a token, for every run and
  in both phases. It can be compared only between runs with the same tokenizer, held-out text and window length.
  The picture cuts off the losses of the first steps; a dashed line marks the switch to plain tokens.
- **Latent tokens** are the positions that the model was run on, which compute is proportional to. **Data tokens** are
  the text read: a superposition step with bags of *s* reads *s* times as much for the same compute. Runs of equal
  latent tokens and one network have **equal FLOPs**, though they read different amounts of text.
- **FLOPs** are counted from the network's shape (forward and backward), not measured. **Wall clock** includes
  the validations and checkpoints before the last logged step; it means something only between runs that had the same
  machine, each to itself.
- **Differences** are arm less baseline, seed by seed: below zero the arm is ahead. One seed tells nothing apart from
  chance.
- **Equal loss** asks how many steps a baseline needs for the arm's final loss. Read off a single baseline's curve it
  flatters the arm, since the learning rate of that curve had not decayed yet: baselines of several lengths are better.
- The method's paper ([arXiv 2605.06546](https://arxiv.org/abs/2605.06546)) measured its gains from 270M parameters up.
  What a smaller run shows, either way, says little about that scale."""


def as_json(report: Report) -> str:
    """``report.json``: the same bytes from the same runs; never a NaN or an infinity."""
    document = {
        "format": FORMAT,
        "version": __version__,
        "runs": [_run(run) for run in report.runs],
        "comparisons": [_comparison(comparison) for comparison in report.comparisons],
        "notes": report.notes,
        "problems": report.problems,
    }
    return json.dumps(_finite(document), indent=2, allow_nan=False) + "\n"


def _run(run: Run) -> dict[str, Any]:
    recipe = run.recipe
    return {
        "name": run.name,
        "directory": run.directory,
        "bag_size": run.bag_size,
        "ratio": None if recipe is None else recipe.ratio,
        "switch_steps": None if recipe is None else recipe.schedule.boundaries,
        "steps": run.steps,
        "total_steps": run.total_steps,
        "finished": run.finished,
        "latent_tokens": run.latent_tokens,
        "data_tokens": run.data_tokens,
        "flops": run.flops,
        "wall_clock": run.wall_clock,
        "val_loss": run.val_loss,
        "val_step": run.val_step,
        "lr": None if recipe is None else recipe.settings.get("optimisation.optimizer.lr"),
        "seed": run.seeds.seed,
        "data_seed": run.seeds.data,
        "not_compared": run.fault,
    }


def _comparison(comparison: Comparison) -> dict[str, Any]:
    found = comparison.equal_loss
    baseline = comparison.baseline
    differences = [pair.difference for pair in comparison.pairs]
    return {
        "arm": comparison.arm.label,
        "baseline": None if baseline is None else baseline.label,
        "differences": [difference._asdict() for difference in comparison.differences],
        "equal_flops": comparison.equal_flops,
        "pairs": [
            {
                "seed": pair.seeds.seed,
                "data_seed": pair.seeds.data,
                "arm": pair.arm.name,
                "baseline": pair.baseline.name,
                "arm_loss": pair.arm.final_loss,
                "baseline_loss": pair.baseline.final_loss,
                "difference": pair.difference,
            }
            for pair in comparison.pairs
        ],
        "unpaired": [run.name for run in comparison.unpaired],
        "mean_difference": comparison.mean_difference,
        "stdev_difference": comparison.spread,
        "min_difference": min(differences, default=None),
        "max_difference": max(differences, default=None),
        "baseline_stdev": comparison.baseline_spread,
        "equal_loss": {
            "baseline_steps": found.baseline_steps,
            "speed_up": found.speed_up,
            "method": found.method,
            "reason": found.reason,
            "baselines": found.baselines,
            "seeds": [seeds._asdict() for seeds in found.seeds],
        },
        "words": sentences(comparison),
    }


def _finite(value: Any) -> Any:
    """With null for what JSON cannot say, and without digits in which two C libraries' logarithms could differ."""
    if isinstance(value, float):
        return float(f"{value:.12g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def _table(runs: Sequence[Run]) -> list[list[str]]:
    """Header and rows; what no run knows has no column."""
    columns = [
        ("run", [run.name for run in runs]),
        ("largest bag", [str(run.bag_size) for run in runs]),
        ("steps", [_steps(run) for run in runs]),
        ("latent tokens", [count(run.latent_tokens) for run in runs]),
        ("data tokens", [count(run.data_tokens) for run in runs]),
    ]
    if any(run.flops is not None for run in runs):
        columns.append(("FLOPs", ["-" if run.flops is None else f"{run.flops:.3g}" for run in runs]))
    if any(run.wall_clock is not None for run in runs):
        columns.append(("wall clock", ["-" if run.wall_clock is None else _clock(run.wall_clock) for run in runs]))
    columns.append(("held-out loss (nats/token)", [_loss(run) for run in runs]))
    return [[name for name, _ in columns], *(list(row) for row in zip(*(cells for _, cells in columns), strict=True))]


def _steps(run: Run) -> str:
    return str(run.steps) if run.total_steps in (None, run.steps) else f"{run.steps} of {run.total_steps}"


def _loss(run: Run) -> str:
    if run.val_step is None:
        return "none yet"
    loss = "not finite" if run.val_loss is None else f"{run.val_loss:.4f}"
    return loss if run.val_step == run.steps else f"{loss} (at step {run.val_step})"


def _clock(seconds: float) -> str:
    """Hours, minutes and seconds: 0:04:31."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


def _markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    rule = ["---", *("---:" for _ in header[1:])]
    return "\n".join(f"| {' | '.join(row)} |" for row in (_cells(header), rule, *(_cells(row) for row in rows)))


def _cells(row: Sequence[str]) -> list[str]:
    return [_escaped(cell) for cell in row]


_MARKUP = re.compile(r"[\\`*\[\]<>|#$~]|(?<![^\W_])_|_(?![^\W_])")  # an underscore in a word means nothing


def _escaped(text: str) -> str:
    """Text that Markdown shows as it is."""
    return _MARKUP.sub(r"\\\g<0>", text)
