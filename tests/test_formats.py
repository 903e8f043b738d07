"""Readers of documents: each format against a plain loop, cut into pieces of any size, whole or damaged."""

import dataclasses
import gzip
import json
import os
import random
import struct
import tracemalloc
from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from tst_lightning.data.documents import plan_dataset, plan_pieces, read_piece
from tst_lightning.data.formats import blocks, hub, jsonl, parquet
from tst_lightning.data.formats.plain import cut_text
from tst_lightning.data.pieces import (
    EMPTY,
    HOLDS_NUL,
    LONE_SURROGATE,
    NO_FIELD,
    NOT_JSON,
    NOT_OBJECT,
    NOT_STRING,
    NOT_TEXT,
    TOO_LONG,
    End,
    Piece,
    UnreadableInput,
)
from tst_lightning.errors import UserError

ODD = "emoji 👩\u200d🚀 e\u0301\r\ncarriage return\x85\u2028, tab\t, \x1b\ufeff and <|endoftext|>\n"


def documents(pieces, *, cuttable=True):
    """(text, or why it is skipped; name) of every document, with everything checked that holds of any input."""
    found = []
    for piece in pieces:
        told = []
        text = ""
        for item in read_piece(
            Piece(**json.loads(json.dumps(dataclasses.asdict(piece)))), told.append, cuttable=cuttable
        ):
            if isinstance(item, str):
                assert item, "an empty string"
                text += item
                continue
            assert item.skipped is not None or item.bytes == len(text.encode())
            assert item.skipped is None or item.bytes == 0
            found.append((item.skipped or text, item.name))
            text = ""
        assert text == "", "a document without an end"
        assert sum(told) == piece.bytes
        assert all(step > 0 for step in told)
    return found


def texts(pieces, **more):
    return [text for text, _ in documents(pieces, **more)]


def long_text(seed, size=200_000):
    draw = random.Random(seed)
    return "".join(draw.choices(["a", "7", "\n", " ", "é", "\r\n", ".", "👩"], k=size))


def compressed(data, extension):
    if extension == ".gz":
        return gzip.compress(data, mtime=0)
    return zstandard.ZstdCompressor(level=1).compress(data) if extension else data


# --- text


@pytest.mark.parametrize("extension", ["", ".gz", ".zst", ".zstd"])
def test_a_text_file_is_a_document(tmp_path, extension):
    content = {f"{number}.txt{extension}": long_text(number, 70_000 * number) for number in (1, 2, 4)}
    content |= {
        f"odd.md{extension}": ODD,
        f"one{extension}": "x",
        f"data.json{extension and '.txt' + extension}": "{\n",
    }
    for name, text in content.items():
        (tmp_path / name).write_bytes(compressed(text.encode(), extension))
    pieces = plan_pieces([str(tmp_path / name) for name in content])
    assert [piece.format for piece in pieces] == ["text"] * len(content)
    assert [piece.bytes for piece in pieces] == [os.path.getsize(tmp_path / name) for name in content]
    expected = [(text, str(tmp_path / name)) for name, text in content.items()]
    assert documents(pieces) == expected
    assert documents(pieces, cuttable=False) == expected


def test_a_text_is_cut_only_between_a_letter_or_digit_and_a_newline(tmp_path):
    path = tmp_path / "a.txt"
    text = long_text(5, 500_000)
    path.write_bytes(text.encode())
    [piece] = plan_pieces([str(path)])
    for strings in (
        [item for item in read_piece(piece, lambda _: None, cuttable=True) if isinstance(item, str)],
        list(cut_text(text, cuttable=True)),
    ):
        assert len(strings) > 5
        assert max(map(len, strings)) < 2 * blocks.BLOCK_BYTES
        assert "".join(strings) == text
        for before, after in pairwise(strings):
            assert before[-1].isascii() and before[-1].isalnum() and after[0] == "\n"
    assert [item for item in read_piece(piece, lambda _: None, cuttable=False) if isinstance(item, str)] == [text]
    assert list(cut_text(text, cuttable=False)) == [text]
    assert list(cut_text("é" * 300_000, cuttable=True)) == ["é" * 300_000], "no place for a cut"


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", EMPTY),
        ("été".encode("latin-1"), NOT_TEXT),
        (b"a\n" * 100_000 + b"\xff" + b"a\n" * 100_000, NOT_TEXT),
        (b"a\n" * 100_000 + "é".encode()[:1], NOT_TEXT),
        (b"\xed\xa0\x80", NOT_TEXT),  # a surrogate
        (b"a\n" * 100_000 + b"\0", HOLDS_NUL),
        ("text".encode("utf-16"), HOLDS_NUL),
    ],
    ids=["empty", "latin-1", "middle", "cut character", "surrogate", "nul", "utf-16"],
)
@pytest.mark.parametrize("extension", ["", ".gz", ".zst"])
def test_what_is_no_text_is_skipped_by_name(tmp_path, data, reason, extension):
    path = tmp_path / f"a.txt{extension}"
    path.write_bytes(compressed(data, extension))
    pieces = plan_pieces([str(path)])
    for cuttable in (True, False):
        assert documents(pieces, cuttable=cuttable) == [(reason, str(path))]


