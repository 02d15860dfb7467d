"""`keepstep status --watch`: the status again while it changes, on a terminal and in a pipe."""

from __future__ import annotations

import os
import select
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests import warm
from tests.cli.conftest import TRAIN, Keepstep
from tests.harness import eventually

LIVE = TRAIN.replace("checkpointer.close()", "")
LIVE += """
import pathlib, time
while not pathlib.Path("end").exists():
    time.sleep(0.01)
    if pathlib.Path("more").exists():
        pathlib.Path("more").unlink()
        checkpointer.save(6)
"""


class Watching:
    """A process whose output is a file."""

    def __init__(self, process: subprocess.Popen[str], printed: Path) -> None:
        self.process, self._printed = process, printed

    @property
    def text(self) -> str:
        return self._printed.read_text()

    def shows(self, part: str) -> None:
        eventually(lambda: part in self.text, what=lambda: f"{part!r} in {self.text!r}")

    @property
    def blocks(self) -> int:
        return self.text.count("sidecar ")

    def end(self) -> None:
        self.process.send_signal(signal.SIGINT)
        assert self.process.wait(30) == 0
        assert "Aborted" not in self.text


@contextmanager
def watching(keepstep: Keepstep, *words: str) -> Iterator[Watching]:
    path = keepstep.home / "printed"
    with path.open("w") as file:
        process = keepstep.start("status", "--watch", *words, stdout=file, stderr=file)
    try:
        yield Watching(process, path)
    finally:
        process.kill()
        process.wait()


@contextmanager
def live_run(keepstep: Keepstep) -> Iterator[None]:
    script = keepstep.script("train.py", LIVE)
    running = keepstep.start("run", "--run", "a", "--", warm.python(), script, "6", "-1")
    eventually(lambda: "step 5" in keepstep("status", code=None).stdout, what="step 5")
    yield
    (keepstep.home / "end").touch()
    assert running.wait(60) == 0
    running.communicate()


def test_status_watch_writes_one_block_to_a_pipe_for_each_change(keepstep: Keepstep) -> None:
    with live_run(keepstep):
        eventually(
            lambda: (keepstep.json("status")["committed"] or {}).get("step") == 5,
            what="step 5 is committed",
        )
        with watching(keepstep) as shown:
            shown.shows("step 5 of epoch 1")
            (keepstep.home / "more").touch()
            shown.shows("step 6 of epoch 1")
            eventually(lambda: "step 6 of epoch 1 (memory, local)" in shown.text)
            assert shown.blocks <= 5  # of the step that is staged, and then durable
            assert "\x1b" not in shown.text
            shown.end()


def test_status_watch_prints_an_error_and_continues_when_the_run_disappears(
    copied: Keepstep,
) -> None:
    record = copied.directory / "train" / "sidecar.toml"
    with watching(copied, "--run", "train") as shown:
        shown.shows("step 5 of epoch 1")
        record.rename(record.with_suffix(".aside"))
        shown.shows("error: ")
        record.with_suffix(".aside").rename(record)
        eventually(lambda: shown.blocks == 2, what=lambda: shown.text)
        shown.end()
    assert "no run 'other'" in copied("status", "--watch", "--run", "other", code=2).stderr


def test_status_watch_refreshes_a_terminal_until_ctrl_c(trained: Keepstep) -> None:
    with trained.on_terminal("status", "--watch") as (process, terminal):
        text = b""

        def read() -> bytes:
            nonlocal text
            if select.select([terminal], [], [], 0)[0]:
                text += os.read(terminal, 1 << 16)
            return text

        # the same again, though nothing changed: ages are shown
        eventually(lambda: read().count(b"\x1b[2J") >= 2, what=lambda: repr(text))
        os.write(terminal, b"\x03")
        assert process.wait(30) == 0
        assert b"Aborted" not in read()
