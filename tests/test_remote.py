"""Corpora in an object store: a real S3 server on loopback, made slow and unreliable on purpose."""

import os
import pickle
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import boto3
import numpy as np
import pytest
import torch

from tests.corpora import write_tokens
from tests.s3 import S3Server
from tests.test_windows import LATENT, RECORD, TOKENS, dataset, order
from tst_lightning.data import stores, windows
from tst_lightning.data.corpus import Corpus
from tst_lightning.data.publish import output_faults, publish
from tst_lightning.data.read_ahead import READS, LookAhead
from tst_lightning.data.stores import MissingObject, StoreError, StorePath, locate
from tst_lightning.data.windows import TokenStream, WindowDataset, WindowLoader, held_out_loader
from tst_lightning.errors import UserError

BUCKET = "corpora"
CHUNK = "GET .*chunk"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with S3Server(tmp_path_factory.mktemp("server")) as server:
        yield server


@pytest.fixture(autouse=True)
def s3(server, monkeypatch):
    """The server, reliable and fast, with an empty log and an empty bucket."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    stores._bucket.cache_clear()
    server.set()
    client = boto3.client("s3")
    client.create_bucket(Bucket=BUCKET)
    for entry in client.list_objects_v2(Bucket=BUCKET).get("Contents", ()):
        client.delete_object(Bucket=BUCKET, Key=entry["Key"])
    server.requests()
    yield server
    stores._bucket.cache_clear()


@pytest.fixture(scope="module")
def positions(tmp_path_factory):
    """The token at position p is p."""
    directory = tmp_path_factory.mktemp("positions")
    write_tokens(directory, np.arange(TOKENS, dtype=np.int32), record_tokens=RECORD)
    return directory


@pytest.fixture
def remote_positions(positions):
    return upload(positions, "positions")


def upload(directory, name):
    """Copy a directory as it is."""
    client = boto3.client("s3")
    for path in sorted(directory.rglob("*")):
        if path.is_file():
            client.upload_file(str(path), BUCKET, f"{name}/{path.relative_to(directory).as_posix()}")
    return f"s3://{BUCKET}/{name}"


def batches(loader):
    return [batch.tolist() for batch in loader]


def read_ahead_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("read-ahead")]


# --- paths ---


def test_a_url_is_told_from_a_path(tmp_path):
    assert locate("s3://bucket/a/b/") == StorePath("s3://bucket/a/b")
    assert locate("gs://bucket/a") == StorePath("gs://bucket/a")
    assert locate(tmp_path) == tmp_path and locate(str(tmp_path)) == tmp_path
    path = locate("s3://bucket/a") / "b.bin"
    assert (str(path), os.fspath(path), path.name, path.key) == (*["s3://bucket/a/b.bin"] * 2, "b.bin", "a/b.bin")
    assert locate(path) == path and pickle.loads(pickle.dumps(path)) == path


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://host/a", "stores of this kind are not known: .*s3://BUCKET/DIRECTORY or gs://"),
        ("azure://a/b", "stores of this kind are not known"),
        ("s3://bucket", "names no directory in a bucket: give s3://BUCKET/DIRECTORY"),
        ("s3:///a", "names no directory in a bucket"),
        ("gs://", "names no directory in a bucket"),
        ("s3://bucket/a//b", "names no directory in a bucket"),
    ],
)
def test_a_url_that_names_nothing_is_refused(url, message):
    with pytest.raises(UserError, match=message):
        locate(url)
    with pytest.raises(UserError, match=message):
        Corpus.load(url)


def test_files_of_any_size_come_back_as_they_were_sent(tmp_path):
    directory = locate(f"s3://{BUCKET}/files")
    sent = []
    for name, size in {"empty": 0, "deep/small": 5, "large": 20_000_000}.items():  # the last in several parts
        path = tmp_path / Path(name).name
        path.write_bytes(os.urandom(size))
        (directory / name).upload(path, advance=sent.append, sha256=f"hash of {name}")
        assert (directory / name).read_bytes() == path.read_bytes()
        assert (directory / name).sha256() == f"hash of {name}"
    assert directory.sizes() == {"empty": 0, "deep/small": 5, "large": 20_000_000}
    assert sum(sent) == 20_000_005
    assert locate(f"s3://{BUCKET}/file").sizes() == {}  # not its namesake with more letters
    assert (directory / "nothing").sha256() is None
    with pytest.raises(MissingObject, match="files/nothing does not exist"):
        (directory / "nothing").read_bytes()


# --- windows ---


@pytest.mark.parametrize("num_workers", [0, 1, 2])
@pytest.mark.parametrize("start", [0, 17])
def test_a_remote_loader_reads_what_a_local_one_reads(positions, remote_positions, num_workers, start):
    """In the process, and in workers that were forked when LitData's client had been used (which must not hang)."""
    loaders = [
        WindowLoader(dataset(path), order(), accumulation=2, num_workers=workers)
        for path, workers in ((positions, 0), (remote_positions, num_workers))
    ]
    for loader in loaders:
        loader.load_state_dict({**loader.state_dict(), "step": start})
    local, remote = map(batches, loaders)
    assert local == remote and len(local) == 2 * (60 - start)
    assert loaders[1].state_dict() == loaders[0].state_dict()


