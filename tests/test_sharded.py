"""Sharded checkpoints: nothing in them is executed, damage is found, and one file can be made of each."""

import os
import pickle
import shutil

import pytest
import torch

from tests.conftest import STEPS, SWITCH
from tests.runs import logged, run, run_ranks
from tests.test_parallel import close
from tst_lightning import UserError
from tst_lightning.checkpoints import checkpoint_fault, newest_whole, read_checkpoint
from tst_lightning.sharded import consolidate_checkpoint

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def trained(recipe, tmp_path_factory):
    """A run of two processes under FSDP2 that keeps all its checkpoints."""
    folder = tmp_path_factory.mktemp("sharded")
    statuses, outputs = run_ranks("fit", f"--config={recipe}", "--checkpoint.keep=-1", folder=folder, strategy="fsdp2")
    assert statuses == [0, 0], outputs
    return folder / "run"


@pytest.fixture
def checkpoint(trained, tmp_path):
    return shutil.copytree(trained / f"checkpoints/step-{SWITCH:09d}.ckpt", tmp_path / "step-000000012.ckpt")


class Evil:
    def __reduce__(self):
        return os.system, ("touch executed",)


def test_one_file_goes_on_as_the_shards_do(recipe, trained, checkpoint, tmp_path):
    (tmp_path / "one/checkpoints").mkdir(parents=True)
    file = tmp_path / "one/checkpoints/step-000000012.ckpt"
    status, output = run("consolidate", checkpoint, "--output", file, folder=tmp_path)
    assert (status, output.split(":")[0]) == (0, str(file))
    assert os.listdir(file.parent) == [file.name]
    saved = read_checkpoint(file)
    assert saved["tst_lightning"]["step"] == SWITCH
    assert set(saved["optimizer_states"][0]["state"]) == set(range(len(saved["state_dict"])))
    status, output = run(
        "fit", f"--config={recipe}", "--trainer.default_root_dir=one", f"--ckpt_path={file}", folder=tmp_path
    )
    assert status == 0, output
    close(logged(tmp_path / "one"), [row for row in logged(trained) if int(row["step"]) > SWITCH])

    status, output = run("consolidate", checkpoint, "--output", recipe, folder=tmp_path)
    assert (status, "exists already" in output) == (2, True)
    status, output = run("generate", checkpoint, folder=tmp_path)
    assert status == 2
    assert f"tst-lightning consolidate {checkpoint} --output FILE" in output
    status, output = run("consolidate", recipe, "--output", "other.ckpt", folder=tmp_path)
    assert (status, "is no sharded checkpoint" in output) == (2, True)


