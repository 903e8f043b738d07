"""Token files of other training stacks: what is read, what is refused, documents cut out of streams."""

import json
import random
import struct

import numpy as np
import pytest

from tst_lightning.data.foreign.cut import Cutter, read_blocks
from tst_lightning.data.foreign.plan import detect, plan_streams
from tst_lightning.errors import UserError

END = 7
pytestmark = pytest.mark.filterwarnings("ignore:An item was larger than the target chunk size")


def llmc(path, ids, *, magic=20240520, version=1, dtype="<u2", tokens=None):
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(ids) if tokens is None else tokens
    path.write_bytes(header.tobytes() + np.array(ids, dtype).tobytes())
    return path


def megatron(base, documents, *, code=8, dtype="<u2", modes=False, version=1):
    """Documents are lists of sequences, those are lists of ids."""
    sequences = [ids for document in documents for ids in document]
    boundaries = [0]
    for document in documents:
        boundaries.append(boundaries[-1] + len(document))
    item = np.dtype(dtype).itemsize
    offsets, at = [], 0
    for ids in sequences:
        offsets.append(at)
        at += len(ids) * item
    index = b"MMIDIDX\0\0" + struct.pack("<QBQQ", version, code, len(sequences), len(boundaries))
    index += b"".join(struct.pack("<i", len(ids)) for ids in sequences)
    index += b"".join(struct.pack("<q", offset) for offset in offsets)
    index += b"".join(struct.pack("<q", boundary) for boundary in boundaries)
    index += bytes(len(sequences)) if modes else b""
    base.with_suffix(".idx").write_bytes(index)
    base.with_suffix(".bin").write_bytes(b"".join(np.array(ids, dtype).tobytes() for ids in sequences))
    return base.with_suffix(".bin")


def litdata(directory, items, chunk_bytes=40):
    """What LitData itself writes for its TokensLoader."""
    from litdata.streaming import TokensLoader
    from litdata.streaming.cache import Cache

    cache = Cache(str(directory), chunk_bytes=chunk_bytes, item_loader=TokensLoader())
    for number, item in enumerate(items):
        cache[number] = item
    cache.done()
    cache.merge()
    return directory


def read(streams, block_tokens=3):
    """All ids, and the places where the files say that a document ends."""
    ids, ends = [], []
    for stream in streams:
        for block, places in read_blocks(stream, block_tokens):
            ends += [len(ids) + int(place) for place in places]
            ids += block.tolist()
    return ids, ends


def faults(*paths, form="auto"):
    with pytest.raises(UserError) as caught:
        plan_streams(paths, form)
    return caught.value.faults


def test_nanogpt(tmp_path):
    ids = [1, 2, END, 65535, 3, END, 0]
    path = tmp_path / "train.bin"
    np.array(ids, "<u2").tofile(path)
    assert read(plan_streams([path])) == (ids, [7])
    assert read(plan_streams([path, path])) == (ids + ids, [7, 14])


@pytest.mark.parametrize(
    ("magic", "version", "dtype", "largest"), [(20240520, 1, "<u2", 2**16 - 1), (20240801, 7, "<u4", 128_255)]
)
def test_llmc_files_run_on_into_each_other(tmp_path, magic, version, dtype, largest):
    ids = [END, 1, 2, 3, 4, largest, END, 6]
    kind = {"magic": magic, "version": version, "dtype": dtype}
    files = [llmc(tmp_path / "a.bin", ids[:3], **kind), llmc(tmp_path / "b.bin", ids[3:], **kind)]
    assert detect(files[0]) == "llm.c"
    assert read(plan_streams(files)) == (ids, [8])


@pytest.mark.parametrize(("code", "dtype"), [(1, "|u1"), (3, "<i2"), (4, "<i4"), (5, "<i8"), (8, "<u2")])
@pytest.mark.parametrize("given", ["set", "set.bin", "set.idx"])
def test_megatron_documents_are_those_of_the_index(tmp_path, monkeypatch, code, dtype, given):
    from tst_lightning.data.foreign import megatron as module

    monkeypatch.setattr(module, "_STEP", 2)
    documents = [[], [[1, 2], [3]], [[4, END]], [], [[5]], [[], [6, 6, 6, 6]], []]
    megatron(tmp_path / "set", documents, code=code, dtype=dtype, modes=code == 8)
    assert detect(tmp_path / given) == "megatron"
    ids, ends = read(plan_streams([tmp_path / given]))
    assert ids == [1, 2, 3, 4, END, 5, 6, 6, 6, 6]
    assert ends == [0, 3, 5, 5, 6, 10, 10]
    both = [tmp_path / "set.bin", tmp_path / "set.idx"]
    assert read(plan_streams(both)) == (ids, ends)  # as a glob names them