def test_the_position_is_that_of_what_was_handed_out(positions, remote_positions):
    local, remote = (WindowLoader(dataset(path), order(), accumulation=2) for path in (positions, remote_positions))
    expected = batches(local)
    iterator = iter(remote)
    first = [next(iterator).tolist() for _ in range(7)]
    assert remote.state_dict()["step"] == 3  # although many more have been begun with
    rest = batches(remote)  # goes on where it stopped, while the old iterator still has its reads under way
    assert first + rest == expected


@pytest.mark.parametrize("num_workers", [0, 1])
def test_the_held_out_windows_are_the_same(positions, remote_positions, num_workers):
    def read(path, workers):
        loader = held_out_loader(dataset(path), batch_size=6, world_size=3, rank=1, num_workers=workers)
        return [(tokens.tolist(), counts.tolist()) for tokens, counts in loader]

    assert read(remote_positions, num_workers) == read(positions, 0)


def test_corpora_of_a_mixture_may_lie_in_different_places(positions, remote_positions):
    data = WindowDataset(
        [TokenStream(path, tokens=TOKENS, record_tokens=RECORD) for path in (positions, remote_positions)], LATENT
    )
    two = order(tokens=(TOKENS, TOKENS), weights=(0.5, 0.5))
    mixed = batches(WindowLoader(data, two))
    here = WindowDataset([TokenStream(positions, tokens=TOKENS, record_tokens=RECORD)] * 2, LATENT)
    assert mixed == batches(WindowLoader(here, two))


def test_only_byte_ranges_are_read_and_nothing_is_kept_on_disk(s3, remote_positions, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    monkeypatch.chdir(tmp_path)
    home = Path("~").expanduser() / ".lightning"
    before = set(home.rglob("*"))
    s3.requests()
    read = batches(WindowLoader(dataset(remote_positions), order(steps=25)))
    requests = s3.requests()
    count = sum(map(len, read))
    chunks = [request for request in requests if "chunk" in request["path"]]
    bounds = [re.fullmatch(r"bytes=(\d+)-(\d+)", request["range"]).groups() for request in chunks]
    tokens = sum(np.array(batch).size for batch in read)
    assert sum(int(last) + 1 - int(first) for first, last in bounds) == 4 * tokens  # not a byte more
    assert count <= len(chunks) <= 2 * count  # those that cross a record take two
    others = [request for request in requests if "chunk" not in request["path"]]
    assert [request["path"] for request in others if request["method"] == "GET"] == [f"/{BUCKET}/positions/index.json"]
    assert not list((tmp_path / "temporary").iterdir()) and set(home.rglob("*")) == before


def test_the_latency_is_hidden_and_the_reads_in_flight_are_bounded(s3, remote_positions):
    s3.set(latency=0.05, match=CHUNK)
    loader = WindowLoader(dataset(remote_positions), order(stages=[], steps=40))  # 320 windows, 8 a batch
    begin = time.monotonic()
    read = batches(loader)
    seconds = time.monotonic() - begin
    under_way = [request["under_way"] for request in s3.requests() if "chunk" in request["path"]]
    assert len(read) == 40
    assert READS / 2 <= max(under_way) <= READS + 1
    assert seconds < 0.05 * len(under_way) / 4  # one at a time takes at least 16 seconds


def test_the_thread_ends_with_the_loader(remote_positions):
    assert not read_ahead_threads()
    for _ in range(3):
        loader = WindowLoader(dataset(remote_positions), order())
        next(iter(loader))
        assert len([t for t in read_ahead_threads() if t.name == "read-ahead"]) == 1
        del loader
        assert not read_ahead_threads()


def test_the_samplers_batches_are_begun_early_enough_and_not_too_early():
    """Against the plain list, with workers that are dealt out batches in turn."""
    for lanes in (1, 2, 3):
        for sizes in ([8] * 50, [1] * 200, [200] * 4, [3, 5, 100, 7] * 9, [8], []):
            plain = [[(number, i) for i in range(size)] for number, size in enumerate(sizes)]
            begun = [[] for _ in range(lanes)]
            asked = [0] * lanes
            for number, request in enumerate(LookAhead(plain, lanes)):
                lane = number % lanes
                assert request.afresh == (number < lanes)
                begun[lane] += request.begin
                mine = plain[lane::lanes]
                assert begun[lane] == mine[: len(begun[lane])]
                ahead = sum(map(len, begun[lane][asked[lane] + 1 :]))
                asked[lane] += 1
                assert len(begun[lane]) >= asked[lane]
                assert ahead <= lanes * (READS + max(sizes))
                if lanes == 1:
                    assert ahead >= READS or begun[lane] == mine
            assert sum(asked) == len(plain) and [b for lane in begun for b in lane] == [
                b for lane in range(lanes) for b in plain[lane::lanes]
            ]


def test_workers_use_the_native_client_if_the_main_process_left_it_alone(s3, remote_positions, tmp_path):
    """The whole of it as a run does it: the sidecar's side in the main process, then forks."""
    s3.requests()
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\n"
        "from tests.test_windows import dataset, order\n"
        "from tst_lightning.data.stores import locate\n"
        "from tst_lightning.data.windows import WindowLoader\n"
        "locate(sys.argv[1]).sizes()\n"
        "for _ in range(2):\n"
        "    print(len(list(WindowLoader(dataset(sys.argv[1]), order(), num_workers=1))))\n"
    )
    done = subprocess.run(
        [sys.executable, script, remote_positions],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "60\n60\n", "")
    agents = {request["agent"].split("/")[0] for request in s3.requests() if "chunk" in request["path"]}
    assert agents == {"object_store"}


