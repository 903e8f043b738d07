"""The sidecar's faults, on a directory laid out by hand as LitData lays it out."""

import hashlib
import json
import struct

import pytest

from tst_lightning.data.corpus import Corpus, Split, dtype_for
from tst_lightning.errors import UserError

RECORD = 8


def write_split(directory, tokens):
    """Two chunks: whole records, then the rest."""
    frames = [RECORD] * (tokens // RECORD) + ([tokens % RECORD] if tokens % RECORD else [])
    directory.mkdir()
    chunks = []
    for number, part in enumerate([frames[:1], frames[1:]]):
        if not part:
            continue
        starts = [4 * (2 + len(part))]
        for length in part:
            starts.append(starts[-1] + 4 + 2 * length)
        data = struct.pack(f"<{1 + len(starts)}I", len(part), *starts)
        data += b"".join(struct.pack("<I", length) + bytes(2 * length) for length in part)
        (directory / f"chunk-0-{number}.bin").write_bytes(data)
        chunks.append({"filename": f"chunk-0-{number}.bin", "temporal_frames": part})
    config = {"temporal_schema": {"fields": {"tokens": {"dtype": "<u2"}}}}
    (directory / "index.json").write_text(json.dumps({"chunks": chunks, "config": config}))


@pytest.fixture
def corpus(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    write_split(tmp_path / "train", 21)
    write_split(tmp_path / "val", 5)
    made = Corpus(
        directory=tmp_path,
        tokenizer_sha256=hashlib.sha256(b"{}").hexdigest(),
        vocab_size=300,
        end_of_text="<|endoftext|>",
        end_of_text_id=0,
        max_token_id=299,
        dtype="uint16",
        record_tokens=RECORD,
        splits={"train": Split(3, 21, 60, "0" * 64), "val": Split(1, 5, None, "1" * 64)},
    )
    made.save()
    return made


def edit(corpus, **changes):
    path = corpus.directory / "corpus.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def faults(corpus):
    with pytest.raises(UserError) as caught:
        Corpus.load(corpus.directory)
    assert all("tst-lightning prepare" in fault for fault in caught.value.faults)
    return "\n".join(caught.value.faults)


def test_what_is_saved_is_loaded(corpus):
    assert Corpus.load(str(corpus.directory)) == corpus
    assert corpus.split_directory("val") == corpus.directory / "val"
    assert not list(corpus.directory.glob("*.tmp"))


def test_a_directory_without_sidecar_is_refused(corpus, tmp_path):
    (tmp_path / "corpus.json").unlink()
    assert "is not a prepared directory" in faults(corpus)
    with pytest.raises(UserError, match="no such directory"):
        Corpus.load(tmp_path / "elsewhere")


def test_a_broken_sidecar_is_refused(corpus):
    (corpus.directory / "corpus.json").write_text('{"format_version": 1,')
    assert "cannot be read" in faults(corpus)
    (corpus.directory / "corpus.json").write_text("[]")
    assert "format_version=None" in faults(corpus)
    edit_path = corpus.directory / "corpus.json"
    edit_path.write_text('{"format_version": 1}')
    assert "format_version=1" in faults(corpus)


def test_all_wrong_keys_are_named_at_once(corpus):
    edit(corpus, vocab_size="300", dtype=True, colour="red")
    message = faults(corpus)
    for part in (
        "vocab_size='300' must be of type int",
        "dtype=True must be of type str",
        "colour is unknown",
    ):
        assert part in message


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "int64"}, "dtype='int64' must be one of uint16, int32"),
        ({"vocab_size": 70_000}, "too small for vocab_size=70000"),
        ({"max_token_id": 300}, "max_token_id=300 must lie in"),
        ({"end_of_text_id": -1}, "end_of_text_id=-1 must lie in"),
        ({"record_tokens": 0}, "record_tokens=0 must be at least 1"),
        ({"splits": {"train": {"documents": 1, "tokens": 1, "bytes": 1}}}, "must be ['train', 'val']"),
        (
            {
                "splits": {
                    "train": {"documents": 0, "tokens": 21, "bytes": None, "sha256": "0"},
                    "val": {"documents": 1, "bytes": 1},
                }
            },
            "splits.train.documents=0 must be at least 1",
        ),
        (
            {"splits": {"train": {"documents": 1, "tokens": 2, "bytes": "6", "sha256": "0"}, "val": 3}},
            "splits.train.bytes='6' must be of type int or null",
        ),
        ({"splits": {"train": 3, "val": {"documents": 1, "bytes": 1}}}, "splits.val.tokens is missing"),
    ],
)
def test_impossible_values_are_named(corpus, changes, message):
    edit(corpus, **changes)
    assert message in faults(corpus)


def test_every_file_is_held_against_the_sidecar(corpus, tmp_path):
    (tmp_path / "tokenizer.json").write_text("[]")
    chunk = tmp_path / "train" / "chunk-0-1.bin"
    chunk.write_bytes(chunk.read_bytes()[:-2])
    (tmp_path / "train" / "chunk-0-0.bin").unlink()
    (tmp_path / "val" / "index.json").unlink()
    message = faults(corpus)
    assert "its hash differs" in message
    assert "chunk-0-1.bin has" in message
    assert "chunk-0-0.bin is missing" in message
    assert "index.json is missing" in message


def test_missing_tokenizer_and_split_are_named(corpus, tmp_path):
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "val").rename(tmp_path / "elsewhere")
    message = faults(corpus)
    assert "tokenizer.json is missing" in message
    assert f"{tmp_path / 'val'} is missing" in message


def test_an_index_with_other_tokens_is_refused(corpus, tmp_path):
    index = tmp_path / "train" / "index.json"
    whole = json.loads(index.read_text())
    index.write_text(json.dumps({**whole, "chunks": whole["chunks"][:1]}))
    assert "lists 8 tokens in 1 records, not 21 in 3" in faults(corpus)
    whole["chunks"][0]["temporal_frames"] = [7]
    whole["chunks"][1]["temporal_frames"] = [8, 6]
    whole["config"]["temporal_schema"]["fields"]["tokens"]["dtype"] = "<i4"
    index.write_text(json.dumps(whole))
    message = faults(corpus)
    assert "records that are not of 8 tokens" in message
    assert "dtype <i4, not <u2" in message
    index.write_text('{"chunks": []}')
    assert "is not the index of token records" in faults(corpus)


def test_the_dtype_holds_the_vocabulary():
    assert [dtype_for(size) for size in (257, 65_536, 65_537, 128_256)] == [
        "uint16",
        "uint16",
        "int32",
        "int32",
    ]
