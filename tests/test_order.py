from __future__ import annotations

import pickle
import subprocess
import sys
from collections import Counter
from fractions import Fraction
from itertools import pairwise
from math import factorial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tst_lightning.batches import Batches
from tst_lightning.data.distribute import HeldOutWindow, batch_faults, held_out, shard
from tst_lightning.data.order import DataOrder, Window, order_faults
from tst_lightning.data.permutation import Permutation, splitmix64
from tst_lightning.errors import UserError
from tst_lightning.phases import PhaseSchedule, Stage

STAGES = {
    "baseline": [],
    "s=2": [Stage(2, ratio=0.3)],
    "s=6": [Stage(6, ratio=0.3)],
    "s=16": [Stage(16, ratio=0.2)],
    "12-4-1": [Stage(12, ratio=0.1), Stage(4, ratio=0.2)],
}


def one_corpus(schedule, tokens, latent_length, global_batch_size, **options):
    return DataOrder(schedule, (tokens,), latent_length, Batches.constant(global_batch_size), **options)


def schedule(steps, *stages):
    """Stages of (bag size, steps), then recovery up to ``steps``."""
    return PhaseSchedule.from_stages([Stage(bag_size, steps=n) for bag_size, n in stages], steps)


def plain_windows(order, step):
    """The step's windows, each as its plain windows' numbers in the flat stream."""
    result = []
    for window in order.batch(step):
        assert window.start % order.latent_length == 0
        first = window.start // order.latent_length
        result.append(list(range(first, first + window.bag_size)))
    return result


def slow_reference(order):
    """Every step's plain windows, by keeping a literal list of the windows that no step has read yet.

    A group lists its (row, column) in the order of rows, then columns. A step with bag size s takes the first
    of them, and the s - 1 rows below it in the same column.
    """
    places = order.batches.size(0)
    unread: list[tuple[int, int]] = []
    group = 0
    for step in range(order.schedule.total_steps):
        bag_size = order.schedule.at(step).bag_size
        if not unread:
            unread = [
                (row, group * order.group_batches + column)
                for row in range(order.unit_windows)
                for column in range(order.group_batches)
            ]
            group += 1
        row, column = unread[0]
        assert row % bag_size == 0
        rows = range(row, row + bag_size)
        for r in rows:
            unread.remove((r, column))
        slots = range(column * places, (column + 1) * places)
        yield [[order.unit(slot)[1] * order.unit_windows + r for r in rows] for slot in slots]


@st.composite
def orders(draw):
    unit_windows = draw(st.sampled_from([1, 2, 4, 6, 8, 12, 24, 48]))
    stages, bag_size = [], unit_windows
    for _ in range(draw(st.integers(0, 4))):
        bag_size = draw(st.sampled_from([d for d in range(1, bag_size + 1) if bag_size % d == 0]))
        stages.append((bag_size, draw(st.integers(1, 40))))
    recovery = draw(st.integers(1, 60))
    latent_length = draw(st.integers(1, 5))
    units = draw(st.integers(1, 40))
    tail = draw(st.integers(0, unit_windows * latent_length - 1))
    return one_corpus(
        schedule(sum(n for _, n in stages) + recovery, *stages),
        tokens=units * unit_windows * latent_length + tail,
        latent_length=latent_length,
        global_batch_size=draw(st.integers(1, 7)),
        seed=draw(st.integers(0, 2**32)),
        unit_windows=unit_windows,
        group_batches=draw(st.integers(1, 9)),
    )


def assert_uniform(counts, cells):
    """Pearson's chi-square of counts over so many equally likely cells, up to four standard deviations."""
    mean = counts.total() / cells
    chi_square = sum((count - mean) ** 2 / mean for count in counts.values()) + mean * (cells - len(counts))
    assert chi_square < cells - 1 + 4 * (2 * (cells - 1)) ** 0.5


# Permutation


