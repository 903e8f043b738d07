"""Text files into a prepared corpus: documents, tokens, all or nothing."""

import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from tst_lightning.__main__ import main
from tst_lightning.data import documents as documents_module
from tst_lightning.data import tokenise
from tst_lightning.data.corpus import Corpus
from tst_lightning.data.documents import Document, check_file, find_files, read_pieces, split_documents
from tst_lightning.data.prepare import prepare
from tst_lightning.data.prepare_job import Job, Reporter, prepare_corpus
from tst_lightning.data.tokenise import encode_documents, load_tokenizer, narrow, train_tokenizer
from tst_lightning.errors import TSTWarning, UserError

RECORD = 1000
ODD = (
    "emoji 👩\u200d🚀 \u00e9 e\u0301\r\ncarriage return, tab\t, bell\x07, escape\x1b\ufeff and <|endoftext|> in text\n"
)


def ignore(*_):
    pass


def document(path):
    return Document(str(path), 0, os.path.getsize(path))


@pytest.fixture(scope="session")
def texts(tmp_path_factory):
    """Thirty small documents in folders, and files that are none."""
    folder = tmp_path_factory.mktemp("texts")
    draw = random.Random(0)
    words = ["the", "of", "novel", "whale", "Ishmael", "sea", "1851", "don't", "—", "été"]
    for number in range(30):
        path = folder / f"part{number % 3}" / f"{number:02}.txt"
        path.parent.mkdir(exist_ok=True)
        text = ODD + " ".join(draw.choices(words, k=150)) + "\n" * (number % 3)
        path.write_bytes(text.encode())
    (folder / "part0" / "empty.txt").touch()
    (folder / "part1" / "latin.txt").write_bytes("été".encode("latin-1"))
    (folder / "part2" / "nul.txt").write_bytes(b"a\0b")
    (folder / "part2" / "notes.md").write_text("not matched by the pattern")
    return folder


def options(output, **more):
    return {"output": output, "pattern": ["*.txt"], "train_tokenizer": 300, "held_out": 0.2, "seed": 1} | more


@pytest.fixture(scope="session")
def corpus(texts, tmp_path_factory):
    directory = tmp_path_factory.mktemp("prepared") / "new" / "corpus"
    with pytest.warns(TSTWarning, match=r"skipped 2 \(not UTF-8 text\): .*latin.txt, .*nul.txt"):
        return prepare(texts, **options(directory, record_tokens=RECORD))


def stream(corpus, split):
    """Every token of a split, through LitData."""
    from litdata import StreamingDataset
    from litdata.streaming import TemporalArrayLoader

    dataset = StreamingDataset(str(corpus.split_directory(split)), item_loader=TemporalArrayLoader())
    return [dataset.read_window(i, 0, dataset.frame_counts[i], ["tokens"])["tokens"] for i in range(len(dataset))]


# The whole way


@pytest.mark.slow
def test_the_corpus_holds_every_document_in_order(corpus, texts):
    paths = [path for path in sorted(texts.rglob("*.txt")) if path.stem.isdigit()]
    train, val = split_documents([document(path) for path in paths], held_out=0.2, seed=1)
    assert len(train) + len(val) == 30
    tokenizer = Tokenizer.from_file(str(corpus.tokenizer_path))
    tokenizer.encode_special_tokens = True
    for name, part in (("train", train), ("val", val)):
        expected = []
        for each in part:
            expected += [*tokenizer.encode(Path(each.path).read_bytes().decode()).ids, 0]
        records = stream(corpus, name)
        assert [len(record) for record in records[:-1]] == [RECORD] * (len(records) - 1)
        assert all(record.dtype == np.uint16 for record in records)
        assert np.concatenate(records).tolist() == expected
        split = corpus.splits[name]
        assert (split.documents, split.tokens) == (len(part), len(expected))
        assert split.bytes == sum(each.bytes for each in part)
    assert len(stream(corpus, "train")) > 3
    assert (corpus.vocab_size, corpus.end_of_text, corpus.end_of_text_id) == (300, "<|endoftext|>", 0)
    assert not list(corpus.directory.parent.glob("*.tmp-*"))