# --- faults in the middle ---


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("fault", ["drop", "unavailable"])
def test_what_fails_a_few_times_is_read_in_the_end(s3, positions, remote_positions, fault, num_workers):
    local = batches(WindowLoader(dataset(positions), order(steps=25)))
    s3.set(**{fault: 3}, match=CHUNK)
    assert batches(WindowLoader(dataset(remote_positions), order(steps=25), num_workers=num_workers)) == local
    statuses = [request["status"] for request in s3.requests() if "chunk" in request["path"]]
    assert statuses.count(None) == 3  # the faults came


@pytest.mark.slow
# more than the client's own tries: of LitData's native one, and of the one behind a fork, which gives up sooner
@pytest.mark.parametrize(("num_workers", "failures"), [(0, 1500), (1, 100)])
def test_an_outage_is_waited_out_as_long_as_is_said(
    s3, positions, remote_positions, num_workers, failures, monkeypatch, caplog
):
    local = batches(WindowLoader(dataset(positions), order(steps=25)))
    assert sum(windows.WAITS[:-1]) == 240
    monkeypatch.setattr(windows, "WAITS", (*[0.1] * 8, None))
    s3.set(unavailable=failures, match=CHUNK)
    loader = WindowLoader(dataset(remote_positions), order(steps=25), num_workers=num_workers)
    begin = time.monotonic()
    assert batches(loader) == local
    if num_workers == 0:
        assert "trying again in 0.1 s" in caplog.text
    monkeypatch.setattr(windows, "WAITS", (0.1, None))
    s3.set(unavailable=10**6, match=CHUNK)
    with pytest.raises(StoreError, match="does not answer as it should, also after several tries"):
        batches(WindowLoader(dataset(remote_positions), order(steps=25), num_workers=num_workers))
    assert time.monotonic() - begin < 120


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("missing", r"positions/chunk-0-2\.bin does not exist: check the name, or prepare and upload it again"),
        ("cut", r"positions/chunk-0-2\.bin is shorter than its index says: it was cut or changed: upload"),
    ],
)
def test_a_damaged_object_is_named_when_its_batch_is_due(remote_positions, num_workers, damage, message):
    client, key = boto3.client("s3"), "positions/chunk-0-2.bin"
    if damage == "missing":
        client.delete_object(Bucket=BUCKET, Key=key)
    else:
        client.put_object(Bucket=BUCKET, Key=key, Body=b"short")
    loader = held_out_loader(dataset(remote_positions), batch_size=8, num_workers=num_workers)
    read = []
    with pytest.raises(StoreError, match=message) as caught:
        read.extend(tokens for tokens, _ in loader)
    assert "\n" not in str(caught.value)
    good = 2 * 2 * RECORD // LATENT // 8  # whole batches in the chunks before it
    assert len(read) == good
    assert torch.cat(read).flatten().tolist() == list(range(good * 8 * LATENT))


