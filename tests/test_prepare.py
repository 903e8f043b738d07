"""Text files into a prepared corpus: documents, tokens, what the command says."""

import hashlib
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.small_parts import contents, prepared_here, set_small, write_lines
from tests.test_assemble import reference_split
from tst_lightning.__main__ import main
from tst_lightning.data import tokenise
from tst_lightning.data.corpus import Corpus
from tst_lightning.data.documents import EMPTY, NOT_TEXT, find_files, plan_pieces, read_piece
from tst_lightning.data.formats import blocks
from tst_lightning.data.parts import PartWriter
from tst_lightning.data.pieces import HOLDS_NUL
from tst_lightning.data.prepare import prepare
from tst_lightning.data.tokenise import AMBIGUOUS, encode_pieces, load_tokenizer, narrow, train_tokenizer
from tst_lightning.errors import TSTWarning, UserError

RECORD = 1000
ODD = (
    "emoji 👩\u200d🚀 \u00e9 e\u0301\r\ncarriage return, tab\t, bell\x07, escape\x1b\ufeff and <|endoftext|> in text\n"
)


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
    with pytest.warns(
        TSTWarning, match=r"skipped 1 \(not UTF-8 text\): .*latin.txt\nskipped 1 \(holds NUL bytes\): .*nul.txt"
    ):
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
    held_out = reference_split(30, 0.2, 1)
    train = [path for number, path in enumerate(paths) if number not in held_out]
    val = [paths[number] for number in held_out]
    tokenizer = Tokenizer.from_file(str(corpus.tokenizer_path))
    tokenizer.encode_special_tokens = True
    for name, part in (("train", train), ("val", val)):
        expected = []
        for each in part:
            expected += [*tokenizer.encode(each.read_bytes().decode()).ids, 0]
        records = stream(corpus, name)
        assert [len(record) for record in records[:-1]] == [RECORD] * (len(records) - 1)
        assert all(record.dtype == np.uint16 for record in records)
        assert np.concatenate(records).tolist() == expected
        split = corpus.splits[name]
        assert (split.documents, split.tokens) == (len(part), len(expected))
        assert split.bytes == sum(each.stat().st_size for each in part)
    assert len(stream(corpus, "train")) > 3
    assert (corpus.vocab_size, corpus.end_of_text, corpus.end_of_text_id) == (300, "<|endoftext|>", 0)
    assert [path.name for path in corpus.directory.parent.iterdir()] == ["corpus"]


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
        "skipped 1 (not UTF-8 text)",
        "skipped 1 (holds NUL bytes)",
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
    assert contents(again.directory) == contents(corpus.directory)


GOLDEN = {
    "tokenizer.json": "88ffa1358619753c2930199e805984840d51de73f87670df9b7af1aca055134c",
    "train/chunk-0-0.bin": "f10d617b9efa074283e4ce9f68f8bfbf2186d50a45070adb76447be244531b17",
    "val/chunk-0-0.bin": "0cffb37a52c37a95bbb9c88e53fcc409fde198234d79bbf39d8be2e382f53901",
}


def test_the_files_of_a_small_corpus_stay_what_they_are(tmp_path):
    """Text that was prepared by another release comes out the same."""
    draw = random.Random(5)
    for number in range(40):
        words = draw.choices(["the", "of", "whale", "sea", "1851", "don't", "été", "x += 1\n", "\n\n\t"], k=200)
        (tmp_path / f"{number}.txt").write_text(" ".join(words))
    corpus = prepared_here(
        sorted(tmp_path.glob("*.txt")), tmp_path / "corpus", train_tokenizer=290, held_out=0.1, seed=2
    )
    found = {name: hashlib.sha256((corpus.directory / name).read_bytes()).hexdigest() for name in GOLDEN}
    assert found == GOLDEN


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"shuffle": True, "max_tokens": 20_000}])
def test_the_number_of_workers_is_of_no_matter(tmp_path, monkeypatch, options):
    set_small(monkeypatch)
    draw = random.Random(0)
    lines = [" ".join(draw.choices(["sea", "whale", "ship", "été"], k=draw.randrange(90))) for _ in range(900)]
    path = write_lines(tmp_path / "a.jsonl", lines)
    made = [
        prepared_here(path, tmp_path / str(workers), train_tokenizer=260, workers=workers, **options)
        for workers in (1, 2, 5)
    ]
    assert contents(made[0].directory) == contents(made[1].directory) == contents(made[2].directory)
    documents = sum(split.documents for split in made[0].splits.values())
    assert documents < 500 if options else documents == sum(map(bool, lines))


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
        ({"output": "ftp://host/corpus"}, "ftp://host/corpus"),
        ({"work": "/tmp/{%Y}"}, "must not hold {%: name another directory by --work"),
        ({"workers": 0}, "--workers 0 must be at least 1"),
        ({"max_tokens": "1.5"}, "--max-tokens 1.5 must be a whole number above 0, such as 300M or 1e9"),
        ({"max_tokens": 0}, "--max-tokens 0 must be"),
        ({"hf": "name"}, "are both given: keep one"),
        ({"hf_config": "name"}, "--hf-config name belongs to --hf"),
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


