"""How many baseline steps reach the loss that an arm ends at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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

    The shortest baseline that ends at that loss or below it answers. If the next shorter one ends above, the steps
    are interpolated between the two, each of which has decayed its learning rate to its own end. Otherwise they are
    the first crossing of that baseline's own validation curve, whose rate had not decayed there: that baseline would
    have got there sooner had it been planned so, and the figure flatters the arm. Interpolation is linear in the
    logarithm of the steps. Losses are means over the seeds that the arm and the baselines used have in common.

    Args:
        arm: the arm.
        baselines: of the arm's recipe but for the total number of steps, in which they differ.
    """
    candidates = sorted((b for b in baselines if _shared(arm, b)), key=lambda baseline: baseline.total_steps)
    if not candidates:
        return _unknown("no baseline shares a seed with the arm: train one with its --seed_everything and --data.seed")
    place = next((i for i, baseline in enumerate(candidates) if _leads(baseline, arm, _shared(arm, baseline))), None)
    if place is None:
        longest = candidates[-1]
        seeds = _shared(arm, longest)
        return _unknown(
            f"no baseline gets down to {arm.final_loss(seeds):.4f}, not even in {longest.total_steps} steps "
            f"({longest.final_loss(seeds):.4f}): train a longer one, such as "
            f"--trainer.max_steps={2 * longest.total_steps}, in a directory of its own"
        )
    reached = candidates[place]
    if place > 0:
        shorter = candidates[place - 1]
        seeds = _shared(arm, shorter, reached)
        if seeds and _leads(reached, arm, seeds) and not _leads(shorter, arm, seeds):
            above, below = ((b.total_steps, b.final_loss(seeds)) for b in (shorter, reached))
            steps = _crossing(above, below, arm.final_loss(seeds))
            return EqualLoss(steps, steps / arm.total_steps, FINISHED, None, (shorter.label, reached.label), seeds)

    seeds = _shared(arm, reached)
    target = arm.final_loss(seeds)
    curve = [(v.step, v.loss) for v in mean_curve([reached.by_seeds[seed] for seed in seeds])]
    first = next(i for i, (_, loss) in enumerate(curve) if loss <= target)
    if first == 0:
        return _unknown(
            f"{reached.label} is below {target:.4f} at its first validation already, at step {curve[0][0]}: "
            "validate more often (trainer.val_check_interval), or train a shorter baseline"
        )
    steps = _crossing(curve[first - 1], curve[first], target)
    return EqualLoss(steps, steps / arm.total_steps, CURVE, None, (reached.label,), seeds)


def _crossing(above: tuple[int, float], below: tuple[int, float], target: float) -> float:
    """Steps at which the line through two (steps, loss), straight in log steps, is at ``target``."""
    (early, worse), (late, better) = above, below
    return early * float((late / early) ** ((worse - target) / (worse - better)))


def _leads(baseline: Group, arm: Group, seeds: Sequence[Seeds]) -> bool:
    return baseline.final_loss(seeds) <= arm.final_loss(seeds)


def _shared(arm: Group, *baselines: Group) -> tuple[Seeds, ...]:
    return tuple(seed for seed in arm.by_seeds if all(seed in baseline.by_seeds for baseline in baselines))


def _unknown(reason: str) -> EqualLoss:
    return EqualLoss(None, None, None, reason)