@pytest.mark.parametrize("size", [1, 400_000])
def test_a_file_that_changed_its_size_is_unreadable(tmp_path, size):
    path = tmp_path / "a.txt"
    path.write_bytes(b"a" * 300_000)
    pieces = plan_pieces([str(path)])
    path.write_bytes(b"a" * size)
    with pytest.raises(UnreadableInput, match=r"a\.txt cannot be read to its end .*300,000 expected"):
        documents(pieces)
    path.unlink()
    with pytest.raises(UnreadableInput, match=r"a\.txt cannot be read to its end .*No such file"):
        documents(pieces)


def test_a_read_error_in_the_middle_is_unreadable(tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    path.write_bytes(b"a" * 300_000)
    pieces = plan_pieces([str(path)])

    def failing(file):
        yield file.read(10)
        raise OSError(5, "Input/output error")

    monkeypatch.setitem(blocks._READERS, "none", failing)
    with pytest.raises(UnreadableInput, match=r"a\.txt cannot be read to its end .*Input/output error"):
        documents(pieces)


# --- compression


FIRST, SECOND = b"first line\n" * 9_000, b"second " * 9_000


def zstd(data, **more):
    return zstandard.ZstdCompressor(**more).compress(data)


SKIPPABLE = struct.pack("<II", 0x184D2A53, 5) + b"12345"
LONG = zstandard.ZstdCompressor(
    compression_params=zstandard.ZstdCompressionParameters(window_log=30, enable_ldm=True)
).compressobj()
WHOLE = {
    "members.gz": (gzip.compress(FIRST) + gzip.compress(SECOND), FIRST + SECOND),
    "empty member.gz": (gzip.compress(FIRST) + gzip.compress(b"") + gzip.compress(SECOND), FIRST + SECOND),
    "padded.gz": (gzip.compress(FIRST) + bytes(100), FIRST),
    "frames.zst": (zstd(FIRST) + zstd(SECOND, write_checksum=True), FIRST + SECOND),
    "many frames.zst": (zstd(b"x\n") * 5_000, b"x\n" * 5_000),
    "empty frame.zst": (zstd(FIRST) + zstd(b"") + zstd(SECOND), FIRST + SECOND),
    "skippable frames.zst": (SKIPPABLE + zstd(FIRST) + SKIPPABLE * 2 + zstd(SECOND) + SKIPPABLE, FIRST + SECOND),
    "no size.zst": (zstd(FIRST, write_content_size=False), FIRST),
    "long window.zst": (LONG.compress(FIRST) + LONG.flush(), FIRST),
}


@pytest.mark.parametrize("name", WHOLE)
def test_every_member_and_frame_is_read(tmp_path, name):
    data, expected = WHOLE[name]
    path = tmp_path / name
    path.write_bytes(data)
    assert texts(plan_pieces([str(path)])) == [expected.decode()]


DAMAGED = {
    "cut.gz": gzip.compress(FIRST)[:-20],
    "cut checksum.gz": gzip.compress(FIRST)[:-3],
    "cut second.gz": gzip.compress(FIRST) + gzip.compress(SECOND)[:5],
    "flipped.gz": gzip.compress(FIRST)[:-8] + b"1234" + gzip.compress(FIRST)[-4:],
    "garbage.gz": gzip.compress(FIRST) + b"garbage",
    "deflate.gz": gzip.compress(FIRST)[:10] + b"\xff" * 50,
    "cut.zst": zstd(FIRST)[:-5],
    "cut second.zst": zstd(FIRST) + zstd(SECOND)[:-1],
    "cut header.zst": zstd(FIRST) + zstd(SECOND)[:3],
    "cut skippable.zst": zstd(FIRST) + SKIPPABLE[:-1],
    "garbage.zst": zstd(FIRST) + b"garbage",
    "flipped.zst": zstd(FIRST, write_checksum=True)[:-4] + b"1234",
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_compressed_file_is_unreadable(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(DAMAGED[name])
    pieces = plan_pieces([str(path)], format="text")
    with pytest.raises(UnreadableInput, match=f"{name} cannot be read to its end"):
        documents(pieces)


def test_a_small_file_that_unpacks_to_a_large_one_takes_little_memory(tmp_path):
    packed = zstd(bytes(200 << 20), level=1)
    path = tmp_path / "a.zst"
    path.write_bytes(packed)
    assert len(packed) < 1 << 16
    [piece] = plan_pieces([str(path)], format="text")
    largest = max(len(block) for block in blocks.read_blocks(piece, blocks.Meter(piece, lambda _: None)))
    assert largest <= 32 << 20


# --- JSON Lines


def line_loop(data, path, field="text"):
    """What the documents are, a line at a time."""
    found, offset = [], 0
    for number, line in enumerate(data.split(b"\n")):
        start, offset = offset, offset + len(line) + 1
        line = line.removeprefix(b"\xef\xbb\xbf") if number == 0 else line
        if line.strip(b" \r\t"):
            text = json.loads(line)[field]
            found.append((text or EMPTY, f"{path}:byte {start}"))
    return found


def as_line(text, **more):
    return json.dumps({"id": 1, "text": text, "meta": {"text": "no"}}, **more).encode()


@pytest.mark.parametrize("extent", [1, 2, 3, 7, 40, 10_000])
@pytest.mark.parametrize(
    "data",
    [
        b"\n".join(as_line(text) for text in ["one", "two\nlines", "", ODD, "x" * 500, "last"]),
        b"\r\n".join(as_line(text, ensure_ascii=False) for text in ["one", ODD, "é" * 99]) + b"\r\n",
        b"\xef\xbb\xbf" + as_line("after a mark") + b"\n" + as_line("second") + b"\n",
        b"\n\n \t\r\n" + as_line("between blanks") + b"\n\n\n" + as_line("end") + b"\n\n",
        b"\xef\xbb\xbf\n" + as_line("after a mark on a blank line"),
        b"\n\n\n",
        b"",
    ],
    ids=["no final newline", "crlf", "mark", "blanks", "mark alone", "only blanks", "nothing"],
)
def test_ranges_of_any_size_hold_each_line_once(tmp_path, monkeypatch, data, extent):
    monkeypatch.setattr(jsonl, "PIECE_BYTES", extent)
    path = tmp_path / "a.jsonl"
    path.write_bytes(data)
    pieces = plan_pieces([str(path)])
    assert len(pieces) == -(-len(data) // extent)
    assert documents(pieces) == line_loop(data, path)


@settings(max_examples=200, deadline=None)
@given(
    data=st.lists(st.sampled_from([b"\n", b"a", b"bc", b"\r\n", b"d" * 9]), max_size=30).map(b"".join),
    extent=st.integers(1, 12),
    block=st.integers(1, 9),
    limit=st.integers(0, 12),
)
def test_split_lines_against_a_plain_split(data, extent, block, limit):
    found = []
    for start in range(0, len(data), extent):
        begin = max(start - 1, 0)
        given = (data[i : i + block] for i in range(begin, len(data), block))
        found += jsonl.split_lines(given, start, min(start + extent, len(data)), limit=limit)
    lines = data.split(b"\n")
    starts = [sum(len(line) + 1 for line in lines[:i]) for i in range(len(lines))]
    expected = [(start, line if len(line) <= limit else None) for start, line in zip(starts, lines, strict=True)]
    if not lines[-1]:
        expected.pop()
    assert found == expected


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.ndjson.zst", "a.json.gz", "A.JSON.ZST", "a.JSONL", "a.ndjson"])
def test_json_lines_go_by_the_name(tmp_path, name):
    expected = ["one", ODD, "three"]
    path = tmp_path / name
    extension = Path(name).suffix.lower()
    data = b"\n".join(map(as_line, expected))
    path.write_bytes(compressed(data, extension if extension in (".gz", ".zst") else ""))
    pieces = plan_pieces([str(path)])
    assert pieces[0].format == "jsonl"
    assert texts(pieces) == expected
    if pieces[0].compression != "none":
        assert [place for _, place in documents(pieces)] == [f"{path}:line {number}" for number in (1, 2, 3)]


def test_the_format_can_be_forced(tmp_path):
    lines = as_line("one") + b"\n" + as_line("two")
    for name in ("a.jsonl", "a.json", "a.txt", "a.txt.gz"):
        path = tmp_path / name
        path.write_bytes(compressed(lines, ".gz" if name.endswith(".gz") else ""))
        assert texts(plan_pieces([str(path)], format="text")) == [lines.decode()]
        assert texts(plan_pieces([str(path)], format="jsonl")) == ["one", "two"]
    pq.write_table(pa.table({"text": ["three"]}), tmp_path / "data")
    assert texts(plan_pieces([str(tmp_path / "data")], format="parquet")) == ["three"]
    with pytest.raises(UserError, match="--format csv must be one of auto, text, jsonl, parquet"):
        plan_pieces([], format="csv")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (b'{"text": ""}', EMPTY),
        (b'{"text": null}', EMPTY),
        (b'{"text": "\xff"}', NOT_TEXT),
        ('{"text": "é"}'.encode("latin-1"), NOT_TEXT),
        (b'{"text": "\xed\xa0\x80"}', NOT_TEXT),
        (b'{"text": "\\ud83d"}', LONE_SURROGATE),
        (b'{"text": "\\ude80\\ud83d"}', LONE_SURROGATE),
        (b'{"text": "one"', NOT_JSON),
        (b'{"text": "one"} {"text": "two"}', NOT_JSON),
        (b"{'text': 'one'}", NOT_JSON),
        (b'{"text": "a\ttab"}', NOT_JSON),
        (b'{"text": "one"}\0', NOT_JSON),
        (b"[" * 100_000, NOT_JSON),
        (b"plain words", NOT_JSON),
        (b'["text"]', NOT_OBJECT),
        (b'"text"', NOT_OBJECT),
        (b"null", NOT_OBJECT),
        (b'{"texts": "one"}', NO_FIELD),
        (b"{}", NO_FIELD),
        (b'{"text": ["one"]}', NOT_STRING),
        (b'{"text": 1}', NOT_STRING),
        (b'{"text": true}', NOT_STRING),
        (b'{"text": "\\ud83d\\ude80"}', "🚀"),
        (b'{"text": "nul \\u0000"}', "nul \0"),
        (b'{"text": "1", "text": "2"}', "2"),
        (b'{"n": ' + b"9" * 9_000 + b', "x": NaN, "text": "big number"}', "big number"),
        (b'\t {"text": " kept "} \r', " kept "),
    ],
)
@pytest.mark.parametrize("extension", ["", ".zst"])
def test_a_bad_line_is_skipped_by_reason(tmp_path, line, expected, extension):
    path = tmp_path / f"a.jsonl{extension}"
    data = as_line("good") + b"\n" + line + b"\n" + as_line("good too")
    path.write_bytes(compressed(data, extension))
    assert texts(plan_pieces([str(path)])) == ["good", expected, "good too"]


def test_a_line_over_the_limit_is_skipped_without_being_held(tmp_path, monkeypatch):
    monkeypatch.setattr(jsonl, "LINE_BYTES", 1 << 20)
    path = tmp_path / "a.jsonl"
    exact = as_line("x" * ((1 << 20) - len(as_line(""))))
    assert len(exact) == 1 << 20
    path.write_bytes(as_line("one") + b"\n" + as_line("y" * (30 << 20)) + b"\n" + exact + b"\n")
    pieces = plan_pieces([str(path)])
    tracemalloc.start()
    found = documents(pieces)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [text[:3] for text, _ in found] == ["one", TOO_LONG[:3], "xxx"]
    assert found[1] == (TOO_LONG, f"{path}:byte {len(as_line('one')) + 1}")
    assert peak < 12 << 20, "a few copies of a line within the limit"


def test_a_range_inside_a_long_line_is_not_read_to_the_end_of_the_line(tmp_path, monkeypatch):
    monkeypatch.setattr(jsonl, "PIECE_BYTES", 100_000)
    path = tmp_path / "a.jsonl"
    path.write_bytes(as_line("y" * 10_000_000))
    pieces = plan_pieces([str(path)])
    read = []
    plain = blocks._READERS["none"]

    def counting(file):
        for block in plain(file):
            read.append(len(block))
            yield block

    monkeypatch.setitem(blocks._READERS, "none", counting)
    assert texts(pieces[1:]) == []
    assert sum(read) < 2 * 10_000_000


def test_a_json_lines_file_that_shrank_is_unreadable(tmp_path, monkeypatch):
    monkeypatch.setattr(jsonl, "PIECE_BYTES", 100)
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\n".join([as_line("words")] * 10))
    pieces = plan_pieces([str(path)])
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(UnreadableInput, match=r"a\.jsonl cannot be read"):
        documents(pieces)


# --- Parquet


KINDS = [
    pa.string(),
    pa.large_string(),
    pa.string_view(),
    pa.dictionary(pa.int32(), pa.string()),
    pa.dictionary(pa.int8(), pa.large_string()),
]
ROWS = ["one", None, "", ODD, "x" * 100_000, "nul \0", *(f"row {i}" for i in range(40))]


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("extent", [1, 600, 1 << 26])
def test_parquet_against_pandas_style_reading(tmp_path, monkeypatch, kind, extent):
    monkeypatch.setattr(parquet, "PIECE_BYTES", extent)
    path = tmp_path / "a.parquet"
    array = pa.array(ROWS, pa.string()).cast(kind) if kind != pa.string_view() else pa.array(ROWS, kind)
    table = pa.table({"id": list(range(len(ROWS))), "body": array, "text.more": ["no"] * len(ROWS)})
    pq.write_table(table, path, row_group_size=7)
    pieces = plan_pieces([str(path)], field="body")
    assert [piece.start for piece in pieces[1:]] == [piece.stop for piece in pieces[:-1]]
    assert (pieces[0].start, pieces[-1].stop) == (0, 7)
    assert len(pieces) == {1: 7, 1 << 26: 1}.get(extent, len(pieces))
    assert documents(pieces) == [(text or EMPTY, f"{path}:row {row}") for row, text in enumerate(ROWS)]
    assert texts(plan_pieces([str(path)], field="text.more")) == ["no"] * len(ROWS)


@pytest.mark.parametrize("compression", ["none", "snappy", "gzip", "zstd", "lz4", "brotli"])
def test_parquet_codecs(tmp_path, compression):
    path = tmp_path / "a.parquet"
    expected = [long_text(i, 30_000) for i in range(20)]
    pq.write_table(pa.table({"text": expected}), path, compression=compression, row_group_size=6)
    assert texts(plan_pieces([str(path)])) == expected


def test_parquet_rows_without_text(tmp_path):
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), tmp_path / "none.parquet")
    pq.write_table(pa.table({"text": pa.array([None, None], pa.string())}), tmp_path / "nulls.parquet")
    assert texts(plan_pieces([str(tmp_path / "none.parquet")])) == []
    assert texts(plan_pieces([str(tmp_path / "nulls.parquet")])) == [EMPTY, EMPTY]


