"""Tokenised parts into a corpus: who is held out, the limit, the shuffle, what lies on the disk."""

import hashlib
import io
import json
import shutil
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tst_lightning.data import shuffle as shuffle_module
from tst_lightning.data.assemble import Choice, assemble, held_out_documents
from tst_lightning.data.corpus import Corpus
from tst_lightning.data.jobs import Reporter
from tst_lightning.data.parts import PartWriter, read_part, together
from tst_lightning.data.split_writer import SplitWriter
from tst_lightning.errors import UserError

END = 7
RECORD = 50


def quiet():
    return Reporter(io.StringIO())


def documents_of(count, seed=0):
    """Documents of 0 to 30 tokens, each of them another, with the end-of-text token."""
    draw = np.random.default_rng(seed)
    return [np.append(draw.integers(8, 60_000, draw.integers(0, 30)), END).astype(np.uint16) for _ in range(count)]


def part_of(folder, number, documents, bytes_of=lambda document: 2 * len(document)):
    with PartWriter(folder, number, "uint16") as part:
        for document in documents:
            part.write(document)
            part.add_documents([(len(document), bytes_of(document))])
        return part.finish()


def assembled(tmp_path, documents, choice, *, sizes=(3, 0, 5), unknown=False, name="corpus"):
    """The corpus of documents that are spread over parts of those sizes and one of the rest."""
    folder, prepared, scratch = tmp_path / f"{name}.parts", tmp_path / name, tmp_path / f"{name}.scratch"
    for each in (folder, prepared, scratch):
        each.mkdir()
    (prepared / "tokenizer.json").write_text("a tokenizer")
    bounds = np.cumsum([0, *sizes])
    groups = [documents[a:b] for a, b in pairwise(bounds)] + [documents[bounds[-1] :]]

    def measure(document):
        return -1 if unknown and len(document) == 5 else 2 * len(document)

    parts = [part_of(folder, number, group, measure) for number, group in enumerate(groups)]
    tokenizer = SimpleNamespace(dtype="uint16", vocab_size=60_000, end_of_text="<end>", end_of_text_id=END)
    assemble(parts, tokenizer, prepared, scratch, choice, record_tokens=RECORD, report=quiet())
    return Corpus.load(prepared)


def stream(corpus, name):
    """Every token of a split, through LitData."""
    from litdata import StreamingDataset
    from litdata.streaming import TemporalArrayLoader

    dataset = StreamingDataset(str(corpus.split_directory(name)), item_loader=TemporalArrayLoader())
    records = [dataset.read_window(i, 0, dataset.frame_counts[i], ["tokens"])["tokens"] for i in range(len(dataset))]
    assert [len(record) for record in records[:-1]] == [RECORD] * (len(records) - 1)
    return np.concatenate(records)


def cut(tokens):
    """The documents of a stream."""
    ends = np.flatnonzero(tokens == END) + 1
    assert ends[-1] == len(tokens)
    return np.split(tokens, ends[:-1])


def same(left, right):
    return len(left) == len(right) and all(map(np.array_equal, left, right))


def reference_split(count, held_out, seed):
    """The rule, as it was first written."""
    draws = [
        int.from_bytes(hashlib.sha256(f"{seed}:{index}".encode()).digest()[:8], "big") / 2**64 for index in range(count)
    ]
    chosen = {index for index, value in enumerate(draws) if value < held_out}
    chosen |= {draws.index(min(draws))}
    chosen -= {draws.index(max(draws))}
    return sorted(chosen)


# Who is held out


@given(st.integers(2, 60), st.floats(1e-9, 1 - 1e-9), st.integers(0, 5))
@settings(max_examples=200, deadline=None, database=None)
def test_the_rule_of_the_split(count, held_out, seed):
    val = held_out_documents(count, held_out=held_out, seed=seed).tolist()
    assert val == reference_split(count, held_out, seed)
    assert 1 <= len(val) < count


def test_held_out_documents_depend_on_seed_and_number_alone():
    val = held_out_documents(2000, held_out=0.1, seed=3)
    assert 140 < len(val) < 260
    assert held_out_documents(1000, held_out=0.1, seed=3).tolist() == val[val < 1000].tolist()
    assert held_out_documents(2000, held_out=0.1, seed=4).tolist() != val.tolist()


# The corpus


@pytest.mark.parametrize("sizes", [(), (3, 0, 5), (1,) * 40])
def test_documents_come_in_order_in_two_splits(tmp_path, sizes):
    documents = documents_of(100)
    val = reference_split(100, 0.2, 5)
    corpus = assembled(tmp_path, documents, Choice(0.2, 5), sizes=sizes)
    expected = {
        "train": [document for number, document in enumerate(documents) if number not in val],
        "val": [documents[number] for number in val],
    }
    for name, those in expected.items():
        tokens, split = stream(corpus, name), corpus.splits[name]
        assert tokens.tolist() == np.concatenate(those).tolist()
        assert (split.documents, split.tokens) == (len(those), len(tokens))
        assert split.bytes == 2 * len(tokens)
        assert split.sha256 == hashlib.sha256(tokens.astype("<u2").tobytes()).hexdigest()
    assert corpus.max_token_id == max(map(max, documents))
    assert (corpus.record_tokens, corpus.dtype, corpus.end_of_text_id) == (RECORD, "uint16", END)