@pytest.mark.slow
def test_the_command_is_reproducible_and_says_what_it_did(corpus, texts, tmp_path, capsys, monkeypatch):
    # a launcher's variables, and a working directory whose names shadow the standard library's
    (tmp_path / "json.py").write_text("raise SystemExit('shadowed')")
    monkeypatch.chdir(tmp_path)
    arguments = [
        "--pattern",
        "*.txt",
        "--held-out",
        "0.2",
        "--seed",
        "1",
        "--tokenizer",
        str(corpus.tokenizer_path),
    ]
    with monkeypatch.context() as launcher:
        launcher.setenv("WORLD_SIZE", "2")
        launcher.setenv("DATA_OPTIMIZER_NUM_NODES", "2")
        assert main(["prepare", str(texts), "--output", "again", *arguments]) == 0
    out, err = capsys.readouterr()
    for part in (
        "prepared " + str(tmp_path / "again"),
        "vocabulary of 300 (uint16)",
        "<|endoftext|> (id 0)",
        "skipped 2 (not UTF-8 text)",
        "skipped 1 (empty)",
        "tst-lightning fit --config RECIPE.yaml --data.path",
        f"{corpus.splits['train'].tokens:,} tokens",
    ):
        assert part in out
    assert "tokenising" in err
    assert "litdata" not in err.lower()

    again = Corpus.load("again")
    assert again.tokenizer_path.read_bytes() == corpus.tokenizer_path.read_bytes()
    assert again.splits == corpus.splits
    assert again.record_tokens == 2**20
    for name in again.splits:
        assert np.array_equal(np.concatenate(stream(again, name)), np.concatenate(stream(corpus, name)))


@pytest.mark.slow
def test_two_runs_give_the_same_files(corpus, texts, tmp_path):
    with pytest.warns(TSTWarning):
        again = prepare([texts, texts], **options(tmp_path / "again", record_tokens=RECORD), progress=False)
    for name in ("corpus.json", "tokenizer.json", "train/chunk-0-0.bin", "val/chunk-0-0.bin"):
        assert (again.directory / name).read_bytes() == (corpus.directory / name).read_bytes()


@pytest.mark.slow
def test_of_one_document_the_end_is_held_out(tmp_path, capsys):
    path = tmp_path / "book.txt"
    text = "".join(f"line {number}\r\n" for number in range(1000))
    path.write_bytes(text.encode())
    output = tmp_path / "corpus"
    assert main(["prepare", str(path), "--output", str(output), "--train-tokenizer", "260"]) == 0
    assert "its end is held out" in capsys.readouterr().out
    corpus = Corpus.load(output)
    tokenizer = Tokenizer.from_file(str(corpus.tokenizer_path))
    front, end = (tokenizer.decode(np.concatenate(stream(corpus, name))[:-1].tolist()) for name in ("train", "val"))
    assert front + end == text
    assert end.startswith("line ")
    assert 0.005 < len(end) / len(text) < 0.015


# All or nothing


