"""Ray Train on two nodes, of which one loses its worker, is lost, or is to go."""

from __future__ import annotations

import functools
import hashlib
import json
import re
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from safetensors import safe_open

from tests.frameworks.conftest import Lives, assert_same, drawn, output_of, result
from tests.frameworks.ray_train import nodes

pytestmark = pytest.mark.timeout(600)  # Ray looks every 20 s which nodes there are


def _done(training: Lives, home: Path, *, code: int = 0, **settings: Any) -> str:
    """What is said by a training in the folder `kept`."""
    command = training.command("kept", settings, 1)
    start = functools.partial(subprocess.Popen, command, cwd=home, env=training.variables())
    return output_of(start, home / "training.log", code=code, timeout_s=500)


def test_training_resumes_bit_equal_after_a_killed_worker_and_lost_shared_memory(lives, tmp_path):
    training = lives("ray_train.py")
    plain = training.undisturbed(ranks=2)
    kill = drawn(range(5, 25))
    with TemporaryDirectory(dir="/dev/shm") as another_filesystem:
        message = _done(training, tmp_path, kill=kill, storage=another_filesystem)
    # the step before may still be on its way into memory
    restored = rf"keepstep: restored step ({kill[0] - 1}|{kill[0] - 2}) of epoch 1"
    assert re.search(restored, message), message[-5000:]
    assert_same(plain, tmp_path / "kept", kills=1, ranks=2)
    assert message.count("run 'two-nodes' stopped") == 2, "sidecars outlive the workers"
    assert "Ray gets no checkpoint" in message
    assert not (tmp_path / "kept" / "reported").exists()

    before = _steps_on_drives(tmp_path / "kept")
    message = _done(training, tmp_path, code=1, shm=0)
    node = re.escape(nodes(tmp_path / "kept")[1])
    refused = rf"UsageError: on node {node}: .*no slots can be kept in shared memory \(/dev/shm/"
    assert re.search(refused, message), message[-5000:]
    assert _steps_on_drives(tmp_path / "kept") == before, "nothing is lost"


def test_workers_use_the_sidecar_that_their_pod_has(lives):
    """As where keepstep's operator injected one: they have its socket, and `dir` is left alone."""
    training = lives("ray_train.py")
    plain = training.undisturbed(ranks=2)
    kept, message = training.kept(kill=drawn(range(5, 25)))
    assert "keepstep: restored step" in message
    assert_same(plain, kept, kills=1, ranks=2)
    assert not any((kept / node).exists() for node in nodes(kept))
    assert not (kept / "reported").exists(), "Ray gets metrics alone"


def test_training_continues_at_the_new_world_size_when_a_node_is_lost_and_returns(lives, tmp_path):
    """Bit by bit as a training whose worlds change at the same steps, handed over by torch.save."""
    training = lives("ray_train.py")
    (lose,) = drawn(range(8, 25))
    message = _done(training, tmp_path, lose=lose)
    kept = tmp_path / "kept"
    begun = [json.loads(line) for line in (kept / "lives").read_text().splitlines()]
    assert [world for world, _ in begun] == [2, 1, 2]
    # rank 0 goes on from step `lose`, where the other one stopped, or from the step before
    first, second = begun[1][1], begun[2][1]
    assert lose <= first <= lose + 1 < second
    parts = [(2, 0, first), (1, first, second), (2, second, second + 15)]
    for number, (world, begin, end) in enumerate(parts):
        lost = f"rank 0 goes on from what other ranks saved of step {number:04d}"
        plain = training.undisturbed(ranks=world, part=[begin, end], random=lost not in message)
    for rank in (0, 1):
        where = [(begin, end) for world, begin, end in parts if world > rank]
        for (begin, end), life, same in zip(
            where, _lives(kept, rank), _lives(plain, rank), strict=True
        ):
            done = {step: loss for step, loss in life.items() if step < end}
            assert done.keys() | {lose} >= set(range(begin, end)), "all but where a node was lost"
            assert done == {step: same[step] for step in done}
        assert result(kept, rank) == result(plain, rank)
    _assert_reported(kept)


def test_a_preemption_notice_makes_the_steps_of_a_node_durable(lives, tmp_path):
    training = lives("ray_train.py")
    (notice,) = drawn(range(8, 25))
    archive = tmp_path / "archive"
    archive.mkdir()
    rarely = {"KEEPSTEP_PERSIST_EVERY": "1000000", "KEEPSTEP_ARCHIVE": str(archive)}
    _done(training, tmp_path, notice=notice, runtime_env={"env_vars": rarely})
    newest = json.loads((tmp_path / "kept" / "reported").read_text())[-1]
    assert sorted(path.name for path in Path(newest).iterdir()) == [
        *("rank-00000-of-00002.safetensors", "rank-00001-of-00002.safetensors", "step.json")
    ], "the last step, as it was archived"
    for node in nodes(tmp_path / "kept"):
        log = (tmp_path / "kept" / node / "two-nodes" / "sidecar.log").read_text()
        events = map(json.loads, log.splitlines())
        flushed = next(event["steps"] for event in events if event["event"] == "flush.finished")
        assert max(int(name[-9:]) for name in flushed) >= notice


def _lives(folder: Path, rank: int) -> list[dict[int, str]]:
    """The losses of each process, by step."""
    found: dict[int, dict[int, str]] = {}
    for line in (folder / f"losses-{rank}").read_text().splitlines():
        step, loss, pid = json.loads(line)
        found.setdefault(pid, {})[step] = loss
    return list(found.values())


def _assert_reported(folder: Path) -> None:
    """Ray has steps as they were trained, also those that keepstep itself has deleted since."""
    *places, newest = map(Path, json.loads((folder / "reported").read_text()))
    trained = dict(map(json.loads, (folder / "weights").read_text().splitlines()))
    assert len(places) == 4
    assert places[-1] == newest
    assert newest.name.removeprefix("checkpoint_") == [*trained][-1]
    for place in places:
        files = sorted(place.iterdir())
        assert len(files) == int(files[0].stem[-5:]), "the shards of all ranks"
        with safe_open(files[0], "pt") as shard:
            weight = shard.get_tensor("model.0.weight")
        assert weight.tolist() == trained[place.name.removeprefix("checkpoint_")]
    links = [file.stat().st_nlink for place in places for file in place.iterdir()]
    assert {1, 2} == set(links), "of the older ones no file is left in the run, of the newest all"


def _steps_on_drives(folder: Path) -> dict[str, str]:
    files = [path for node in nodes(folder) for path in (folder / node / "two-nodes").glob("0*/*")]
    return {str(file): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
