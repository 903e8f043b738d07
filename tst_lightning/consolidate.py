"""Make one file of a sharded checkpoint."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("checkpoint", type=Path, help="directory that a run under FSDP has saved (step-NNNNNNNNN.ckpt)")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="the file to make")


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return its exit status.

    Raises:
        UserError: if there is no whole sharded checkpoint, or the output exists.
    """
    from tst_lightning.sharded import consolidate_checkpoint

    output = consolidate_checkpoint(arguments.checkpoint, arguments.output)
    sys.stdout.write(f"{output}: {output.stat().st_size / 1e6:.1f} MB\n")
    return 0
