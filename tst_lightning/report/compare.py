"""Which arms may be held against which baseline, and by how much they differ."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from tst_lightning.errors import UserError
from tst_lightning.report.groups import Group
from tst_lightning.report.recipe import Difference, Recipe, Seeds, same_cost_a_step
from tst_lightning.report.runs import Run
from tst_lightning.report.speedup import EqualLoss, equal_loss


@dataclass(frozen=True)
class Pair:
    """An arm's run and the baseline's of the same seeds."""

    seeds: Seeds
    arm: Run
    baseline: Run

    @property
    def difference(self) -> float:
        """The arm's final loss less the baseline's, in nats a token: below 0 the arm is ahead."""
        return self.arm.final_loss - self.baseline.final_loss


@dataclass(frozen=True)
class Comparison:
    """An arm against a baseline.

    Attributes:
        arm: the arm.
        baseline: the baseline of as many steps, or the one that the user named; None where there are only
            baselines of other lengths, which answer the question of equal loss.
        differences: the settings that the two do not share: none, unless the user named the baseline.
        equal_flops: whether both took the same training FLOPs, None where that cannot be told.
        pairs: the runs of the same seeds.
        unpaired: the runs whose seeds the other has not.
        equal_loss: how many baseline steps reach the arm's final loss.
    """

    arm: Group
    baseline: Group | None
    differences: tuple[Difference, ...]
    equal_flops: bool | None
    pairs: tuple[Pair, ...]
    unpaired: tuple[Run, ...]
    equal_loss: EqualLoss

    @property
    def mean_difference(self) -> float | None:
        """The mean over the pairs, None without any."""
        return fmean(pair.difference for pair in self.pairs) if self.pairs else None

    @property
    def spread(self) -> float | None:
        """The sample standard deviation of the pairs' differences, None with fewer than two pairs."""
        return stdev(pair.difference for pair in self.pairs) if len(self.pairs) > 1 else None

    @property
    def baseline_spread(self) -> float | None:
        """The sample standard deviation of the paired baselines' losses, None with fewer than two pairs."""
        return stdev(pair.baseline.final_loss for pair in self.pairs) if len(self.pairs) > 1 else None


def compare(groups: Sequence[Group], named: str | None = None) -> tuple[list[Comparison], list[str]]:
    """Hold every arm with a superposition phase against its baseline.

    An arm's baseline has the same recipe and as many steps, and reads plain tokens throughout. Of another
    recipe, only a baseline that the user names is taken, and then what the two differ in is listed. Losses of
    different text, tokenizers or lengths are never compared.

    Args:
        groups: the arms, baselines among them.
        named: the baseline that the user chose: a run's name or directory, or a group's label.

    Returns:
        The comparisons, and a sentence for every run that is left out.

    Raises:
        UserError: if there is no such baseline.
    """
    notes = [f"{run.name} is compared with nothing: {run.fault}" for group in groups for run in group.runs if run.fault]
    notes += [
        f"{again.name} is not counted: it has the seeds of {first.name} ({first.seeds})"
        for group in groups
        for again, first in group.repeats
    ]
    notes += [
        f"{run.name} is not counted: no seed was set (seed_everything), and it is not the only one of its recipe"
        for group in groups
        for run in group.unseeded
    ]
    chosen = None if named is None else _chosen(groups, named)
    sound = [group for group in groups if group.by_seeds]
    if chosen is not None and not chosen.by_seeds:
        return [], notes
    arms = [group for group in sound if not group.recipe.is_baseline and group is not chosen]
    baselines = [group for group in sound if group.recipe.is_baseline]
    comparisons: list[Comparison] = []
    for arm in arms:
        if chosen is not None:
            faults = arm.recipe.loss_faults(chosen.recipe)
            if faults:
                notes.append(_other_nats(arm, chosen, faults))
            else:
                alike = [group for group in baselines if _differ_only_in_length(group.recipe, chosen.recipe)]
                comparisons.append(_comparison(arm, chosen, alike if chosen.recipe.is_baseline else []))
            continue
        alike = [group for group in baselines if _differ_only_in_length(arm.recipe, group.recipe)]
        if alike and not arm.recipe.loss_faults(alike[0].recipe):
            equal = next((group for group in alike if group.total_steps == arm.total_steps), None)
            comparisons.append(_comparison(arm, equal, alike))
        else:
            notes.append(_no_baseline(arm, baselines))
    if chosen is None:
        notes += [note for group in baselines if (note := _unused(group, comparisons))]
    return comparisons, notes


