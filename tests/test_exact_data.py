"""Nothing is lost, repeated or out of proportion, whatever the corpora, the phases and the topology."""

import itertools
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.corpora import write_tokens
from tst_lightning.batches import Batches
from tst_lightning.data.distribute import shard
from tst_lightning.data.order import DataOrder
from tst_lightning.data.windows import TokenStream, WindowDataset, WindowLoader
from tst_lightning.phases import PhaseSchedule, Stage


@st.composite
def orders(draw, changes=True, parts=1):
    """Any run over one to four corpora; with changes, of its global batch and with steps that were skipped."""
    unit_windows = draw(st.sampled_from([1, 2, 4, 6, 12, 24]))
    stages, bag_size = [], unit_windows
    for _ in range(draw(st.integers(0, 3))):
        bag_size = draw(st.sampled_from([d for d in range(1, bag_size + 1) if bag_size % d == 0]))
        stages.append(Stage(bag_size, steps=draw(st.integers(1, 25))))
    steps = sum(stage.steps for stage in stages) + draw(st.integers(1, 60))
    latent_length = draw(st.integers(1, 5))
    sources = draw(st.integers(1, 4))
    units = [draw(st.integers(1, 12)) for _ in range(sources)]
    tail = draw(st.integers(0, unit_windows * latent_length - 1))
    size = st.integers(1, 5).map(lambda n: n * parts)
    batches = Batches.constant(draw(size))
    if changes:
        batches = batches.skipping(draw(st.lists(st.integers(0, steps - 1), max_size=3)))
        for step in sorted(draw(st.lists(st.integers(1, steps), max_size=3, unique=True))):
            batches = batches.resized(step, draw(size))
    return DataOrder(
        PhaseSchedule.from_stages(stages, steps),
        tuple(n * unit_windows * latent_length + tail for n in units),
        latent_length,
        batches,
        seed=draw(st.integers(0, 2**32)),
        weights=tuple(draw(st.sampled_from([0.05, 0.3, 1.0, 1 / 3, 7.0])) for _ in range(sources)),
        unit_windows=unit_windows,
        group_batches=draw(st.integers(1, 5)),
    )


def plain_windows(order, window):
    """(corpus, number of the plain window in it) for each that a window is made of."""
    first, rest = divmod(window.start, order.latent_length)
    assert rest == 0
    return [(window.source, first + i) for i in range(window.bag_size)]


def slow_reference(order):
    """What every step trains on and what it throws away before that, by a literal list of what is not read yet."""
    slots = order.batches.size(0) * order.group_batches
    unread: dict[int, int] = {}  # rows read of each slot of the open group
    group = -1

    def pieces(bag_size, number):
        nonlocal group, unread
        for _ in range(number):
            unread = {slot: rows for slot, rows in unread.items() if rows < order.unit_windows}
            if not unread:
                group += 1
                unread = dict.fromkeys(range(slots), 0)
            slot = min(unread, key=lambda slot: (unread[slot], slot))
            source, unit = order.unit(group * slots + slot)
            yield [(source, unit * order.unit_windows + unread[slot] + i) for i in range(bag_size)]
            unread[slot] += bag_size

    for step in range(order.schedule.total_steps):
        bag_size, size = order.schedule.at(step).bag_size, order.batches.size(step)
        thrown_away = list(pieces(bag_size, size * order.batches.skipped.count(step)))
        yield thrown_away, list(pieces(bag_size, size))


@settings(max_examples=150, deadline=None)
@given(orders(), st.randoms(use_true_random=False))
def test_any_step_at_random_access_reads_what_the_slow_reference_reads(order, random):
    expected = list(slow_reference(order))
    steps = list(range(order.schedule.total_steps))
    random.shuffle(steps)
    for step in steps:
        assert [plain_windows(order, window) for window in order.batch(step)] == expected[step][1]