@pytest.mark.parametrize("kind", ["torch.int32", "torch.int64", "torch.uint16", "uint16", "int32", "uint32"])
def test_litdata_is_what_its_own_reader_gives(tmp_path, kind):
    import torch
    from litdata import StreamingDataset
    from litdata.streaming import TokensLoader

    draw = random.Random(0)
    items = [[draw.randrange(300) for _ in range(draw.randrange(1, 9))] for _ in range(30)]
    if kind.startswith("torch"):
        made = [torch.tensor(item, dtype=getattr(torch, kind.removeprefix("torch."))) for item in items]
    else:
        made = [np.array(item, kind) for item in items]
    directory = litdata(tmp_path / "tokens", made)
    streams = plan_streams([directory])
    assert len(streams) > 2
    flat = [index for item in items for index in item]
    assert read(streams) == (flat, [len(flat)])
    theirs = StreamingDataset(str(directory), item_loader=TokensLoader(block_size=1), shuffle=False)
    assert [int(theirs[i][0]) for i in range(len(theirs))] == flat


@pytest.mark.parametrize("block_tokens", [1, 2, 5, 100])
def test_blocks_do_not_change_what_is_read(tmp_path, block_tokens):
    path = megatron(tmp_path / "set", [[[1, 2, 3]], [], [[4]], [[5, 6]]])
    assert read(plan_streams([path]), block_tokens) == ([1, 2, 3, 4, 5, 6], [3, 3, 4, 6])


def test_a_file_that_becomes_shorter_is_an_error(tmp_path):
    path = llmc(tmp_path / "a.bin", list(range(10)))
    (stream,) = plan_streams([path])
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(OSError, match="has become shorter"):
        read([stream])


def slow_cut(ids, ends, lengths):
    """Documents one id at a time."""
    out, rows, text, empty = [], [], [], 0

    def close():
        nonlocal empty
        if text:
            rows.append([len(text) + 1, sum(lengths[index] for index in text)])
            out.extend([*text, END])
        else:
            empty += 1
        text.clear()

    for place in range(len(ids) + 1):
        said = ends.count(place)
        if place and ids[place - 1] == END:
            said -= 1  # the token said it already
        for _ in range(said):
            close()
        if place < len(ids):
            if ids[place] == END:
                close()
            else:
                text.append(ids[place])
    return out + text, rows, empty


@pytest.mark.parametrize("seed", range(200))
def test_cutter_against_one_id_at_a_time(seed):
    draw = random.Random(seed)
    ids = [draw.choice([1, 2, 3, END, END]) for _ in range(draw.randrange(1, 30))]
    ends = sorted(draw.randrange(len(ids) + 1) for _ in range(draw.randrange(6)))
    lengths = np.array([0, 1, 2, 5, 0, 0, 0, 0])
    cutter = Cutter(END, 8, "uint16", lengths)
    unknown = Cutter(END, 8, "int32", None)
    out, rows, size = [], [], draw.randrange(1, 9)
    for start in range(0, len(ids), size):
        places = [end - start for end in ends if start < end <= start + size or end == start == 0]
        block = np.array(ids[start : start + size], "<u4"), np.array(places, np.int64)
        got, documents = cutter.cut(*block, "file", start)
        assert got.dtype == np.uint16
        out += got.tolist()
        rows += documents.tolist()
        got, documents = unknown.cut(*block, "file", start)
        assert got.tolist() == out[len(out) - len(got) :]
        assert (documents[:, 1] == -1).all()
    assert (out, rows, cutter.empty) == slow_cut(ids, ends, lengths)
    assert cutter.empty == unknown.empty


