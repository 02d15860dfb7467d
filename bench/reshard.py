"""Restores into another world: planning at scale, and 2 GiB of four ranks into two.

python -m bench.reshard --plan             how planning grows with the ranks that saved
python -m bench.reshard --bytes 2147483648 --directory DIR
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from array import array
from pathlib import Path

from bench.reshard_lives import measure

_TENSORS = 2000
_WORLDS = (256, 1024, 4096)


def plan(world: int, tensors: int) -> tuple[float, float, int]:
    """Seconds and MiB to plan for one of `world` // 2 ranks, and the pieces of that plan.

    The layouts are those of a 2-D mesh: rows over `world` / 8 ranks, columns over 8. They are
    simulated as the index holds them after all headers were read.
    """
    import torch

    from keepstep.restore.boxes import Box, Index, Saved
    from keepstep.restore.plan import Want, make

    torch.set_num_threads(1)
    before = _peak_mib()
    columns, rows = 8, world // 8
    shape = (rows * 16 + 3, columns * 64)
    rank = torch.arange(world)
    height = -(-shape[0] // rows)
    top = ((rank // columns) * height).clamp(max=shape[0])
    size = (shape[0] - top).clamp(max=height)
    boxes = [top, (rank % columns) * 64, size, torch.full_like(rank, 64)]
    found = {}
    for number in range(tensors):
        name = f"model.layers.{number}.weight"
        begin = torch.full_like(rank, 4096 * (1 + number))
        numbers = torch.stack([rank, begin, *boxes], dim=1)
        found[name] = Saved(name, "F32", shape, array("q", numbers.numpy().tobytes()))
    index = Index(world=world, tensors=found)
    target = -(-shape[0] // (rows // 2))
    wants = [Want(name, Box((target, 0), (target, 128))) for name in found]
    begun = time.perf_counter()
    made = make(wants, index, rank=1, nearness=[2] * world)
    return time.perf_counter() - begun, _peak_mib() - before, len(made.columns)


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _plans() -> None:
    print("ranks   tensors      boxes   pieces   seconds   MiB beyond torch")
    for world in _WORLDS:
        # each in its own process, because a process's peak never goes down
        command = [sys.executable, "-m", "bench.reshard", "--plan-one", str(world)]
        subprocess.run(command, check=True)


def _plan_one(world: int) -> None:
    seconds, mib, pieces = plan(world, _TENSORS)
    print(
        f"{world:5} {_TENSORS:9} {world * _TENSORS:10} {pieces:8} {seconds:9.2f} {mib:9.0f}"
        f"   (process: {_peak_mib():.0f})"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plan", action="store_true")
    parser.add_argument("--plan-one", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--bytes", type=int, default=2 << 30)
    parser.add_argument("--directory", type=Path)
    arguments = parser.parse_args()
    if arguments.plan_one:
        _plan_one(arguments.plan_one)
    elif arguments.plan:
        _plans()
    else:
        with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
            for name, value in measure(arguments.bytes, Path(directory)).items():
                print(f"{name:24} {value:8.2f}")


if __name__ == "__main__":
    main()