def test_an_index_of_other_records_is_refused(remote_positions):
    loader = WindowLoader(dataset(remote_positions, record_tokens=RECORD * 2), order(), num_workers=0)
    with pytest.raises(UserError, match="tokens in records of 1024: prepare it again"):
        next(iter(loader))


def read_with_obstore(server, key, **changes):
    """What LitData's client meets, in the words that it is told in."""
    import obstore
    from obstore.store import S3Store

    config = {"endpoint": server.endpoint, "region": "us-east-1", "virtual_hosted_style_request": False}
    config |= {"access_key_id": "testing", "secret_access_key": "testing-secret", **changes}
    store = S3Store(BUCKET, config=config, retry_config={"max_retries": 0})
    with stores.store_errors(f"s3://{BUCKET}/{key}"):
        obstore.get_range(store, key, start=0, length=4)


@pytest.mark.parametrize("key", ["text", "416/certificate/SSLError/NoSuchKey/region-403"])
def test_the_names_of_things_and_times_are_not_taken_for_what_went_wrong(s3, key):
    client = boto3.client("s3")
    client.put_object(Bucket=BUCKET, Key=key, Body=b"0123456789")
    read_with_obstore(s3, key)
    s3.set(unavailable=1)
    with pytest.raises(stores.NoAnswer):
        read_with_obstore(s3, key)
    with pytest.raises(StoreError, match=r"access is denied \(InvalidAccessKeyId\)"):
        read_with_obstore(s3, key, access_key_id="wrong")
    s3.set(truncate=True)
    with pytest.raises(StoreError, match="is shorter than its index says"):
        read_with_obstore(s3, key)
    s3.set()
    client.delete_object(Bucket=BUCKET, Key=key)
    with pytest.raises(MissingObject):
        read_with_obstore(s3, key)


@pytest.mark.parametrize("elapsed", ["2.05704169s", "1.404s", "3.403s"])
def test_a_time_is_not_taken_for_a_status(elapsed):
    from obstore.exceptions import GenericError

    with pytest.raises(stores.NoAnswer), stores.store_errors("s3://a/b"):
        raise GenericError(f"Error performing GET https://h/a/b in {elapsed} - non-2xx status code: 503 Unavailable")


# --- a corpus ---


@pytest.fixture
def remote(text_corpus):
    return upload(text_corpus.directory, "text")


def faults(url):
    with pytest.raises(UserError) as caught:
        Corpus.load(url)
    assert "\n" not in "".join(caught.value.faults)
    return "\n".join(caught.value.faults)


def test_a_corpus_is_loaded_from_its_url(s3, remote, text_corpus):
    s3.requests()
    corpus = Corpus.load(f"{remote}/")
    assert not [request for request in s3.requests() if "chunk" in request["path"]]
    assert str(corpus.directory) == remote
    assert {**vars(corpus), "directory": None} == {**vars(text_corpus), "directory": None}
    assert corpus.tokenizer_path.read_bytes() == text_corpus.tokenizer_path.read_bytes()
    assert str(corpus.split_directory("val")) == f"{remote}/val"


@pytest.mark.parametrize("name", ["corpus.json", "tokenizer.json", "train/index.json", "val/chunk-0-0.bin"])
@pytest.mark.parametrize("damage", ["missing", "cut"])
def test_every_damaged_file_of_a_corpus_is_named(remote, name, damage):
    client = boto3.client("s3")
    if damage == "missing":
        client.delete_object(Bucket=BUCKET, Key=f"text/{name}")
    else:
        client.put_object(Bucket=BUCKET, Key=f"text/{name}", Body=b"{}")
    found = faults(remote)
    assert name in found and "tst-lightning prepare" in found


