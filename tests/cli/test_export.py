"""`keepstep export`: what comes out is what was trained, or nothing does."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import safetensors.torch
import torch

from tests import warm
from tests.cli.conftest import Keepstep
from tests.harness import ROOT, eventually, flip

SCRIPT = Path(__file__).with_name("export_script.py")


def train(keepstep: Keepstep, layout: str, ranks: int, steps: int, *options: str) -> None:
    """A life of the run `export_script` that ends well."""
    launch(keepstep, [str(SCRIPT), layout, str(steps)], ranks, *options)


def launch(keepstep: Keepstep, words: list[str], ranks: int, *options: str) -> None:
    """A script on so many ranks, which ends well."""
    python = warm.python(warm.TRAINER)
    command = [python, *words]
    if ranks > 1:
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command = [python, *torchrun, *words]
    environment = {"OMP_NUM_THREADS": "1", "PYTHON_EXEC": python}
    mark = {"KEEPSTEP_TEST_CLI": str(keepstep.home)}
    with keepstep.start(
        *("run", *options, "--", *command),
        env={**os.environ, **environment, **mark},
        stderr=subprocess.STDOUT,
    ) as process:
        output, _ = process.communicate(timeout=150)
    assert process.returncode == 0, output[-3000:]


def trained(keepstep: Keepstep) -> dict[str, torch.Tensor]:
    """The state dict at the end; what is tied once, as Hugging Face has it."""
    whole: dict[str, torch.Tensor] = torch.load(keepstep.home / "trained.pt")
    assert torch.equal(whole.pop("head.weight"), whole["embedding.weight"])
    return whole


def load(folder: Path) -> dict[str, torch.Tensor]:
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return safetensors.torch.load_file(folder / "model.safetensors")
    places = json.loads(index.read_text())["weight_map"]
    loaded: dict[str, torch.Tensor] = {}
    for name in sorted(set(places.values())):
        there = safetensors.torch.load_file(folder / name)
        assert {key for key, place in places.items() if place == name} == set(there)
        loaded |= there
    return loaded


def assert_equal(first: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert first.keys() == other.keys()
    for name, tensor in first.items():
        assert tensor.dtype == other[name].dtype, name
        assert torch.equal(tensor, other[name]), name


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Keepstep]:
    """One rank that has ended after steps 0 to 5, all of them archived. Not to be changed."""
    made = Keepstep(tmp_path_factory.mktemp("alone"))
    (made.home / "archive").mkdir()
    train(made, "alone", 1, 6, "--archive", "archive", "--archive-every", "1")
    yield made
    made.end()


@pytest.mark.parametrize(
    "lives",
    [
        [("2d", 4)],
        [("alone", 1), ("fsdp", 2)],
        [("fsdp", 2), ("ddp", 3)],
    ],
    ids=lambda lives: "-then-".join(f"{layout}{ranks}" for layout, ranks in lives),
)
def test_a_step_of_any_world_size_and_layout_exports_the_same_model(
    keepstep: Keepstep, lives: list[tuple[str, int]]
) -> None:
    for number, (layout, ranks) in enumerate(lives, start=1):
        train(keepstep, layout, ranks, 3 * number)
    answer = keepstep.json("export", "latest", "--to", "out")
    assert_equal(load(keepstep.home / "out"), trained(keepstep))
    assert answer["tied"] == {"head.weight": "embedding.weight"}
    keepstep("export", str(3 * len(lives) - 1), "--to", "cut", "--shard-size", "8KB")
    assert len(list((keepstep.home / "cut").glob("model-*-of-*.safetensors"))) > 2
    assert_equal(load(keepstep.home / "cut"), trained(keepstep))


def test_an_export_to_bf16_equals_the_conversion_of_torch(alone: Keepstep, tmp_path: Path) -> None:
    alone("export", "latest", "--to", str(tmp_path / "out"), "--dtype", "bf16")
    expected = {
        name: tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor
        for name, tensor in trained(alone).items()
    }
    assert_equal(load(tmp_path / "out"), expected)


def test_export_reads_missing_shards_from_the_archive(keepstep: Keepstep) -> None:
    (keepstep.home / "archive").mkdir()
    train(keepstep, "fsdp", 2, 3, "--archive", "archive", "--archive-every", "1")
    (lost,) = keepstep.directory.glob("*/*-000000002/rank-00001-of-*")
    lost.unlink()
    for archived in (keepstep.home / "archive").glob("*/*-000000002/rank-00000-of-*"):
        flip(archived, at=archived.stat().st_size // 3)  # nobody asks for it
    (record,) = keepstep.directory.glob("*/sidecar.toml")
    settings = ("--config", str(record))
    keepstep("export", "2", "--to", "out", *settings)
    assert_equal(load(keepstep.home / "out"), trained(keepstep))
    (keepstep.home / "archive").rename(keepstep.home / "away")
    assert "mount it" in keepstep("export", "2", "--to", "no", *settings, code=1).stderr
    assert not (keepstep.home / "no").exists()


DCP = """
import torch, keepstep.dcp
import torch.distributed.checkpoint as dcp
model = torch.nn.Linear(30, 20)
optimizer = torch.optim.Adam(model.parameters())
model(torch.ones(30)).sum().backward()
optimizer.step()
state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
dcp.save(state, checkpoint_id="5", storage_writer=keepstep.dcp.StorageWriter(), no_dist=True)
torch.save(model.state_dict(), "trained.pt")
"""


def test_a_step_of_dcp_save_is_exported_too(keepstep: Keepstep) -> None:
    python = warm.python(warm.TRAINER)
    keepstep("run", "--", python, keepstep.script("save.py", DCP))
    keepstep("export", "latest", "--to", "out")
    assert_equal(load(keepstep.home / "out"), torch.load(keepstep.home / "trained.pt"))
    output = keepstep("export", "5", "--to", "state", "--only", "optimizer").stdout
    assert "param_groups.0.betas" in output
    assert "state.0.exp_avg" in load(keepstep.home / "state")


SLICES = """
import os, torch, keepstep
from torch import nn
torch.distributed.init_process_group("gloo")
rank = torch.distributed.get_rank()
torch.manual_seed(0)
slices, alike = nn.Linear(4, 2), nn.LayerNorm(4)
for one in (slices, alike):  # several parts are compared
    one.register_buffer("long", torch.arange(5 << 19, dtype=torch.float32))
