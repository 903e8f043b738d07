"""The command line as a user meets it."""

import csv
import fcntl
import hashlib
import json
import os
import pty
import re
import shutil
import signal
import struct
import subprocess
import sys
import termios
import time

import pytest
import torch
import yaml

from tests.runs import logged, run
from tst_lightning.__main__ import main


def fit(recipe, folder, *arguments):
    return run("fit", "--config", recipe, *arguments, folder=folder)


def test_the_summary_says_what_is_about_to_happen_and_nothing_alarming_is_printed(recipe, tmp_path):
    status, output = fit(recipe, tmp_path)
    assert status == 0, output
    for line in (
        r"network +Transformer, 12\.8k parameters \(12,848\)",
        r"corpus +.*stdlib: \d+k tokens in 11 documents, \d\.\d+k held out",
        r"superposition +steps 0-11: 12 steps on bags of 4, 6\.14k data tokens",
        r"recovery +steps 12-23: 12 steps on plain tokens, 1\.54k data tokens",
        r"in all +7\.68k data tokens, 0\.04 epochs",
        r"results +run",
        r"step 12: the superposition phase \(bags of 4\) ends, recovery \(plain tokens\) begins",
        r"step 24 of 24: recovery \(plain tokens\), loss 5\.\d+, 7\.68k data and 3\.07k latent tokens",
        r"step 24: held-out loss 5\.\d+ nats a token, perplexity \d+",
    ):
        assert re.search(line, output), (line, output)
    assert not re.search("warn|deprecat|error|traceback|INFO", output, re.IGNORECASE), output
    names = {path.name.split(".")[0] for path in (tmp_path / "run").iterdir()}
    assert names == {"config", "metrics", "run", "events", "checkpoints", ""}  # the last is .lock


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--phases.bag_size=5"], "bag size 5 does not divide data.unit_windows=48"),
        (["--phases.ratio=1.5"], "ratio=1.5 must lie in [0, 1]"),
        (["--phases.stages=[{bag_size: 2, ratio: 0.1}]"], "both given: keep one form"),
        (["--phases.bags=5"], "phases.bags"),
        (["--model.warmup_steps=30"], "warmup_steps=30"),
        (["--model.weighting=steep"], "steep"),
        (["--model.optimizer=torch.optim.Nothing"], "torch.optim.Nothing"),
        (["--model.network.init_args.config.hidden_size=15"], "hidden_size=15 is not a multiple"),
        (["--model.network.init_args.config.vocab_size=300"], "network has 300 rows"),
        (["--data.path=nowhere"], "nowhere: no such directory"),
        (["--data.global_batch_size=3"], "data.global_batch_size=3 is not a multiple of 2"),
        (["--data.latent_length=9000"], "less than one window of 9000"),
        (["--trainer.limit_train_batches=3"], "set trainer.max_steps"),
        (["--trainer.fast_dev_run=true"], "set trainer.max_steps"),
        (["--trainer.max_steps=0"], "at least one optimiser step"),
        (["--ckpt_path=nowhere"], "no such checkpoint or run directory"),
        (["--trainer.accelerator=foo"], "foo"),
        (["--trainer.devices=-5"], "should be an int > 0"),
        (["--checkpoint.keep=0"], "checkpoint.keep=0"),
        (["--data.latent_length=1"], "data.latent_length=1 must be at least 2"),
        (["--checkpoint.directory=/proc/x"], "cannot be written"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_mistake_costs_nothing_and_leaves_nothing(arguments, expected, recipe, tmp_path):
    status, output = fit(recipe, tmp_path, *arguments)
    assert status == 2, output
    assert expected in output and "Traceback" not in output, output
    assert not (tmp_path / "run").exists()


def test_faults_come_all_at_once(recipe, tmp_path):
    status, output = fit(recipe, tmp_path, "--phases.bag_size=5", "--model.warmup_steps=99", "--data.seed=1")
    assert status == 2 and "bag size 5" in output and "warmup_steps=99" in output


def test_any_optimiser_and_the_default_one(recipe, tmp_path):
    status, output = fit(
        recipe, tmp_path, "--model.optimizer=torch.optim.SGD", "--model.optimizer.lr=0.1",
        "--model.optimizer.momentum=0.9", "--trainer.default_root_dir=sgd",
    )  # fmt: skip
    assert status == 0, output
    optimizer = yaml.safe_load((tmp_path / "sgd/config.yaml").read_text())["model"]["optimizer"]
    assert optimizer["class_path"] == "torch.optim.SGD" and optimizer["init_args"]["momentum"] == 0.9
    status, output = fit(recipe, tmp_path, "--model.optimizer.lr=0.002")
    assert status == 0, output
    optimizer = yaml.safe_load((tmp_path / "run/config.yaml").read_text())["model"]["optimizer"]
    assert optimizer["class_path"] == "torch.optim.AdamW"
    assert optimizer["init_args"]["lr"] == 0.002 and optimizer["init_args"]["betas"] == [0.9, 0.95]


def test_bf16_mixed_trains_to_about_the_same(recipe, tmp_path):
    losses = {}
    for precision in ("32-true", "bf16-mixed"):
        status, output = fit(
            recipe, tmp_path, f"--trainer.precision={precision}", f"--trainer.default_root_dir={precision}"
        )
        assert status == 0, output
        with (tmp_path / precision / "metrics.csv").open(newline="") as file:
            losses[precision] = [float(row["val/loss"]) for row in csv.DictReader(file) if row["val/loss"]]
    assert losses["bf16-mixed"] == pytest.approx(losses["32-true"], rel=5e-3)
    assert losses["bf16-mixed"] != losses["32-true"]


def test_an_older_checkpoint_is_not_gone_on_from_where_newer_ones_would_be_lost(recipe, tmp_path):
    assert fit(recipe, tmp_path, "--checkpoint.keep=-1")[0] == 0
    older = "run/checkpoints/step-000000005.ckpt"
    status, output = fit(recipe, tmp_path, f"--ckpt_path={older}")
    assert status == 2 and "step-000000024.ckpt" in output and "gone further" in output
    whole = (tmp_path / "run/metrics.csv").read_bytes()
    rows = logged(tmp_path / "run")
    status, output = fit(recipe, tmp_path, f"--ckpt_path={older}", "--trainer.default_root_dir=fork")
    assert status == 0, output
    assert (tmp_path / "run/metrics.csv").read_bytes() == whole
    assert logged(tmp_path / "fork") == [row for row in rows if int(row["step"]) > 5]


def test_a_run_that_is_not_there_is_named(tmp_path):
    status, output = run("fit", "--ckpt_path=runs/nope", folder=tmp_path)
    assert (
        status == 2 and output.strip() == "error: --ckpt_path runs/nope: there is no such checkpoint or run directory"
    )


def test_a_moved_run_goes_on(recipe, tmp_path):
    assert fit(recipe, tmp_path, "--trainer.default_root_dir=whole")[0] == 0
    arguments = ["--trainer.callbacks+=tests.runs.KillAt", "--trainer.callbacks.step=17"]
    assert fit(recipe, tmp_path, *arguments)[0] == -signal.SIGKILL
    (tmp_path / "run").rename(tmp_path / "moved")
    status, output = fit(recipe, tmp_path, "--ckpt_path=moved")
    assert status == 0, output
    assert logged(tmp_path / "moved") == logged(tmp_path / "whole")
    assert not (tmp_path / "run").exists()


def test_the_checkpoint_loads_into_a_bare_network(recipe, tmp_path):
    from tst_lightning import Transformer, TransformerConfig

    assert fit(recipe, tmp_path)[0] == 0
    checkpoint = torch.load(tmp_path / "run/checkpoints/step-000000024.ckpt", weights_only=True)
    network = Transformer(TransformerConfig.from_dict(checkpoint["tst_lightning"]["network"]))
    network.load_state_dict({k.removeprefix("network."): v for k, v in checkpoint["state_dict"].items()})


@pytest.mark.parametrize("arguments", [[], ["nothing"], ["report"], ["prepare"]], ids=str)
def test_usage(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    assert "usage: tst-lightning" in capsys.readouterr().err


@pytest.mark.slow
def test_fit_help_lists_the_phases(tmp_path):
    status, output = run("fit", "--help", folder=tmp_path)
    assert status == 0 and "--phases.bag_size" in output and "--checkpoint.every_n_steps" in output


@pytest.mark.slow
def test_a_terminal_shows_a_bar_and_ctrl_c_says_how_to_go_on(recipe, tmp_path):
    """A real pseudo-terminal and a real Ctrl-C, in the middle of the run."""
    parent, child = pty.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 120, 0, 0))
    command = [sys.executable, "-m", "tst_lightning", "fit", "--config", str(recipe), "--trainer.max_steps=100000"]
    process = subprocess.Popen(
        command, stdin=child, stdout=child, stderr=child, cwd=tmp_path, start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # Ctrl-C reaches its own terminal only
    )  # fmt: skip
    os.close(child)
    output, deadline, interrupted = b"", time.monotonic() + 120, False
    while time.monotonic() < deadline:
        try:
            output += os.read(parent, 4096)
        except OSError:  # the other end is closed
            break
        if not interrupted and b"superposition s=4|" in output:
            os.write(parent, b"\x03")
            interrupted = True
    assert process.wait(timeout=60) == 130
    text = output.decode(errors="replace")
    assert re.search(r"superposition s=4\|.*\| \d+/100000, .* left, loss \d+\.\d+ data \S+ latent \S+", text), text
    assert "--ckpt_path last goes on from" in text and "Traceback" not in text, text


