"""Corpora that were tokenised elsewhere: whatever the format, the same as if `prepare` had read the text."""

import json
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.test_foreign import litdata, llmc, megatron
from tst_lightning.__main__ import main
from tst_lightning.data import import_job
from tst_lightning.data.corpus import Corpus
from tst_lightning.data.import_tokens import import_tokens
from tst_lightning.data.inspect import inspect
from tst_lightning.data.prepare import prepare
from tst_lightning.errors import UserError

RECORD = 500
FORMS = ["nanogpt", "llm.c", "megatron", "litdata"]
pytestmark = pytest.mark.filterwarnings("ignore:An item was larger than the target chunk size")


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Twenty documents of a few lines in a JSON Lines file."""
    draw = random.Random(0)
    words = ["the", "of", "whale", "Ishmael", "sea", "1851", "don't", "—", "été", "👩\u200d🚀"]
    path = tmp_path_factory.mktemp("texts") / "texts.jsonl"
    documents = [" ".join(draw.choices(words, k=draw.randrange(1, 200))) for _ in range(20)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    return path


@pytest.fixture(scope="module")
def prepared(texts, tmp_path_factory):
    """The same text by `prepare`."""
    directory = tmp_path_factory.mktemp("prepared") / "corpus"
    return prepare(
        texts, directory, train_tokenizer=300, held_out=0.2, seed=1, workers=1, record_tokens=RECORD, progress=False
    )


@pytest.fixture(scope="module")
def documents(texts, prepared):
    """The ids of every document, without end-of-text."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(prepared.tokenizer_path))
    tokenizer.encode_special_tokens = True
    return [tokenizer.encode(json.loads(line)["text"]).ids for line in texts.read_text().splitlines()]


def write(form, directory, documents, end):
    """Files of a format, as its own scripts write them."""
    directory.mkdir(exist_ok=True)
    if form == "nanogpt":
        np.array([i for ids in documents for i in [*ids, end]], "<u2").tofile(directory / "train.bin")
        return [directory / "train.bin"]
    if form == "llm.c":  # in front of each document; the second file goes on in the middle of one
        flat = [i for ids in documents for i in [end, *ids]]
        cut = len(flat) // 2
        return [llmc(directory / "000.bin", flat[:cut]), llmc(directory / "001.bin", flat[cut:])]
    if form == "megatron":  # some documents end with the token, some have several sequences
        sequences = [[ids[:1], ids[1:]] if n % 3 else [[*ids, end]] for n, ids in enumerate(documents)]
        return [megatron(directory / "set", sequences)]
    return [litdata(directory / "chunks", [np.array([*ids, end], "uint16") for ids in documents], chunk_bytes=3000)]


def files(directory):
    return {path.relative_to(directory): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def options(prepared, **more):
    return {"tokenizer": prepared.tokenizer_path, "record_tokens": RECORD, "progress": False} | more


def splits(corpus):
    """The tokens of both splits, read through LitData."""
    from litdata import StreamingDataset
    from litdata.streaming import TemporalArrayLoader

    found = {}
    for name in ("train", "val"):
        dataset = StreamingDataset(str(corpus.split_directory(name)), item_loader=TemporalArrayLoader())
        records = (
            dataset.read_window(i, 0, dataset.frame_counts[i], ["tokens"])["tokens"] for i in range(len(dataset))
        )
        found[name] = np.concatenate(list(records)).tolist()
    return found


@pytest.mark.parametrize("form", FORMS)
def test_every_format_gives_what_prepare_gives_byte_for_byte(form, prepared, documents, tmp_path):
    inputs = write(form, tmp_path / "in", documents, prepared.end_of_text_id)
    corpus = import_tokens(inputs, tmp_path / "out", **options(prepared, held_out=0.2, seed=1))
    assert corpus.splits == prepared.splits
    assert corpus.splits["train"].bytes is not None
    assert files(tmp_path / "out") == files(prepared.directory)
    assert inspect(tmp_path / "out").faults == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]


