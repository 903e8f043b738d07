from __future__ import annotations

import itertools
import pickle
import random
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from tests.corpora import write_tokens
from tst_lightning.batches import Batches
from tst_lightning.data.order import DataOrder, Window
from tst_lightning.data.windows import TokenStream, WindowDataset, WindowLoader, held_out_loader
from tst_lightning.errors import UserError
from tst_lightning.phases import PhaseSchedule, Stage

TOKENS, RECORD = 20_007, 512  # the last record is short, and the last unit is cut off
LATENT, UNIT = 5, 12  # 333 units of 60 tokens; a window of 12 * 5 tokens often crosses records
STAGES = {
    "baseline": [],
    "s=2": [Stage(2, ratio=0.3)],
    "s=6": [Stage(6, ratio=0.3)],
    "12-4-1": [Stage(12, steps=11), Stage(4, steps=10)],
}


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """The token at position p is p, so that a batch says what was read."""
    directory = tmp_path_factory.mktemp("positions")
    write_tokens(directory, np.arange(TOKENS, dtype=np.int32), record_tokens=RECORD)
    return directory


def dataset(corpus, **changes):
    options = {"tokens": TOKENS, "record_tokens": RECORD, **changes}
    latent_length = options.pop("latent_length", LATENT)
    return WindowDataset([TokenStream(corpus, **options)], latent_length)


def order(stages=STAGES["12-4-1"], steps=60, **changes):
    options = {"tokens": (TOKENS,), "latent_length": LATENT, "seed": 7, "unit_windows": UNIT}
    batches = Batches.constant(changes.pop("global_batch_size", 8))
    schedule = PhaseSchedule.from_stages(stages, steps)
    return DataOrder(schedule, batches=batches, group_batches=3, **{**options, **changes})


def steps_read(loader):
    """Per optimiser step, the tokens in the order of this process's micro-batches."""
    batches = [batch.flatten().tolist() for batch in loader]
    return [
        list(itertools.chain(*batches[i : i + loader.accumulation]))
        for i in range(0, len(batches), loader.accumulation)
    ]


def random_states():
    return random.getstate(), repr(np.random.get_state()), torch.get_rng_state().tolist()


def assert_same(batches, expected):
    assert len(batches) == len(expected)
    for batch, other in zip(batches, expected, strict=True):
        assert torch.equal(batch, other)


# One window


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
@pytest.mark.parametrize("record_tokens", [16, 100, 1000])
def test_every_window_is_a_slice_of_the_stream(tmp_path, dtype, record_tokens):
    tokens = np.random.default_rng(0).integers(0, np.iinfo(np.uint16).max, 777, endpoint=True).astype(dtype)
    write_tokens(tmp_path, tokens, record_tokens=record_tokens)
    windows = WindowDataset([TokenStream(tmp_path, tokens=777, record_tokens=record_tokens)], 7)
    for bag_size in (1, 2, 16):
        length = 7 * bag_size
        starts = [
            *range(0, 777 - length, 31),
            777 - length,
        ]  # the first and the last window, and some between
        for start in starts:
            got = windows[Window(start, bag_size)]
            assert got.dtype == (torch.uint16 if dtype is np.uint16 else torch.int32)
            assert got.shape == ((7,) if bag_size == 1 else (7, bag_size))
            assert got.numpy().ravel().tolist() == tokens[start : start + length].tolist()
        batch = windows.__getitems__([Window(start, bag_size) for start in starts])
        assert torch.equal(batch.int(), torch.stack([windows[Window(start, bag_size)].int() for start in starts]))


def test_a_batch_is_writable_and_its_own(corpus):
    windows = dataset(corpus)
    for size in (1, 2):
        batch = windows.__getitems__([Window(0, 2)] * size)
        batch.zero_()
        assert windows[Window(0, 2)].flatten().tolist() == list(range(2 * LATENT))