def test_the_metadata_cannot_have_anything_executed(checkpoint, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (checkpoint / ".metadata").write_bytes(pickle.dumps(Evil()))
    assert "asks for posix.system, which no checkpoint needs" in checkpoint_fault(checkpoint)
    with pytest.raises(UserError, match="which no checkpoint needs"):
        consolidate_checkpoint(checkpoint, tmp_path / "out.ckpt")
    assert os.listdir(tmp_path) == [checkpoint.name]


def test_nor_can_a_value_beside_the_tensors(checkpoint, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with (checkpoint / ".metadata").open("rb") as file:
        metadata = pickle.load(file)
    index, place = next(
        (index, place) for index, place in metadata.storage_data.items() if index.fqn.endswith("groups.0.betas")
    )
    torch.save(Evil(), tmp_path / "evil")
    evil = (tmp_path / "evil").read_bytes()
    with (checkpoint / place.relative_path).open("ab") as file:
        place.offset, place.length = file.tell(), file.write(evil)
    (tmp_path / "evil").unlink()
    with (checkpoint / ".metadata").open("wb") as file:
        pickle.dump(metadata, file)
    assert f"{index.fqn} cannot be read without executing it" in checkpoint_fault(checkpoint)
    assert os.listdir(tmp_path) == [checkpoint.name]


def cut(checkpoint):
    path = checkpoint / "__1_0.distcp"
    os.truncate(path, path.stat().st_size // 2)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut, "__1_0.distcp is cut short"),
        (lambda checkpoint: (checkpoint / "__0_0.distcp").unlink(), "__0_0.distcp is missing"),
        (lambda checkpoint: (checkpoint / ".metadata").unlink(), "no .metadata in the directory|FileNotFoundError"),
        (lambda checkpoint: (checkpoint / ".metadata").write_bytes(b""), "not a whole checkpoint"),
        (lambda checkpoint: (checkpoint / ".metadata").write_bytes(pickle.dumps([])), "holds something else"),
        (lambda checkpoint: (checkpoint / "meta.pt").unlink(), "not a whole checkpoint"),
    ],
)
def test_damage_is_found_before_anything_is_loaded(damage, message, trained, checkpoint, tmp_path):
    assert checkpoint_fault(checkpoint) is None
    damage(checkpoint)
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(checkpoint_fault(checkpoint))
    before = shutil.copytree(trained / "checkpoints/step-000000010.ckpt", tmp_path / "step-000000010.ckpt")
    assert newest_whole([before, checkpoint])[0] == before
    with pytest.raises(UserError):
        consolidate_checkpoint(checkpoint, tmp_path / "out.ckpt")
    assert not (tmp_path / "out.ckpt").exists()


def test_a_trainer_of_ones_own_refuses_it_too(trained, checkpoint, tmp_path):
    """Elsewhere than on the command line, before PyTorch reads anything of it."""
    (checkpoint / ".metadata").write_bytes(pickle.dumps(Evil()))
    status, output = run(
        "validate", f"--config={trained / 'config.yaml'}", f"--ckpt_path={checkpoint}", folder=tmp_path
    )
    assert (status, "which no checkpoint needs" in output) == (2, True)
    assert not (tmp_path / "executed").exists()


def test_what_is_written_in_the_background_is_what_was_trained(recipe, tmp_path):
    """Every checkpoint, though the weights change while it is written."""
    folders = {}
    for asynchronous in ("false", "true"):
        folder = folders[asynchronous] = tmp_path / asynchronous
        folder.mkdir()
        statuses, outputs = run_ranks(
            "fit", f"--config={recipe}", "--checkpoint.keep=-1", "--checkpoint.every_n_steps=1",
            f"--checkpoint.asynchronous={asynchronous}", folder=folder, strategy="fsdp2",
        )  # fmt: skip
        assert statuses == [0, 0], outputs
    assert logged(tmp_path / "true/run") == logged(tmp_path / "false/run")
    names = sorted(os.listdir(tmp_path / "false/run/checkpoints"))
    assert names == sorted(os.listdir(tmp_path / "true/run/checkpoints"))
    assert len(names) == STEPS
    for name in names[::5]:
        one, other = (
            read_checkpoint(consolidate_checkpoint(folder / "run/checkpoints" / name, folder / name))
            for folder in folders.values()
        )
        for weights in one["state_dict"]:
            assert torch.equal(one["state_dict"][weights], other["state_dict"][weights])
        torch.testing.assert_close(one["optimizer_states"], other["optimizer_states"], rtol=0, atol=0)


@pytest.mark.parametrize("asynchronous", ["false", "true"])
def test_a_disk_that_is_full_is_one_clear_line(asynchronous, recipe, tmp_path):
    statuses, outputs = run_ranks(
        "fit", f"--config={recipe}", "--trainer.callbacks+=tests.test_stop.SmallDisk",
        f"--checkpoint.asynchronous={asynchronous}", folder=tmp_path, strategy="fsdp2",
    )  # fmt: skip
    assert statuses == [1, 1], outputs
    assert "Traceback" not in "".join(outputs)
    assert "could not be saved (" in outputs[0]
    assert "make room" in outputs[0]
    assert not [name for name in os.listdir(tmp_path / "run/checkpoints") if name.endswith(".tmp")]