def test_faults_of_callbacks_come_with_all_others_before_anything_is_written(recipe, tmp_path):
    throughput = ["--trainer.callbacks+=tst_lightning.Throughput", "--trainer.callbacks.peak_flops=-1"]
    prompts = f'--samples.prompts=["{"x y " * 40}"]'
    status, output = fit(recipe, tmp_path, prompts, *throughput, "--trainer.val_check_interval=3")
    assert status == 2 and "Traceback" not in output, output
    for fault in ("samples.prompts: 'x y", "peak_flops=-1", "trainer.val_check_interval=3"):
        assert fault in output, (fault, output)
    assert not (tmp_path / "run").exists()


def test_a_second_process_keeps_out_of_a_run(recipe, tmp_path):
    (tmp_path / "run").mkdir()
    with (tmp_path / "run/.lock").open("w") as lock:
        fcntl.lockf(lock, fcntl.LOCK_EX)
        status, output = fit(recipe, tmp_path, "--ckpt_path=last")
        assert status == 2 and "another process is training in run" in output, output
        assert not (tmp_path / "run/metrics.csv").exists()
    assert fit(recipe, tmp_path, "--ckpt_path=last")[0] == 0


def test_a_start_without_a_checkpoint_loses_no_log(recipe, tmp_path):
    assert fit(recipe, tmp_path)[0] == 0
    whole, rows = (tmp_path / "run/metrics.csv").read_bytes(), logged(tmp_path / "run")
    status, output = fit(recipe, tmp_path, "--ckpt_path=last", "--checkpoint.directory=elsewhere")
    assert status == 0 and "is now in run/abandoned-1" in output, output
    assert (tmp_path / "run/abandoned-1/metrics.csv").read_bytes() == whole
    assert logged(tmp_path / "run") == rows