def test_shuffle_and_limit_are_those_of_prepare(texts, prepared, documents, tmp_path):
    more = {"shuffle": True, "max_tokens": "2.5k", "seed": 7, "held_out": 0.3}
    prepare(texts, tmp_path / "text", workers=1, **options(prepared, **more))
    inputs = write("llm.c", tmp_path / "in", documents, prepared.end_of_text_id)
    corpus = import_tokens(inputs, tmp_path / "out", **options(prepared, **more))
    assert sum(split.tokens for split in corpus.splits.values()) <= 2500
    assert files(tmp_path / "out") == files(tmp_path / "text")


@pytest.mark.parametrize("form", FORMS)
def test_val_is_held_out_whole(form, prepared, documents, tmp_path):
    end = prepared.end_of_text_id
    train = write(form, tmp_path / "train", documents[:15], end)
    val = write(form, tmp_path / "val", documents[15:], end)
    corpus = import_tokens(train, tmp_path / "out", **options(prepared, val=val))
    assert splits(corpus) == {
        "train": [i for ids in documents[:15] for i in [*ids, end]],
        "val": [i for ids in documents[15:] for i in [*ids, end]],
    }
    if form != "megatron":
        return
    limit = 1 + sum(len(ids) + 1 for ids in documents[:4])
    corpus = import_tokens(train, tmp_path / "less", **options(prepared, val=val, max_tokens=limit))
    assert corpus.splits["train"].documents == 4
    assert corpus.splits["val"].documents == 5


@pytest.mark.parametrize("leading", [False, True])
def test_the_end_of_a_single_document_is_held_out(leading, prepared, documents, tmp_path):
    end = prepared.end_of_text_id
    text = [i for ids in documents for i in ids]
    llmc(tmp_path / "a.bin", [end, *text] if leading else text)
    corpus = import_tokens(tmp_path / "a.bin", tmp_path / "out", **options(prepared, held_out=0.25))
    cut = len(text) - round(len(text) * 0.25)
    assert splits(corpus) == {"train": [*text[:cut], end], "val": [*text[cut:], end]}
    assert sum(split.bytes for split in corpus.splits.values()) == sum(
        split.bytes for split in prepared.splits.values()
    )
    assert [split.documents for split in corpus.splits.values()] == [1, 1]


def test_parts_do_not_change_the_corpus(prepared, documents, tmp_path, monkeypatch):
    """Many small parts, in this process, against one."""
    import io

    from tst_lightning.data.foreign.plan import plan_streams
    from tst_lightning.data.jobs import Reporter

    inputs = write("llm.c", tmp_path / "in", documents, prepared.end_of_text_id)
    monkeypatch.setattr(import_job, "PART_TOKENS", 300)
    monkeypatch.setattr("tst_lightning.data.foreign.cut.BLOCK_TOKENS", 37)
    monkeypatch.setattr("tst_lightning.data.foreign.cut.read_blocks.__defaults__", (37,))
    for limit, name in ((None, "all"), (1000, "less")):
        work = tmp_path / name
        work.mkdir()
        job = import_job.Job(
            streams=[vars(stream) for stream in plan_streams(inputs)],
            val=[],
            work=str(work),
            tokenizer=str(prepared.tokenizer_path),
            end_of_text=None,
            held_out=0.2,
            seed=1,
            shuffle=False,
            max_tokens=limit,
            record_tokens=RECORD,
        )
        assert import_job.import_corpus(job, Reporter(io.StringIO())) == {"empty": 1, "added": 1, "cut": False} or limit
        parts = len(list((work / "imported").glob("*.json")))
        assert parts > 5 if limit is None else parts < 6  # reads no farther than it must
        corpus = Corpus.load(work / "prepared")
        if limit is None:
            assert files(work / "prepared") == files(prepared.directory)
        else:
            assert sum(split.tokens for split in corpus.splits.values()) <= limit