slices.long[-1] += rank
slices.bias.data += rank
slices.uneven = nn.Parameter(torch.ones(1 + rank))
checkpointer = keepstep.Checkpointer(model=slices, alike=alike)
checkpointer.restore()
checkpointer.save(0)
checkpointer.close()
if rank == 0:
    torch.save([slices.state_dict(), alike.state_dict()], "trained.pt")
torch.distributed.barrier()
torch.distributed.destroy_process_group()
os._exit(0)
"""


def test_tensors_that_differ_between_ranks_are_exported_only_with_the_lowest_rank_option(
    keepstep: Keepstep,
) -> None:
    """Plain tensors of which each rank has its own: which it is, their bytes tell."""
    launch(keepstep, [str(keepstep.script("slices.py", SLICES))], 2)
    slices, alike = torch.load(keepstep.home / "trained.pt")

    output = keepstep("export", "0", "--to", "out", code=2).stderr
    assert "ranks have values of their own in bias, long, uneven;" in output
    assert "--lowest-rank" in output
    assert not [path for path in keepstep.home.iterdir() if "out" in path.name]

    answer = keepstep.json("export", "0", "--to", "out", "--lowest-rank")
    assert answer["own"] == ["bias", "long", "uneven"]
    assert_equal(load(keepstep.home / "out"), slices)
    output = keepstep("export", "0", "--to", "again", "--lowest-rank").stderr
    assert "values of their own, the lowest rank's are written" in output
    assert keepstep.json("export", "0", "--to", "same", "--only", "alike")["own"] == []
    assert_equal(load(keepstep.home / "same"), alike)


def test_a_flipped_byte_aborts_the_export_and_leaves_no_output(copied_alone: Keepstep) -> None:
    (shard,) = copied_alone.directory.glob("*/*-000000005/rank-*")
    flip(shard, at=shard.stat().st_size // 3)
    output = copied_alone("export", "5", "--to", "out", code=1).stderr
    assert "is damaged" in output
    assert shard.name in output
    assert not [path for path in copied_alone.home.iterdir() if "out" in path.name]


@pytest.fixture
def copied_alone(alone: Keepstep, tmp_path: Path) -> Keepstep:
    home = tmp_path / "copy"
    shutil.copytree(alone.home, home, symlinks=True)
    record = home / ".keepstep/export_script/sidecar.toml"
    record.write_text(record.read_text().replace(str(alone.home), str(home)))
    return Keepstep(home)


def test_export_refuses_an_existing_output_directory_and_does_not_change_it(
    alone: Keepstep, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    alone("export", "5", "--to", str(out))
    before = (out / "model.safetensors").read_bytes()
    assert "stays as it is" in alone("export", "5", "--to", str(out), code=2).stderr
    assert (out / "model.safetensors").read_bytes() == before
    (tmp_path / "empty").mkdir()
    alone("export", "5", "--to", str(tmp_path / "empty"))
    (tmp_path / "file").touch()
    assert "is a file" in alone("export", "5", "--to", str(tmp_path / "file"), code=2).stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("9999",), "no step 9999 of run"),
        (("5", "--only", "nothing"), "it has: model, optimizer"),
        (("5", "--shard-size", "0"), "no size"),
        (("5", "--dtype", "int8"), "int8"),
    ],
)
def test_wrong_arguments_print_an_error_that_names_the_fix(
    words: tuple[str, ...], message: str, alone: Keepstep, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    output = alone("export", *words, "--to", str(out), code=2).stderr
    assert message in output or "does not hold step 9999" in output
    assert not out.exists()


@pytest.mark.root
def test_a_full_disk_is_refused_before_anything_is_read(alone: Keepstep, tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=16k", "none", str(small)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("nothing may be mounted here")
    try:
        output = alone("export", "5", "--to", str(small / "out"), code=1).stderr
        assert "no space for" in output
        assert not list(small.iterdir())
    finally:
        subprocess.run(["umount", str(small)], check=True)


LARGE = """
import itertools, time, torch, keepstep
model = torch.nn.ParameterDict(
    {str(n): torch.nn.Parameter(torch.full((128, 1 << 16), float(n))) for n in range(12)}
)
checkpointer = keepstep.Checkpointer({"model": model})
checkpointer.restore()
for step in itertools.count():
    if checkpointer.save(step):
        break
    time.sleep(0.05)  # no slot of this size is made yet