# A single document


def test_one_line_cannot_be_cut(tmp_path):
    path = tmp_path / "line.txt"
    path.write_text("a single line\n")
    with pytest.raises(UserError, match="only document and has no line break"):
        prepared_here(path, tmp_path / "corpus", train_tokenizer=257)


@pytest.mark.parametrize("others", [False, True])
@pytest.mark.parametrize(
    ("text", "held_out", "front"),
    [("0123\n" + "x" * 94 + "\n", 0.01, 5), ("x" * 90 + "\n" + "x" * 9, 0.2, 91), ("a\n" * 50, 0.5, 50)],
)
def test_the_cut_is_at_the_nearest_line_break(tmp_path, text, held_out, front, others):
    path = tmp_path / "lines.txt"
    path.write_text(text)
    inputs = [path]
    if others:  # which are no documents
        (tmp_path / "empty.txt").touch()
        (tmp_path / "latin.txt").write_bytes(b"\xe9")
        inputs = [write_lines(tmp_path / "blank.jsonl", ["", ""]), tmp_path / "empty.txt", path, tmp_path / "latin.txt"]
    corpus = prepared_here(inputs, tmp_path / "corpus", train_tokenizer=257, held_out=held_out)
    assert corpus.splits["train"].bytes == front
    assert corpus.splits["val"].bytes == len(text) - front


def test_a_tokenizer_learns_nothing_of_a_held_out_end(tmp_path):
    path = tmp_path / "lines.txt"
    path.write_text("abcabc\n" * 50 + "xyzxyz\n" * 50)
    (tmp_path / "empty.txt").touch()
    corpus = prepared_here([tmp_path / "empty.txt", path], tmp_path / "corpus", train_tokenizer=259, held_out=0.5)
    assert corpus.splits["train"].bytes == corpus.splits["val"].bytes
    merges = json.loads(corpus.tokenizer_path.read_text())["model"]["merges"]
    assert len(merges) == 2 and not set("xyz") & set("".join(map("".join, merges)))


def test_a_limit_below_a_single_document(tmp_path):
    path = tmp_path / "lines.txt"
    path.write_text("line\n" * 100)
    with pytest.raises(UserError, match="--max-tokens 100 leaves no documents"):
        prepared_here(path, tmp_path / "corpus", train_tokenizer=258, max_tokens=100)
    corpus = prepared_here(path, tmp_path / "other", train_tokenizer=258, max_tokens=1000)
    assert corpus.splits["val"].documents == 1


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ([b"", b""], r"there is no document in the input \(2 files\): 2 empty \(.*0.txt, ...\): give files with text"),
        ([b"\xff", b""], r"1 not UTF-8 text \(.*0.txt\), 1 empty \(.*1.txt\): give readable UTF-8 text"),
    ],
)
def test_nothing_to_read(tmp_path, texts, message):
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.txt").write_bytes(text)
    (tmp_path / "tokenizer.json").write_text(byte_level(PRE_TOKENIZERS[0]).to_str())
    with pytest.raises(UserError, match=message):
        prepared_here(sorted(tmp_path.glob("*.txt")), tmp_path / "corpus", tokenizer=tmp_path / "tokenizer.json")


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


def encoded(tokenizer, folder, *paths):
    """The ids that files give, and the part."""
    counts = np.zeros(3, dtype=int)

    def advance(*amounts):
        counts[:] += amounts

    with PartWriter(folder, 0, tokenizer.dtype) as writer:
        encode_pieces(plan_pieces([str(path) for path in paths]), tokenizer, writer, advance)
        part = writer.finish()
    size = sum(os.path.getsize(path) for path in paths)
    assert counts.tolist() == [size, part.documents, part.tokens]
    assert part.lengths()[:, 0].sum() == part.tokens
    return part.ids().tolist(), part