def test_our_own_bugs_are_asserted(corpus):
    windows = dataset(corpus)
    with pytest.raises(AssertionError, match=r"\[20003, 20008\) is not in \[0, 20007\)"):
        windows[Window(TOKENS - LATENT + 1, 1)]
    with pytest.raises(AssertionError, match="one bag size"):
        windows.__getitems__([Window(0, 1), Window(0, 2)])


@pytest.mark.parametrize("changes", [{"tokens": TOKENS - 1}, {"record_tokens": 2 * RECORD}])
def test_other_records_than_promised_are_refused(corpus, changes):
    with pytest.raises(UserError, match=r"holds 20007 tokens in 40 records, not .*: prepare it again"):
        dataset(corpus, **changes)[Window(0, 1)]


def test_reading_leaves_the_directory_alone(corpus):
    before = sorted(path.name for path in corpus.iterdir())
    dataset(corpus)[Window(0, 1)]
    assert sorted(path.name for path in corpus.iterdir()) == before


def test_an_open_dataset_can_be_pickled_and_is_sent_unopened(corpus):
    windows = dataset(corpus)
    unopened = pickle.dumps(windows)
    expected = windows[Window(100, 2)]
    assert len(pickle.dumps(windows)) == len(unopened)
    assert torch.equal(pickle.loads(unopened)[Window(100, 2)], expected)


def test_an_open_dataset_can_be_forked(corpus):
    windows = dataset(corpus)
    expected = list(WindowLoader(windows, order()))
    loader = WindowLoader(windows, order(), num_workers=2)
    loader.multiprocessing_context = "fork"
    assert_same(list(loader), expected)


@pytest.mark.slow
def test_spawned_workers_read_the_same(corpus):
    loader = WindowLoader(dataset(corpus), order(steps=25), num_workers=1)
    loader.multiprocessing_context = "spawn"
    assert steps_read(loader) == steps_read(WindowLoader(dataset(corpus), order(steps=25)))


# The training loader


@pytest.mark.parametrize("stages", STAGES.values(), ids=STAGES)
def test_batches_are_what_the_order_says_in_the_shape_of_the_phase(corpus, stages):
    wanted = order(stages)
    loader = WindowLoader(dataset(corpus), wanted)
    assert len(loader) == 60
    for step, batch in enumerate(loader):
        bag_size = wanted.schedule.at(step).bag_size
        assert batch.shape == ((8, LATENT) if bag_size == 1 else (8, LATENT, bag_size))
        starts = [window.start for window in wanted.batch(step)]
        assert batch.flatten(1).tolist() == [list(range(s, s + LATENT * bag_size)) for s in starts]


@pytest.mark.parametrize("stages", STAGES.values(), ids=STAGES)
def test_whole_epochs_read_every_token_but_the_tail_equally_often(corpus, stages):
    units, epochs = 333, 3
    plain = UNIT * units * epochs // 9  # plain windows that each place of the batch reads: 37 groups of 36
    steps = next(n for n in itertools.count(25) if PhaseSchedule.from_stages(stages, n).position(n) >= plain)
    wanted = order(stages, steps, global_batch_size=9)
    read: Counter[int] = Counter()
    for step, batch in enumerate(WindowLoader(dataset(corpus), wanted)):
        if wanted.schedule.position(step) >= plain:
            break
        read.update(batch.flatten().tolist())
    assert read == dict.fromkeys(range(units * UNIT * LATENT), epochs)