def test_how_parts_are_cut_is_of_no_matter_and_nothing_tells_the_time(tmp_path):
    from tests.small_parts import contents

    documents = documents_of(60)
    for choice in (Choice(0.1, 0), Choice(0.1, 0, shuffle=True, max_tokens=700)):
        made = [
            assembled(tmp_path, documents, choice, sizes=sizes, name=f"{choice.shuffle}-{number}")
            for number, sizes in enumerate([(), (3, 0, 5), (1,) * 30])
        ]
        assert contents(made[0].directory) == contents(made[1].directory) == contents(made[2].directory)


def test_the_sums_are_of_all_files_in_the_form_of_sha256sum(tmp_path):
    corpus = assembled(tmp_path, documents_of(100), Choice(0.2, 0))
    lines = (corpus.directory / "SHA256SUMS").read_text().splitlines()
    names = [line.split("  ")[1] for line in lines]
    assert names == sorted(names)
    assert {"tokenizer.json", "train/index.json", "train/chunk-0-0.bin", "val/chunk-0-0.bin"} <= set(names)
    there = {p.relative_to(corpus.directory).as_posix() for p in corpus.directory.rglob("*") if p.is_file()}
    assert set(names) == there - {"SHA256SUMS", "corpus.json"}
    for line in lines:
        digest, name = line.split("  ")
        assert digest == hashlib.sha256((corpus.directory / name).read_bytes()).hexdigest()


def test_chunks_are_of_their_size(tmp_path, monkeypatch):
    from tst_lightning.data import split_writer

    monkeypatch.setattr(split_writer, "CHUNK_BYTES", 400)
    corpus = assembled(tmp_path, documents_of(100), Choice(0.2, 0))
    assert len(list((corpus.directory / "train").glob("*.bin"))) > 5
    assert (
        stream(corpus, "train").tolist()
        == np.concatenate(
            [d for n, d in enumerate(documents_of(100)) if n not in reference_split(100, 0.2, 0)]
        ).tolist()
    )


def test_bytes_are_unknown_as_soon_as_those_of_one_document_are(tmp_path):
    documents = documents_of(50)
    assert any(len(document) == 5 for document in documents)
    corpus = assembled(tmp_path, documents, Choice(0.2, 0), unknown=True)
    assert None in [split.bytes for split in corpus.splits.values()]


# The limit


def test_the_limit_takes_whole_documents_from_the_first_on(tmp_path):
    documents = documents_of(40)
    ends = np.cumsum([len(document) for document in documents])
    for number, (limit, count) in enumerate([(ends[20], 21), (ends[20] - 1, 20), (ends[1], 2), (10**9, 40)]):
        corpus = assembled(tmp_path, documents, Choice(0.3, 1, max_tokens=int(limit)), name=str(number))
        val = reference_split(count, 0.3, 1)
        assert same(cut(stream(corpus, "val")), [documents[index] for index in val])
        assert same(cut(stream(corpus, "train")), [d for i, d in enumerate(documents[:count]) if i not in val])
        assert sum(split.tokens for split in corpus.splits.values()) <= limit


@pytest.mark.parametrize(
    ("count", "limit", "message"),
    [
        (0, None, "the input holds no documents, .*: give at least two"),
        (1, None, "the input holds one document, .*: give at least two"),
        (20, 1, "--max-tokens 1 leaves (one document|no documents), and one is trained on .*: raise it"),
    ],
)
def test_too_few_documents(tmp_path, count, limit, message):
    with pytest.raises(UserError, match=message):
        assembled(tmp_path, documents_of(count), Choice(0.3, 1, max_tokens=limit))


# What is held out as a whole


@pytest.mark.parametrize("shuffle", [False, True])
def test_the_documents_from_one_on_are_held_out_beside_the_limit(tmp_path, shuffle):
    documents = documents_of(40)
    limit = sum(map(len, documents[:11]))
    corpus = assembled(tmp_path, documents, Choice(0.3, 1, shuffle, limit, held_out_from=30))
    assert same(cut(stream(corpus, "val")), documents[30:])
    train = cut(stream(corpus, "train"))
    assert sorted(map(tuple, train)) == sorted(map(tuple, documents[:11]))
    assert same(train, documents[:11]) != shuffle


def test_a_limit_below_the_first_document_is_refused(tmp_path):
    with pytest.raises(UserError, match="--max-tokens 1 leaves"):
        assembled(tmp_path, documents_of(40, seed=1), Choice(0.3, 1, max_tokens=1, held_out_from=30))


# The shuffle