@pytest.mark.parametrize("pre_tokenizer", PRE_TOKENIZERS)
def test_pieces_give_the_tokens_of_the_whole(pre_tokenizer, tmp_path_factory, monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 7)
    monkeypatch.setattr(tokenise, "_BATCH_CHARACTERS", 20)
    folder = tmp_path_factory.mktemp("pieces")
    tokenizer = load_tokenizer(saved(byte_level(pre_tokenizer), folder))
    assert tokenizer.cuttable

    @settings(max_examples=150, deadline=None, database=None)
    @given(st.text(alphabet="aab1.' \n\n\r\té€\u0301<", min_size=1, max_size=60))
    def check(text):
        path = folder / "text"
        path.write_bytes(text.encode())
        ids, _ = encoded(tokenizer, folder, path, path)
        expected = [*tokenizer.tokenizer.encode(text).ids, 0]
        assert ids == [*expected, *expected]

    check()
    (folder / "text").write_text("ab\n" * 100)
    (piece,) = plan_pieces([str(folder / "text")])
    assert len(list(read_piece(piece, lambda _: None, cuttable=True))) > 20


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
    documents = [path.read_bytes().decode() for path in sorted(texts.rglob("[0-9]*.txt"))]
    files = []
    for name in ("one.json", "two.json"):
        train_tokenizer(documents, 290, tmp_path / name)
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
    ids, part = encoded(load_tokenizer(saved(tokenizer, tmp_path)), tmp_path, path, path)
    assert ids.count(0) == 2
    assert len(ids) == part.tokens == 2 * (len("abc def") - 1 + 1)
    assert part.max_token_id == max(ids)


def test_a_literal_end_of_text_that_cannot_be_text_is_left_out(tmp_path, monkeypatch):
    """An added token that is not special is matched in text: its document must not be cut in two silently."""
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 8)
    monkeypatch.setattr(tokenise, "_BATCH_CHARACTERS", 8)
    tokenizer = byte_level(PRE_TOKENIZERS[0])
    tokenizer.add_tokens(["<eos>"])
    loaded = load_tokenizer(saved(tokenizer, tmp_path), "<eos>")
    texts = {"one": "abc", "two": "ab\nab\nab <eos>\nab\nab", "three": "aab", "four": "<eos>", "five": "<eos>" * 9}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    ids, part = encoded(loaded, tmp_path, *(tmp_path / name for name in texts))
    end = loaded.end_of_text_id
    assert ids == [*tokenizer.encode("abc").ids, end, *tokenizer.encode("aab").ids, end]
    assert part.skipped == {AMBIGUOUS: (3, [str(tmp_path / name) for name in ("two", "four", "five")])}
    assert part.lengths()[:, 1].tolist() == [3, 3]


def test_if_every_document_holds_the_end_of_text_token_that_is_said(tmp_path):
    tokenizer = byte_level(PRE_TOKENIZERS[0])
    tokenizer.add_tokens(["<eos>"])
    (tmp_path / "text").write_text("ab <eos>")
    with pytest.raises(UserError, match=r"every document holds '<eos>', which .*: name another one with --end-of-text"):
        prepared_here(tmp_path / "text", tmp_path / "corpus", tokenizer=saved(tokenizer, tmp_path), end_of_text="<eos>")


@pytest.mark.parametrize("characters", [1, 30, 200, 10**6])
def test_documents_of_any_size_in_batches_of_any_size(tmp_path, monkeypatch, characters):
    """Documents that begin, end and are dropped anywhere in a batch."""
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 16)
    monkeypatch.setattr(tokenise, "_BATCH_CHARACTERS", characters)
    loaded = load_tokenizer(saved(byte_level(PRE_TOKENIZERS[0]), tmp_path))
    draw = random.Random(0)
    expected, lengths, skipped, paths = [], [], {}, []
    for number in range(40):
        path = tmp_path / f"{number:02}"
        text = "".join(draw.choices("ab1 \n", k=draw.choice([0, 3, 20, 150])))
        damage = draw.choice([b"", b"", b"\xff\xff", b"\0"])
        path.write_bytes(text.encode() + damage)
        paths.append(path)
        if damage or not text:
            reason = {b"": EMPTY, b"\0": HOLDS_NUL}.get(damage, NOT_TEXT)
            skipped.setdefault(reason, []).append(str(path))
        else:
            ids = loaded.tokenizer.encode(text).ids
            expected += [*ids, 0]
            lengths.append([len(ids) + 1, len(text)])
    found, part = encoded(loaded, tmp_path, *paths)
    assert found == expected
    assert part.lengths().tolist() == lengths
    assert part.skipped == {reason: (len(names), names[:3]) for reason, names in skipped.items()}
    assert len(skipped) == 3


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
    assert encoded(loaded, tmp_path, path)[0] == [3, 65_535, 65_536]


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