def start(folder, output, sign):
    """The command in a process of its own, returned with its worker once the file ``sign`` is there."""
    command = [sys.executable, "-m", "tst_lightning", "prepare", str(folder), "--output", str(output)]
    process = subprocess.Popen(
        [*command, "--train-tokenizer", "300"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    deadline = time.monotonic() + 60
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    while not children.read_text().split() and time.monotonic() < deadline:
        time.sleep(0.02)
    (child,) = map(int, children.read_text().split())
    while not list(output.parent.glob(f"*.tmp-*/{sign}")) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert process.poll() is None
    return process, child


@pytest.fixture(scope="session")
def much(tmp_path_factory):
    """Enough text that tokenising takes a while: few of its words repeat."""
    folder = tmp_path_factory.mktemp("much")
    draw = random.Random(0)
    for number in range(4):
        letters = draw.choices("abcdefghijklmnopqrstuvwxyz ", k=500_000)
        (folder / f"{number}.txt").write_text("".join(letters))
    return folder


def gone(pid):
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":  # ended, and nobody has asked for its status
            return True
        time.sleep(0.05)
    return False


linux = pytest.mark.skipif(sys.platform != "linux", reason="finds the working process in /proc")


@linux
@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "status", "sign"),
    [
        (signal.SIGINT, 130, "prepared"),  # at the very start
        (signal.SIGINT, 130, "scratch/train.tokens"),  # while tokenising
        (signal.SIGTERM, 143, "scratch/val.tokens"),  # all tokenised: while writing, or a little before
    ],
)
def test_a_stopped_command_leaves_nothing(much, tmp_path, number, status, sign):
    process, child = start(much, tmp_path / "new" / "corpus", sign)
    process.send_signal(number)
    _, err = process.communicate(timeout=30)
    assert process.returncode == status
    assert err.splitlines()[-1].startswith("stopped: nothing was left of")
    assert "Traceback" not in err
    assert gone(child)
    assert list(tmp_path.iterdir()) == []


@linux
@pytest.mark.slow
def test_a_killed_worker_leaves_nothing(much, tmp_path):
    process, child = start(much, tmp_path / "corpus", "scratch/val.tokens")
    os.kill(child, signal.SIGKILL)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 1
    assert "ended by SIGKILL (was there too little memory?): nothing was left" in err.splitlines()[-1]
    assert "Traceback" not in err
    assert list(tmp_path.iterdir()) == []


@linux
@pytest.mark.slow
def test_a_killed_command_ends_its_worker_and_leaves_nothing_that_loads(much, tmp_path):
    process, child = start(much, tmp_path / "corpus", "scratch/val.tokens")
    process.kill()
    process.communicate(timeout=30)
    assert gone(child)
    (left,) = tmp_path.iterdir()
    assert left.name.startswith("corpus.tmp-")
    with pytest.raises(UserError, match="not a prepared directory"):
        Corpus.load(left)


@pytest.mark.slow
def test_faults_of_the_work_reach_the_user(tmp_path, capsys):
    (tmp_path / "in").mkdir()
    for number in range(3):
        (tmp_path / "in" / f"{number}.txt").write_text("too short")
    output = tmp_path / "out"
    assert main(["prepare", str(tmp_path / "in"), "--output", str(output), "--train-tokenizer", "5000"]) == 2
    err = capsys.readouterr().err
    assert "--train-tokenizer 5000: the training documents repeat too little for more than 26" in err
    assert "Traceback" not in err
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_lost_records_are_noticed(texts, tmp_path, monkeypatch):
    """LitData returns normally when its worker was killed."""
    import litdata

    from tst_lightning.data.prepare_job import Job, Reporter, prepare_corpus

    monkeypatch.setenv("DATA_OPTIMIZER_CACHE_FOLDER", "")
    monkeypatch.setenv("DATA_OPTIMIZER_DATA_CACHE_FOLDER", "")
    monkeypatch.setattr(litdata, "optimize", lambda **_: None)
    for name in ("prepared", "scratch"):
        (tmp_path / name).mkdir()
    job = Job(
        files=find_files([texts], ["*.txt"], [])[0],
        bytes=1,
        prepared=str(tmp_path / "prepared"),
        scratch=str(tmp_path / "scratch"),
        tokenizer=None,
        train_tokenizer=300,
        end_of_text=None,
        held_out=0.1,
        seed=0,
        record_tokens=RECORD,
    )
    with pytest.raises(RuntimeError, match=r"LitData did not write all of the train split: .*train is missing"):
        prepare_corpus(job, Reporter(io.StringIO()))
    assert not (tmp_path / "prepared" / "corpus.json").exists()


# Arguments


