"""`keepstep top`: one frame at 80 columns, and a real terminal that it gives back as it was."""

from __future__ import annotations

import io
import os
import re
import select
import termios

import pytest
from rich.console import Console

from keepstep.core.goodput import Badput, Goodput
from keepstep.core.history import Event, Kind, Restart
from keepstep.steps import Epoch, EpochId, StepId, Tier
from keepstep.wire.status import RankStatus, Status, TierStatus, VolumeStatus
from keepstep_sidecar.cli.commands.top import Pace, Seen, frame, pace
from tests import warm
from tests.cli.conftest import TRAIN, Keepstep
from tests.harness import eventually

NOW = 10_000.0


def step(number: int, epoch: int = 1) -> StepId:
    return StepId(EpochId(epoch, f"{epoch:08x}"), number)


def staged(first: int, last: int, at: float, until: float, epoch: int = 1) -> Event:
    return Event(
        sequence=1, kind=Kind.STAGED, at=at, until=until, first=first, step=step(last, epoch),
        count=last - first + 1, seconds=0.002 * (last - first + 1),
    )  # fmt: skip


def test_the_time_of_a_step_is_of_the_last_minute_of_this_life() -> None:
    before = [staged(0, 900, NOW - 1000, NOW - 999)]
    slow = [staged(number, number, NOW + number, NOW + number, 2) for number in range(1, 5)]
    assert pace([*before, *slow]) == Pace(step_s=1.0, blocked_s=0.002)
    fast = [staged(5, 104, NOW + 70.0, NOW + 70.99, 2)]
    found = pace([*before, *slow, *fast])
    assert found is not None
    assert found.step_s == pytest.approx(0.01)
    apart = [staged(number, number, NOW + 100 * number, NOW + 100 * number) for number in (1, 2, 3)]
    assert pace(apart) == Pace(step_s=100.0, blocked_s=0.002)
    assert pace(before) is not None
    assert pace(apart[:1]) is pace([]) is pace([apart[0], slow[0]]) is None


def seen() -> Seen:
    restart = Restart(at=NOW - 60, detection_s=1.25, start_s=8.5, restore_s=0.75, first_step_s=0.5)
    live = Status(
        run="gpt", sidecar="1", pid=1, started_at=NOW - 3600, protocol=1,
        locked="mlock", epoch=Epoch(EpochId(3, "00000003")), committed_at=NOW - 8,
        watermarks={"memory": step(1204), "local": step(1200)},
        ranks=tuple(
            RankStatus(rank=rank, world=40, alive=rank != 1, pid=100 + rank, staged=step(1204),
                       durable=step(1200), saves=1200, skipped=2, discarded=1, blocked_s=1.2)
            for rank in range(40)
        ),
        volumes=(VolumeStatus(path="/nvme0/" + "deep/" * 30, engine="direct", used_bytes=1 << 30,
                              free_bytes=1 << 40, failed="Input/output error"),),
        depots=(TierStatus(tier=Tier.ARCHIVE, where="s3://b", backlog=7),),
        warnings=("slow \x1b[2J [red]drive[/red]",),
    )  # fmt: skip
    goodput = Goodput(
        since=0.0, productive_s=90.0, badput=Badput(wasted_progress=10.0), interruptions=2
    )
    events = [
        Event(
            sequence=1, kind=Kind.RESTARTED, at=NOW - 50, until=NOW - 50, rank=3, restart=restart
        ),
        *(staged(number, number, NOW + number / 4, NOW + number / 4) for number in range(8)),
    ]
    return Seen("gpt", live, goodput, events)


def text_of(*runs: Seen) -> str:
    from keepstep_sidecar.cli import output

    console = output.console()
    console.width, console.file = 80, io.StringIO()
    assert isinstance(console, Console)
    console.print(frame(runs, now=NOW))
    return console.file.getvalue()


def test_a_frame_has_it_all_at_80_columns() -> None:
    other = Seen("old", goodput=Goodput(since=0.0, productive_s=1.0))
    text = text_of(seen(), other, Seen("bad", trouble="no answer"))
    assert max(map(len, text.splitlines())) <= 80
    flat = re.sub(r"\s+", " ", text)
    for part in (
        "gpt: 39 of 40 trainers, epoch 3, sidecar up 1h",
        "staged 1204, committed 1200 (8s ago), 4 steps/s, 250 ms a step, saves block 2 ms",
        "memory 1204, local 1200", "archive: 7 shards wait",
        "1.00 GiB used, 1.00 TiB free; FAILED: Input/output error",
        "90.0 % of 1m40s, interrupted 2 x; lost: steps done again or torn 10s",
        "1 of 40 none 1204 1200 1200 3 1 ms", "and 24 more ranks",
        "50s ago 3 11 s 1.25 s 8.5 s 750 ms 500 ms",
        "old: not running", "bad: no answer", r"warning: slow \x1b[2J [red]drive[/red]",
    ):  # fmt: skip
        assert part in flat, f"{part}\n{text}"


def test_once_prints_one_frame_and_a_pipe_is_no_terminal(trained: Keepstep) -> None:
    for words in (("top", "--once"), ("top",), ("top", "--run", "train")):
        text = trained(*words).stdout
        assert "train: not running" in text
        assert "goodput" in text
    assert "no run 'other'" in trained("top", "--run", "other", code=2).stderr


LIVE = TRAIN.replace("checkpointer.close()", "")
LIVE += """
import pathlib, time
checkpointer.wait(5, "staged", timeout=30)
pathlib.Path("ready").touch()
while not pathlib.Path("end").exists():
    time.sleep(0.01)
"""


def read(terminal: int, until: bytes, *, so_far: bytes = b"") -> bytes:
    """What is shown, until that is."""
    text = so_far

    def more() -> bool:
        nonlocal text
        if select.select([terminal], [], [], 0)[0]:
            try:
                text += os.read(terminal, 1 << 16)
            except OSError:
                pytest.fail(f"it ended: {text!r}")
        return until in text

    eventually(more, what=lambda: f"{until!r} in {text[-3000:]!r}")
    return text


@pytest.mark.parametrize("key", [b"q", b"\x03"])
def test_a_terminal_shows_a_live_run_and_is_given_back(keepstep: Keepstep, key: bytes) -> None:
    running = keepstep.start(
        "run", "--run", "a", "--", warm.python(), keepstep.script("train.py", LIVE), "6", "-1"
    )
    eventually((keepstep.home / "ready").exists, what="step 5")
    with keepstep.on_terminal("top", "--every", "0.2") as (shown, terminal):
        before = termios.tcgetattr(terminal)
        text = read(terminal, b"staged 5")
        assert b"\x1b[?1049h" in text, "a screen of its own"
        os.write(terminal, key)
        read(terminal, b"\x1b[?1049l", so_far=text)
        assert shown.wait(30) == 0
        assert termios.tcgetattr(terminal) == before
    (keepstep.home / "end").touch()
    assert running.wait(60) == 0
    running.communicate()