def _unused(baseline: Group, comparisons: Sequence[Comparison]) -> str | None:
    """What the reader should know of a baseline that no arm is held against: above all that it is better."""
    nearest: tuple[Comparison, list[Difference]] | None = None
    for comparison in comparisons:
        differences = comparison.arm.recipe.differences(baseline.recipe)
        only_length = all(difference.name == "total_steps" for difference in differences)
        if only_length and comparison.arm.by_seeds.keys() & baseline.by_seeds.keys():
            return None
        if not comparison.arm.recipe.loss_faults(baseline.recipe) and (
            nearest is None or len(differences) < len(nearest[1])
        ):
            nearest = comparison, differences
    if nearest is None:
        return None
    arm, differences = nearest[0].arm, nearest[1]
    mine, other = (fmean(run.final_loss for run in group.by_seeds.values()) for group in (baseline, arm))
    why = f"differs in {'; '.join(map(str, differences))} from it" if differences else "shares no seed with it"
    return (
        f"{baseline.label} ends {'BELOW' if mine < other else 'above'} {arm.label}, at {mine:.4f} against {other:.4f} "
        f"nats/token, and is not held against it, as {arm.label} {why}. --baseline {baseline.label} compares them all "
        "the same"
    )


def _comparison(arm: Group, baseline: Group | None, alike: Sequence[Group]) -> Comparison:
    """One comparison; ``alike`` are the baselines that differ from each other only in length."""
    differences = arm.recipe.differences((baseline or alike[0]).recipe)
    if baseline is not None and not baseline.recipe.is_baseline:
        phases = [str(group.recipe.schedule) for group in (arm, baseline)]
        if phases[0] != phases[1]:
            differences.insert(0, Difference("phases", *phases))
        reached = EqualLoss(None, None, None, f"{baseline.label} is no baseline, it has a superposition phase too")
    elif same_cost_a_step(differences):
        reached = equal_loss(arm, alike)
    else:
        reached = EqualLoss(None, None, None, f"a step of {arm.label} costs other FLOPs than one of {alike[0].label}")
    mine, other = arm.by_seeds, {} if baseline is None else baseline.by_seeds
    pairs = tuple(Pair(seeds, run, other[seeds]) for seeds, run in mine.items() if seeds in other)
    alone = [run for seeds, run in mine.items() if seeds not in other]
    alone += [run for seeds, run in other.items() if seeds not in mine]
    return Comparison(
        arm=arm,
        baseline=baseline,
        differences=tuple(differences) if baseline else (),
        equal_flops=_equal_flops(arm, baseline, differences) if baseline else None,
        pairs=pairs,
        unpaired=tuple(alone) if baseline else (),
        equal_loss=reached,
    )


def _equal_flops(arm: Group, baseline: Group, differences: Sequence[Difference]) -> bool | None:
    if same_cost_a_step([*differences]):
        return arm.total_steps == baseline.total_steps
    return None if arm.flops is None or baseline.flops is None else arm.flops == baseline.flops


def _differ_only_in_length(a: Recipe, b: Recipe) -> bool:
    return all(difference.name == "total_steps" for difference in a.differences(b))


def _chosen(groups: Sequence[Group], named: str) -> Group:
    for group in groups:
        if named == group.label or any(named == run.name for run in group.runs):
            return group
    for group in groups:
        if any(os.path.realpath(named) == os.path.realpath(run.directory) for run in group.runs):
            return group
    names = ", ".join(run.name for group in groups for run in group.runs)
    raise UserError(f"--baseline {named} is none of the runs: choose one of {names}")


def _no_baseline(arm: Group, baselines: Sequence[Group]) -> str:
    """Why the arm stands alone, with what keeps the nearest baseline from being its own."""
    if not baselines:
        return f"{arm.label} is compared with nothing: no finished baseline (--phases.bag_size=1) is among the runs"
    same_nats = [group for group in baselines if not arm.recipe.loss_faults(group.recipe)]
    if not same_nats:
        return _other_nats(arm, baselines[0], arm.recipe.loss_faults(baselines[0].recipe))
    nearest = min(same_nats, key=lambda group: len(arm.recipe.differences(group.recipe)))
    differences = "; ".join(map(str, arm.recipe.differences(nearest.recipe)))
    return (
        f"{arm.label} is compared with nothing: no baseline has its recipe. The nearest, {nearest.label}, differs in "
        f"{differences}. --baseline {nearest.label} compares them all the same"
    )


def _other_nats(arm: Group, baseline: Group, faults: Sequence[str]) -> str:
    return (
        f"{arm.label} and {baseline.label} are not compared: a nat a token cannot be taken to be the same thing in "
        f"both ({'; '.join(faults)})"
    )
