"""A comparison in plain sentences, as ready to say that an arm is behind as that it is ahead."""

from __future__ import annotations

from collections.abc import Sequence

from tst_lightning.report.compare import Comparison
from tst_lightning.report.runs import Run
from tst_lightning.report.speedup import CURVE
from tst_lightning.text import count


def title(comparison: Comparison) -> str:
    """What is held against what."""
    other = f"baselines of other lengths than {comparison.arm.total_steps} steps"
    return f"{comparison.arm.label} against {other if comparison.baseline is None else comparison.baseline.label}"


def sentences(comparison: Comparison) -> list[str]:
    """Who is ahead, how sure that is, at what cost, and when the baseline gets there."""
    lines = [_verdict(comparison), *_cost(comparison)]
    if comparison.unpaired:
        runs = ", ".join(f"{run.name} (seed {run.seeds})" for run in comparison.unpaired)
        lines.append(f"Left out, as the other arm has no run of these seeds: {runs}.")
    return [*lines, _equal_loss(comparison)]


def machine_notes(runs: Sequence[Run]) -> list[str]:
    """A warning where the wall clocks, or the software, of the runs are not alike."""
    recipes = [run.recipe for run in runs if run.recipe is not None]
    notes = []
    places = dict.fromkeys(f"{r.machine.get('processes')} x {r.machine.get('device')}" for r in recipes)
    if len(places) > 1:
        notes.append(f"wall clocks are not comparable: the runs were trained on {', '.join(places)}")
    versions = dict.fromkeys(
        f"tst_lightning {recipe.version} with torch {recipe.machine.get('torch')}" for recipe in recipes
    )
    if len(versions) > 1:
        notes.append(f"the runs were trained by different software: {', '.join(versions)}")
    return notes


def _verdict(comparison: Comparison) -> str:
    arm, baseline, pairs = comparison.arm.label, comparison.baseline, comparison.pairs
    if baseline is None:
        return f"No baseline of the same recipe has {comparison.arm.total_steps} steps: equal steps are not compared."
    mean, spread = comparison.mean_difference, comparison.spread
    if mean is None:
        return "The two have no seed in common: their losses are not compared."
    if round(mean, 4) == 0:
        stand = f"{arm} is level with {baseline.label} to four decimals"
    else:
        stand = f"{arm} is {'behind' if mean > 0 else 'ahead of'} {baseline.label} by {abs(mean):.4f} nats/token"
    if spread is None:
        losses = f"{pairs[0].arm.final_loss:.4f} against {pairs[0].baseline.final_loss:.4f}"
        return f"{stand} ({losses}). One seed: that cannot be told from chance."
    differences = [pair.difference for pair in pairs]
    counted = {"ahead": sum(d < 0 for d in differences), "behind": sum(d > 0 for d in differences)}
    every = "both" if len(pairs) == 2 else f"all {len(pairs)}"
    seeds = " and ".join(
        f"{where} in {every if number == len(pairs) else f'{number} of {len(pairs)}'} seeds"
        for where, number in counted.items()
        if number
    )
    larger = "larger than" if abs(mean) > spread else "not larger than"
    return (
        f"{stand} on average, {seeds or 'the same in every seed'} "
        f"(differences {min(differences):+.4f} to {max(differences):+.4f}). "
        f"The mean difference is {larger} the spread of the differences over seeds (standard deviation {spread:.4f}); "
        f"the baseline itself moves between seeds by a standard deviation of {comparison.baseline_spread:.4f}."
        f"{' Two seeds tell little.' if len(pairs) == 2 else ''}"
    )


def _cost(comparison: Comparison) -> list[str]:
    if comparison.baseline is None:
        return []
    if not comparison.differences:
        flops = comparison.arm.flops
        each = f"{comparison.arm.total_steps} steps" + ("" if flops is None else f", {flops:.3g} FLOPs")
        return [f"Equal FLOPs: one recipe, {each} a run."]
    costs = {True: "equal FLOPs", False: "other FLOPs", None: "FLOPs that cannot be compared"}
    differences = "; ".join(map(str, comparison.differences))
    return [f"Two recipes, at {costs[comparison.equal_flops]}. They differ in {differences}."]


def _equal_loss(comparison: Comparison) -> str:
    found = comparison.equal_loss
    if found.baseline_steps is None:
        return f"Equal loss is unknown: {found.reason}."
    assert found.speed_up is not None
    target = comparison.arm.final_loss(found.seeds)
    over = "" if len(found.seeds) == 1 else f" (means over {len(found.seeds)} seeds)"
    if len(comparison.arm.by_seeds) > len(found.seeds):
        over = f" (over seed{'s' if len(found.seeds) > 1 else ''} {', '.join(map(str, found.seeds))} only)"
    change = f"{found.speed_up:.2f}x"
    if change != "1.00x":
        change = f"a {'speed-up' if found.speed_up > 1 else 'slow-down'}, {change}"
    caveat = ""
    if found.method == CURVE:
        how = f"read off the validation curve of {found.baselines[0]}"
        if change != "1.00x":
            caveat = (
                " The learning rate of that curve had not decayed to its end there, so the figure flatters "
                f"{comparison.arm.label}: a baseline planned to end there gets there sooner."
            )
    else:
        how = f"interpolated between {' and '.join(found.baselines)}, each decayed to its own end"
    return (
        f"Equal loss: a baseline gets to {target:.4f} in about {count(found.baseline_steps)} steps{over}, where "
        f"{comparison.arm.label} takes {comparison.arm.total_steps}: {change} ({how}).{caveat}"
    )
