"""The command as a real process, in a directory of its own; whatever it leaves is ended."""

from __future__ import annotations

import json
import os
import pty
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from keepstep_sidecar.cli.run_dir import memory_directory
from tests import warm

MARK = "KEEPSTEP_TEST_CLI"

_ON_TERMINAL = """
import fcntl, runpy, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
runpy.run_module("keepstep_sidecar.cli", run_name="__main__")
"""


class Keepstep:
    """`keepstep` in `home`; every process that descends from it carries a mark."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.prefix: tuple[str, ...] = ()
        """Words before the command's own, as of `unshare`."""

    @property
    def directory(self) -> Path:
        return self.home / ".keepstep"

    def memory(self, run: str) -> Path:
        return memory_directory(self.directory, run)

    def script(self, name: str, text: str) -> str:
        (self.home / name).write_text(text)
        return name

    def start(
        self,
        *words: str,
        via: tuple[str, ...] = ("-m", "keepstep_sidecar.cli"),
        forked: bool = False,
        **options: Any,
    ) -> subprocess.Popen[str]:
        """`forked`: also `run`, which nobody looks for, starts without its imports."""
        settings: dict[str, Any] = {
            "stdin": subprocess.DEVNULL,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
            "cwd": self.home,
            "env": {**os.environ, MARK: str(self.home)},
            "text": True,
        }
        # a run is found by its process, and ended by signals, and only the leader of a session gets
        # a terminal; whatever else is asked starts quickly
        itself = (words[0] == "run" and not forked) or "start_new_session" in options
        modules = warm.EXPORT if words[0] == "export" else warm.SIDECAR
        python = sys.executable if itself else warm.python(modules)
        return subprocess.Popen([*self.prefix, python, *via, *words], **{**settings, **options})

    @contextmanager
    def on_terminal(self, *words: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
        """The process, and the end of its terminal on which a person types."""
        master, terminal = pty.openpty()
        try:
            streams = dict.fromkeys(("stdin", "stdout", "stderr"), terminal)
            process = self.start(
                *words, via=("-c", _ON_TERMINAL), start_new_session=True, **streams
            )
            os.close(terminal)
            yield process, master
        finally:
            os.close(master)

    def __call__(
        self, *words: str, code: int | None = 0, input: str | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run to the end; the exit code must be `code`, unless that is None."""
        piped = subprocess.DEVNULL if input is None else subprocess.PIPE
        with self.start(*words, stdin=piped) as process:
            out, err = process.communicate(input, timeout=90)
        if code is not None:
            assert process.returncode == code, f"{words} -> {process.returncode}\n{out}\n{err}"
        assert "Traceback" not in err, err
        return subprocess.CompletedProcess(words, process.returncode, out, err)

    def json(self, *words: str, code: int = 0) -> Any:
        return json.loads(self(*words, "--json", code=code).stdout)

    def family(self) -> list[psutil.Process]:
        """Live processes that carry the mark."""
        return [process for process in psutil.process_iter() if _marked(process, str(self.home))]

    def sidecars(self) -> list[psutil.Process]:
        return [process for process in self.family() if "keepstep_sidecar" in words_of(process)]

    def sidecar(self) -> psutil.Process:
        (sidecar,) = self.sidecars()
        return sidecar

    def kill(self) -> None:
        """All of them. Some end by themselves as soon as another one is gone."""
        for process in self.family():
            with suppress(psutil.NoSuchProcess):
                process.kill()

    def end(self) -> None:
        self.kill()
        psutil.wait_procs(self.family(), timeout=10)
        for home in self.directory.glob("*/"):
            shutil.rmtree(self.memory(home.name), ignore_errors=True)


def words_of(process: psutil.Process) -> list[str]:
    """Its command line; nothing for one that has ended."""
    try:
        return process.cmdline()
    except psutil.Error:  # it ended meanwhile
        return []


def _marked(process: psutil.Process, mark: str) -> bool:
    try:
        return process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


LISTENER = """
import pathlib, signal, sys, time
got = []
def handle(number, frame):
    got.append(number)
    part = pathlib.Path("part")
    part.write_text(" ".join(map(str, got)))
    part.rename("got")
for name in ("SIGINT", "SIGTERM", "SIGUSR1"):
    signal.signal(getattr(signal, name), handle)
pathlib.Path("ready").touch()
while not pathlib.Path("end").exists():
    time.sleep(0.01)
sys.exit(3)
"""

TRAIN = """
import os, sys
import torch
import keepstep

steps, fail_at = int(sys.argv[1]), int(sys.argv[2])
torch.manual_seed(0)
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.Adam(model.parameters())
checkpointer = keepstep.Checkpointer({"model": model, "optimizer": optimizer})
at = checkpointer.restore()
print("from", at.step if at else None, flush=True)
for step in range(at.step + 1 if at else 0, steps):
    model(torch.randn(4, 64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    checkpointer.save(step)
    if step == fail_at:
        checkpointer.wait(step, "staged", timeout=30)
        os.kill(os.getpid(), 9)
checkpointer.close()
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Keepstep]:
    """A run `train` that has ended well with steps 4 and 5 committed. Not to be changed."""
    made = Keepstep(tmp_path_factory.mktemp("trained"))
    made("run", "--", warm.python(), made.script("train.py", TRAIN), "6", "-1")
    yield made
    made.end()


@pytest.fixture
def copied(trained: Keepstep, tmp_path: Path) -> Keepstep:
    """A copy of `trained` to damage: volumes are plain directories that can be moved."""
    home = tmp_path / "copy"
    shutil.copytree(trained.home, home, symlinks=True)
    record = home / ".keepstep" / "train" / "sidecar.toml"
    record.write_text(record.read_text().replace(str(trained.home), str(home)))
    return Keepstep(home)