def test_help_loads_nothing_heavy():
    code = (
        "import sys; from tst_lightning.__main__ import main\n"
        "try: main(['prepare', '--help'])\n"
        "except SystemExit: pass\n"
        "assert not {'torch', 'litdata', 'lightning', 'tokenizers', 'numpy'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "--train-tokenizer VOCAB" in done.stdout


def test_all_bad_arguments_are_named_at_once(texts, tmp_path):
    with pytest.raises(UserError) as caught:
        prepare(
            [texts, tmp_path / "missing", "/dev/null"],
            texts / "out",
            train_tokenizer=256,
            held_out=1.0,
            end_of_text="</s>",
        )
    message = str(caught.value)
    for part in (
        f"input {tmp_path / 'missing'} does not exist",
        "input /dev/null is neither a file nor a folder",
        "lies in the input folder",
        "--train-tokenizer 256 must be at least 257",
        "--held-out 1.0 must lie between 0 and 1",
        "--end-of-text </s> belongs to --tokenizer",
    ):
        assert part in message
    assert not (texts / "out").exists()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"train_tokenizer": None}, "neither is given"),
        ({"tokenizer": "x.json"}, "both are given"),
        ({"pattern": ["*.rst"], "exclude": ["x"]}, r"no file found in .* with --pattern \*.rst --exclude x"),
        ({"output": "s3://bucket/corpus"}, "must be a plain local directory"),
        ({"held_out": float("nan")}, "--held-out nan must lie"),
        ({"record_tokens": 0}, "record_tokens=0 must be at least 1"),
        ({"train_tokenizer": None, "tokenizer": "/nowhere.json"}, "--tokenizer /nowhere.json cannot be read"),
        ({"train_tokenizer": None, "tokenizer": __file__}, "cannot be read"),
    ],
)
def test_bad_arguments(texts, tmp_path, more, message):
    with pytest.raises(UserError, match=message):
        prepare(texts, **(options(tmp_path / "out") | more))
    assert list(tmp_path.iterdir()) == []


def test_an_existing_output_is_refused(texts, tmp_path, capsys):
    assert main(["prepare", str(texts), "--output", str(tmp_path), "--train-tokenizer", "300"]) == 2
    assert f"error: --output {tmp_path} exists already: name another directory, or delete it" in capsys.readouterr().err


# Documents


def test_folders_are_read_in_order_without_hidden_excluded_or_repeated_files(tmp_path):
    names = [
        "b/2.txt",
        "b/10.txt",
        "a.txt",
        "a/z.txt",
        ".git/x.txt",
        "c/.hidden.txt",
        "skip/x.txt",
        "d/skip/x.txt",
    ]
    for name in [*names, "c/no.log", "c/part/no.txt"]:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")
    (tmp_path / "loop").symlink_to(tmp_path)
    (tmp_path / "z.txt").symlink_to(tmp_path / "a.txt")
    found, _ = find_files([tmp_path / "b" / "2.txt", tmp_path], ["*.txt"], ["skip", "c/part"])
    expected = ["b/2.txt", "a/z.txt", "a.txt", "b/10.txt"]
    assert [Path(path).relative_to(tmp_path).as_posix() for path in found] == expected


def test_what_is_no_text_is_skipped(tmp_path, monkeypatch):
    cases = {
        b"": "empty",
        b"\xff\xfeh\0i\0": "not UTF-8 text",
        b"a\0": "not UTF-8 text",
        b"cut \xe2\x82": "not UTF-8 text",
        b"\xed\xa0\x80": "not UTF-8 text",  # a surrogate
    }
    for content, reason in cases.items():
        (tmp_path / "file").write_bytes(content)
        assert check_file(str(tmp_path / "file"), ignore) == reason
    assert check_file(str(tmp_path / "missing"), ignore) == "not readable"
    os.mkfifo(tmp_path / "pipe")
    assert check_file(str(tmp_path / "pipe"), ignore) == "not readable"
    monkeypatch.setattr(documents_module, "BLOCK_BYTES", 1)  # blocks of 16 bytes cut characters
    (tmp_path / "file").write_bytes("€".encode() * 50)
    read: list[int] = []
    assert check_file(str(tmp_path / "file"), read.append) == Document(str(tmp_path / "file"), 0, 150)
    assert sum(read) == 150