def test_wrong_keys_no_keys_no_bucket_no_directory(remote, monkeypatch, tmp_path):
    assert re.search("elsewhere.*no such directory", faults(f"s3://{BUCKET}/elsewhere"))
    assert "there is no bucket s3://nobodys at this endpoint" in faults("s3://nobodys/text")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "wrong")
    stores._bucket.cache_clear()
    assert re.search(r"access is denied \(InvalidAccessKeyId\): set AWS_ACCESS_KEY_ID", faults(remote))
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("HOME", str(tmp_path))
    stores._bucket.cache_clear()
    assert "no credentials were found: set AWS_ACCESS_KEY_ID" in faults(remote)


def test_endpoints_that_cannot_be_used(remote, server, monkeypatch, tmp_path):
    monkeypatch.setattr(stores, "ATTEMPTS", 1)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    stores._bucket.cache_clear()
    assert "is not encrypted, and LitData reads from https:// only" in faults(remote)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "https://127.0.0.1:9")
    stores._bucket.cache_clear()
    assert re.search("does not answer as it should.*127.0.0.1:9.*check the network", faults(remote))
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.endpoint)
    monkeypatch.delenv("AWS_CA_BUNDLE")
    stores._bucket.cache_clear()
    assert "certificate is not trusted: name its authority's file by both SSL_CERT_FILE and AWS_CA_BUNDLE" in faults(
        remote
    )


def test_a_store_that_recovers_is_waited_for(s3, remote):
    s3.set(unavailable=2)
    assert Corpus.load(remote).splits["train"].tokens > 0
    assert {request["status"] for request in s3.requests()} >= {None, 200}