@pytest.mark.parametrize("form", ["nanogpt", "megatron"])
def test_an_id_outside_the_vocabulary(form, prepared, documents, tmp_path, capsys):
    wrong = [*documents[:3], [*documents[3][:5], 299, 300, 301], *documents[4:]]
    inputs = write(form, tmp_path / "in", wrong, prepared.end_of_text_id)
    arguments = ["--tokenizer", str(prepared.tokenizer_path), "--output", str(tmp_path / "out")]
    assert main(["import", *map(str, inputs), *arguments]) == 2
    place = np.fromfile(inputs[0], "<u2").tolist().index(300)
    error = capsys.readouterr().err
    assert f"error: {inputs[0]}: token {place:,} is 300, outside the vocabulary of 300: " in error
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in"]


def test_bytes_are_null_where_the_tokenizer_does_not_say_them(prepared, documents, tmp_path):
    from tokenizers import Tokenizer, models

    vocabulary = {f"w{i}": i for i in range(299)} | {"<|endoftext|>": 299}
    Tokenizer(models.WordLevel(vocabulary, "w0")).save(str(tmp_path / "words.json"))
    inputs = write("nanogpt", tmp_path / "in", [[i % 299 for i in ids] for ids in documents], 299)
    corpus = import_tokens(inputs, tmp_path / "out", **options(prepared, tokenizer=tmp_path / "words.json"))
    assert [split.bytes for split in corpus.splits.values()] == [None, None]
    assert json.loads((tmp_path / "out" / "corpus.json").read_text())["splits"]["val"]["bytes"] is None
    found = inspect(tmp_path / "out")
    assert found.faults == []
    assert "bytes of text unknown" in found.summary()


