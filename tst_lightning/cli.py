"""LightningCLI for ``fit`` and ``validate``: one recipe, the phases at its top, one directory a run."""

from __future__ import annotations

import argparse
import fcntl
import logging
import os
import signal
import sys
import warnings
from contextlib import suppress
from functools import partial
from itertools import count as count_from
from pathlib import Path
from typing import Any, NoReturn

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher

from tst_lightning.callbacks.checkpoint import StepCheckpoint, checkpoint_folder_faults
from tst_lightning.callbacks.progress import RunSummary, StepProgress
from tst_lightning.callbacks.samples import Samples
from tst_lightning.callbacks.stop import GracefulStop, Stopped
from tst_lightning.callbacks.throughput import Throughput
from tst_lightning.checkpoints import (
    RECORD,
    VALIDATION_DUE,
    checkpoint_fault,
    list_checkpoints,
    newest_whole,
    read_checkpoint,
    set_aside,
)
from tst_lightning.data.datamodule import TSTDataModule
from tst_lightning.errors import UserError
from tst_lightning.loggers import MetricsCSV, TensorBoard, is_rank_zero
from tst_lightning.model import Transformer
from tst_lightning.module import ADAMW, TSTModule
from tst_lightning.non_finite import NonFiniteError
from tst_lightning.phases import Phases, PhaseSchedule
from tst_lightning.signals import LAUNCHER, SignalWatch
from tst_lightning.strategies import FSDP2Strategy  # noqa: F401 (gives it its name for trainer.strategy)


def run_trainer(arguments: list[str], signals: SignalWatch) -> int:
    """Run ``fit`` or ``validate``.

    Args:
        arguments: of the command line, the command's name first.
        signals: already at work.

    Returns:
        The exit status.

    Raises:
        UserError: with every fault in what the user gave.
    """
    _quiet()
    watch = _Watch()
    try:
        TSTCLI(_from_run_directory(arguments), signals, watch)
    except MisconfigurationException as error:
        raise UserError(str(error)) from error
    except ValueError as error:
        if watch.started or isinstance(error, (UserError, UnicodeError)):
            raise
        raise UserError(str(error)) from error  # Lightning's own word on an option, before anything was done
    except _NothingToDo as done:
        sys.stdout.write(f"{done}\n")
    except Stopped as stop:
        return int(stop.code or 0)
    except NonFiniteError as error:
        if is_rank_zero():
            sys.stderr.write(f"error: {error}\n")
        return 1
    return 0