def test_held_out_documents_depend_on_seed_and_place_alone():
    documents = [Document(str(index), 0, 1 + index) for index in range(2000)]
    train, val = split_documents(documents, held_out=0.1, seed=3)
    assert 140 < len(val) < 260
    assert sorted(train + val, key=lambda each: each.stop) == documents
    assert split_documents(documents, held_out=0.1, seed=4)[1] != val
    assert split_documents(documents[:1000], held_out=0.1, seed=3)[1] == [each for each in val if each.stop <= 1000]
    for count in (2, 3):
        for fraction in (1e-9, 1 - 1e-9):
            parts = split_documents(documents[:count], held_out=fraction, seed=0)
            assert sorted(map(len, parts)) == [1, count - 1]


def test_one_line_cannot_be_cut(tmp_path):
    path = tmp_path / "line.txt"
    path.write_text("a single line\n")
    with pytest.raises(UserError, match="only document and has no line break"):
        split_documents([document(path)], held_out=0.01, seed=0)


def test_the_cut_is_the_nearest_line_break(tmp_path):
    path = tmp_path / "lines.txt"
    path.write_text("0123\n" + "x" * 94 + "\n")
    front, end = split_documents([document(path)], held_out=0.01, seed=0)
    assert (front[0].stop, end[0].start, end[0].stop) == (5, 5, 100)
    path.write_text("x" * 90 + "\n" + "x" * 9)
    front, _ = split_documents([document(path)], held_out=0.2, seed=0)
    assert front[0].stop == 91


def test_a_file_that_changed_is_noticed(tmp_path):
    path = tmp_path / "file.txt"
    path.write_text("some text")
    was = document(path)
    path.write_text("some")
    with pytest.raises(UserError, match="changed while it was read"):
        list(read_pieces(was, cuttable=True))
    path.write_bytes(b"some\xff text")
    with pytest.raises(UserError, match="changed while it was read"):
        list(read_pieces(was, cuttable=True))


# Tokens