@pytest.mark.parametrize(("dtype", "bad"), [("<u2", 8), ("<i4", -1), ("<u4", 2**32 - 1), ("<i8", 2**40)])
def test_the_first_id_outside_the_vocabulary_is_named(dtype, bad):
    ids = np.array([1, 2, bad, bad], dtype)
    with pytest.raises(UserError, match=f"^file: token 1,002 is {bad}, outside the vocabulary of 8: "):
        Cutter(END, 8, "uint16", None).cut(ids, np.empty(0, np.int64), "file", 1000)


def test_every_bad_input_is_named_at_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    from pathlib import Path

    good = llmc(Path("good.bin"), [1, 2, 3])
    cases = {
        "missing.bin": (None, "missing.bin does not exist"),
        "odd.bin": (b"\1\2\3", "odd.bin has 3 bytes, which is no whole number of 16-bit ids"),
        "empty.bin": (b"", "empty.bin is empty"),
        "text.bin": (b"Call me Ishmael.", "text.bin is text, not ids: give it to tst-lightning prepare"),
        "gz.bin": (b"\x1f\x8b\x08\x00", "gz.bin is compressed with gzip"),
        "zstd.bin": (b"\x28\xb5\x2f\xfd", "zstd.bin is compressed with zstd"),
        "array.bin": (b"\x93NUMPY\x01\x00", "array.bin is a NumPy file"),
        "table.bin": (b"PAR1\x15\x04\x15\x00", "table.bin is a Parquet file"),
        "torch.bin": (b"PK\x03\x04\x00\x00", "torch.bin is a zip archive or a PyTorch file"),
        "wide.bin": (np.array([5, 1000, 50256, 100_000] * 20, "<u4").tobytes(), "wide.bin is of 32-bit ids"),
        "tokens.dat": (b"\1\0\2\0", "tokens.dat begins as no known token file does: name its format with --from"),
        "short.bin": (good.read_bytes()[:-2], r"short.bin has 1,028 bytes, not the 1,030 of the 3 tokens"),
        "long.bin": (good.read_bytes() + b"\0\0", r"long.bin has 1,032 bytes, not the 1,030 of the 3 tokens"),
        "header.bin": (good.read_bytes()[:100], "header.bin has 100 bytes, less than llm.c's header"),
        "lonely.idx": (b"MMIDIDX\0\0", "lonely.bin is missing: a data set of Megatron-LM has both files"),
    }
    for name, (content, _) in cases.items():
        if content is not None:
            Path(name).write_bytes(content)
    llmc(Path("version.bin"), [1], version=2)
    llmc(Path("none.bin"), [])
    llmc(Path("negative.bin"), [], tokens=-5)
    llmc(Path("questions.bin"), [1], magic=20240522)
    Path("folder").mkdir()
    Path("folder/train.bin").touch()
    more = {
        "version.bin": "version.bin is of llm.c's version 2 for magic number 20240520: only 1",
        "none.bin": "none.bin holds no tokens",
        "negative.bin": "negative.bin has 1,024 bytes, not the",
        "questions.bin": "questions.bin holds llm.c's multiple-choice questions",
        "folder": "folder is a folder without LitData's index.json: it holds train.bin: name them",
    }
    expected = [text for _, text in cases.values()] + list(more.values())
    found = faults(*map(Path, [*cases, *more, "good.bin"]))
    assert len(found) == len(expected)
    for fault, text in zip(found, expected, strict=True):
        assert text in fault


def test_formats_are_not_mixed(tmp_path):
    np.array([1, 2], "<u2").tofile(tmp_path / "train.bin")
    assert "formats llm.c and nanogpt" in faults(tmp_path / "train.bin", llmc(tmp_path / "a.bin", [1]))[0]


def test_a_format_that_is_named_is_held_to(tmp_path):
    np.array([1, 2], "<u2").tofile(tmp_path / "train.bin")
    assert "no file of llm.c" in faults(tmp_path / "train.bin", form="llm.c")[0]
    assert "train.idx is missing" in faults(tmp_path / "train.bin", form="megatron")[0]
    assert "is not a folder" in faults(tmp_path / "train.bin", form="litdata")[0]
    assert "give --from llm.c" in faults(llmc(tmp_path / "a.bin", [1]), form="nanogpt")[0]
    assert "give --from megatron" in faults(megatron(tmp_path / "set", [[[1]]]), form="nanogpt")[0]
    (tmp_path / "tokens.dat").write_bytes(b"\1\0\2\0")
    assert read(plan_streams([tmp_path / "tokens.dat"], "nanogpt"))[0] == [1, 2]
    for form in ("nanogpt", "llm.c"):
        assert "is a folder: name the files" in faults(tmp_path, form=form)[0]


