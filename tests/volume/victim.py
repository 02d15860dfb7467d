"""A process that uses a volume until a fault kills it; it says what was promised to it.

`python -m tests.volume.victim ROOT`, with KEEPSTEP_FAULTS in the environment.
"""

from __future__ import annotations

import sys
from pathlib import Path

from keepstep.steps import Epoch, EpochId, shard_name
from keepstep_sidecar.history import MachineHistory
from keepstep_sidecar.volume.history_file import HistoryFile
from keepstep_sidecar.volume.volume import Volume
from tests.volume.images import RUN, empty_slot, load, make_layout, staged, step_id


def main(root: Path) -> None:
    volume = Volume(root, run=RUN)
    volume.save_record(volume.record.with_added_epochs(Epoch(EpochId(1, "1f9c2d7a"))))
    print("recorded", flush=True)
    for step in (1, 2):
        for rank in range(2):
            slot = staged(make_layout(rank=rank), step)
            volume.write(slot.view, slot.layout, slot.control)
            print(f"durable {rank} {step}", flush=True)
        volume.publish_step(step_id(step))
        print(f"published {step}", flush=True)
    path = volume.root / str(step_id(2)) / shard_name(0, 2)
    load(volume, path, empty_slot(make_layout()))
    print("retiring", flush=True)
    volume.delete_step(step_id(1))
    over = staged(make_layout(), 3)  # written over rank 0's shard of step 1
    volume.write(over.view, over.layout, over.control)
    print("durable 0 3", flush=True)
    history = MachineHistory()
    HistoryFile(volume.root / "history.jsonl", run=RUN).append(history.all(), history.before)
    print("losing", flush=True)
    volume.quarantine_file(path, "test")
    volume.delete_step(step_id(2), reuse=False)
    print("done", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
