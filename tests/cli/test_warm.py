"""`keepstep run --warm`: the next life is forked from a process that has imported torch."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.cli.conftest import LISTENER, TRAIN, Keepstep, words_of
from tests.harness import eventually

PYTHON = sys.executable
WARM = ("run", "--run", "a", "--restarts", "5", "--warm")

STARTS = """
import os, sys
life = len(open("lives").readlines()) if os.path.exists("lives") else 0
print("torch" in sys.modules, file=open("lives", "a"))
"""


def lives(keepstep: Keepstep) -> list[str]:
    return (keepstep.home / "lives").read_text().split()


def test_every_warm_start_has_torch_imported_and_resumes_from_memory(keepstep: Keepstep) -> None:
    keepstep.script("train.py", STARTS + TRAIN)
    done = keepstep(*WARM, "--", PYTHON, "train.py", "6", "3")
    assert done.stdout.splitlines() == ["from None", "from 3"]
    assert lives(keepstep) == ["True", "True"]
    assert "cold" not in done.stderr
    assert keepstep.family() == []


RANKS = """
import os, sys, time, torch, torch.distributed as dist
import keepstep

dist.init_process_group("gloo")
rank = dist.get_rank()
os.write(1, f"{rank} {there}\\n".encode())  # at once, as two write to one pipe
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
checkpointer = keepstep.Checkpointer({"model": model})
at = checkpointer.restore()
begin = at.step + 1 if at else 0
for step in range(begin, 8):
    checkpointer.save(step)
    checkpointer.wait(step, "staged", timeout=60)
    if step == 3 and begin == 0 and rank == 1:
        os.kill(os.getpid(), 9)
    dist.barrier()
checkpointer.close()
dist.destroy_process_group()
"""


def test_torchrun_and_its_workers_start_warm(keepstep: Keepstep) -> None:
    text = "import sys\nthere = 'torch' in sys.modules\n" + RANKS
    torchrun = str(Path(PYTHON).with_name("torchrun"))
    words = (torchrun, "--standalone", "--nproc-per-node", "2", keepstep.script("ddp.py", text))
    with keepstep.start(*WARM, "--", *words) as running:
        out, err = running.communicate(timeout=120)
    assert running.returncode == 0, err
    started = sorted(line.split() for line in out.splitlines())
    assert started == [["0", "True"]] * 2 + [["1", "True"]] * 2
    assert "the command failed with 1; restart 1 of 5; it can go on from step 3" in err
    assert "committed: step 7 of epoch 2" in err
    assert "cold" not in err
    assert keepstep.family() == []


def test_starts_are_cold_after_a_fork_server_died_until_a_new_one_is_ready(
    keepstep: Keepstep,
) -> None:
    keepstep.script("train.py", STARTS + "open(f'at {life}', 'w').close()\nsys.stdin.read()")
    words = (*WARM[:-3], "--restarts", "1000", "--warm", "--", PYTHON, "train.py")
    with keepstep.start(*words, stdin=subprocess.PIPE) as running:
        eventually((keepstep.home / "at 0").exists)
        kill(keepstep, "keepstep.warm.server")
        killed = 0
        while killed == 0 or lives(keepstep)[killed] == "False":
            kill(keepstep, "train.py")
            killed += 1
            eventually((keepstep.home / f"at {killed}").exists)
        _, err = running.communicate("", timeout=90)
    assert running.returncode == 0, err
    assert lives(keepstep)[:2] == ["True", "False"]
    assert err.count("a cold start this time: the fork server has died") == 1
    importing = err.count("a cold start this time: the fork server is still importing")
    assert err.count("cold start") == 1 + importing


def find(keepstep: Keepstep, word: str) -> list[psutil.Process]:
    """Processes with this word, but not `keepstep run` itself."""
    found = [(process, words_of(process)) for process in keepstep.family()]
    return [
        process for process, words in found if word in words and "keepstep_sidecar.cli" not in words
    ]


def kill(keepstep: Keepstep, word: str) -> None:
    (process,) = find(keepstep, word)
    process.send_signal(signal.SIGKILL)


@pytest.mark.parametrize(
    ("options", "command", "reason"),
    [
        (
            (),
            ("sh", "-c", "true"),
            "only `python FILE`, `python -m` and torchrun can start warm, not /",
        ),
        (
            (),
            (PYTHON, "-c", "1"),
            "only `python FILE`, `python -m` and torchrun can start warm, not /",
        ),
        (("--preload", "no_such"), (PYTHON, "train.py"), "module no_such cannot be imported"),
    ],
)
def test_a_command_that_cannot_start_warm_starts_cold_and_prints_the_reason(
    keepstep: Keepstep, options: tuple[str, ...], command: tuple[str, ...], reason: str
) -> None:
    keepstep.script("train.py", "")
    done = keepstep(*WARM, *options, "--", *command)
    assert f"starts are cold, not warm: {reason}" in done.stderr


def test_ctrl_c_on_a_terminal_reaches_the_command_and_not_the_fork_server(
    keepstep: Keepstep,
) -> None:
    script = keepstep.script("listener.py", f"line = input()\n{LISTENER}")
    words = ("run", "--run", "a", "--warm", "--", PYTHON, script)
    with keepstep.on_terminal(*words) as (running, terminal):
        os.write(terminal, b"hello\n")
        eventually(lambda: (keepstep.home / "ready").exists(), within_s=90)
        os.write(terminal, b"\x03")
        eventually((keepstep.home / "got").exists)
        assert find(keepstep, "keepstep.warm.server")
        (keepstep.home / "end").touch()
        assert running.wait(60) == 3
        assert (keepstep.home / "got").read_text() == str(int(signal.SIGINT))
    eventually(lambda: keepstep.family() == [] or keepstep.sidecars() == keepstep.family())