class TSTCLI(LightningCLI):
    """LightningCLI with ``phases`` linked into the model, where the data find them, and runs that go on in place."""

    def __init__(self, args: list[str], signals: SignalWatch, *callbacks: Callback) -> None:
        self._signals = signals
        self._callbacks = callbacks
        self._newest_whole: str | None = None
        self._damaged: dict[Path, str] = {}  # later ones, and what is wrong with them
        self._start_afresh = False
        super().__init__(
            TSTModule,
            TSTDataModule,
            args=args,
            save_config_callback=KeepConfig,
            save_config_kwargs={"save_to_log_dir": False},
            seed_everything_default=0,
            parser_class=_Parser,
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,
            trainer_defaults={
                "default_root_dir": "runs/run",
                "use_distributed_sampler": False,  # ours shards the exact order
                "num_sanity_val_steps": 0,
                "check_val_every_n_epoch": None,
                "enable_model_summary": False,
                "log_every_n_steps": 10,
            },
        )

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """The two that have a meaning here."""
        return {
            "fit": {"model", "train_dataloaders", "val_dataloaders", "datamodule"},
            "validate": {"model", "dataloaders", "datamodule"},
        }

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Put the phases at the recipe's top, and checkpoints and samples beside the trainer."""
        parser.add_argument("--phases", type=Phases, default=Phases(), help="bag size and ratio, or stages")
        # jsonargparse 4.53 cannot read a tuple out of the default in the signature
        parser.set_defaults({"model.optimizer": {"class_path": "torch.optim.AdamW", "init_args": ADAMW}})
        parser.link_arguments("phases", "model.phases")
        # initialised where it ends up, see parallelise
        parser.add_instantiator(_on_meta, class_type=Transformer, subclasses=True)
        parser.add_argument(
            "--extend",
            type=int | None,
            metavar="STEPS",
            help="fit: lengthen the run to STEPS steps in all; the phases' boundaries stay, the decay moves to the end",
        )
        parser.add_lightning_class_args(StepCheckpoint, "checkpoint")
        parser.add_lightning_class_args(Samples, "samples")

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parse, without Lightning's warning that ``sys.argv`` holds arguments too: they are the same."""
        self.config = parser.parse_args(args)

    def _parse_ckpt_path(self) -> None:
        """Lightning would let what is stored in a checkpoint override the recipe: the recipe counts."""

    def before_instantiate_classes(self) -> None:
        """Turn ``last`` or a run's directory into a checkpoint file before anything is built."""
        config = self.config[self.subcommand]
        trainer = config.trainer
        if config.ckpt_path is not None and _is_run(Path(config.ckpt_path)):  # go on there
            trainer.default_root_dir, config.ckpt_path = str(Path(config.ckpt_path)), "last"
        run = Path(trainer.default_root_dir)
        folder = Path(config.checkpoint.directory or run / "checkpoints")
        checkpoints = list_checkpoints(folder)
        last = config.ckpt_path == "last"
        if last:
            whole, self._damaged = newest_whole(checkpoints)
            if checkpoints and whole is None:
                raise UserError(
                    [*self._damaged.values(), f"no checkpoint in {folder} is whole: move them away to start at step 0"]
                )
            config.ckpt_path = self._newest_whole = None if whole is None else str(whole)
        if config.ckpt_path is not None:
            _must_exist(config.ckpt_path)
        config.weights_only = True  # nothing that a checkpoint may hold is ever executed
        if self.subcommand == "validate":
            trainer.logger = False  # it would add a row to the run's log
            if is_rank_zero():
                sys.stdout.writelines(f"{fault}\n" for fault in self._damaged.values())
            config.verbose = False  # the progress says it in a line
            if config.ckpt_path is None:
                hint = "take the newest one by --ckpt_path last" if checkpoints else "name one by --ckpt_path"
                raise UserError(f"no checkpoint was chosen ({len(checkpoints)} in {folder}): {hint}")
            return
        if is_rank_zero():
            self._check_run(run, folder, checkpoints, last)
        _lengthen(config)

    def _check_run(self, run: Path, folder: Path, checkpoints: list[Path], last: bool) -> None:
        """Refuse to start where another run is, or to go on where a later part of this one would be lost."""
        config = self.config[self.subcommand]
        if faults := checkpoint_folder_faults(folder, config.ckpt_path, self._damaged):
            raise UserError(faults)
        here = [path.resolve() for path in checkpoints]
        goes_on = last or (config.ckpt_path is not None and Path(config.ckpt_path).resolve() in here)
        if not goes_on and (run / "metrics.csv").exists():
            raise UserError(
                f"{run} already holds a run: go on with it by --ckpt_path last, choose another "
                "--trainer.default_root_dir, or delete it"
            )
        if last and not checkpoints:
            sys.stdout.write(f"no checkpoint in {run} yet: starting at step 0\n")
            self._start_afresh = True

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Both logs, the progress bar, the summary and the throughput by default; ``logger: false``: no logs."""
        trainer = self.config_init[self.subcommand].trainer
        if trainer.logger in (None, True):
            trainer.logger = [MetricsCSV(trainer.default_root_dir), TensorBoard(trainer.default_root_dir)]
        given = trainer.callbacks or []
        trainer.callbacks = [*given] if isinstance(given, list) else [given]
        wanted = {RunSummary: RunSummary, Throughput: Throughput, GracefulStop: GracefulStop}
        if trainer.enable_progress_bar in (None, True):
            wanted[StepProgress] = ProgressBar
        for ours, kind in wanted.items():  # unless the recipe brings its own
            if not any(isinstance(callback, kind) for callback in trainer.callbacks):
                trainer.callbacks.append(ours())
        for callback in trainer.callbacks:
            if isinstance(callback, GracefulStop):
                callback.watch = self._signals
        trainer.callbacks += self._callbacks  # behind the bar, which must be closed before they speak
        try:
            made = super().instantiate_trainer(**kwargs)
        except TypeError as error:  # Lightning's word for some values of an option
            raise UserError(str(error)) from error
        launcher = made.strategy.launcher
        if isinstance(launcher, _SubprocessScriptLauncher):
            if not launcher.cluster_environment.creates_processes_externally:
                os.environ[LAUNCHER] = str(os.getpid())
            self._signals.before_exit.append(partial(launcher.kill, signal.SIGKILL))
        return made

    def before_fit(self) -> None:
        """Every fault before anything is written."""
        path = self.config_init[self.subcommand].ckpt_path
        checkpoint = None if path is None else self._read(path)
        self.model.check(self.trainer, self.datamodule, checkpoint)
        complete = checkpoint is not None and checkpoint[RECORD]["step"] == self.model.schedule.total_steps
        if complete and not (checkpoint or {}).get(VALIDATION_DUE):
            raise _NothingToDo(f"{path} is the end of this run: there is nothing left to train")
        if is_rank_zero():
            self._claim(Path(self.trainer.default_root_dir))

    def _read(self, path: str) -> dict[str, Any]:
        """The chosen checkpoint, held against its checksums unless it was when it was chosen."""
        if path != self._newest_whole and (fault := checkpoint_fault(Path(path))):
            raise UserError(fault)
        return read_checkpoint(path)

    def _claim(self, run: Path) -> None:
        """Make the run's directories, keep other processes out of them, and clear what a failed start has logged."""
        folder = Path(self.config_init[self.subcommand].checkpoint.directory or run / "checkpoints")
        new = [path for path in (folder, run) if not path.exists()]
        try:
            folder.mkdir(parents=True, exist_ok=True)
            run.mkdir(parents=True, exist_ok=True)
            # a lock of the process (its loader processes do not inherit it) that ends with it, however it ends
            self._lock = (run / ".lock").open("w")
            fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(f"another process is training in {run}: wait for it, or stop it") from error
        except OSError as error:
            for path in new:
                with suppress(OSError):
                    path.rmdir()
            raise UserError(f"the run's directory cannot be written ({error}): choose another one") from error
        for path, fault in self._damaged.items():
            sys.stdout.write(f"{fault}\n{path} is now {set_aside(path).name}: an earlier checkpoint is gone on from\n")
        if self._start_afresh:  # a try that reached no checkpoint
            logs = [path for path in (run / "metrics.csv", *run.glob("events.out.tfevents.*")) if path.exists()]
            if logs:
                aside = next(p for i in count_from(1) if not (p := run / f"abandoned-{i}").exists())
                aside.mkdir()
                for path in logs:
                    path.rename(aside / path.name)
                sys.stdout.write(f"what a try without a checkpoint had logged is now in {aside}\n")

    def after_fit(self) -> None:
        """Say so if the run ended early."""
        step, total_steps = self.trainer.global_step, self.model.schedule.total_steps
        if step < total_steps and is_rank_zero():
            sys.stdout.write(f"stopped at step {step} of {total_steps}: --ckpt_path last goes on\n")

    def before_validate(self) -> None:
        """Every fault before the checkpoint is loaded."""
        faults = self.datamodule.faults(self.trainer, schedule=None, vocab_size=self.model.vocab_size)
        faults = faults or self.model.validation_faults(
            self._read(self.config_init[self.subcommand].ckpt_path), self.datamodule
        )
        if faults:
            raise UserError(faults)


