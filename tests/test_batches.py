"""What each step takes from the data, against sums over the steps one by one."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tst_lightning.batches import Batches
from tst_lightning.phases import PhaseSchedule, Stage


@st.composite
def runs(draw):
    """A schedule and the batches of a run that was resumed and skipped now and then."""
    bags = draw(st.sampled_from([(), (4,), (8, 2)]))
    stages = [Stage(bag, steps=draw(st.integers(1, 12))) for bag in bags]
    schedule = PhaseSchedule.from_stages(stages, sum(stage.steps for stage in stages) + draw(st.integers(1, 20)))
    last = schedule.total_steps - 1
    batches = Batches.constant(draw(st.integers(1, 9)), draw(st.lists(st.integers(0, last), max_size=4)))
    for step in sorted(draw(st.lists(st.integers(1, last), max_size=3, unique=True)) if last else []):
        batches = batches.resized(step, draw(st.integers(1, 9)))
    return schedule, batches


@settings(max_examples=200, deadline=None)
@given(runs())
def test_counts_against_a_sum_over_the_steps(run):
    schedule, batches = run
    latent = data = behind = 0
    for step in range(schedule.total_steps):
        size = next(size for first, size in reversed(batches.sizes) if first <= step)
        bag = schedule.at(step).bag_size
        behind += batches.skipped.count(step) * bag * size
        assert batches.size(step) == size
        assert batches.latent_windows(step) == latent
        assert batches.data_windows(schedule, step) == data
        assert batches.position(schedule, step) == behind
        latent, data, behind = latent + size, data + bag * size, behind + bag * size
    assert batches.latent_windows(schedule.total_steps) == latent
    assert batches.position(schedule, schedule.total_steps) == behind


def test_a_size_that_stays_is_no_change():
    batches = Batches.constant(8)
    assert batches.resized(5, 8) == batches
    changed = batches.resized(5, 4)
    assert changed.sizes == ((0, 8), (5, 4))
    # from a checkpoint before the change, it is made again
    assert changed.resized(3, 4).sizes == ((0, 8), (3, 4)) and changed.resized(3, 8) == batches
    assert changed.resized(0, 2).sizes == ((0, 2),)


def test_a_step_is_skipped_as_often_as_it_is_named_and_not_again_on_a_resume():
    batches = Batches.constant(8, [5]).skipping([5, 3])
    assert batches.skipped == (3, 5)
    assert batches.skipping([5]).skipped == (3, 5) and batches.skipping([5, 5]).skipped == (3, 5, 5)


@pytest.mark.parametrize("sizes", [(), ((1, 2),), ((0, 2), (0, 3)), ((0, 0),)])
def test_our_own_bugs_are_asserted(sizes):
    with pytest.raises(AssertionError):
        Batches(sizes)
