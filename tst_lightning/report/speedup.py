"""How many baseline steps reach the loss that an arm ends at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from tst_lightning.report.groups import Group, mean_curve
from tst_lightning.report.recipe import Seeds

FINISHED = "between finished baselines"
CURVE = "on the baseline's own curve"


@dataclass(frozen=True)
class EqualLoss:
    """The answer, or the reason why there is none.

    Attributes:
        baseline_steps: steps of a baseline that ends at the arm's final loss, None if unknown.
        speed_up: that over the arm's own steps: above 1 the arm needs fewer, below 1 more.
        method: :data:`FINISHED` or :data:`CURVE`, None if unknown.
        reason: why it is unknown, and the way out.
        baselines: labels of the baselines that it was read from.
        seeds: over which the losses are means.
    """

    baseline_steps: float | None
    speed_up: float | None
    method: str | None
    reason: str | None
    baselines: tuple[str, ...] = ()
    seeds: tuple[Seeds, ...] = ()


def equal_loss(arm: Group, baselines: Sequence[Group]) -> EqualLoss:
    """Find the number of steps after which a baseline has the arm's final loss.

    Where that loss lies between the final losses of two baselines of different lengths, each of which has
    decayed its learning rate to its own end, it is interpolated between them, linearly in the logarithm of the
    steps. Otherwise it is the first crossing of one baseline's own validation curve, whose rate had not
    decayed there: that baseline would have got there sooner had it been planned so, and the figure flatters
    the arm. Losses are means over the seeds that all have.

    Args:
        arm: the arm.
        baselines: of the arm's recipe but for the total number of steps, in which they differ.
    """
    candidates = sorted(
        (b for b in baselines if b.by_seeds.keys() & arm.by_seeds.keys()), key=lambda baseline: baseline.total_steps
    )
    if not candidates:
        return _unknown("no baseline shares a seed with the arm: train one with its --seed_everything and --data.seed")
    seeds = _shared(arm, candidates)
    if not seeds:  # the most seeds, and of these the longest
        candidates = [max(candidates, key=lambda b: (len(_shared(arm, [b])), b.total_steps))]
        seeds = _shared(arm, candidates)
    target = arm.final_loss(seeds)
    ends = [(baseline, baseline.final_loss(seeds)) for baseline in candidates]

    for (short, worse), (long, better) in pairwise(ends):
        if worse >= target >= better:
            share = (worse - target) / (worse - better) if worse > better else 0.0
            steps = short.total_steps * (long.total_steps / short.total_steps) ** share
            return EqualLoss(steps, steps / arm.total_steps, FINISHED, None, (short.label, long.label), seeds)

    reached = [baseline for baseline, loss in ends if loss <= target]
    if not reached:
        longest = candidates[-1]
        return _unknown(
            f"no baseline gets down to {target:.4f}, not even in {longest.total_steps} steps "
            f"({min(loss for _, loss in ends):.4f}): train a longer one, such as "
            f"--trainer.max_steps={2 * longest.total_steps}, in a directory of its own"
        )
    baseline = reached[0]
    curve = mean_curve([baseline.by_seeds[seed] for seed in seeds])
    crossing = next(i for i, validation in enumerate(curve) if validation.loss <= target)
    after = curve[crossing]
    if crossing == 0:
        return _unknown(
            f"{baseline.label} is below {target:.4f} at its first validation already, at step {after.step}: "
            "validate more often (trainer.val_check_interval), or train a shorter baseline"
        )
    before = curve[crossing - 1]
    steps = before.step + (after.step - before.step) * (before.loss - target) / (before.loss - after.loss)
    return EqualLoss(steps, steps / arm.total_steps, CURVE, None, (baseline.label,), seeds)


def _shared(arm: Group, baselines: Sequence[Group]) -> tuple[Seeds, ...]:
    return tuple(seed for seed in arm.by_seeds if all(seed in baseline.by_seeds for baseline in baselines))


def _unknown(reason: str) -> EqualLoss:
    return EqualLoss(None, None, None, reason)