def change(path, at, new):
    content = bytearray(path.read_bytes())
    content[at : at + len(new)] = new
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("at", "new", "fault"),
    [
        (0, b"X", "is no index of Megatron-LM"),
        (9, struct.pack("<Q", 2), "is of version 2: only version 1"),
        (17, b"\6", "says that the ids are of dtype code 6, which is no integer"),
        (18, struct.pack("<Q", 4), "it was cut off or damaged"),
        (34, struct.pack("<i", -1), "sequence 0 does not follow the one before"),
        (34 + 12, struct.pack("<q", 6), "sequence 0 does not follow the one before"),
        (34 + 12 + 16, struct.pack("<q", 2), "sequence 2 does not follow the one before"),
        (34 + 36, struct.pack("<q", 1), "hold the sequences 1 to 3, not all of 3"),
        (34 + 36 + 8, struct.pack("<q", 3), "document boundaries go backwards"),
        (34 + 36 + 24, struct.pack("<q", 2), "hold the sequences 0 to 2, not all of 3"),
    ],
)
def test_a_damaged_index_is_refused(tmp_path, at, new, fault):
    path = megatron(tmp_path / "set", [[[1, 2]], [[3]], [[4, 5]]])
    change(path.with_suffix(".idx"), at, new)
    assert any(fault in each for each in faults(path, form="megatron"))


def test_an_index_of_another_data_set_is_refused(tmp_path):
    path = megatron(tmp_path / "set", [[[1, 2]], [[3]]])
    other = megatron(tmp_path / "other", [[[1, 2]], [[3, 4]]])
    other.with_suffix(".idx").replace(path.with_suffix(".idx"))
    assert "has 6 bytes, not the 8 of the 4 tokens in set.idx: it was cut off, or the two files" in faults(path)[0]
    path.with_suffix(".idx").write_bytes(b"MMIDIDX\0\0\1")
    assert "less than its header" in faults(path)[0]


def edit_index(directory, **config):
    path = directory / "index.json"
    state = json.loads(path.read_text())
    state["config"] |= config
    path.write_text(json.dumps(state))


def test_bad_litdata_directories_are_refused(tmp_path):
    items = [np.array([1, 2, 3], "uint16")] * 20
    made = {name: litdata(tmp_path / name, items) for name in ("zip", "key", "float", "rows", "json", "cut", "swap")}
    edit_index(made["zip"], compression="zstd")
    edit_index(made["key"], encryption={"algorithm": "fernet"})
    edit_index(made["float"], data_format=["no_header_numpy:9"])
    edit_index(made["rows"], data_format=["jpeg", "int"])
    (made["json"] / "index.json").write_text("{}")
    chunks = sorted(made["cut"].glob("*.bin"))
    change(chunks[0], 0, b"\xff")
    chunks[1].unlink()
    chunks[2].write_bytes(chunks[2].read_bytes()[:-1])
    (made["swap"] / "index.json").unlink()
    found = [faults(directory, form="litdata") for directory in made.values()]
    assert "are compressed with zstd: write it again without" in found[0][0]
    assert "are encrypted" in found[1][0]
    assert "of format no_header_numpy:9, which is no integer" in found[2][0]
    assert "not hold tokens for LitData's TokensLoader but records of jpeg, int" in found[3][0]
    assert "is no index of LitData's (KeyError" in found[4][0]
    assert len(found[5]) == 3
    for fault, words in zip(found[5], ("does not hold the", "does not exist", "bytes, not the"), strict=True):
        assert words in fault
    assert "has no index.json" in found[6][0]


def test_a_prepared_corpus_is_not_imported(text_corpus):
    assert "is a prepared corpus already" in faults(text_corpus.directory)[0]


def byte_level(**changes):
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=changes.pop("add_prefix_space", False))
    tokenizer.decoder = decoders.ByteLevel()
    for name, value in changes.items():
        setattr(tokenizer, name, value)
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<end>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator([TEXT] * 3, trainer)
    tokenizer.add_tokens([AddedToken("Ishmaël", special=False)])
    tokenizer.add_special_tokens(["<begin>"])
    return tokenizer


