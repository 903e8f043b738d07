"""What `inspect` says of a whole corpus, and of each way in which one can be damaged."""

import hashlib
import json
import shutil

import numpy as np
import pytest
from tokenizers import Tokenizer, models

from tst_lightning.__main__ import main
from tst_lightning.data.corpus import Corpus, Split, file_sha256
from tst_lightning.data.inspect import inspect
from tst_lightning.errors import UserError

RECORD = 10
WORDS = 40
END = 3
pytestmark = pytest.mark.filterwarnings("ignore:An item was larger than the target chunk size")


def stream(seed, documents):
    draw = np.random.default_rng(seed)
    allowed = [index for index in range(WORDS) if index != END]
    return np.concatenate([[*draw.choice(allowed, draw.integers(1, 9)), END] for _ in range(documents)])


def write_split(directory, ids, dtype):
    """LitData's own directory of records, two a chunk."""
    from litdata.streaming import TemporalArrayLoader
    from litdata.streaming.cache import Cache

    cache = Cache(str(directory), chunk_size=2, item_loader=TemporalArrayLoader())
    for number, start in enumerate(range(0, len(ids), RECORD)):
        cache[number] = {"tokens": ids[start : start + RECORD].astype(dtype)}
    cache.done()
    cache.merge()


def write_sums(directory):
    files = [*directory.glob("*/*"), directory / "tokenizer.json"]
    lines = [f"{file_sha256(path)}  {path.relative_to(directory).as_posix()}" for path in sorted(files)]
    (directory / "SHA256SUMS").write_text("\n".join(lines) + "\n")


@pytest.fixture(scope="module", params=["uint16", "int32"])
def whole(request, tmp_path_factory):
    """A corpus of several chunks a split."""
    directory = tmp_path_factory.mktemp("whole") / "corpus"
    directory.mkdir()
    vocab_size = WORDS if request.param == "uint16" else 70_000
    tokenizer = Tokenizer(models.WordLevel({f"w{i}" if i != END else "<end>": i for i in range(WORDS)}, "w0"))
    tokenizer.save(str(directory / "tokenizer.json"))
    streams = {"train": stream(0, 25), "val": stream(1, 5)}
    for name, ids in streams.items():
        write_split(directory / name, ids, request.param)
    Corpus(
        directory=directory,
        tokenizer_sha256=file_sha256(directory / "tokenizer.json"),
        vocab_size=vocab_size,
        end_of_text="<end>",
        end_of_text_id=END,
        max_token_id=int(max(ids.max() for ids in streams.values())),
        dtype=request.param,
        record_tokens=RECORD,
        splits={
            name: Split(
                int((ids == END).sum()), len(ids), None, hashlib.sha256(ids.astype(request.param).tobytes()).hexdigest()
            )
            for name, ids in streams.items()
        },
    ).save()
    write_sums(directory)
    return directory


@pytest.fixture
def copy(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "corpus")


def documents(directory):
    """Every document of both splits, read through LitData."""
    from litdata import StreamingDataset
    from litdata.streaming import TemporalArrayLoader

    found = []
    for name in ("train", "val"):
        dataset = StreamingDataset(str(directory / name), item_loader=TemporalArrayLoader())
        ids = np.concatenate(
            [dataset.read_window(i, 0, dataset.frame_counts[i], ["tokens"])["tokens"] for i in range(len(dataset))]
        )
        found += [(name, part[part != END]) for part in np.split(ids, np.flatnonzero(ids == END) + 1)[:-1]]
    return found


def chunk(directory, split, number):
    state = json.loads((directory / split / "index.json").read_text())
    return directory / split / state["chunks"][number]["filename"]


def place(record, token, dtype):
    """Where a token of the second record of a chunk lies."""
    return 4 * (2 + 2) + record * (4 + RECORD * np.dtype(dtype).itemsize) + 4 + token * np.dtype(dtype).itemsize


def change(path, at, new):
    content = bytearray(path.read_bytes())
    content[at : at + len(new)] = new
    path.write_bytes(content)


def sidecar(directory, **values):
    path = directory / "corpus.json"
    state = json.loads(path.read_text())
    splits = values.pop("splits", {})
    state |= values
    for name, more in splits.items():
        state["splits"][name] |= more
    path.write_text(json.dumps(state))