@pytest.mark.parametrize(
    ("stages", "unit", "steps"),
    [
        (STAGES["s=2"], UNIT, 150),
        (STAGES["s=6"], UNIT, 150),
        (STAGES["12-4-1"], UNIT, 150),
        ([Stage(16, ratio=0.3)], 48, 1000),
    ],
    ids=["s=2", "s=6", "12-4-1", "s=16"],
)
def test_tst_and_the_baseline_read_the_same_units_in_the_same_order(corpus, stages, unit, steps):
    def units(stages):
        seen: dict[tuple[int, int, int], None] = {}
        wanted = order(stages, steps, unit_windows=unit)
        for step, batch in enumerate(WindowLoader(dataset(corpus), wanted)):
            group = wanted.schedule.position(step) // (unit * 3)
            for place, tokens in enumerate(batch.flatten(1).tolist()):
                seen[group, place, tokens[0] // (unit * LATENT)] = None
        return list(seen)

    baseline, tst = units([]), units(stages)
    assert len(baseline) > 90
    assert tst[: len(baseline)] == baseline


@pytest.mark.parametrize("num_workers", [1, 2])
def test_workers_change_nothing(corpus, num_workers):
    expected = list(WindowLoader(dataset(corpus), order()))
    assert_same(list(WindowLoader(dataset(corpus), order(), num_workers=num_workers)), expected)


@pytest.mark.parametrize(
    ("world_size", "accumulation"), [(1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (2, 4), (4, 1), (4, 2)]
)
def test_processes_and_accumulation_change_nothing(corpus, world_size, accumulation):
    expected = [batch.flatten(1).tolist() for batch in WindowLoader(dataset(corpus), order())]
    loaders = [
        WindowLoader(dataset(corpus), order(), world_size=world_size, rank=rank, accumulation=accumulation)
        for rank in range(world_size)
    ]
    assert {len(loader) for loader in loaders} == {60 * accumulation}
    rounds = list(zip(*loaders, strict=True))  # in the order of time: a micro-batch of each process
    for step, batch in enumerate(expected):
        parts = itertools.chain(*rounds[step * accumulation : (step + 1) * accumulation])
        assert [tokens for part in parts for tokens in part.flatten(1).tolist()] == batch


def test_a_batch_that_does_not_divide_is_refused(corpus):
    with pytest.raises(UserError, match=r"data.global_batch_size=8 is not a multiple of 3 .* 6 or 9"):
        WindowLoader(dataset(corpus), order(), accumulation=3)


# Stopping and going on


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("stop", [0, 1, 10, 11, 20, 59, 60])
def test_a_stopped_run_goes_on_exactly(corpus, num_workers, stop):
    expected = list(WindowLoader(dataset(corpus), order()))
    loader = WindowLoader(dataset(corpus), order(), num_workers=num_workers)
    batches = list(itertools.islice(loader, stop))
    state = loader.state_dict()
    assert state["step"] == stop
    resumed = WindowLoader(dataset(corpus), order(), num_workers=num_workers)
    resumed.load_state_dict(pickle.loads(pickle.dumps(state)))
    assert len(resumed) == 60
    assert_same([*batches, *resumed], expected)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_resume_may_change_accumulation_and_processes(corpus, num_workers):
    expected = steps_read(WindowLoader(dataset(corpus), order()))
    loader = WindowLoader(dataset(corpus), order(), accumulation=4, num_workers=num_workers)
    for _ in itertools.islice(loader, 4 * 15 + 3):  # in the middle of step 15, which has to be read again
        pass
    state = loader.state_dict()
    assert state["step"] == 15

    one = WindowLoader(dataset(corpus), order(), accumulation=2, num_workers=num_workers)
    one.load_state_dict(state)
    assert steps_read(one) == expected[15:]

    ranks = [WindowLoader(dataset(corpus), order(), world_size=2, rank=rank) for rank in range(2)]
    for rank in ranks:
        rank.load_state_dict(state)
    parts = zip(*map(steps_read, ranks), strict=True)
    assert [first + second for first, second in parts] == expected[15:]
    assert ranks[0].state_dict() == ranks[1].state_dict()  # a checkpoint keeps that of rank 0


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_state_counts_what_was_handed_out_when_it_was(corpus, num_workers):
    loader = WindowLoader(dataset(corpus), order(), num_workers=num_workers)
    for step, _ in enumerate(itertools.islice(loader, 20)):
        assert loader.state_dict()["step"] == step + 1  # the consumer holds the batch and saves


def test_iterating_is_lazy_and_goes_on(corpus):
    expected = list(WindowLoader(dataset(corpus), order()))
    loader = WindowLoader(dataset(corpus), order(), accumulation=1)
    early = iter(loader)  # Lightning makes one before it restores the state
    loader.load_state_dict({**loader.state_dict(), "step": 12})
    assert torch.equal(next(early), expected[12])
    assert_same([*itertools.islice(iter(loader), 3), *loader], expected[13:])
    assert list(loader) == []
    assert loader.state_dict()["step"] == 60


def test_iterating_again_in_the_middle_of_a_step_goes_on(corpus):
    expected = list(WindowLoader(dataset(corpus), order(), accumulation=4))
    loader = WindowLoader(dataset(corpus), order(), accumulation=4)
    assert_same([*itertools.islice(loader, 6), *itertools.islice(loader, 1), *loader], expected)


def test_a_state_of_another_order_is_refused_with_every_difference(corpus):
    state = WindowLoader(dataset(corpus), order()).state_dict()
    assert state == {
        "step": 0,
        "seed": 7,
        "tokens": [TOKENS],
        "weights": ["1"],
        "latent_length": LATENT,
        "unit_windows": UNIT,
        "global_batch_size": 8,
        "group_batches": 3,
    }
    assert {type(value) for value in state.values()} == {int, list}
    other = WindowLoader(dataset(corpus), order(seed=8, global_batch_size=4))
    with pytest.raises(UserError) as caught:
        other.load_state_dict({**state, "step": 61})
    assert caught.value.faults == (
        "the checkpoint read the data with seed=7, this run has seed=8: restore the old value or start a new run",
        "the checkpoint read the data with global_batch_size=8, this run has global_batch_size=4: "
        "restore the old value or start a new run",
        "the checkpoint is at step 61, behind the end of this run at 60: raise trainer.max_steps",
    )
    assert other.state_dict()["step"] == 0


@pytest.mark.parametrize("num_workers", [0, 2])
def test_global_random_states_are_left_alone(corpus, num_workers):
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    before = random_states()
    for loader in (
        WindowLoader(dataset(corpus), order(), num_workers=num_workers),
        held_out_loader(dataset(corpus), batch_size=100, num_workers=num_workers),
    ):
        assert len(list(loader)) > 1
    assert random_states() == before


def test_the_global_random_state_does_not_change_the_order(corpus):
    torch.manual_seed(1)
    expected = steps_read(WindowLoader(dataset(corpus), order()))
    torch.manual_seed(2)
    assert steps_read(WindowLoader(dataset(corpus), order())) == expected


# Held-out text


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_held_out_window_counts_once_over_all_processes(corpus, world_size, num_workers):
    loaders = [
        held_out_loader(dataset(corpus), batch_size=300, world_size=world_size, rank=rank, num_workers=num_workers)
        for rank in range(world_size)
    ]
    assert all(isinstance(loader, DataLoader) for loader in loaders)
    assert len({len(loader) for loader in loaders}) == 1
    counted = []
    for loader in loaders:
        batches = list(loader)
        assert len(batches) == len(loader)
        for tokens_BL, counts in batches:
            assert tokens_BL.shape == (300, LATENT)
            assert counts.shape == (300,)
            assert counts.dtype == torch.bool
            counted += tokens_BL[counts].tolist()
    windows = TOKENS // LATENT
    assert sorted(counted) == np.arange(windows * LATENT).reshape(windows, LATENT).tolist()


def test_held_out_text_shorter_than_a_window_is_refused(corpus):
    with pytest.raises(UserError, match="has 20007 tokens, but one window takes 30000"):
        held_out_loader(dataset(corpus, latent_length=30_000), batch_size=4)


@pytest.mark.slow
def test_a_program_ends_with_a_loader_left_open(corpus):
    """Its processes ignore SIGTERM, by which multiprocessing asks them to end."""
    code = (
        "import sys, tests.test_windows as t\n"
        "loader = iter(t.WindowLoader(t.dataset(sys.argv[1]), t.order(), num_workers=2))\n"
        "next(loader)\n"
        "raise SystemExit(7)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(corpus)], timeout=60, check=False)
    assert done.returncode == 7