def command(*arguments, folder):
    """Run the command in a process of its own, where it has all to itself."""
    done = subprocess.run(
        [sys.executable, "-m", "tst_lightning", *map(str, arguments)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_run_on_a_remote_corpus_is_the_run_on_the_local_one(s3, recipe, remote, tmp_path, num_workers):
    s3.set(latency=0.02)
    rows = {}
    for name, path in {"local": [], "remote": [f"--data.path={remote}"]}.items():
        status, output = command(
            "fit", "--config", recipe, *path, f"--data.num_workers={num_workers}",
            f"--trainer.default_root_dir={tmp_path / name}", folder=tmp_path,
        )  # fmt: skip
        assert status == 0, output
        lines = (tmp_path / name / "metrics.csv").read_text().splitlines()
        columns = lines[0].split(",")
        keep = [i for i, column in enumerate(columns) if "loss" in column or column == "step"]
        rows[name] = [[line.split(",")[i] for i in keep] for line in lines]
    assert rows["local"] == rows["remote"] and len(rows["local"]) > 24
    # the run goes on, is validated, and generates, with the corpus in the store
    last = sorted((tmp_path / "remote/checkpoints").glob("*.ckpt"))[-1]
    for arguments in (
        ["validate", "--config", tmp_path / "remote/config.yaml", "--ckpt_path", last],
        ["generate", last, "--max-new-tokens", 5],
    ):
        status, output = command(*arguments, folder=tmp_path)
        assert status == 0, output


@pytest.mark.slow
def test_what_goes_wrong_is_one_line(s3, recipe, remote, tmp_path):
    arguments = ["fit", "--config", recipe]
    status, output = command(*arguments, f"--data.path={remote}-not", folder=tmp_path)
    assert status == 2 and re.fullmatch(r"error: s3://corpora/text-not: no such directory: .*\n", output), output
    for num_workers in (0, 1):
        s3.set(truncate=True, match=CHUNK)
        status, output = command(
            *arguments, f"--data.path={remote}", f"--data.num_workers={num_workers}",
            f"--trainer.default_root_dir=run-{num_workers}", folder=tmp_path,
        )  # fmt: skip
        assert status == 1 and "Traceback" not in output, output
        assert re.search(r"^error: s3://corpora/text/\w+/chunk-0-0\.bin is shorter than its index says", output, re.M)


# --- publishing ---


@pytest.fixture
def finished(text_corpus, tmp_path):
    """A corpus on disk with a second, larger file."""
    return Path(shutil.copytree(text_corpus.directory, tmp_path / "finished"))


def test_a_corpus_is_published_with_its_sidecar_last(s3, finished):
    output = locate(f"s3://{BUCKET}/published")
    assert output_faults(output) == []
    s3.requests()
    publish(finished, output, progress=False)
    puts = [request["path"] for request in s3.requests() if request["method"] == "PUT"]
    assert len(puts) == len(set(puts)) == len([path for path in finished.rglob("*") if path.is_file()])
    assert puts[-1] == f"/{BUCKET}/published/corpus.json"
    assert Corpus.load(str(output)).splits == Corpus.load(finished).splits
    (fault,) = output_faults(output)
    assert "already holds a prepared corpus: choose another --output" in fault
    with pytest.raises(UserError, match="already holds"):
        publish(finished, output, progress=False)


def test_a_broken_upload_leaves_no_corpus_and_is_gone_on_with(s3, finished, monkeypatch):
    monkeypatch.setattr(stores, "ATTEMPTS", 1)
    output = locate(f"s3://{BUCKET}/published")
    before = {path: path.stat().st_mtime for path in finished.rglob("*")}
    s3.set(unavailable=1000, match="PUT .*train/chunk")
    with pytest.raises(StoreError, match=r"published/train/chunk-0-0\.bin: the store does not answer"):
        publish(finished, output, progress=False)
    assert {path: path.stat().st_mtime for path in finished.rglob("*")} == before
    there = output.sizes()
    assert "corpus.json" not in there and "train/chunk-0-0.bin" not in there
    with pytest.raises(UserError, match=r"is not a prepared directory|no such directory"):
        Corpus.load(str(output))
    # a file of another corpus, of the same size, is not taken for this one's
    other = finished.parent / "other"
    other.write_bytes(bytes((finished / "val/chunk-0-0.bin").stat().st_size))
    (output / "val/chunk-0-0.bin").upload(other, advance=lambda _: None, sha256="0" * 64)
    s3.set()
    s3.requests()
    publish(finished, output, progress=False)
    puts = {
        request["path"].removeprefix(f"/{BUCKET}/published/") for request in s3.requests() if request["method"] == "PUT"
    }
    everything = {path.relative_to(finished).as_posix() for path in finished.rglob("*") if path.is_file()}
    assert puts == everything - (set(there) - {"val/chunk-0-0.bin"})
    assert Corpus.load(str(output)).splits == Corpus.load(finished).splits


def test_a_bucket_that_cannot_be_written_to_is_told_before_the_work(monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "wrong")
    stores._bucket.cache_clear()
    (fault,) = output_faults(locate(f"s3://{BUCKET}/published"))
    assert "access is denied" in fault
    stores._bucket.cache_clear()
    (fault,) = output_faults(locate("s3://nobodys/published"))
    assert fault


@pytest.mark.slow
def test_prepare_uploads_what_it_has_made(s3, tmp_path):
    text = tmp_path / "text"
    text.mkdir()
    for number in range(20):
        (text / f"{number}.txt").write_text(f"Text number {number}.\n" * 50)
    url = f"s3://{BUCKET}/prepared"
    arguments = ["prepare", "text", "--train-tokenizer", 270, "--held-out", 0.1, "--output"]
    assert command(*arguments, "here", folder=tmp_path)[0] == 0
    s3.set(unavailable=10**6, match="PUT .*train/chunk")
    status, output = command(*arguments, url, folder=tmp_path)
    assert status == 1 and "Traceback" not in output
    assert re.search(r"train/chunk-0-0\.bin: the store does not answer.*finished corpus is kept in .*--resume", output)
    assert "corpus.json" not in locate(url).sizes()
    s3.set()
    status, output = command(*arguments, url, "--resume", folder=tmp_path)
    assert status == 0, output
    for path in (tmp_path / "here").rglob("*"):
        if path.is_file():
            assert (locate(url) / path.relative_to(tmp_path / "here").as_posix()).read_bytes() == path.read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["here", "text"]
    status, output = command(*arguments, url, folder=tmp_path)
    assert status == 2 and "already holds a prepared corpus" in output
    status, output = command("inspect", url, folder=tmp_path)
    assert status == 0 and "every chunk, token and hash is right" in output, output


@pytest.mark.slow
def test_the_benchmark_reports(tmp_path):
    script = Path(__file__).parents[1] / "benchmarks/loader.py"
    sizes = ["--length", "8", "--batch", "2", "--batches", "3", "--tokens", str(2**21), "--repeats", "3", "--remote"]
    done = subprocess.run(
        [sys.executable, script, *sizes], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert {"memory map s=1", "LitData s=4", "windows s=16", "quickstart step", "S3, 50 ms, by the clock s=16"} <= {
        re.split(r"  +", line)[0] for line in done.stdout.splitlines()
    }
    ratios = dict(part.rsplit(" ", 1) for part in done.stdout.splitlines()[-1].removeprefix("ratios: ").split(", "))
    assert "windows / LitData s=16" in ratios and all(float(value) > 0 for value in ratios.values())
    assert not list(tmp_path.iterdir())