@pytest.mark.parametrize("samples", [0, 1, 2, 3, 7, 30, 100])
def test_a_whole_corpus_and_the_documents_it_shows(whole, samples):
    found = inspect(whole, samples=samples)
    assert found.faults == []
    assert found.chunks == {"train": len(list(whole.glob("train/*.bin"))), "val": len(list(whole.glob("val/*.bin")))}
    assert found.chunks["train"] > 3
    every = documents(whole)
    assert len(every) == 30
    assert len(found.samples) == min(samples, 30)
    for sample in found.samples:
        split, ids = every[sample.document]
        assert sample.split == split
        assert sample.text == " ".join(f"w{index}" for index in ids)
    if samples > 1:
        assert [found.samples[0].document, found.samples[-1].document] == [0, 29]


def test_the_command_says_it_in_lines_and_as_json(whole, capsys):
    assert main(["inspect", str(whole)]) == 0
    output = capsys.readouterr().out
    corpus = Corpus.load(whole)
    for text in (corpus.tokenizer_sha256, corpus.splits["val"].sha256, "25 documents", "5 documents", "<end> (id 3)"):
        assert text in output
    assert output.count("\ndocument ") == 3
    assert output.endswith("every chunk, token and hash is right\n")
    assert main(["inspect", str(whole), "--json", "--samples", "2"]) == 0
    state = json.loads(capsys.readouterr().out)
    assert state["faults"] == []
    assert state["splits"]["train"]["tokens"] == corpus.splits["train"].tokens
    assert [sample["split"] for sample in state["samples"]] == ["train", "val"]


def test_every_damaged_chunk_is_named(copy, capsys):
    dtype = Corpus.load(copy).dtype
    out = 39 if dtype == "uint16" else 40  # within the vocabulary of the second only
    sidecar(copy, max_token_id=38) if dtype == "uint16" else None
    first, second, third, fourth = (chunk(copy, "train", number) for number in range(4))
    change(first, place(1, 2, dtype), np.array([999_999 if dtype == "int32" else 999], dtype).tobytes())
    change(second, 4, b"\0")
    change(second, place(0, 0, dtype) - 4, b"\x0b")
    third.write_bytes(third.read_bytes()[:-3])
    fourth.unlink()
    change(chunk(copy, "val", 0), place(0, 5, dtype), np.array([out], dtype).tobytes())
    with pytest.raises(UserError):
        Corpus.load(copy)
    assert main(["inspect", str(copy)]) == 1
    output = capsys.readouterr().out
    for text in (
        f"{first}: record 1: token 2 is 999",
        f"{first} is damaged: its hash is not the one in SHA256SUMS",
        f"{second}: its header does not say where the index's 2 records lie",
        f"{second}: record 0 says that it has 11 tokens, the index says 10",
        f"{second} is damaged",
        f"{third} has ",
        f"{fourth} is missing",
        f"{chunk(copy, 'val', 0)}: record 0: token 5 is {out}, more than the largest id",
    ):
        assert text in output, text
    assert "documents" not in output.split("damaged:")[1]  # nothing that only follows from the above


def test_a_changed_token_within_the_vocabulary_is_found(copy):
    dtype = Corpus.load(copy).dtype
    path = chunk(copy, "train", 1)
    at = place(0, 1, dtype)
    old = np.frombuffer(path.read_bytes()[at : at + 2], "<u2")[0]
    change(path, at, bytes([old % 2]))
    assert inspect(copy).faults == [f"{path} is damaged: its hash is not the one in SHA256SUMS"]
    write_sums(copy)  # whoever changed it also wrote new sums
    (fault, *more) = inspect(copy).faults
    assert fault.startswith(f"{copy / 'train'}: its tokens are not those that the sidecar vouches for")
    assert not [each for each in more if "document" not in each]


def test_a_sidecar_that_says_otherwise(copy):
    largest = Corpus.load(copy).max_token_id
    sidecar(copy, max_token_id=largest + 0, splits={"train": {"documents": 24}, "val": {"sha256": "0" * 64}})
    assert inspect(copy).faults == [
        f"{copy / 'train'} holds 25 end-of-text tokens, but the sidecar says 24 documents",
        f"{copy / 'val'}: its tokens are not those that the sidecar vouches for (the hash differs)",
    ]


def test_the_largest_id_and_the_last_document(copy):
    corpus = Corpus.load(copy)
    sidecar(copy, max_token_id=WORDS - 1, end_of_text_id=END + 1, vocab_size=corpus.vocab_size)
    faults = "\n".join(inspect(copy).faults)
    assert ("the largest id is" in faults) == (corpus.max_token_id != WORDS - 1)
    assert faults.count("its last document is not closed by an end-of-text token") == 2


