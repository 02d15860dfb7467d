"""Trains adapters over a frozen base: `train.py STEPS OUT` restores, trains up to STEPS steps, and
saves each after it has appended `step loss` to OUT."""

from __future__ import annotations

import sys
from pathlib import Path

import keepstep
from tests.frozen.models import made, train


def main() -> None:
    steps, out = int(sys.argv[1]), Path(sys.argv[2])
    model, optimizer = made()
    checkpointer = keepstep.Checkpointer(
        {"model": model, "optimizer": optimizer}, strict=True, frozen_once=True
    )
    at = checkpointer.restore()
    for step in range(at.step + 1 if at else 0, steps):
        (loss,) = train(model, optimizer)
        with out.open("a") as file:
            file.write(f"{step} {loss!r}\n")
        checkpointer.save(step)
    checkpointer.close()


if __name__ == "__main__":
    main()