class _Parser(LightningArgumentParser):
    """Says what is wrong with an argument, without pages of usage before it."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Called by jsonargparse."""
        raise UserError(f"{message.strip()} (tst-lightning fit --help lists every option)") from ex


class KeepConfig(SaveConfigCallback):
    """Writes ``config.yaml`` into the run's directory, and each resume's config beside it."""

    def save_config(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Called on rank 0 when the run is set up."""
        if stage != "fit":
            return
        folder = Path(trainer.default_root_dir)
        name = "config.yaml"
        if self.config.ckpt_path is not None and (folder / name).exists():
            resumes = 1
            while (folder / f"config-resume-{resumes}.yaml").exists():
                resumes += 1
            name = f"config-resume-{resumes}.yaml"
        self.parser.save(self.config, str(folder / name), skip_none=False, overwrite=True)


class _Watch(Callback):
    """Knows whether the work has begun."""

    def __init__(self) -> None:
        self.started = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Called by Lightning as the work begins."""
        self.started = True


class _NothingToDo(Exception):
    """The run is complete."""


def _on_meta(class_type: type[Transformer], *args: Any, **kwargs: Any) -> Transformer:
    with torch.device("meta"):
        return class_type(*args, **kwargs)


def _lengthen(config: Any) -> None:
    """Give a run that is to be lengthened, or was before, its steps; the recipe keeps saying the old ones."""
    trainer, phases = config.trainer, config.phases
    steps, recipe_steps = config.extend, trainer.max_steps - phases.extension
    if recipe_steps < 1:  # refused later
        return
    so_far = trainer.max_steps
    if config.ckpt_path is not None and not phases.extension:
        saved = PhaseSchedule.from_dict(read_checkpoint(config.ckpt_path)[RECORD]["schedule"])
        so_far = max(so_far, saved.total_steps)
    if steps is None and so_far > recipe_steps and not phases.extension:
        with suppress(UserError):  # which is told later
            if Phases(**vars(phases)).schedule(recipe_steps).lengthened(so_far) == saved:
                steps = so_far
    if steps is None:
        return
    if steps < so_far:
        raise UserError(f"--extend {steps}: the run has {so_far} steps already: give a larger number, of steps in all")
    trainer.max_steps = steps
    for place in (phases, config.model.phases):
        place.extension = steps - recipe_steps


def _is_run(path: Path) -> bool:
    return (path / "checkpoints").is_dir() or (path / "config.yaml").is_file()


def _must_exist(ckpt_path: str) -> None:
    if not Path(ckpt_path).exists():
        raise UserError(f"--ckpt_path {ckpt_path}: there is no such checkpoint or run directory")


def _from_run_directory(arguments: list[str]) -> list[str]:
    """Let ``fit --ckpt_path RUN`` alone use the recipe that the run keeps."""
    given = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    given.add_argument("--ckpt_path")
    given.add_argument("-c", "--config", action="append")
    known, _ = given.parse_known_args(arguments)
    if known.ckpt_path and not known.config:
        if known.ckpt_path != "last":
            _must_exist(known.ckpt_path)
        recipe = Path(known.ckpt_path, "config.yaml")
        if recipe.is_file():
            return [arguments[0], f"--config={recipe}", *arguments[1:]]
    return arguments


def _quiet() -> None:
    """Leave what the user should read: Lightning's tips and device notes go."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    # one loader process or none is right here: a read costs less than handing it over
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    # `validate` logs nothing into the run's directory, on purpose
    warnings.filterwarnings("ignore", message=".*but have no logger configured.*")
    # Lightning 2.6.6 calls what torch 2.14 deprecates
    warnings.filterwarnings("ignore", message=".*treespec, LeafSpec.*", category=FutureWarning)
