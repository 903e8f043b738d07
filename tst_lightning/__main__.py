"""The ``tst-lightning`` command: light commands at once, the Trainer's only when they are asked for."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from tst_lightning import __version__
from tst_lightning.errors import UserError
from tst_lightning.signals import SignalWatch

TRAINER_COMMANDS = {
    "fit": "train, or go on with a run (--config RECIPE; fit --help lists every option)",
    "validate": "held-out loss of a checkpoint",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns:
        The exit status: 0, 1 for a failure, 2 for something that the user can mend, 128 + signal after a signal.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the caller
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 (until the end)
    try:
        if arguments and arguments[0] in TRAINER_COMMANDS:
            with SignalWatch() as signals:
                from tst_lightning.cli import run_trainer

                return run_trainer(arguments, signals)
        return _light(arguments)
    except UserError as error:
        for fault in error.faults:
            sys.stderr.write(f"error: {fault}\n")
        return 2
    except BrokenPipeError:  # of `| head`, say
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nothing more to flush at exit
        return 1
    except (OSError, UnicodeError) as error:  # a path that cannot be read, written or even be printed; a full disk
        sys.stderr.write(f"error: {str(error).encode('ascii', 'backslashreplace').decode()}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return 130


def _light(arguments: list[str]) -> int:
    from tst_lightning import consolidate
    from tst_lightning.data import import_tokens, inspect, merge, prepare
    from tst_lightning.generation import command as generate
    from tst_lightning.report import command as report

    parser = argparse.ArgumentParser(
        prog="tst-lightning",
        description="Pre-train language models with Token Superposition Training on PyTorch Lightning.",
    )
    parser.add_argument("--version", action="version", version=f"tst-lightning {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, module in {
        "prepare": prepare,
        "merge": merge,
        "import": import_tokens,
        "inspect": inspect,
        "report": report,
        "generate": generate,
        "consolidate": consolidate,
    }.items():
        summary = (module.__doc__ or "").split("\n")[0]
        command = commands.add_parser(name, help=summary[:1].lower() + summary[1:].rstrip("."), description=summary)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    for name, summary in TRAINER_COMMANDS.items():
        commands.add_parser(name, help=summary)
    parsed = parser.parse_args(arguments)
    status: int = parsed.run(parsed)
    return status


if __name__ == "__main__":
    sys.exit(main())