def test_the_shuffle_is_of_whole_training_documents_and_the_seed_fixes_it(tmp_path, monkeypatch):
    monkeypatch.setattr(shuffle_module, "_GATHER_TOKENS", 100)
    documents = documents_of(300)
    plain = assembled(tmp_path, documents, Choice(0.1, 1), name="plain")
    made = {
        name: assembled(tmp_path, documents, Choice(0.1, seed, shuffle=True), name=name)
        for name, seed in {"one": 1, "again": 1, "other": 2}.items()
    }
    trains = {name: cut(stream(corpus, "train")) for name, corpus in {**made, "plain": plain}.items()}
    assert same(trains["one"], trains["again"])
    assert not same(trains["one"], trains["plain"])
    assert sorted(map(tuple, trains["one"])) == sorted(map(tuple, trains["plain"]))
    assert stream(made["one"], "val").tolist() == stream(plain, "val").tolist()
    assert made["one"].splits["train"].bytes == plain.splits["train"].bytes
    assert not same(trains["other"], trains["one"])
    # far from where they were: of a random order, a third of the way on average
    where = {tuple(document): place for place, document in enumerate(trains["plain"])}
    moved = [abs(where[tuple(document)] - place) for place, document in enumerate(trains["one"])]
    assert 0.25 < np.mean(moved) / len(moved) < 0.42


# Parts


def test_a_part_comes_back_as_it_was_written(tmp_path):
    documents = documents_of(20)
    with PartWriter(tmp_path, 3, "uint16") as part:
        part.write(documents[0][:2])
        part.skip("no good", "zero")
        part.write(np.concatenate(documents[:5]))
        part.add_documents([(len(d), 9) for d in documents[:5]], first="first")
        part.write(documents[5][:-1])
        part.write(documents[5][-1:])
        part.add_documents([(len(documents[5]), 8)], first="sixth")
        for name in "abcde":
            part.skip("no good", name)
        part.write(np.array([1, 65_535], dtype=np.uint16))
        part.skip("worse", "last")
        assert read_part(tmp_path, 3) is None
        written = part.finish()
    read = read_part(tmp_path, 3)
    assert read == written
    assert read.ids().tolist() == np.concatenate(documents[:6]).tolist()
    assert read.lengths().tolist() == [*([len(d), 9] for d in documents[:5]), [len(documents[5]), 8]]
    assert read.skipped == {"no good": (6, ["zero", "a", "b"]), "worse": (1, ["last"])}
    assert (read.documents, read.first_document) == (6, "first")
    assert read.max_token_id == max(map(max, documents[:6]))  # 65,535 was left out
    assert read.fault() is None
    assert together([read, read])["no good"] == (12, ["zero", "a", "b"])
    assert read_part(tmp_path, 4) is None


def test_an_empty_part(tmp_path):
    with PartWriter(tmp_path, 0, "int32") as part:
        part.finish()
    part = read_part(tmp_path, 0)
    assert (part.documents, part.tokens, part.max_token_id, part.nbytes) == (0, 0, -1, 0)
    assert part.ids().dtype == np.int32
    assert len(part.ids()) == len(part.lengths()) == 0


@pytest.mark.parametrize("name", ["000000.tokens", "000000.documents.npy"])
def test_a_damaged_part_is_known(tmp_path, name):
    part = part_of(tmp_path, 0, documents_of(9))
    path = tmp_path / name
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert part.fault() == f"{path} is damaged (its hash differs)"
    path.unlink()
    assert part.fault() == f"{path} is missing"


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"skipped": 3}', '{"skipped": {}, "other": 1}'])
def test_what_vouches_for_a_part_is_checked(tmp_path, content):
    (tmp_path / "000000.json").write_text(content)
    with pytest.raises(UserError, match=r"000000.json is damaged .*: prepare this part again"):
        read_part(tmp_path, 0)


# Accidents


def test_a_disk_without_room_is_told_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(OSError, match=r"No space left on device: [\d,]+ bytes are needed .*, 1,000 are free"):
        assembled(tmp_path, documents_of(40), Choice(0.3, 1))
    assert [path.name for path in (tmp_path / "corpus").iterdir()] == ["tokenizer.json"]


def test_lost_records_are_noticed(tmp_path, monkeypatch):
    from litdata.streaming import Cache

    put = Cache.__setitem__
    monkeypatch.setattr(Cache, "__setitem__", lambda self, index, data: put(self, index, data) if index != 3 else None)
    with pytest.raises((RuntimeError, AssertionError)):
        assembled(tmp_path, documents_of(100), Choice(0.3, 1))
    assert not (tmp_path / "corpus" / "corpus.json").exists()


def test_a_split_that_litdata_cut_short_is_noticed(tmp_path, monkeypatch):
    writer = SplitWriter(tmp_path / "train", "uint16", RECORD)
    tokens = np.arange(120, dtype=np.uint16)
    writer.add(tokens, np.array([[120, 1]]))
    done = writer._cache.done

    def lossy():
        done()
        index = next((tmp_path / "train").glob("*.index.json"))
        state = json.loads(index.read_text())
        state["chunks"][0]["temporal_frames"][-1] = 10
        index.write_text(json.dumps(state))

    monkeypatch.setattr(writer._cache, "done", lossy)
    with pytest.raises(RuntimeError, match="LitData did not write all of the train split: "):
        writer.finish()
