"""Shards of several machines into one corpus: the same, byte for byte, as of one call."""

import json
import random
import shutil

import numpy as np
import pytest

from tests.small_parts import contents, prepared_here, set_small, write_lines
from tst_lightning.__main__ import main
from tst_lightning.data.corpus import Corpus
from tst_lightning.data.merge import merge
from tst_lightning.data.parts import read_part
from tst_lightning.data.prepare import prepare
from tst_lightning.data.shards import read_shards
from tst_lightning.errors import UserError


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Two JSON Lines files, of which some lines are skipped, and a text file between them: eleven parts."""
    folder = tmp_path_factory.mktemp("texts")
    draw = random.Random(0)
    for name in ("a", "c"):
        lines = [
            " ".join(draw.choices(["sea", "whale", "ship", "été", "1851"], k=draw.randrange(90))) for _ in range(900)
        ]
        write_lines(folder / f"{name}.jsonl", lines)
    with (folder / "a.jsonl").open("a") as file:
        file.write('{"text": 3}\nno JSON\n')
    (folder / "b.txt").write_text("a text file\n" * 5000)
    return folder


@pytest.fixture(scope="module")
def tokenizer(texts, tmp_path_factory):
    corpus = prepare(
        texts / "b.txt", tmp_path_factory.mktemp("tokenizer") / "corpus", train_tokenizer=262, progress=False
    )
    return corpus.tokenizer_path


def shards_of(texts, tokenizer, folder, count, **options):
    for index in range(count):
        prepared_here(texts, folder / str(index), tokenizer=tokenizer, shard=[index, count], **options)
    return [folder / str(index) for index in range(count)]


@pytest.fixture(scope="module")
def three(texts, tokenizer, tmp_path_factory):
    """Three shards, not to be changed."""
    with pytest.MonkeyPatch.context() as patch:
        set_small(patch)
        return shards_of(texts, tokenizer, tmp_path_factory.mktemp("three"), 3)


@pytest.fixture
def shards(three, tmp_path):
    """Three shards to do harm to."""
    return [shutil.copytree(shard, tmp_path / shard.name) for shard in three]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "workers", "options"),
    [
        (1, 1, {}),
        (2, 2, {"shuffle": True}),
        (3, 1, {"max_tokens": 30_000}),
        (7, 1, {"shuffle": True, "max_tokens": 50_000, "held_out": 0.1, "seed": 3}),
        (20, 1, {}),
    ],
)
def test_any_number_of_shards_gives_what_one_call_gives(
    texts, tokenizer, tmp_path, monkeypatch, count, workers, options
):
    set_small(monkeypatch)
    shards = shards_of(texts, tokenizer, tmp_path, count, workers=workers)
    parts = [len(list((shard / "parts").glob("*.json"))) for shard in shards]
    assert sum(parts) > 8 and max(parts) - min(parts) <= 1
    whole = prepared_here(texts, tmp_path / "whole", tokenizer=tokenizer, **options)
    random.Random(0).shuffle(shards)
    made = merge(shards, tmp_path / "merged", **options, record_tokens=1000, progress=False)
    assert contents(made.directory) == contents(whole.directory)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*map(str, range(count)), "whole", "merged"])


@pytest.mark.slow
def test_the_commands(texts, tokenizer, tmp_path, capsys):
    arguments = ["--tokenizer", str(tokenizer)]
    for index in range(2):
        output = tmp_path / f"shard-{index}"
        shard = ["--shard", f"{index}/2", "--output", str(output)]
        assert main(["prepare", str(texts), *arguments, *shard]) == 0
        out = capsys.readouterr().out
        assert f"prepared shard {index} of 2 in {output}" in out
        assert "next: tst-lightning merge SHARD... --output DIR, once all are there" in out
        with pytest.raises(UserError, match=r"shard-. is one shard of a corpus: put all of them together .*merge"):
            Corpus.load(output)
    assert main(["merge", *(str(tmp_path / f"shard-{i}") for i in (1, 0)), "--output", str(tmp_path / "one")]) == 0
    out = capsys.readouterr().out
    assert "skipped 1 (line is not JSON): " in out and "skipped 1 (field is not a string)" in out
    assert main(["prepare", str(texts), *arguments, "--output", str(tmp_path / "two")]) == 0
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "shard-0", "shard-1", "two"]


# Faults


def test_shards_come_back_in_order(three):
    found = read_shards(three[::-1])
    assert [shard.index for shard in found] == [0, 1, 2]
    assert [part.number for shard in found for part in shard.parts] == list(range(found[0].total_parts))


def change(directory, **values):
    path = directory / "shard.json"
    state = json.loads(path.read_text())
    for name, value in values.items():
        (state if name in state else state["identity"])[name] = value
    path.write_text(json.dumps(state))


def missing(shards):
    return shards[:2], ["shard 2 of 3 is missing: prepare it with --shard 2/3"]


def missing_and_doubled(shards):
    return [shards[0], shards[0]], [
        f"shard 0 of 3 is given more than once: {shards[0]}, {shards[0]}",
        "shard 1 of 3 is missing",
        "shard 2 of 3 is missing",
    ]


def other_inputs(shards):
    change(shards[1], inputs_sha256="0" * 64)
    return shards, [f"{shards[1]} and {shards[0]} are not shards of one input: they were made of other files"]


def other_tokenizer(shards):
    from tst_lightning.data.corpus import file_sha256

    (shards[2] / "tokenizer.json").write_text("{}")
    change(shards[2], tokenizer_sha256=file_sha256(shards[2] / "tokenizer.json"))
    return shards, [f"{shards[2]} and {shards[0]} are not shards of one input: they have other tokenizers"]


def other_end(shards):
    change(shards[2], end_of_text="</s>")
    return shards, ["they end documents with other tokens (</s> and <|endoftext|>)"]


def other_count(shards):
    change(shards[1], shard=[1, 4])
    return shards, [f"{shards[1]} is one of 4 shards, {shards[0]} one of 3"]


def other_parts(shards):
    change(shards[1], total_parts=99)
    return shards, [f"{shards[1]} and {shards[0]} were cut into parts by different releases"]


def no_shard(shards):
    (shards[0] / "shard.json").unlink()
    (shards[1] / "shard.json").write_text("{")
    change(shards[2], format=9)
    return [*shards, shards[0] / "nowhere"], [
        f"{shards[0]} is no shard (it has no shard.json)",
        "shard.json is damaged (JSONDecodeError",
        "shard.json has format 9, and this release reads 1",
        f"{shards[0] / 'nowhere'} is no shard",
    ]


def lost_part(shards):
    name = next((shards[1] / "parts").glob("*.json"))
    name.unlink()
    return shards, [f"{shards[1]} misses its parts {int(name.stem)}: prepare this shard again"]


def lost_tokenizer(shards):
    (shards[0] / "tokenizer.json").unlink()
    (shards[1] / "tokenizer.json").write_text("{}")
    return shards, [
        f"{shards[0] / 'tokenizer.json'} is missing or not the file that made these tokens",
        f"{shards[1] / 'tokenizer.json'} is missing or not",
    ]


@pytest.mark.parametrize(
    "harm",
    [
        missing,
        missing_and_doubled,
        other_inputs,
        other_tokenizer,
        other_end,
        other_count,
        other_parts,
        no_shard,
        lost_part,
        lost_tokenizer,
    ],
)
def test_shards_that_do_not_make_a_corpus(shards, tmp_path, harm):
    given, messages = harm(shards)
    with pytest.raises(UserError) as caught:
        merge(given, tmp_path / "merged", progress=False)
    assert len(caught.value.faults) == len(messages)
    for message, fault in zip(messages, caught.value.faults, strict=True):
        assert message in fault
    assert not list(tmp_path.glob("merged*"))


@pytest.mark.slow
def test_every_damaged_part_is_named_before_anything_is_made(shards, tmp_path):
    parts = [read_part(shard / "parts", read_shards(shards)[i].parts[0].number) for i, shard in enumerate(shards)]
    with (shards[0] / "parts" / f"{parts[0].number:06}.tokens").open("r+b") as file:
        file.write(b"\xff")
    (shards[1] / "parts" / f"{parts[1].number:06}.tokens").unlink()
    lengths = shards[2] / "parts" / f"{parts[2].number:06}.documents.npy"
    np.save(lengths, np.load(lengths)[:-1])
    with pytest.raises(UserError) as caught:
        merge(shards, tmp_path / "merged", progress=False)
    assert [fault.split(": ")[0].rpartition(".")[2] for fault in caught.value.faults] == [
        "tokens is damaged (its hash differs)",
        "tokens is missing",
        "npy is damaged (its hash differs)",
    ]
    assert not list(tmp_path.glob("merged*"))


def test_wrong_arguments_are_named_at_once(three, tmp_path):
    with pytest.raises(UserError) as caught:
        merge([*three, "s3://bucket/shard"], three[0] / "merged", held_out=1.0, max_tokens="many", progress=False)
    message = str(caught.value)
    for part in (
        "--held-out 1.0 must lie between 0 and 1",
        "lies in the input folder",
        "--max-tokens many must be a whole number above 0, such as 300M or 1e9",
        "s3://bucket/shard is remote: copy it to this machine and name the copy",
    ):
        assert part in message
    assert not (three[0] / "merged").exists()


def test_an_existing_output_is_refused(three, tmp_path, capsys):
    assert main(["merge", *map(str, three), "--output", str(tmp_path)]) == 2
    assert f"error: --output {tmp_path} exists already: name another directory, or delete it" in capsys.readouterr().err


def test_what_belongs_to_the_whole_is_refused_for_a_shard(texts, tmp_path, capsys):
    arguments = ["--shuffle", "--max-tokens", "300M", "--held-out", "0.1", "--train-tokenizer", "300"]
    assert main(["prepare", str(texts), "--output", str(tmp_path / "o"), "--shard", "0/2", *arguments]) == 2
    assert (
        "--train-tokenizer, --held-out, --max-tokens, --shuffle cannot be decided by one shard: give --tokenizer, the "
        "same to all, and the rest to `tst-lightning merge`"
    ) in capsys.readouterr().err


@pytest.mark.parametrize("shard", ["2/2", "1", "-1/2", "0/0", "a/b"])
def test_a_shard_is_one_of_some(texts, tmp_path, capsys, shard):
    assert main(["prepare", str(texts), "--output", str(tmp_path / "o"), f"--shard={shard}"]) == 2
    assert f"--shard {shard} must be I/N with I from 0 to N-1, such as 0/4" in capsys.readouterr().err