@settings(max_examples=150, deadline=None)
@given(orders())
def test_no_window_twice_in_an_epoch_and_none_left_out_but_the_tail(order):
    read = [Counter() for _ in order.tokens]
    for thrown_away, trained_on in slow_reference(order):
        for source, window in itertools.chain(*thrown_away, *trained_on):
            read[source][window] += 1
    per_group = order.batches.size(0) * order.group_batches * order.unit_windows
    whole = order.batches.position(order.schedule, order.schedule.total_steps) // per_group
    slots = order.batches.size(0) * order.group_batches
    for source, counts in enumerate(read):
        per_epoch = order.units(source) * order.unit_windows
        assert all(0 <= window < per_epoch for window in counts)
        # the groups that were used up took the corpus's units one epoch after the other, each of them whole
        used = Counter(unit for s, unit in map(order.unit, range(whole * slots)) if s == source)
        begun = Counter(unit for s, unit in map(order.unit, range((whole + 1) * slots)) if s == source)
        assert max(begun.values(), default=0) - min((begun[u] for u in range(order.units(source))), default=0) <= 1
        for window in range(per_epoch):
            unit = window // order.unit_windows
            assert used[unit] <= counts[window] <= begun[unit]


@settings(max_examples=150, deadline=None)
@given(orders(changes=False))
def test_proportions_hold_to_one_window_in_each_step_and_to_one_unit_over_the_run(order):
    size = order.batches.size(0)
    units = [0] * len(order.tokens)
    for step in range(order.schedule.total_steps):
        counts = Counter(window.source for window in order.batch(step))
        for source, share in enumerate(order.shares):
            assert abs(counts[source] - share * size) < 1
    for column in range(30):
        for slot in range(column * size, (column + 1) * size):
            units[order.unit(slot)[0]] += 1
        for source, share in enumerate(order.shares):
            assert abs(units[source] - Fraction((column + 1) * size) * share) < 1


@settings(max_examples=100, deadline=None)
@given(st.data(), st.integers(1, 3), st.integers(1, 3))
def test_the_order_knows_no_topology(data, world_size, accumulation):
    order = data.draw(orders(parts=world_size * accumulation))
    for step in range(order.schedule.total_steps):
        batch = order.batch(step)
        parts = [
            shard(batch, accumulation=accumulation, world_size=world_size, rank=rank) for rank in range(world_size)
        ]
        assert [w for micro in range(accumulation) for rank in range(world_size) for w in parts[rank][micro]] == batch


CORPORA = (5003, 2010)


@pytest.fixture(scope="module")
def streams(tmp_path_factory):
    """Two corpora in which every token is its own place: 0, 1, ... and 1,000,000, 1,000,001, ..."""
    found = []
    for source, tokens in enumerate(CORPORA):
        folder = tmp_path_factory.mktemp(f"corpus-{source}") / "train"
        write_tokens(folder, np.arange(tokens, dtype=np.int32) + source * 1_000_000, record_tokens=700)
        found.append(TokenStream(folder, tokens=tokens, record_tokens=700))
    return found


@pytest.mark.slow
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from([(1, 1), (1, 4), (2, 1), (2, 2), (4, 1)]),
    st.sampled_from([(1, 1), (1, 4), (2, 2)]),
    st.sampled_from([0, 1, 2]),
    st.sampled_from([[], [Stage(4, steps=7)], [Stage(12, steps=3), Stage(4, steps=5)]]),
    st.sampled_from([(1.0, 1.0), (0.3, 0.7), (5.0, 1.0)]),
    st.integers(0, 2**32),
    st.data(),
)
def test_the_loaders_of_any_topology_read_the_same_across_a_resume(
    streams, first, then, workers, stages, weights, seed, data
):
    latent_length, batch = 10, 8
    schedule = PhaseSchedule.from_stages(stages, 20)
    order = DataOrder(
        schedule, CORPORA, latent_length, Batches.constant(batch), seed=seed, weights=weights, unit_windows=12
    )
    stop = data.draw(st.integers(0, 20))

    def read(topology, start, end):
        world_size, accumulation = topology
        loaders = []
        for rank in range(world_size):
            loader = WindowLoader(
                WindowDataset(streams, latent_length), order, world_size=world_size, rank=rank,
                accumulation=accumulation, num_workers=workers,
            )  # fmt: skip
            loader.load_state_dict({**loader.state_dict(), "step": start})
            loaders.append(itertools.islice(loader, (end - start) * accumulation))
        steps = []
        for _ in range(start, end):
            micro_batches = [[next(loader) for loader in loaders] for _ in range(accumulation)]
            steps.append([row.flatten().tolist() for ranks in micro_batches for part in ranks for row in part])
        return steps

    expected = []
    for step in range(20):
        length = latent_length * schedule.at(step).bag_size
        starts = [window.start + window.source * 1_000_000 for window in order.batch(step)]
        expected.append([list(range(start, start + length)) for start in starts])
    assert read(first, 0, stop) + read(then, stop, 20) == expected