@pytest.mark.parametrize("sizes", [range(1, 200), [255, 256, 257, 1000, 4095, 4097, 10_007]])
def test_a_permutation_is_a_bijection(sizes):
    for size in sizes:
        for seed in (0, 1, 2**63):
            assert sorted(map(Permutation(size, seed, 0), range(size))) == list(range(size))


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_every_ordering_of_few_units_is_equally_likely(size):
    seeds = 200 * factorial(size)
    counts = Counter(tuple(map(Permutation(size, seed, 3), range(size))) for seed in range(seeds))
    assert_uniform(counts, factorial(size))


@pytest.mark.parametrize("size", [7, 12, 31])
def test_every_unit_is_equally_likely_at_every_place_and_beside_every_other(size):
    seeds = 3000
    places: Counter[tuple[int, int]] = Counter()
    pairs: Counter[tuple[int, int]] = Counter()
    for seed in range(seeds):
        units = list(map(Permutation(size, seed, 0), range(size)))
        places.update(enumerate(units))
        pairs.update(pairwise(units))
    assert_uniform(places, size * size)
    assert_uniform(pairs, size * (size - 1))


def test_a_large_permutation_has_no_pattern():
    size = 100_003
    shuffle = Permutation(size, 11, 0)
    units = [shuffle(place) for place in range(20_000)]
    ahead = sum(a < b for a, b in pairwise(units))
    assert abs(ahead - 10_000) < 200  # neighbours rise as often as they fall (standard deviation 41)
    assert abs(sum(units) / 20_000 / size - 0.5) < 0.01
    assert sum(abs(a - b) == 1 for a, b in pairwise(units)) < 6  # 0.4 expected
    assert abs(sum(unit < place * size // 20_000 for place, unit in enumerate(units)) - 10_000) < 400


def test_epochs_and_seeds_differ():
    keys = [(seed, epoch) for seed in range(20) for epoch in range(20)]
    assert len({tuple(map(Permutation(50, *key), range(50))) for key in keys}) == 400


def test_the_order_stays_the_same_for_ever():
    # SplitMix64's published outputs for the seed 1234567
    assert [splitmix64(1234567, i) for i in range(3)] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
    ]
    assert list(map(Permutation(10, 0, 0), range(10))) == [9, 5, 8, 7, 6, 4, 2, 1, 0, 3]
    order = one_corpus(schedule(100, (6, 10)), 10_000, 4, 3, seed=42)
    starts = [[window.start for window in order.batch(step)] for step in (0, 9, 10, 99)]
    assert starts == [[6144, 4224, 2112], [5568, 9600, 5376], [3456, 9216, 3264], [612, 3108, 7716]]


# The order of the windows


@settings(max_examples=150, deadline=None)
@given(orders(), st.randoms(use_true_random=False))
def test_the_order_is_the_slow_reference_at_random_access(order, random):
    expected = list(slow_reference(order))
    steps = list(range(order.schedule.total_steps))
    random.shuffle(steps)
    for step in steps:
        assert plain_windows(order, step) == expected[step]


@settings(max_examples=100, deadline=None)
@given(orders())
def test_nothing_is_skipped_or_read_twice(order):
    per_group = order.unit_windows * order.group_batches
    read: Counter[int] = Counter()
    group = 0
    for step in range(order.schedule.total_steps):
        batch = plain_windows(order, step)
        assert len(batch) == order.batches.size(step)
        read.update(window for windows in batch for window in windows)
        after = order.schedule.position(step + 1)
        if after % per_group == 0:  # the end of a group: exactly its units were read, each once per slot
            first = group * order.group_batches * order.batches.size(0)
            slots = range(first, first + order.group_batches * order.batches.size(0))
            rows = range(order.unit_windows)
            assert read == Counter(order.unit(slot)[1] * order.unit_windows + row for slot in slots for row in rows)
            read.clear()
            group += 1


@settings(max_examples=100, deadline=None)
@given(orders(), st.integers(0, 3))
def test_every_epoch_holds_every_unit_once(order, epoch):
    units = [order.unit(slot)[1] for slot in range(epoch * order.units(0), (epoch + 1) * order.units(0))]
    assert sorted(units) == list(range(order.tokens[0] // (order.unit_windows * order.latent_length)))


@pytest.mark.parametrize("stages", STAGES.values(), ids=STAGES)
def test_whole_epochs_read_every_window_but_the_tail_equally_often(stages):
    units, batch, epochs = 24, 3, 2
    plain = units * 48 * epochs // batch  # plain windows that each place of the batch reads in two epochs
    steps = 1000
    while PhaseSchedule.from_stages(stages, steps).position(steps) < plain:
        steps += 1
    phases = PhaseSchedule.from_stages(stages, steps)
    order = one_corpus(phases, units * 48 * 5 + 239, 5, batch, seed=1, group_batches=4)
    read: Counter[int] = Counter()
    for step in range(steps):
        if order.schedule.position(step) == plain:
            break
        read.update(window for windows in plain_windows(order, step) for window in windows)
    assert read == dict.fromkeys(range(units * 48), epochs)


@pytest.mark.parametrize("name", ["s=2", "s=6", "s=16", "12-4-1"])
def test_tst_and_the_baseline_read_the_same_units_in_the_same_order(name):
    def groups(stages, steps):
        """Per group, what each unit slot's place was given, in the order of reading."""
        order = one_corpus(PhaseSchedule.from_stages(stages, steps), 48 * 5 * 400, 5, 4, seed=9)
        first_seen: dict[tuple[int, int, int], None] = {}
        for step in range(steps):
            for place, windows in enumerate(plain_windows(order, step)):
                group = order.schedule.position(step) // (48 * 16)
                first_seen.setdefault((group, place, windows[0] // 48))
        return list(first_seen), order

    baseline, _ = groups([], 48 * 16 * 4)
    tst, order = groups(STAGES[name], 1500)
    whole = min(order.schedule.position(1500) // (48 * 16), 4) * 16 * 4  # of each, the whole groups
    assert whole > 64
    assert tst[:whole] == baseline[:whole]


def test_consecutive_plain_windows_are_one_superposition_window():
    plain = one_corpus(schedule(96), 48 * 8 * 10, 8, 2, seed=0, group_batches=1)
    bagged = one_corpus(schedule(17, (6, 16)), 48 * 8 * 10, 8, 2, seed=0, group_batches=1)
    for step in range(16):
        for place in range(2):
            start, bag_size, _ = bagged.batch(step)[place]
            starts = [plain.batch(6 * step + i)[place].start for i in range(6)]
            assert bag_size == 6
            assert starts == list(range(start, start + 6 * 8, 8))


def test_pieces_are_read_row_by_row_and_the_rest_after_a_switch():
    # one unit a column, so the numbers can be read off: unit_windows=4, two columns, a switch after one step
    order = one_corpus(schedule(7, (2, 1)), 4 * 100, 1, 1, seed=3, unit_windows=4, group_batches=2)
    left, right = (order.unit(slot)[1] * 4 for slot in range(2))
    assert [batch[0] for batch in map(order.batch, range(7))] == [
        Window(left, 2),
        *(Window(start, 1) for start in (right, right + 1, left + 2, right + 2, left + 3, right + 3)),
    ]


def test_consecutive_steps_read_different_units():
    order = one_corpus(schedule(16 * 48, (4, 16 * 12)), 48 * 8 * 10_000, 8, 2, seed=0)
    for step in range(15):
        units = {windows[0] // 48 for s in (step, step + 1) for windows in plain_windows(order, s)}
        assert len(units) == 4


def test_extending_a_run_changes_nothing_before_its_end():
    short = one_corpus(schedule(50, (6, 20)), 48 * 8 * 30, 8, 3, seed=0)
    long = one_corpus(schedule(5000, (6, 20)), 48 * 8 * 30, 8, 3, seed=0)
    assert [short.batch(step) for step in range(50)] == [long.batch(step) for step in range(50)]


def test_epochs_and_seeds_read_different_orders():
    order = one_corpus(schedule(9), 48 * 8 * 30, 8, 3, seed=0)
    epochs = {tuple(map(order.unit, range(30 * epoch, 30 * (epoch + 1)))) for epoch in range(5)}
    assert len(epochs) == 5
    seeds = (-1, 0, 1, 2**32, 2**40)
    assert len({tuple(one_corpus(schedule(9), 48 * 8 * 30, 8, 3, seed=seed).batch(0)) for seed in seeds}) == 5


def test_epochs_are_the_share_of_the_units_that_was_read():
    order = one_corpus(schedule(100, (6, 10)), 48 * 8 * 20 + 99, 8, 4, seed=0)
    assert [order.epochs(step) for step in (0, 10, 100)] == [
        0,
        float(Fraction(60 * 4, 20 * 48)),
        float(Fraction(150 * 4, 20 * 48)),
    ]


def test_steps_outside_the_run_and_odd_copies():
    order = one_corpus(schedule(10), 48 * 8, 8, 4, seed=0)
    with pytest.raises(IndexError, match=r"outside the run's \[0, 10\)"):
        order.batch(10)
    copy = pickle.loads(pickle.dumps(order))
    assert copy == order
    assert copy.batch(3) == order.batch(3)


# Faults


@pytest.mark.parametrize("bag_size", [2, 3, 4, 6, 8, 12, 16, 24, 48])
def test_bag_sizes_that_divide_are_fine(bag_size):
    assert order_faults(schedule(10, (bag_size, 5)), 48) == []


def test_a_bag_size_that_does_not_divide_is_named_with_those_that_do():
    assert order_faults(schedule(10, (5, 5)), 48) == [
        "bag size 5 does not divide data.unit_windows=48: use one of 2, 3, 4, 6, 8, 12, 16, 24, 48 or set "
        "data.unit_windows to a multiple of 5"
    ]


def test_every_fault_of_a_chain_is_named():
    assert order_faults(schedule(10, (10, 1), (6, 1), (4, 1)), 48) == [
        "bag size 10 does not divide data.unit_windows=48: use one of 2, 3, 4, 6, 8, 12, 16, 24, 48 or set "
        "data.unit_windows to a multiple of 10",
        "bag size 6 does not divide 10, the bag size of the stage before it: use 2, use one of 12, 24, 48 "
        "before it or leave out one of the two stages",
        "bag size 4 does not divide 6, the bag size of the stage before it: use one of 2, 3, use one of 8, "
        "12, 16, 24, 48 before it or leave out one of the two stages",
    ]
    assert len(order_faults(schedule(10, (2, 1), (4, 1)), 48)) == 1  # fine to coarse


@given(
    st.lists(st.integers(1, 24), min_size=1, max_size=4),
    st.integers(1, 96),
)
def test_faults_are_found_exactly_when_there_are_any(bag_sizes, unit_windows):
    phases = schedule(100, *((bag_size, 10) for bag_size in bag_sizes))
    resolved = [phase.bag_size for phase in phases.phases]
    good = all(unit_windows % s == 0 for s in resolved) and all(a % b == 0 for a, b in pairwise(resolved))
    assert (order_faults(phases, unit_windows) == []) == good


def test_a_corpus_shorter_than_a_unit_is_refused_with_the_ways_out():
    with pytest.raises(UserError) as caught:
        one_corpus(schedule(10, (6, 5)), tokens=1000, latent_length=64, global_batch_size=2, seed=0)
    assert caught.value.faults == (
        "the corpus has 1000 tokens, but a unit takes 3072 (data.unit_windows=48 times data.latent_length=64)"
        ": set data.unit_windows to 12 or a smaller multiple of 6, set data.latent_length to at most 20 or "
        "prepare more text",
    )
    for ways in ({"unit_windows": 12, "latent_length": 64}, {"unit_windows": 48, "latent_length": 20}):
        assert one_corpus(schedule(10, (6, 5)), tokens=1000, global_batch_size=2, seed=0, **ways).units(0) == 1


def test_all_faults_come_at_once():
    with pytest.raises(UserError) as caught:
        one_corpus(schedule(10, (5, 5)), tokens=10, latent_length=64, global_batch_size=1, seed=0)
    assert [fault.split(":")[0] for fault in caught.value.faults] == [
        "bag size 5 does not divide data.unit_windows=48",
        "the corpus has 10 tokens, but a unit takes 3072 (data.unit_windows=48 times data.latent_length=64)",
    ]
    with pytest.raises(UserError) as caught:
        one_corpus(schedule(10), tokens=10, latent_length=0, global_batch_size=1, seed=0, unit_windows=0)
    assert caught.value.faults == (
        "data.unit_windows=0 must be at least 1 (the default is 48)",
        "data.latent_length=0 must be at least 1",
    )


# Sharding


@pytest.mark.parametrize("accumulation", [1, 2, 3])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_shards_put_together_are_the_batch(world_size, accumulation):
    batch = [Window(start, 1) for start in range(24)]
    shards = [shard(batch, accumulation=accumulation, world_size=world_size, rank=rank) for rank in range(world_size)]
    together = [window for micro in range(accumulation) for rank in shards for window in rank[micro]]
    assert together == batch
    assert {len(micro) for rank in shards for micro in rank} == {24 // world_size // accumulation}


def test_a_batch_that_does_not_divide_is_refused_with_values_that_work():
    assert batch_faults(10, 2, 2) == [
        "data.global_batch_size=10 is not a multiple of 4 (2 processes times "
        "trainer.accumulate_grad_batches=2): set data.global_batch_size to 8 or 12 or set "
        "trainer.accumulate_grad_batches to one of 1, 5"
    ]
    assert batch_faults(2, 4, 1) == [
        "data.global_batch_size=2 is not a multiple of 4 (4 processes times "
        "trainer.accumulate_grad_batches=1): set data.global_batch_size to 4 or use one of 1, 2 processes"
    ]
    assert batch_faults(0, 1, 0) == [
        "data.global_batch_size=0 must be at least 1",
        "trainer.accumulate_grad_batches=0 must be at least 1",
    ]
    with pytest.raises(UserError, match="not a multiple of 3"):
        shard([Window(0, 1)] * 4, accumulation=3, world_size=1, rank=0)


@given(st.integers(1, 60), st.integers(1, 8), st.integers(1, 8))
def test_a_batch_is_refused_exactly_when_it_does_not_divide(batch, world_size, accumulation):
    assert (batch_faults(batch, world_size, accumulation) == []) == (batch % (world_size * accumulation) == 0)


# Held-out text


@given(st.integers(1, 200), st.integers(1, 7), st.integers(1, 9), st.integers(1, 5))
def test_every_held_out_window_counts_once_and_no_rank_waits(tokens, latent_length, batch_size, world_size):
    windows = tokens // latent_length
    if windows == 0:
        with pytest.raises(UserError, match=f"has {tokens} tokens, but one window takes {latent_length}"):
            held_out(tokens, latent_length, batch_size=batch_size)
        return
    ranks = [
        held_out(tokens, latent_length, batch_size=batch_size, world_size=world_size, rank=rank)
        for rank in range(world_size)
    ]
    assert len({len(batches) for batches in ranks}) == 1
    assert len(ranks[0]) == -(-windows // (batch_size * world_size))
    items: list[HeldOutWindow] = [item for batches in ranks for batch in batches for item in batch]
    assert all(len(batch) == batch_size for batches in ranks for batch in batches)
    assert sorted(item.window.start for item in items if item.counts) == list(
        range(0, windows * latent_length, latent_length)
    )
    assert all(item.window.bag_size == 1 and item.window.start + latent_length <= tokens for item in items)


def test_only_the_standard_library_is_imported():
    heavy = "{'torch', 'numpy', 'litdata', 'lightning'}"
    code = f"import sys, tst_lightning.data.order; print(*{heavy} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