checkpointer.close()
"""

_PEAK = """
import resource, sys, runpy
sys.argv = ["keepstep", *sys.argv[1:]]
try:
    runpy.run_module("keepstep_sidecar.cli", run_name="__main__")
finally:
    print("peak", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def test_memory_does_not_grow_with_the_model(keepstep: Keepstep, alone: Keepstep) -> None:
    """384 MiB take at most 128 MiB more than a model of some kilobytes: chunks that are read, and
    pages of files that were written since they were last let go."""
    script = keepstep.script("large.py", LARGE)
    keepstep("run", "--slots", "2", "--", warm.python(warm.TRAINER), script)

    def peak(home: Path, *words: str) -> int:
        paths = os.pathsep.join([str(ROOT), *sys.path])
        done = subprocess.run(
            [sys.executable, "-c", _PEAK, "export", "latest", *words],
            cwd=home,
            env={**os.environ, "PYTHONPATH": paths},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return int(done.stdout.split()[-1]) << 10

    small = peak(alone.home, "--to", str(keepstep.home / "small"))
    large = peak(keepstep.home, "--to", "large", "--shard-size", "200MB")
    assert large - small < 128 << 20
    loaded = load(keepstep.home / "large")
    assert all(bool((tensor == float(name)).all()) for name, tensor in loaded.items())
    assert len(loaded) == 12


GOING_ON = """
import time, torch, keepstep
model = torch.nn.Linear(1 << 10, 1 << 12, bias=False)
checkpointer = keepstep.Checkpointer({"model": model})
checkpointer.restore()
step = 0
while True:
    with torch.no_grad():
        model.weight.fill_(step)
    checkpointer.save(step)
    checkpointer.wait(step, "committed", timeout=60)
    step += 1
"""


def test_the_newest_step_is_exported_whole_although_steps_are_retired_meanwhile(
    keepstep: Keepstep,
) -> None:
    """Each step is on the volumes for about two others."""
    script = keepstep.script("train.py", GOING_ON)
    with keepstep.start(
        *("run", "--keep", "1", "--persist-every", "1", "--"),
        *(warm.python(warm.TRAINER), script),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        try:
            eventually(
                lambda: list(keepstep.directory.glob("train/*-*/rank-*")), what="a committed step"
            )
            for number in range(6):
                export_newest(keepstep, f"out{number}")
            assert process.poll() is None, "the training goes on"
        finally:
            process.kill()


def export_newest(keepstep: Keepstep, name: str) -> None:
    done = keepstep("export", "latest", "--to", name, "--json")
    step = int(json.loads(done.stdout)["step"].rpartition("-")[2])
    assert bool((load(keepstep.home / name)["weight"] == float(step)).all())
