"""`keepstep archive` and `keepstep run --archive`, as a user meets them."""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp

from keepstep_sidecar.config.sidecar import ArchiveConfig
from keepstep_sidecar.volume.volume import Volume
from tests import warm
from tests.archive.conftest import Bucket, commit, running, write_step
from tests.cli.conftest import TRAIN, Keepstep
from tests.harness import flip
from tests.volume.images import RUN, step_id


@pytest.fixture
def archived(local: Volume, archive_dir: Path) -> Path:
    """Steps 10 and 20 of two ranks in a directory."""
    fill(ArchiveConfig(url=str(archive_dir), every=1), local)
    return archive_dir


def fill(config: ArchiveConfig, local: Volume, **image: int) -> None:
    async def scenario() -> None:
        async with running(config) as remote_tier:
            for step in (10, 20):
                commit(remote_tier, write_step(local, step, **image))
            assert await remote_tier.drain(timeout_s=30)

    asyncio.run(scenario())


def test_ls_lists_steps_and_names_their_problems(keepstep: Keepstep, archived: Path) -> None:
    (archived / RUN / str(step_id(10)) / "rank-00001-of-00002.safetensors").unlink()
    shown = keepstep("archive", "ls", "--archive", str(archived)).stdout
    assert "all 2" in shown
    assert "damaged" in shown
    assert "rank-00001-of-00002.safetensors is missing" in shown
    steps = keepstep.json("archive", "ls", "--archive", str(archived), "--run", RUN)["steps"]
    assert [(step["step"], step["complete"]) for step in steps] == [(10, False), (20, True)]


def test_ls_removes_no_file_of_a_writer(keepstep: Keepstep, archived: Path) -> None:
    for place in (archived / RUN / str(step_id(10)), archived / RUN):
        hidden = place / ".step.json.tmp-0123abcd"
        hidden.write_text("another machine's")
        os.utime(hidden, (0, 0))
    before = sorted(archived.rglob("*"))
    assert "damaged" not in keepstep("archive", "ls", "--archive", str(archived)).stdout
    assert sorted(archived.rglob("*")) == before


def test_verify_reads_every_byte_and_names_the_damaged_chunk(
    keepstep: Keepstep, archived: Path
) -> None:
    where = ("--archive", str(archived))
    assert "every digest is right" in keepstep("archive", "verify", *where).stdout
    flip(archived / RUN / str(step_id(20)) / "rank-00000-of-00002.safetensors", 3 * 4096)
    output = keepstep("archive", "verify", "20", *where, code=1).stderr
    assert "rank-00000-of-00002.safetensors" in output
    assert "chunk 0" in output
    assert keepstep.json("archive", "verify", *where, code=1)["verified"] is False
    assert "every digest is right" in keepstep("archive", "verify", "10", *where).stdout


def test_pull_resumes_after_an_interruption_and_keeps_no_damaged_byte(
    keepstep: Keepstep, local: Volume, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(bucket.config(), local, parameters=3 << 20)
    where = ("--archive", f"s3://{bucket.name}/runs", "--archive-endpoint", bucket.proxy.endpoint)
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    target = keepstep.home / "restored"
    bucket.proxy.faults.flip = 1 << 20  # every chunk comes damaged
    output = keepstep("archive", "pull", "20", str(target), *where, code=1).stderr
    assert "is damaged" in output
    growing = target / f".{step_id(20)}.pulling"
    assert not (target / str(step_id(20))).exists()
    shutil.copy(shard(local, 20, 0), growing / "rank-00000-of-00002.safetensors")
    flip(growing / "rank-00000-of-00002.safetensors", 20 << 20)
    bucket.proxy.faults.flip, bucket.proxy.faults.seen = None, []
    keepstep("archive", "pull", "20", str(target), *where)
    for rank in range(2):
        pulled = target / str(step_id(20)) / f"rank-0000{rank}-of-00002.safetensors"
        assert pulled.read_bytes() == shard(local, 20, rank).read_bytes()
    reads = [line for line in bucket.proxy.faults.seen if "rank-00000" in line]
    assert len(reads) == 3, "header, table with control page, and the one damaged chunk"
    assert "exists already" in keepstep("archive", "pull", "20", str(target), *where, code=1).stderr


def shard(local: Volume, step: int, rank: int) -> Path:
    return local.root / "pending" / str(step_id(step)) / f"rank-0000{rank}-of-00002.safetensors"


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("ls",), 2, "no run is kept"),
        (("ls", "--archive", "s3://"), 2, "names no bucket"),
        (("ls", "--archive", "{dir}/absent"), 1, "mount it"),
        (("pull", "99", "out", "--archive", "{dir}"), 2, "does not hold step 99"),
    ],
)
def test_wrong_arguments_print_an_error_that_names_the_fix(
    words: tuple[str, ...], code: int, message: str, keepstep: Keepstep, archived: Path
) -> None:
    words = tuple(word.format(dir=archived) for word in words)
    assert message in keepstep("archive", *words, code=code).stderr


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_a_run_whose_machine_was_lost_resumes_from_its_archive(
    keepstep: Keepstep, archive_dir: Path
) -> None:
    """And stock readers read what it left there, without us."""
    script = keepstep.script("train.py", TRAIN)
    run = ("run", "--archive", str(archive_dir), "--archive-every", "2", "--", warm.python())
    assert "from None" in keepstep(*run, script, "7", "-1").stdout
    steps = keepstep.json("archive", "ls", "--archive", str(archive_dir))["steps"]
    assert [step["step"] for step in steps if step["complete"]][-1] == 6
    keepstep("stop", code=None)
    shutil.rmtree(keepstep.directory)
    assert "from 6" in keepstep(*run, script, "9", "-1").stdout

    newest = Path(
        archive_dir,
        "train",
        keepstep.json("archive", "ls", "--archive", str(archive_dir))["steps"][-1]["id"],
    )
    (file,) = newest.glob("*.safetensors")
    stored = safetensors.torch.load_file(file)
    target = {"model.weight": torch.zeros(64, 64)}
    dcp.load(target, storage_reader=dcp.HuggingFaceStorageReader(str(newest)), no_dist=True)
    assert torch.equal(target["model.weight"], stored["model.weight"])


def test_a_step_that_the_script_waits_for_is_archived_outside_the_archive_interval(
    keepstep: Keepstep, archive_dir: Path
) -> None:
    script = keepstep.script("train.py", TRAIN.replace(".close()", f".wait(2, 'archived'){CLOSE}"))
    run = ("run", "--archive", str(archive_dir), "--archive-every", "500", "--", warm.python())
    keepstep(*run, script, "3", "-1")
    steps = keepstep.json("archive", "ls", "--archive", str(archive_dir))["steps"]
    assert [step["step"] for step in steps if step["complete"]] == [0, 2]


CLOSE = "\ncheckpointer.close()"