TEXT = "Call me Ishmaël. 👩\u200d🚀 e\u0301 \r\n\t\x07 some years ago — never mind how long précisément"


@pytest.mark.parametrize("end", ["<end>", "Ishmaël", "C"])
def test_byte_lengths_add_up_to_the_text(end):
    from tst_lightning.data.foreign.text_bytes import byte_lengths

    tokenizer = byte_level()
    lengths = byte_lengths(tokenizer, tokenizer.token_to_id(end))
    assert len(lengths) == tokenizer.get_vocab_size()
    assert lengths[tokenizer.token_to_id("<begin>")] == 0
    for start in range(len(TEXT)):
        text = TEXT[start:].replace("Call", "").replace("Ishmaël", "" if end == "Ishmaël" else "Ishmaël")
        ids = tokenizer.encode(text).ids
        assert sum(lengths[ids]) == len(text.encode())
        assert sum(lengths[[*ids, tokenizer.token_to_id(end)]]) == len(text.encode())


def test_byte_lengths_are_unknown_where_tokens_do_not_say_them():
    from tokenizers import Tokenizer, decoders, models, normalizers

    from tst_lightning.data.foreign.text_bytes import byte_lengths

    others = [
        byte_level(add_prefix_space=True),
        byte_level(normalizer=normalizers.Lowercase()),
        byte_level(decoder=decoders.Metaspace()),
        Tokenizer(models.WordLevel({"a": 0, "<end>": 1}, "a")),
        Tokenizer(models.BPE({"a": 0, "<end>": 1}, [])),
    ]
    assert [byte_lengths(tokenizer, 0) for tokenizer in others] == [None] * 5


def ignore(_):
    pass


def cutter():
    return Cutter(END, 8, "uint16", None)


@pytest.mark.parametrize(
    ("ids", "single"),
    [
        ([1, 2, 3], (0, 3)),
        ([END, END, 1, 2, END, END], (2, 4)),
        ([1, END, 2], None),
        ([END, 1, END, 2], None),
    ],
)
@pytest.mark.parametrize("split", [0, 1, 2])
def test_single_document(tmp_path, ids, single, split):
    from tst_lightning.data.foreign.documents import single_document

    files = [llmc(tmp_path / "a.bin", ids[:split]), llmc(tmp_path / "b.bin", ids[split:])] if split else []
    streams = plan_streams(files or [llmc(tmp_path / "c.bin", ids)])
    assert single_document(streams, cutter(), ignore) == single


def test_streams_without_a_document(tmp_path):
    from tst_lightning.data.foreign.documents import single_document

    streams = plan_streams([llmc(tmp_path / "a.bin", [END] * 5)])
    with pytest.raises(UserError, match=r"a.bin: nothing but end-of-text tokens: give files with text"):
        single_document(streams, cutter(), ignore)


@pytest.mark.parametrize(
    ("single", "held_out", "place"),
    [((0, 100), 0.1, 90), ((5, 105), 0.1, 95), ((0, 100), 1e-9, 99), ((3, 103), 0.9999, 4), ((0, 2), 0.5, 1)],
)
def test_place_to_cut(single, held_out, place):
    from tst_lightning.data.foreign.documents import place_to_cut

    assert place_to_cut(single, held_out, "a.bin") == place


def test_a_single_token_cannot_be_cut():
    from tst_lightning.data.foreign.documents import place_to_cut

    with pytest.raises(UserError, match=r"^a.bin holds a single token of text"):
        place_to_cut((4, 5), 0.5, "a.bin")


@pytest.mark.parametrize("cut_at", range(2, 5))
def test_a_cut_goes_through_the_middle_of_a_document(tmp_path, cut_at):
    from tst_lightning.data.foreign.documents import cut_documents

    files = [llmc(tmp_path / "a.bin", [END, 1, 2]), llmc(tmp_path / "b.bin", [3, 4, END])]
    read_bytes = []
    blocks = list(cut_documents(plan_streams(files), cutter(), read_bytes.append, cut_at=cut_at))
    ids = [index for block, _ in blocks for index in block.tolist()]
    text = [1, 2, 3, 4]
    assert ids == [*text[: cut_at - 1], END, *text[cut_at - 1 :], END]
    assert [row[0] for _, rows in blocks for row in rows.tolist()] == [cut_at, 6 - cut_at]
    assert sum(read_bytes) == 12
