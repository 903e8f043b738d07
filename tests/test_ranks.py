"""Processes that train together end together."""

import os
import subprocess
import sys
import time

import pytest

from tests.runs import free_port

SCRIPT = """
import sys, time
import torch
from torch import distributed
from tst_lightning.callbacks import ranks

distributed.init_process_group("gloo")
ranks.end_process_groups_at_exit()
ranks.end_process_groups_at_exit()
ranks.EXIT_SECONDS = 2
blocked = sys.argv[1] == "blocked"
if blocked:
    distributed.destroy_process_group = lambda: time.sleep(100)  # as if another rank never came
print("done", end="")  # in the buffer
"""


@pytest.mark.slow
@pytest.mark.parametrize(("how", "status"), [("together", 0), ("blocked", 1)])
def test_a_rank_ends_even_if_the_others_do_not(how, status):
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "1", "RANK": "0"}
    started = time.monotonic()
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, how], env={**os.environ, **environment}, capture_output=True, text=True,
        timeout=120, check=False,
    )  # fmt: skip
    assert result.returncode == status, result.stderr
    assert result.stdout == "done"
    assert time.monotonic() - started < 90