def test_a_parquet_cell_that_is_not_utf_8_is_skipped(tmp_path):
    path = tmp_path / "a.parquet"
    damaged = pa.array([b"one", b"\xff", b"three"], pa.binary()).view(pa.string())
    pq.write_table(pa.table({"text": damaged}), path)
    assert texts(plan_pieces([str(path)])) == ["one", NOT_TEXT, "three"]


def test_a_parquet_file_damaged_behind_its_footer_is_unreadable(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(
        pa.table({"text": [long_text(i, 3_000) for i in range(200)]}),
        path,
        write_page_checksum=True,
        use_dictionary=False,
    )
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    pieces = plan_pieces([str(path)])
    path.write_bytes(data)
    with pytest.raises(UnreadableInput, match=r"a\.parquet cannot be read to its end .*(CRC|corrupt)"):
        documents(pieces)
    path.write_bytes(data[:1000])
    with pytest.raises(UnreadableInput, match=r"a\.parquet cannot be read to its end"):
        documents(pieces)


def test_another_parquet_file_in_its_place_is_unreadable(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["a", "b"]}), path, row_group_size=1)
    pieces = plan_pieces([str(path)])
    for table, rows in [({"text": ["a", "b"]}, 2), ({"texts": ["a", "b"]}, 1), ({"text": [1, 2]}, 1)]:
        pq.write_table(pa.table(table), path, row_group_size=rows)
        with pytest.raises(UnreadableInput, match=r"a\.parquet cannot be read to its end"):
            documents(pieces)