def test_checksums_are_held_against_the_files(copy):
    sums = copy / "SHA256SUMS"
    lines = sums.read_text().splitlines()
    sums.write_text("\n".join([*lines[1:], "0" * 64 + "  train/more.bin"]))
    unlisted = lines[0].split("  ")[1]
    assert inspect(copy).faults == [
        f"{copy / unlisted} is not listed in SHA256SUMS",
        f"{sums} lists train/more.bin, which is no file of this corpus",
    ]
    sums.write_text("nonsense")
    assert any("cannot be read as lines of a hash and a name" in fault for fault in inspect(copy).faults)
    sums.unlink()
    assert inspect(copy).faults == [f"{sums} is missing"]


def test_files_around_the_chunks(copy):
    (copy / "tokenizer.json").write_text("{}")
    (copy / "train" / "index.json").write_text("{")
    (copy / "val" / "index.json").unlink()
    found = inspect(copy)
    text = "\n".join(found.faults)
    assert f"{copy / 'tokenizer.json'} is not the file that made these tokens" in text
    assert f"{copy / 'tokenizer.json'} is damaged" in text
    assert f"{copy / 'train' / 'index.json'} is not the index of token records" in text
    assert f"{copy / 'train' / 'index.json'} is damaged" in text
    assert f"{copy / 'val' / 'index.json'} is missing" in text
    assert len(found.faults) == 5
    assert found.chunks == {"train": None, "val": None}
    assert found.samples == []
    assert "damaged:" in found.summary()
    shutil.rmtree(copy / "val")
    assert any(fault == f"{copy / 'val'} is missing" for fault in inspect(copy).faults)


def test_a_chunk_that_cannot_be_read(copy, monkeypatch):
    from pathlib import Path

    real, bad = Path.read_bytes, chunk(copy, "train", 0)

    def read(path):
        if path == bad:
            raise OSError(5, "Input/output error")
        return real(path)

    monkeypatch.setattr(Path, "read_bytes", read)
    assert inspect(copy).faults == [f"{bad} cannot be read (Input/output error)"]


@pytest.mark.parametrize("kind", ["missing", "empty", "file", "broken", "version"])
def test_what_is_no_corpus_is_status_2(tmp_path, kind, capsys):
    path = tmp_path / "corpus"
    if kind == "file":
        path.write_text("text")
    elif kind != "missing":
        path.mkdir()
    if kind in ("broken", "version"):
        (path / "corpus.json").write_text("{" if kind == "broken" else '{"format_version": 99}')
    assert main(["inspect", str(path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert "prepare" in error
    assert error.count("\n") == 1


def test_a_negative_number_of_samples(whole):
    with pytest.raises(UserError, match="--samples -1 must be at least 0"):
        inspect(whole, samples=-1)


def test_control_characters_of_a_text_do_not_reach_the_terminal(whole):
    from tst_lightning.data.inspect import _printable

    assert _printable("a\x1b[31m\tb\u2028é") == "a\\x1b[31m\tb\\u2028é"


class FolderBucket:
    """A bucket whose objects are the files of a folder."""

    def __init__(self, folder):
        self.folder = folder

    def get(self, key, file):
        from tst_lightning.data.stores import MissingObject

        if not (self.folder / key).is_file():
            raise MissingObject(f"{key} does not exist")
        file.write((self.folder / key).read_bytes())

    def list(self, prefix):
        for path in sorted(self.folder.rglob("*")):
            if path.is_file() and (key := path.relative_to(self.folder).as_posix()).startswith(prefix):
                yield key, path.stat().st_size


def test_a_corpus_in_a_store(copy, monkeypatch):
    from tst_lightning.data import stores

    monkeypatch.setattr(stores, "_bucket", lambda *_: FolderBucket(copy.parent))
    url = "s3://bucket/corpus"
    found = inspect(url)
    assert found.faults == []
    assert [sample.text for sample in found.samples] == [sample.text for sample in inspect(copy).samples]
    first, second = chunk(copy, "train", 0), chunk(copy, "train", 1)
    change(first, 20, b"\xff\xff\xff")
    second.unlink()
    faults = inspect(url).faults
    assert f"{url}/train/{second.name} is missing" in faults
    assert f"{url}/train/{first.name} is damaged: its hash is not the one in SHA256SUMS" in faults