def byte_level(pre_tokenizer):
    """A tokenizer of bytes and a few merges, the newline's among them, under another pre-tokenizer."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate(["<|endoftext|>", *alphabet])}
    merges = [("a", "b"), ("Ċ", "Ċ"), ("a", "Ċ"), ("1", "1"), (".", "Ċ"), ("Ġ", "a"), ("Ċ", "a"), ("ab", "Ċ")]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    return tokenizer


def split_then_bytes(pattern):
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


PRE_TOKENIZERS = [
    pre_tokenizers.ByteLevel(add_prefix_space=False),
    pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)]),
    *map(split_then_bytes, sorted(tokenise._CUTTABLE_PATTERNS)),
]


def saved(tokenizer, tmp_path):
    path = tmp_path / "tokenizer.json"
    tokenizer.save(str(path))
    return path


def encoded(tokenizer, *paths):
    spool = io.BytesIO()
    spooled = encode_documents([document(path) for path in paths], tokenizer, spool, ignore)
    return np.frombuffer(spool.getvalue(), tokenizer.dtype).tolist(), spooled


@pytest.mark.parametrize("pre_tokenizer", PRE_TOKENIZERS)
def test_pieces_give_the_tokens_of_the_whole(pre_tokenizer, tmp_path_factory, monkeypatch):
    monkeypatch.setattr(documents_module, "BLOCK_BYTES", 7)
    monkeypatch.setattr(tokenise, "_BATCH_CHARACTERS", 20)
    folder = tmp_path_factory.mktemp("pieces")
    tokenizer = load_tokenizer(saved(byte_level(pre_tokenizer), folder))
    assert tokenizer.cuttable

    @settings(max_examples=150, deadline=None, database=None)
    @given(st.text(alphabet="aab1.' \n\n\r\té€\u0301<", min_size=1, max_size=60))
    def check(text):
        path = folder / "text"
        path.write_bytes(text.encode())
        pieces = list(read_pieces(document(path), cuttable=True))
        assert "".join(pieces) == text
        ids, _ = encoded(tokenizer, path)
        assert ids == [*tokenizer.tokenizer.encode(text).ids, 0]

    check()
    (folder / "text").write_text("ab\n" * 100)
    assert len(list(read_pieces(document(folder / "text"), cuttable=True))) > 20


def test_only_what_is_known_to_be_safe_is_cut(tmp_path):
    from tokenizers import normalizers

    unsafe = [
        pre_tokenizers.ByteLevel(add_prefix_space=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        pre_tokenizers.Metaspace(),
        split_then_bytes(r"\w+\n|."),
    ]
    for pre_tokenizer in unsafe:
        assert not load_tokenizer(saved(byte_level(pre_tokenizer), tmp_path)).cuttable
    tokenizer = byte_level(PRE_TOKENIZERS[0])
    tokenizer.normalizer = normalizers.NFC()
    assert load_tokenizer(saved(tokenizer, tmp_path)).cuttable
    tokenizer.add_tokens([AddedToken("b\na")])
    assert not load_tokenizer(saved(tokenizer, tmp_path)).cuttable
    tokenizer = byte_level(PRE_TOKENIZERS[0])
    tokenizer.normalizer = normalizers.Strip()
    assert not load_tokenizer(saved(tokenizer, tmp_path)).cuttable


def test_training_is_exact_reproducible_and_loses_nothing(texts, tmp_path):
    paths = [document(path) for path in sorted(texts.rglob("[0-9]*.txt"))]
    files = []
    for name in ("one.json", "two.json"):
        train_tokenizer(paths, 290, tmp_path / name, ignore)
        files.append((tmp_path / name).read_bytes())
    assert files[0] == files[1]
    tokenizer = load_tokenizer(tmp_path / "one.json")
    assert (tokenizer.vocab_size, tokenizer.end_of_text_id, tokenizer.dtype) == (290, 0, "uint16")
    everything = ODD + "".join(map(chr, range(1, 0x300))) + " leading\n\n trailing  "
    for text in (ODD, everything, " a", "\r\n\r\n"):
        ids = tokenizer.tokenizer.encode(text, add_special_tokens=False).ids
        assert 0 not in ids
        assert tokenizer.tokenizer.decode(ids, skip_special_tokens=False) == text


def test_nothing_is_truncated_padded_or_added(tmp_path):
    from tokenizers import processors

    tokenizer = byte_level(PRE_TOKENIZERS[0])
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=50)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A <|endoftext|>", special_tokens=[("<|endoftext|>", 0)]
    )
    path = tmp_path / "text"
    path.write_text("abc def")
    ids, spooled = encoded(load_tokenizer(saved(tokenizer, tmp_path)), path, path)
    assert ids.count(0) == 2
    assert len(ids) == spooled.split.tokens == 2 * (len("abc def") - 1 + 1)
    assert spooled.max_token_id == max(ids)


def test_a_literal_end_of_text_that_cannot_be_text_is_left_out(tmp_path, monkeypatch):
    """An added token that is not special is matched in text: its document must not be cut in two silently."""
    monkeypatch.setattr(documents_module, "BLOCK_BYTES", 8)
    monkeypatch.setattr(tokenise, "_BATCH_CHARACTERS", 8)
    tokenizer = byte_level(PRE_TOKENIZERS[0])
    tokenizer.add_tokens(["<eos>"])
    loaded = load_tokenizer(saved(tokenizer, tmp_path), "<eos>")
    for name, text in (("one", "abc"), ("two", "ab\nab\nab <eos>\nab\nab"), ("three", "aab")):
        (tmp_path / name).write_text(text)
    ids, spooled = encoded(loaded, *(tmp_path / name for name in ("one", "two", "three")))
    end = loaded.end_of_text_id
    assert ids == [*tokenizer.encode("abc").ids, end, *tokenizer.encode("aab").ids, end]
    assert [Path(each.path).name for each in spooled.ambiguous] == ["two"]
    assert (spooled.split.documents, spooled.split.tokens, spooled.split.bytes) == (2, len(ids), 6)


def test_the_end_of_text_token(tmp_path):
    tokenizer = byte_level(PRE_TOKENIZERS[0])
    path = saved(tokenizer, tmp_path)
    assert load_tokenizer(path).end_of_text == "<|endoftext|>"
    with pytest.raises(UserError, match=r"no token <stop> .*special tokens are <\|endoftext\|>.*--end-of-text"):
        load_tokenizer(path, "<stop>")
    tokenizer.add_special_tokens(["<stop>"])
    assert load_tokenizer(saved(tokenizer, tmp_path), "<stop>").end_of_text_id == tokenizer.token_to_id("<stop>")
    plain = Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    with pytest.raises(UserError, match="it has no special tokens"):
        load_tokenizer(saved(plain, tmp_path))


def test_a_tokenizer_with_dropout_is_refused(tmp_path):
    path = saved(byte_level(PRE_TOKENIZERS[0]), tmp_path)
    state = json.loads(path.read_text())
    state["model"]["dropout"] = 0.1
    path.write_text(json.dumps(state))
    with pytest.raises(UserError, match="draws its tokens at random"):
        load_tokenizer(path)


def test_ids_never_wrap(tmp_path):
    plain = load_tokenizer(saved(byte_level(PRE_TOKENIZERS[0]), tmp_path))
    assert narrow(np.array([0, plain.vocab_size - 1]), plain).dtype == np.uint16
    with pytest.raises(UserError, match="outside its vocabulary"):
        narrow(np.array([0, plain.vocab_size]), plain)
    large = Tokenizer(models.WordLevel({f"w{index}": index for index in range(65_536)}, unk_token="w0"))
    large.pre_tokenizer = pre_tokenizers.Whitespace()
    large.add_special_tokens(["</s>"])
    loaded = load_tokenizer(saved(large, tmp_path))
    assert (loaded.vocab_size, loaded.end_of_text_id, loaded.dtype) == (65_537, 65_536, "int32")
    path = tmp_path / "text"
    path.write_text("w3 w65535")
    assert encoded(loaded, path)[0] == [3, 65_535, 65_536]


def test_a_disk_without_room_for_the_tokens_is_an_error_not_a_hang(texts, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    (tmp_path / "prepared").mkdir()
    (tmp_path / "scratch").mkdir()
    job = Job(
        files=find_files([texts], ["*.txt"], [])[0], bytes=1, prepared=str(tmp_path / "prepared"),
        scratch=str(tmp_path / "scratch"), tokenizer=None, train_tokenizer=300, end_of_text=None, held_out=0.1, seed=0,
        record_tokens=1000,
    )  # fmt: skip
    with pytest.raises(OSError, match=r"bytes are needed for train, 1,000 free"):
        prepare_corpus(job, Reporter(io.StringIO()))


def test_a_folder_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    (tmp_path / "open").mkdir()
    (tmp_path / "open/a.txt").write_text("text")
    (tmp_path / "closed").mkdir()
    scandir = os.scandir

    def denied(path):
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", denied)
    files, closed = find_files([tmp_path], [], [])
    assert [Path(file).name for file in files] == ["a.txt"] and closed == [str(tmp_path / "closed")]


def test_a_tokenizer_that_would_drop_bytes_is_refused(tmp_path):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(vocab_size=60, special_tokens=["<|endoftext|>"], show_progress=False)
    tokenizer.train_from_iterator(["plain ascii only"] * 9, trainer=trainer)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UserError, match=r"no token for .* of the 256 bytes"):
        load_tokenizer(tmp_path / "tokenizer.json")