def test_a_large_row_group_is_not_held(tmp_path):
    path = tmp_path / "a.parquet"
    draw = random.Random(0)
    table = pa.table({"text": [draw.randbytes(5_000).hex() for _ in range(8_000)]})
    pq.write_table(table, path, compression="none", use_dictionary=False, row_group_size=len(table))
    del table
    default = pa.default_memory_pool()
    counted = pa.proxy_memory_pool(default)
    pa.set_memory_pool(counted)
    try:
        assert len(documents(plan_pieces([str(path)]))) == 8_000
    finally:
        pa.set_memory_pool(default)
    assert path.stat().st_size > 80_000_000
    assert 0 < counted.max_memory() < 40_000_000


# --- Hugging Face data sets


@pytest.fixture
def saved(tmp_path):
    """A data set saved in three files, and its texts."""
    datasets = pytest.importorskip("datasets")
    rows = [f"row {i} {'x' * (i % 90)}" if i % 11 else None for i in range(2_500)]
    dataset = datasets.Dataset.from_dict({"id": list(range(len(rows))), "text": rows, "label": [1] * len(rows)})
    dataset.save_to_disk(tmp_path / "one", num_shards=3)
    splits = datasets.DatasetDict(train=dataset, test=dataset.select(range(1_000, 1_003)))
    splits.save_to_disk(tmp_path / "splits")
    return tmp_path, dataset