def test_a_run_that_ends_early_says_so(recipe, tmp_path):
    status, output = fit(recipe, tmp_path, "--trainer.max_time=00:00:00:00")
    assert status == 0 and re.search(r"stopped at step \d+ of 24: --ckpt_path last goes on", output), output


def test_validate_says_what_does_not_fit(recipe, tmp_path, text_corpus):
    assert fit(recipe, tmp_path)[0] == 0

    def validate(*arguments):
        status, output = run("validate", "--config", recipe, *arguments, folder=tmp_path)
        assert status == 2 and "Traceback" not in output, output
        return output

    assert "--ckpt_path last" in validate()
    assert "network.hidden_size was 16" in validate(
        "--ckpt_path=last", "--model.network.init_args.config.hidden_size=32"
    )
    torch.save([1, 2], tmp_path / "list.ckpt")
    assert "list.ckpt was not saved by a TST run" in validate("--ckpt_path=list.ckpt")

    other = tmp_path / "other"
    shutil.copytree(text_corpus.directory, other)
    sidecar = json.loads((other / "corpus.json").read_text())
    tokenizer = (other / "tokenizer.json").read_bytes() + b"\n"
    (other / "tokenizer.json").write_bytes(tokenizer)
    sidecar["tokenizer_sha256"] = hashlib.sha256(tokenizer).hexdigest()
    (other / "corpus.json").write_text(json.dumps(sidecar))
    assert "data.tokenizer_sha256 was" in validate("--ckpt_path=last", f"--data.path={other}")


@pytest.mark.parametrize(
    ("status", "arguments"),
    [(2, ["report", "a" * 300]), (1, ["prepare", "a" * 300, "--output", "x", "--train-tokenizer", "300"])],
    ids=["report", "prepare"],
)
def test_a_path_that_the_system_refuses(status, arguments, capsys):
    assert main(arguments) == status
    assert "File name too long" in capsys.readouterr().err


@pytest.mark.slow
def test_sigterm_is_no_success(recipe, tmp_path):
    command = [sys.executable, "-m", "tst_lightning", "fit", "--config", str(recipe), "--trainer.max_steps=100000"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=tmp_path, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert process.stdout is not None
    for line in process.stdout:
        if "held-out loss" in line:
            process.terminate()
            break
    output = process.stdout.read()
    assert process.wait(timeout=60) == 128 + signal.SIGTERM, output
    assert "--ckpt_path last goes on from" in output and "Traceback" not in output, output
