"""Time to durable with one drive and with two, which are file systems on loop devices (root).

    python -m bench.drives [--mib 192] [--ranks 2] [--mb-per-second 100] [--rounds 3]

The kernel slows both drives to the same speed (cgroup v1, blkio.throttle), because two files on one
real drive share its speed. Without this throttle nothing is measured. Writes are those of a
sidecar: one thread for each volume, each rank's image on its own volume. The bar is 1.8 for two
ranks. One rank's image lies on one volume, so a second drive does not help a single rank.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from keepstep_sidecar.volume.volume import Volume
from keepstep_sidecar.volume.volume_set import VolumeSet
from tests.volume.images import RUN, Slot, make_layout, staged

BAR = 1.8
_THROTTLE = Path("/sys/fs/cgroup/blkio")
_DRIVES = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=192, help="of each rank's image")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--mb-per-second", type=int, default=100, help="of each drive")
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    with contextlib.ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="keepstep-drives-")))
        size = 3 * asked.ranks * asked.mib << 20
        drives = [stack.enter_context(_drive(home / f"drive-{n}", size)) for n in range(_DRIVES)]
        stack.enter_context(_throttled(drives, asked.mb_per_second * 1_000_000))
        found = measure(drives, ranks=asked.ranks, mib=asked.mib, rounds=asked.rounds)
        print(json.dumps(found | {"mb_per_second": asked.mb_per_second}, indent=1))


def measure(drives: list[Path], *, ranks: int, mib: int, rounds: int) -> dict[str, Any]:
    """Seconds until the images of all ranks are durable, on one drive and on two in turns."""
    slots = [staged(_layout(rank, ranks, mib), 1) for rank in range(ranks)]
    seconds: dict[int, list[float]] = {1: [], _DRIVES: []}
    for number in range(rounds):
        for count, times in seconds.items():
            times.append(_write(drives[:count], slots, name=f"{number}-{count}"))
    one, two = (statistics.median(times) for times in seconds.values())
    return {
        "ranks": ranks,
        "mib": mib,
        "one_drive_s": round(one, 3),
        "two_drives_s": round(two, 3),
        "gain": round(one / two, 2),
        "bar": BAR if ranks > 1 else None,
        "all_s": {str(count): [round(one, 3) for one in each] for count, each in seconds.items()},
    }


def _layout(rank: int, world: int, mib: int) -> Any:
    return make_layout(rank=rank, world=world, parameters=(mib << 20) // 8)


def _write(drives: list[Path], slots: list[Slot], *, name: str) -> float:
    volumes = VolumeSet([Volume(drive / name / RUN, run=RUN) for drive in drives])
    lanes = [ThreadPoolExecutor(1) for _ in drives]
    begun = time.perf_counter()
    writes = [
        lanes[volumes.lane(slot.control.rank)].submit(
            volumes.write, slot.view, slot.layout, slot.control
        )
        for slot in slots
    ]
    for write in writes:
        write.result()
    took = time.perf_counter() - begun
    for slot in slots:
        volumes.retire(slot.id)
    volumes.close()
    for lane in lanes:
        lane.shutdown()
    return took


@contextlib.contextmanager
def _drive(point: Path, size_bytes: int) -> Iterator[Path]:
    image = point.with_suffix(".image")
    with image.open("wb") as file:
        file.truncate(size_bytes)
    point.mkdir()
    _command("mkfs.ext4", "-q", "-F", "-m", "0", image)
    _command("mount", "-o", "loop", image, point)
    try:
        yield point
    finally:
        _command("umount", point)


@contextlib.contextmanager
def _throttled(drives: list[Path], bytes_per_second: int) -> Iterator[None]:
    """Put this process into a cgroup that limits its writes to each drive."""
    group = _THROTTLE / f"keepstep-drives-{os.getpid()}"
    home = _THROTTLE / _own_group()
    group.mkdir()
    try:
        for drive in drives:
            number = drive.stat().st_dev
            line = f"{os.major(number)}:{os.minor(number)} {bytes_per_second}"
            (group / "blkio.throttle.write_bps_device").write_text(line)
        (group / "cgroup.procs").write_text(str(os.getpid()))
        yield
    finally:
        (home / "cgroup.procs").write_text(str(os.getpid()))
        group.rmdir()


def _own_group() -> str:
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "blkio" in controllers.split(","):
            return path.lstrip("/")
    raise SystemExit("no cgroup v1 blkio controller: this cannot be measured here")


def _command(*words: str | Path) -> None:
    subprocess.run([str(word) for word in words], check=True)


if __name__ == "__main__":
    main()
