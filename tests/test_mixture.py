"""Exact proportions of a mixture's sources, in the batches and end to end."""

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tst_lightning.batches import Batches
from tst_lightning.data.mixture import Shares
from tst_lightning.data.order import DataOrder
from tst_lightning.data.sources import DataSource, chosen_sources, source_names
from tst_lightning.errors import UserError
from tst_lightning.phases import PhaseSchedule


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=9), st.integers(1, 20))
def test_no_source_is_ever_a_whole_place_off_its_share(weights, batch_size):
    shares = Shares([Fraction(weight) for weight in weights], batch_size)
    total = sum(weights)
    had = [0] * len(weights)
    for batch in range(40):
        places = shares.places(batch)
        assert len(places) == batch_size
        for source, weight in enumerate(weights):
            here = [number for s, number in places if s == source]
            assert here == list(range(had[source], had[source] + len(here)))  # none twice, none left out
            assert abs(len(here) - Fraction(batch_size * weight, total)) < 1
            had[source] += len(here)
            assert abs(had[source] - Fraction((batch + 1) * batch_size * weight, total)) < 1


def test_a_mixture_in_whole_places_is_the_same_in_every_batch_and_alternates():
    shares = Shares([Fraction(1), Fraction(1)], 8)
    for batch in (0, 1, 1000):
        assert [source for source, _ in shares.places(batch)] == [0, 1] * 4
    assert shares.before(1000) == (4000, 4000)


def test_equal_halves_of_an_odd_batch_take_turns():
    shares = Shares([Fraction(1), Fraction(1)], 3)
    counts = [sum(source == 0 for source, _ in shares.places(batch)) for batch in range(4)]
    assert sorted(counts[:2]) == sorted(counts[2:]) == [1, 2]


def test_a_single_source_is_read_as_ever():
    schedule = PhaseSchedule.from_ratio(6, 0.1, 100)
    one = DataOrder(schedule, (10_000,), 4, Batches.constant(3), seed=42, weights=(0.3,))
    assert one.batch(0) == DataOrder(schedule, (10_000,), 4, Batches.constant(3), seed=42).batch(0)


def test_names_are_the_shortest_ends_that_differ():
    assert source_names([DataSource("data/web"), DataSource("/x/code")]) == ["web", "code"]
    assert source_names([DataSource("a/train"), DataSource("b/train")]) == ["a/train", "b/train"]
    assert source_names([DataSource("a/train", name="web"), DataSource("b/train")]) == ["web", "train"]


def test_every_fault_of_the_sources_at_once():
    with pytest.raises(UserError) as caught:
        chosen_sources(None, [DataSource("a", 0.0), DataSource("a/", float("nan")), DataSource("b", name="")])
    assert len(caught.value.faults) == 5
    words = " ".join(caught.value.faults)
    for part in ("weight=0.0 must be", "weight=nan must be", "2 of them have the path a", "name='' must not be"):
        assert part in words
    for path, sources, way_out in (
        (None, None, "neither is given"),
        ("a", [DataSource("b")], "both are given"),
        (None, [], "name at least one"),
    ):
        with pytest.raises(UserError, match=way_out):
            chosen_sources(path, sources)
