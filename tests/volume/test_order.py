"""The order of writes, line by line: what docs/architecture.md tells, and what the code does."""

from __future__ import annotations

import re
from pathlib import Path

from keepstep_sidecar.volume.files import Engine
from keepstep_sidecar.volume.volume import Volume
from tests.volume.images import RUN, make_layout, staged, step_id
from tests.volume.powercut import Link, Note, Recorder, Rename, Resize, Sync, Unlink, Write

WRITTEN = """\
resize shard
write data
write digests
sync shard
write control
sync shard
rename .rank-00000-of-00001.safetensors.tmp to rank-00000-of-00001.safetensors
"""

STORY = f"""
link pending
sync /
link 0001.1f9c2d7a-000000001
sync pending
link .rank-00000-of-00001.safetensors.tmp
{WRITTEN}sync 0001.1f9c2d7a-000000001
durable
rename 0001.1f9c2d7a-000000001 to 0001.1f9c2d7a-000000001
sync /
sync pending
published
link retired
sync /
rename 0001.1f9c2d7a-000000001 to 0001.1f9c2d7a-000000001.1
sync retired
sync /
link spare
sync /
rename rank-00000-of-00001.safetensors to rank-00000-of-00001.safetensors
unlink 0001.1f9c2d7a-000000001.1
retired
link 0001.1f9c2d7a-000000002
sync pending
link .rank-00000-of-00001.safetensors.tmp
rename rank-00000-of-00001.safetensors to .rank-00000-of-00001.safetensors.tmp
write control
sync shard
rename .rank-00000-of-00001.safetensors.tmp to .rank-00000-of-00001.safetensors.tmp
{WRITTEN}sync 0001.1f9c2d7a-000000002
durable
"""


def test_the_order_of_writes_is_the_one_that_a_power_cut_cannot_break(tmp_path: Path) -> None:
    root = tmp_path / RUN
    root.mkdir()
    recorder = Recorder(root)
    volume = Volume(root, run=RUN, filesystem=recorder, engine=Engine.BUFFERED)
    slot, later = (staged(make_layout(rank=0, world=1, parameters=1000), step) for step in (1, 2))
    volume.write(slot.view, slot.layout, slot.control)
    recorder.note("durable")
    volume.publish(step_id(1))
    recorder.note("published")
    volume.retire(step_id(1))
    recorder.note("retired")
    volume.write(later.view, later.layout, later.control)
    recorder.note("durable")
    volume.close()
    parts = {0: "data", slot.layout.digests_begin: "digests", slot.layout.control_begin: "control"}
    assert _told(recorder, parts) == STORY.strip().splitlines()


def _told(recorder: Recorder, parts: dict[int, str]) -> list[str]:
    names = {0: "/"}
    lines = []
    for entry in recorder.log:
        if isinstance(entry, Link):
            name = re.sub(r"-\d+-\d+$", "", entry.name) if "tmp" in entry.name else entry.name
            names[entry.node] = "shard" if "tmp" in name else name
            lines.append(f"link {name}")
        elif isinstance(entry, Rename):
            old, new = (re.sub(r"tmp-.*", "tmp", end[1]) for end in (entry.source, entry.target))
            lines.append(f"rename {old} to {new}")
        elif isinstance(entry, Unlink):
            lines.append(f"unlink {entry.name}")
        elif isinstance(entry, Resize):
            lines.append(f"resize {names[entry.node]}")
        elif isinstance(entry, Write):
            lines.append(f"write {parts[entry.offset]}")
        elif isinstance(entry, Sync):
            lines.append(f"sync {names[entry.node]}")
        elif isinstance(entry, Note):
            lines.append(entry.text)
    return lines