@pytest.mark.parametrize("extent", [1_000, 30_000, 1 << 26])
def test_a_saved_data_set_against_its_rows(saved, monkeypatch, extent):
    monkeypatch.setattr(hub, "PIECE_BYTES", extent)
    folder, dataset = saved
    expected = [text or EMPTY for text in dataset["text"]]
    for name in ("one", "splits"):
        pieces = plan_dataset(str(folder / name))
        assert texts(pieces) == expected
        files = {piece.path for piece in pieces}
        assert sum(piece.bytes for piece in pieces) == sum(map(os.path.getsize, files))
        assert len(pieces) == len(files) or extent < 1 << 26
    rows = documents(plan_dataset(str(folder / "splits"), split="test"))
    assert [text for text, _ in rows] == expected[1_000:1_003]
    assert rows[2][1].endswith(".arrow:row 2")


def test_a_shuffled_data_set_keeps_its_order_when_saved(saved):
    folder, dataset = saved
    shuffled = dataset.shuffle(seed=1)
    shuffled.save_to_disk(folder / "shuffled")
    assert texts(plan_dataset(str(folder / "shuffled"))) == [text or EMPTY for text in shuffled["text"]]


def test_a_data_set_of_the_hub_is_asked_for_once(saved, monkeypatch):
    import datasets

    folder, dataset = saved
    asked = []

    def load_dataset(*args, **kwargs):
        asked.append((args, kwargs))
        return datasets.load_from_disk(folder / "one")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    pieces = plan_dataset("someone/texts", config="en", split="validation", field="text")
    assert texts(pieces) == [text or EMPTY for text in dataset["text"]]
    assert asked == [(("someone/texts", "en"), {"split": "validation"})]

    def offline(*_, **__):
        raise ConnectionError("couldn't reach the hub")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    with pytest.raises(UserError, match=r"--hf someone/texts cannot be loaded \(ConnectionError: couldn't reach"):
        plan_dataset("someone/texts")


