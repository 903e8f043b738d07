"""The phases of a run as functions of the optimiser step."""

from __future__ import annotations

import json
import math
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tst_lightning.errors import UserError
from tst_lightning.phases import Phase, Phases, PhaseSchedule, Stage


def spans(schedule):
    return [(phase.bag_size, phase.start, phase.stop) for phase in schedule.phases]


percents = st.integers(0, 100).map(lambda percent: percent / 100)


@st.composite
def schedules(draw):
    """Schedules of up to three stages, some in ratios and some in steps, that fit."""
    total = draw(st.integers(1, 400))
    stages, left = [], Fraction(1)
    for _ in range(draw(st.integers(0, 3))):
        ratio = draw(st.integers(0, math.floor(left * 100))) / 100
        left -= Fraction(str(ratio))
        if draw(st.booleans()):
            stages.append(Stage(draw(st.integers(1, 8)), ratio=ratio))
        else:
            stages.append(Stage(draw(st.integers(1, 8)), steps=math.floor(Fraction(str(ratio)) * total)))
    try:
        return PhaseSchedule.from_stages(stages, total)
    except UserError:  # a stage that is too short for one step is refused, and tested below
        return PhaseSchedule.from_stages([Stage(4, steps=total // 3)], total)


def test_the_papers_two_phases():
    schedule = PhaseSchedule.from_ratio(6, 0.3, 20_000)
    assert spans(schedule) == [(6, 0, 6000), (1, 6000, 20_000)]
    assert schedule.total_steps == 20_000
    assert schedule.boundaries == (6000,)
    assert [phase.name for phase in schedule.phases] == ["superposition", "recovery"]
    assert [phase.steps for phase in schedule.phases] == [6000, 14_000]
    assert str(schedule) == "bag 6 for steps 0-5999, bag 1 for steps 6000-19999"


@pytest.mark.parametrize(
    ("ratio", "total", "switch"),
    [
        (0.29, 100, 29),  # 28.999999999999996 in floating point
        (0.57, 100, 57),  # 56.99999999999999
        (0.07, 100, 7),  # 7.000000000000001
        (0.3, 5, 2),  # halves up, and not to even: 1.5
        (0.5, 5, 3),  # 2.5
        (0.5, 1, 1),
        (1e-4, 20_000, 2),
        (1, 7, 7),
    ],
)
def test_the_switch_is_rounded_on_the_written_number(ratio, total, switch):
    expected = [(4, 0, switch)] + ([(1, switch, total)] if switch < total else [])
    assert spans(PhaseSchedule.from_ratio(4, ratio, total)) == expected


@given(ratio=percents, total=st.integers(1, 100_000))
def test_the_switch_is_the_nearest_step(ratio, total):
    exact = Fraction(str(ratio)) * total
    try:
        schedule = PhaseSchedule.from_ratio(4, ratio, total)
    except UserError:
        assert 0 < exact < Fraction(1, 2)
        return
    switch = schedule.phases[0].stop if schedule.phases[0].bag_size == 4 else 0
    assert -Fraction(1, 2) < switch - exact <= Fraction(1, 2)  # halves go up


@pytest.mark.parametrize(
    "phases",
    [
        Phases(),
        Phases(bag_size=1),
        Phases(bag_size=1, ratio=0.3),
        Phases(bag_size=6, ratio=0),
        Phases(stages=[]),
    ],
)
def test_baselines_are_one_recovery_phase(phases):
    assert spans(phases.schedule(100)) == [(1, 0, 100)]
    assert phases.schedule(100).boundaries == ()


def test_switch_step():
    assert spans(Phases(bag_size=4, switch_step=30).schedule(100)) == [(4, 0, 30), (1, 30, 100)]
    assert spans(Phases(bag_size=4, switch_step=100).schedule(100)) == [(4, 0, 100)]


def test_stages_in_order():
    phases = Phases(stages=[Stage(16, 0.1), Stage(4, steps=15), Stage(2, 0.2)])
    schedule = phases.schedule(100)
    assert spans(schedule) == [(16, 0, 10), (4, 10, 25), (2, 25, 45), (1, 45, 100)]
    assert schedule.boundaries == (10, 25, 45)


def test_boundaries_are_cumulative_so_that_rounding_does_not_add_up():
    # Each stage is 1.5 steps; rounded one by one they would be 2, 2 and 2.
    stages = [Stage(8, 0.15), Stage(4, 0.15), Stage(2, 0.15)]
    assert PhaseSchedule.from_stages(stages, 10).boundaries == (2, 3, 5)


def test_ratios_are_added_exactly():
    ratios = (0.2, 0.4, 0.3, 0.1)
    assert sum(ratios) > 1  # in floating point
    stages = [Stage(bag_size, ratio) for bag_size, ratio in zip((16, 8, 4, 2), ratios, strict=True)]
    assert spans(PhaseSchedule.from_stages(stages, 10)) == [(16, 0, 2), (8, 2, 6), (4, 6, 9), (2, 9, 10)]


def test_equal_neighbours_are_merged_and_empty_stages_dropped():
    stages = [Stage(4, 0.1), Stage(4, 0.2), Stage(8, 0.0), Stage(4, steps=0), Stage(1, 0.3)]
    assert spans(PhaseSchedule.from_stages(stages, 100)) == [(4, 0, 30), (1, 30, 100)]


@given(schedules())
def test_phases_cover_the_run_without_a_gap(schedule):
    steps = [step for phase in schedule.phases for step in range(phase.start, phase.stop)]
    assert steps == list(range(schedule.total_steps))
    for a, b in pairwise(schedule.phases):
        assert a.bag_size != b.bag_size
    for phase in schedule.phases:
        assert schedule.at(phase.start) == schedule.at(phase.stop - 1) == phase
        assert phase.name == ("recovery" if phase.bag_size == 1 else "superposition")


@given(schedules(), st.integers(1, 64), st.integers(1, 512))
def test_position_and_tokens_against_a_sum_over_the_steps(schedule, global_batch_size, latent_length):
    shape = {"global_batch_size": global_batch_size, "latent_length": latent_length}
    windows = latent = data = 0
    for step in range(schedule.total_steps + 1):
        assert schedule.position(step) == windows
        assert schedule.latent_tokens(step, **shape) == latent
        assert schedule.data_tokens(step, **shape) == data
        if step < schedule.total_steps:
            bag_size = schedule.at(step).bag_size
            windows += bag_size
            latent += global_batch_size * latent_length
            data += global_batch_size * latent_length * bag_size


def test_a_superposition_step_reads_bag_size_times_the_data():
    schedule, shape = PhaseSchedule.from_ratio(4, 0.5, 10), {"global_batch_size": 2, "latent_length": 8}
    assert schedule.data_tokens(5, **shape) == 4 * 5 * 16
    assert schedule.data_tokens(10, **shape) == (4 + 1) * 5 * 16
    assert schedule.latent_tokens(10, **shape) == 10 * 16


@pytest.mark.parametrize("step", [-1, 10, 11])
def test_at_knows_its_bounds(step):
    with pytest.raises(IndexError, match=rf"step {step} is outside the run's \[0, 10\)"):
        PhaseSchedule.from_ratio(4, 0.5, 10).at(step)


@pytest.mark.parametrize("step", [-1, 11])
def test_position_and_tokens_know_their_bounds(step):
    schedule, shape = PhaseSchedule.from_ratio(4, 0.5, 10), {"global_batch_size": 2, "latent_length": 8}
    for function in (
        schedule.position,
        lambda step: schedule.latent_tokens(step, **shape),
        lambda step: schedule.data_tokens(step, **shape),
    ):
        with pytest.raises(IndexError, match=rf"step {step} is outside the run's \[0, 10\]"):
            function(step)


@given(schedules())
def test_round_trip_in_plain_types(schedule):
    state = json.loads(json.dumps(schedule.to_dict()))
    assert state == schedule.to_dict()
    assert PhaseSchedule.from_dict(state) == schedule


@pytest.mark.parametrize(
    "phases",
    [
        [],
        [Phase(4, 1, 5)],  # does not start at 0
        [Phase(4, 0, 5), Phase(1, 6, 9)],  # a gap
        [Phase(4, 0, 5), Phase(4, 5, 9)],  # not merged
        [Phase(4, 0, 0)],
        [Phase(0, 0, 5)],
    ],
)
def test_a_schedule_that_cannot_be_is_our_own_bug(phases):
    with pytest.raises(AssertionError):
        PhaseSchedule(tuple(phases))


@pytest.mark.parametrize(
    ("phases", "faults"),
    [
        (
            Phases(bag_size=4, ratio=0.3, stages=[Stage(4, 0.3)]),
            ["phases.stages and bag_size=4, ratio=0.3 are both given: keep one form and set the other to null"],
        ),
        (
            Phases(switch_step=3, stages=[]),
            ["phases.stages and switch_step=3 are both given: keep one form and set the other to null"],
        ),
        (
            Phases(bag_size=4, ratio=0.3, switch_step=30),
            ["phases.ratio=0.3 and phases.switch_step=30 both set the switch: keep one and set the other to null"],
        ),
        (
            Phases(bag_size=4),
            ["phases.bag_size=4 needs phases.ratio (0.2 to 0.4 in the paper) or phases.switch_step"],
        ),
        (
            Phases(ratio=0.3),
            ["ratio=0.3 needs phases.bag_size (4 to 8 in the paper; 1 is the baseline)"],
        ),
        (
            Phases(ratio=0.3, switch_step=30),
            [
                "phases.ratio=0.3 and phases.switch_step=30 both set the switch: keep one and set the other to null",
                "ratio=0.3, switch_step=30 needs phases.bag_size (4 to 8 in the paper; 1 is the baseline)",
            ],
        ),
        (Phases(bag_size=0, ratio=0.3), ["phases: bag_size=0 must be at least 1"]),
        (Phases(bag_size=4, ratio=1.2), ["phases: ratio=1.2 must lie in [0, 1]"]),
        (Phases(bag_size=4, ratio=-0.1), ["phases: ratio=-0.1 must lie in [0, 1]"]),
        (Phases(bag_size=4, ratio=math.nan), ["phases: ratio=nan must lie in [0, 1]"]),
        (
            Phases(bag_size=-1, ratio=3),
            ["phases: bag_size=-1 must be at least 1", "phases: ratio=3 must lie in [0, 1]"],
        ),
        (Phases(bag_size=4, switch_step=-1), ["phases: -1 steps must not be negative"]),
        (
            Phases(bag_size=4, ratio=0.004),
            ["phases: ratio=0.004 of 100 steps rounds to no step at all: raise it, or set ratio=0 for the baseline"],
        ),
        (
            Phases(bag_size=4, switch_step=101),
            ["the superposition stages take 101 of 100 steps: shorten them, or raise trainer.max_steps"],
        ),
        (
            Phases(stages=[Stage(8, 0.6), Stage(4, 0.5)]),
            ["the superposition stages take 110 of 100 steps: shorten them, or raise trainer.max_steps"],
        ),
        (
            Phases(stages=[Stage(0, 0.1), Stage(4), Stage(4, 0.1, 10), Stage(4, steps=-2), Stage(2, 7.0)]),
            [
                "phase 1 of 5: bag_size=0 must be at least 1",
                "phase 2 of 5: give ratio or steps, one of them",
                "phase 3 of 5: give ratio or steps, one of them",
                "phase 4 of 5: -2 steps must not be negative",
                "phase 5 of 5: ratio=7.0 must lie in [0, 1]",
            ],
        ),
    ],
)
def test_all_faults_are_named_with_the_way_out(phases, faults):
    with pytest.raises(UserError) as caught:
        phases.schedule(100)
    assert list(caught.value.faults) == faults


@pytest.mark.parametrize("total", [0, -1])
def test_a_run_needs_a_step(total):
    # -1 is Lightning's "no limit", which has no share to take.
    with pytest.raises(UserError, match=f"at least one optimiser step, not {total}: set trainer.max_steps"):
        Phases(bag_size=4, ratio=0.3).schedule(total)