def test_another_token_between_documents(prepared, documents, tmp_path):
    """A corpus whose documents begin with a token of their own, as litgpt's may: that token stands between them."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(prepared.tokenizer_path))
    tokenizer.add_special_tokens(["<begin>"])
    tokenizer.save(str(tmp_path / "two.json"))
    flat = [i for ids in documents for i in [300, *ids]]
    items = [np.array(flat[start : start + 100], "int32") for start in range(0, len(flat), 100)]
    litdata(tmp_path / "in", items, chunk_bytes=2000)
    more = options(prepared, tokenizer=tmp_path / "two.json", end_of_text="<begin>")
    corpus = import_tokens(tmp_path / "in", tmp_path / "out", **more)
    assert (corpus.end_of_text, corpus.end_of_text_id) == ("<begin>", 300)
    assert sum(split.documents for split in corpus.splits.values()) == 20
    assert sum(split.tokens for split in corpus.splits.values()) == len(flat)


def test_the_command_says_what_it_did(prepared, documents, tmp_path, capsys):
    end = prepared.end_of_text_id
    shared = ["--tokenizer", str(prepared.tokenizer_path), "--held-out", "0.2"]
    (nanogpt,) = write("nanogpt", tmp_path / "n", documents, end)
    assert main(["import", str(nanogpt), *shared, "--output", str(tmp_path / "a")]) == 0
    captured = capsys.readouterr()
    assert f"{nanogpt}: taken for nanoGPT's 16-bit ids, as no signature says otherwise" in captured.err
    for text in ("prepared ", " documents ", "tst-lightning inspect", "next: tst-lightning"):
        assert text in captured.out
    assert "left out" not in captured.out
    inputs = write("llm.c", tmp_path / "l", documents, end)
    assert main(["import", *map(str, inputs), *shared, "--output", str(tmp_path / "b")]) == 0
    captured = capsys.readouterr()
    assert "format llm.c" in captured.err
    assert "left out 1 end-of-text tokens with no document before them" in captured.out
    assert "added end-of-text to 1 documents that had none" in captured.out


def test_every_fault_is_named_before_the_work(prepared, documents, tmp_path, capsys):
    (tmp_path / "out").mkdir()
    (train,) = write("nanogpt", tmp_path / "in", documents, prepared.end_of_text_id)
    arguments = ["import", str(train), str(tmp_path / "missing.bin"), "--val", str(train), "--held-out", "2"]
    arguments += ["--output", str(tmp_path / "out"), "--tokenizer", str(train), "--max-tokens", "many"]
    assert main(arguments) == 2
    error = capsys.readouterr().err
    for text in (
        "--held-out 2.0 must lie between 0 and 1",
        "--held-out 2.0 and --val",
        "--max-tokens many must be",
        "exists already",
        "--tokenizer",
        "missing.bin does not exist",
    ):
        assert text in error
    assert error.count("error: ") == 6


def refused(prepared, tmp_path, *inputs, **more):
    with pytest.raises(UserError) as caught:
        import_tokens(inputs, tmp_path / "out", **options(prepared, **more))
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "out.unfinished").exists()
    return caught.value.faults


def test_streams_that_make_no_corpus(prepared, documents, tmp_path):
    end = prepared.end_of_text_id
    empty = llmc(tmp_path / "empty.bin", [end] * 4)
    one = llmc(tmp_path / "one.bin", [end, 5])
    text = llmc(tmp_path / "text.bin", documents[0])
    assert "empty.bin: nothing but end-of-text tokens" in refused(prepared, tmp_path, empty)[0]
    assert "a single token of text" in refused(prepared, tmp_path, one)[0]
    assert "empty.bin holds nothing but end-of-text tokens" in refused(prepared, tmp_path, text, val=empty)[0]
    assert "INPUT" in refused(prepared, tmp_path, empty, val=text)[0]
    assert "--max-tokens 3" in refused(prepared, tmp_path, text, max_tokens=3)[0]
    assert "is given twice" in refused(prepared, tmp_path, text, text)[0]
    assert "is given twice" in refused(prepared, tmp_path, text, val=text)[0]
    assert "format='gpt' must be one of auto" in refused(prepared, tmp_path, text, format="gpt")[0]
    (nanogpt,) = write("nanogpt", tmp_path / "in", documents, end)
    assert "formats llm.c and nanogpt" in refused(prepared, tmp_path, text, val=nanogpt)[0]


def test_a_tokenizer_too_large_for_the_ids(prepared, documents, tmp_path):
    from tokenizers import Tokenizer, models

    vocabulary = {f"w{i}": i for i in range(70_000)} | {"<|endoftext|>": 70_000}
    Tokenizer(models.WordLevel(vocabulary, "w0")).save(str(tmp_path / "large.json"))
    inputs = write("nanogpt", tmp_path / "in", documents, 0)
    faults = refused(prepared, tmp_path, *inputs, tokenizer=tmp_path / "large.json")
    assert "holds ids of 2 bytes, too small for" in faults[0]


@pytest.mark.slow
def test_memory_is_bounded(prepared, tmp_path):
    """Two hundred megabytes of tokens, of which one document is half."""
    draw = np.random.default_rng(0)
    ids = draw.integers(1, 300, 10**8, dtype=np.uint16)
    ids[prepared.end_of_text_id == ids] = 1 if prepared.end_of_text_id != 1 else 2
    ids[10**8 // 2 :: 500] = prepared.end_of_text_id
    ids.tofile(tmp_path / "train.bin")
    del ids
    code = (
        "import resource, sys\nfrom tst_lightning import import_tokens\n"
        "import_tokens(sys.argv[1], sys.argv[2], tokenizer=sys.argv[3], progress=False)\n"
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // 1024)"
    )
    arguments = [str(tmp_path / "train.bin"), str(tmp_path / "out"), str(prepared.tokenizer_path)]
    run = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
    peak = int(run.stdout)
    (tmp_path / "few.bin").write_bytes(Path(arguments[0]).read_bytes()[: 2 * 10**5])
    few = [str(tmp_path / "few.bin"), str(tmp_path / "few"), arguments[2]]
    base = int(subprocess.run([sys.executable, "-c", code, *few], capture_output=True, text=True, check=True).stdout)
    assert peak - base < 400, (peak, base)
    assert inspect(tmp_path / "out").faults == []