def test_what_load_dataset_converts_is_read_whole_or_refused(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    files = [str(tmp_path / f"{number}.jsonl") for number in range(3)]
    expected = [f"{file} {row}" for file in files for row in range(40)]
    for number, file in enumerate(files):
        Path(file).write_bytes(b"\n".join(map(as_line, expected[40 * number : 40 * number + 40])))
    load = datasets.load_dataset

    def load_dataset(name, config, *, split):
        return load("json", data_files={"train": files[:2], "test": files[2:]}, split=split, cache_dir=str(tmp_path))

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert texts(plan_dataset("someone/texts")) == expected[:80]
    assert texts(plan_dataset("someone/texts", split="test")) == expected[80:]
    assert texts(plan_dataset("someone/texts", split="test+train")) == expected[80:] + expected[:80]
    for split in ("train[:5]", "train[50%:]+train[:50%]"):
        with pytest.raises(UserError, match=r"--hf-split train\[.* a selection: name a whole split"):
            plan_dataset("someone/texts", split=split)
    with pytest.raises(UserError, match=r"cannot be loaded \(ValueError: .*valid"):
        plan_dataset("someone/texts", split="valid")


def test_a_data_set_that_cannot_be_used(saved, monkeypatch, tmp_path):
    folder, _ = saved
    for expected, name, options in [
        (r"has no column 'body' \(it has id, text, label\): name the column", "one", {"field": "body"}),
        (r"column 'id' of --hf .* holds int64, not strings \(columns of strings: text\)", "one", {"field": "id"}),
        (r"--hf-split dev: .*splits has the splits train, test", "splits", {"split": "dev"}),
        (r"--hf-split dev: .*one holds one split only", "one", {"split": "dev"}),
        (r"--hf-config en belongs to a data set of the hub", "one", {"config": "en"}),
        (r"is no folder that save_to_disk wrote .* as INPUT", ".", {}),
    ]:
        with pytest.raises(UserError, match=expected):
            plan_dataset(str(folder / name), **options)
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(UserError, match=r"pip install 'tst-lightning\[hf\]'"):
        plan_dataset("someone/texts")


def test_a_damaged_data_set_is_unreadable(saved):
    folder, _ = saved
    pieces = plan_dataset(str(folder / "one"))
    path = Path(pieces[-1].path)
    data = path.read_bytes()
    for size in (0, 50, len(data) // 2):
        path.write_bytes(data[:size])
        with pytest.raises(UnreadableInput, match=r"\.arrow cannot be read to its end"):
            documents(pieces)
    path.unlink()
    with pytest.raises(UnreadableInput, match=r"\.arrow cannot be read to its end"):
        documents(pieces)


def test_a_data_set_cut_off_between_two_batches_is_unreadable(tmp_path):
    path = tmp_path / "a.arrow"
    table = pa.table({"text": [f"row {i}" for i in range(30)]})
    with open(path, "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
        ends = []
        for start in (0, 10, 20):
            stream.write_table(table.slice(start, 10))
            ends.append(file.tell())
    pieces = [Piece(str(path), "hf", "none", start, start + 15, 100, "text") for start in (0, 15)]
    assert texts(pieces) == table["text"].to_pylist()
    os.truncate(path, ends[1])
    assert texts(pieces[:1]) == table["text"].to_pylist()[:15]
    with pytest.raises(UnreadableInput, match=r"a\.arrow cannot be read to its end \(5 rows, 15 expected\)"):
        documents(pieces)


# --- all faults before the work


def test_all_faults_are_named_at_once(tmp_path):
    good = {
        "good.txt": b"text",
        "good.jsonl": as_line("one"),
        "long.jsonl": b'{"more": 1, "text": null}\n' * 3,
        "empty.jsonl": b"",
        "blank.jsonl.gz": gzip.compress(b"\n \n"),
    }
    bad = {
        "not.gz": (b"plain", r"not\.gz is not gzip, as its name says \(it begins with b'plai'\): fetch it again"),
        "not.jsonl.zst": (gzip.compress(b"{}"), r"not\.jsonl\.zst is not zstd, as its name says"),
        "empty.zst": (b"", r"empty\.zst is not zstd, as its name says \(it is an empty file\)"),
        "cut.jsonl.gz": (gzip.compress(as_line("a"))[:-9], r"cut\.jsonl\.gz cannot be read to its end"),
        "words.jsonl": (b"\n\nsome words\n", r"words\.jsonl .*first line is not JSON: b'some words'\).*--format text"),
        "pretty.json.gz": (gzip.compress(b'{\n "a": 1\n}'), r"pretty\.json\.gz .*first line is not JSON: b'{'\)"),
        "list.jsonl": (b'["text"]', r"list\.jsonl .*first line is not a JSON object"),
        "utf16.jsonl": (as_line("a").decode().encode("utf-16"), r"utf16\.jsonl .*first line is not UTF-8 text"),
        "field.jsonl": (
            b'{"body": "a", "id": 1}',
            r"field\.jsonl has no field 'text' .*\(it has 'body', 'id'\).*--field",
        ),
        "number.jsonl": (b'{"text": 1}', r"number\.jsonl holds no string in field 'text'"),
        "not.parquet": (b"plain", r"not\.parquet cannot be read as Parquet .*fetch it again"),
        "empty.parquet": (b"", r"empty\.parquet cannot be read as Parquet"),
    }
    for name, data in good.items():
        (tmp_path / name).write_bytes(data)
    for name, (data, _) in bad.items():
        (tmp_path / name).write_bytes(data)
    tables = {
        "column.parquet": (
            {"body": ["a"], "id": [1]},
            r"column\.parquet has no column 'text' \(it has body, id\).*--field",
        ),
        "kind.parquet": ({"text": [[1]], "b": ["a"]}, r"'text' of .*kind\.parquet holds list<.*strings: b\).*--field"),
        "bytes.parquet": ({"text": [b"a"]}, r"'text' of .*bytes\.parquet holds binary, not strings"),
    }
    for name, (columns, _) in tables.items():
        pq.write_table(pa.table(columns), tmp_path / name)
    whole = tmp_path / "cut.parquet"
    pq.write_table(pa.table({"text": ["a"] * 1000}), whole)
    os.truncate(whole, whole.stat().st_size - 10)
    os.mkfifo(tmp_path / "pipe")
    expected = [pattern for _, pattern in bad.values()] + [pattern for _, pattern in tables.values()]
    expected += [
        r"cut\.parquet cannot be read as Parquet",
        r"pipe is not a regular file",
        r"gone\.txt cannot be opened \(No",
    ]
    files = [str(tmp_path / name) for name in [*good, *bad, *tables, "cut.parquet", "pipe", "gone.txt"]]
    with pytest.raises(UserError) as caught:
        plan_pieces(files)
    assert len(caught.value.faults) == len(expected)
    for fault, pattern in zip(caught.value.faults, expected, strict=True):
        with pytest.raises(UserError, match=pattern):
            raise UserError(fault)
    assert texts(plan_pieces(files[: len(good)])) == ["text", "one", EMPTY, EMPTY, EMPTY]


def test_thousands_of_faults_are_cut_short(tmp_path):
    with pytest.raises(UserError) as caught:
        plan_pieces([str(tmp_path / str(i)) for i in range(5_000)])
    assert len(caught.value.faults) == 21
    assert caught.value.faults[-1] == "4,980 more files have faults like these"


def test_a_file_that_may_not_be_opened(tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    path.write_text("text")

    def refuse(*_):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("tst_lightning.data.documents.compression_fault", refuse)
    with pytest.raises(UserError, match=r"a\.txt cannot be opened \(Permission denied\): make it readable, or leave"):
        plan_pieces([str(path)])


def test_a_field_without_anything_that_has_fields(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("text")
    with pytest.raises(UserError, match="--field body belongs to JSON Lines and Parquet"):
        plan_pieces([str(path)], field="body")


def test_the_kinds_of_file_can_be_mixed_and_keep_their_order(tmp_path):
    (tmp_path / "a.txt").write_text("first")
    (tmp_path / "b.jsonl").write_bytes(as_line("second") + b"\n" + as_line("third"))
    pq.write_table(pa.table({"text": ["fourth"]}), tmp_path / "c.parquet")
    (tmp_path / "d.txt.gz").write_bytes(gzip.compress(b"fifth"))
    files = [str(path) for path in sorted(tmp_path.iterdir())]
    assert texts(plan_pieces(files)) == ["first", "second", "third", "fourth", "fifth"]
    assert texts(plan_pieces(files[::-1])) == ["fifth", "fourth", "second", "third", "first"]


def test_a_reader_that_is_left_early_closes_its_file(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\n".join([as_line("words")] * 9_000))
    pq.write_table(pa.table({"text": ["a"] * 9_000}), tmp_path / "a.parquet")
    open_before = len(os.listdir("/proc/self/fd"))
    for piece in plan_pieces([str(path), str(tmp_path / "a.parquet")]):
        reader = read_piece(piece, lambda _: None, cuttable=True)
        assert isinstance(next(reader), str)
        assert isinstance(next(reader), End)
        assert len(os.listdir("/proc/self/fd")) > open_before
        reader.close()
        assert len(os.listdir("/proc/self/fd")) == open_before
