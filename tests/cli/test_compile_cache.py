"""`keepstep run` keeps what torch.compile made beside the run: for this user's next start alone."""

from __future__ import annotations

import json
import os
import shutil
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import keepstep as keepstep_library
from keepstep import compile_cache
from keepstep.directory import OpenDirectory
from keepstep.errors import StorageError, UsageError
from tests.cli.conftest import TRAIN, Keepstep
from tests.lib.training import bring_back, keep

PYTHON = sys.executable
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="gives a directory to another group")

SHOW = """
import json, os
names = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
print(json.dumps([os.environ.get(name) for name in names]))
"""

COMPILED = """
import json, os, time, torch, keepstep
from torch._dynamo.utils import counters

torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(2)), torch.nn.GELU())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
checkpointer = keepstep.Checkpointer({"model": model, "optimizer": optimizer})
at = checkpointer.restore()
compiled = torch.compile(model)
for step in range(at.step + 1 if at else 0, 4):
    begin = time.monotonic()
    compiled(torch.ones(2, 16)).sum().backward()
    if step in (0, 2):
        told = {"seconds": time.monotonic() - begin, **counters["inductor"]}
        print(json.dumps(told), flush=True)
    optimizer.step()
    optimizer.zero_grad()
    checkpointer.save(step)
    if step == 1:
        checkpointer.wait(step, "staged", timeout=60)
        os.kill(os.getpid(), 9)
checkpointer.close()
"""

ELSEWHERE = """
import json, os, sys, time, torch, keepstep
from torch._dynamo.utils import counters

torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(2)), torch.nn.GELU())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
kept = keepstep.CompileCache()
state = {"model": model, "optimizer": optimizer, "compiled": kept}
checkpointer = keepstep.Checkpointer(state)
at = checkpointer.restore()
restored = kept.state_dict()["torch_compile_cache"]
compiled = torch.compile(model)
for step in range(at.step + 1 if at else 0, 4):
    begin = time.monotonic()
    compiled(torch.ones(2, 16)).sum().backward()
    if step in (0, 2):
        seconds = time.monotonic() - begin
    optimizer.step()
    optimizer.zero_grad()
    checkpointer.save(step)
    if step == 1:
        checkpointer.wait(step, "archived", timeout=60)
        break
same = [*map(id, kept.state_dict()["torch_compile_cache"])] == [*map(id, restored)]
report = {"step": step, "same": same, "seconds": seconds, "tier": at and at.tier}
report |= counters["inductor"]
print(json.dumps(report), flush=True)
if step == 1:
    os.kill(os.getpid(), 9)
checkpointer.close()
"""

RANKS = """
import json, os, pathlib, signal, sys, threading, time, torch, keepstep
from torch._dynamo.utils import counters

rank, lives = int(os.environ["RANK"]), len(list(pathlib.Path().glob("life-*-0")))
torch.distributed.init_process_group("gloo")
torch.distributed.barrier()
pathlib.Path(f"life-{lives}-{rank}").touch()

def die_while_compiling(place):
    while not any(place.rglob("*.cpp")):
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGKILL)

if lives == 0 and rank == 1:  # the other rank may hold a lock, or wait for one
    place = pathlib.Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    threading.Thread(target=die_while_compiling, args=[place]).start()
torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(2)), torch.nn.GELU())
compiled = torch.nn.parallel.DistributedDataParallel(torch.compile(model))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
checkpointer = keepstep.Checkpointer({"model": model, "optimizer": optimizer})
at = checkpointer.restore()
for step in range(at.step + 1 if at else 0, 4):
    loss = compiled(torch.full((2, 16), 1.0 + rank)).sum()
    loss.backward()
    told = {"life": lives, "step": step, "loss": loss.item(), **counters["inductor"]}
    pathlib.Path(f"told-{rank}-{lives}-{step}").write_text(json.dumps(told))
    optimizer.step()
    optimizer.zero_grad()
    checkpointer.save(step)
    if lives == 1 and step == 1:
        checkpointer.wait(step, "staged", timeout=60)
        torch.distributed.barrier()
        if rank == 0:
            os.kill(os.getpid(), 9)
        signal.pause()
checkpointer.close()
"""


def places(keepstep: Keepstep, *options: str) -> list[str | None]:
    """Where a command of the run `show` would keep its caches."""
    script = keepstep.script("show.py", SHOW)
    found: list[str | None] = json.loads(
        keepstep("run", *options, "--", PYTHON, script).stdout.splitlines()[-1]
    )
    return found


def cache(keepstep: Keepstep, *options: str) -> Path:
    inductor, triton = places(keepstep, *options)
    assert inductor is not None
    assert triton is not None
    assert Path(inductor).parent == Path(triton).parent
    return Path(inductor).parent


@pytest.mark.timeout(180)
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs g++ on a CPU")
def test_a_restart_after_a_kill_compiles_nothing_again(keepstep: Keepstep) -> None:
    script = keepstep.script("train.py", COMPILED)
    done = keepstep("run", "--restarts", "1", "--", PYTHON, script)
    first, second = map(json.loads, done.stdout.splitlines())
    print(f"first step {first['seconds']:.2f} s, after the kill {second['seconds']:.2f} s")
    assert first["fxgraph_cache_miss"] > 0
    assert "fxgraph_cache_hit" not in first
    assert second["fxgraph_cache_hit"] == first["fxgraph_cache_miss"]
    assert "fxgraph_cache_miss" not in second
    kept = keepstep.directory / "train" / "compile-cache"
    assert list(kept.glob("*/inductor/**/*.so"))


@pytest.mark.timeout(300)
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs g++ on a CPU")
def test_a_restart_on_another_machine_finds_its_compiled_graphs_in_the_step(
    keepstep: Keepstep,
) -> None:
    artifacts()
    command = ("--", PYTHON, keepstep.script("train.py", ELSEWHERE))
    (keepstep.home / "archive").mkdir()
    archive = ("--archive", str(keepstep.home / "archive"), "--archive-every", "1")
    reports = []
    for machine in ("one", "two"):
        output, errors = keepstep.start("run", "--dir", machine, *archive, *command).communicate()
        reports.append(json.loads(output or errors))
    first, second = reports
    print(f"first step {first['seconds']:.2f} s, elsewhere {second['seconds']:.2f} s")
    assert (first["step"], second["step"], second["tier"]) == (1, 3, "archive")
    assert first["fxgraph_cache_miss"] > 0
    assert second["fxgraph_cache_hit"] == first["fxgraph_cache_miss"]
    assert "fxgraph_cache_miss" not in second
    assert (first["same"], second["same"]) == (False, True), "only what is new is added"


def artifacts() -> Any:
    return pytest.importorskip("torch.compiler._cache", reason="as torch 2.6").CacheArtifactManager


@pytest.fixture
def recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[str, str], None]]:
    """Record an artifact, as inductor does when it has found the best form of a kernel."""
    manager = artifacts()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    manager._ensure_cache_artifacts_registered()
    with manager.with_fresh_cache():
        yield lambda key, content: manager.record_artifact("autotune", key, content)


def test_a_step_holds_what_was_compiled_before_it(
    recorded: Callable[[str, str], None], tmp_path: Path
) -> None:
    kept = keepstep_library.CompileCache()
    assert kept.state_dict() == {"torch_compile_cache": []}, "nothing is compiled yet"
    recorded("aa1", "first")
    (first,) = kept.state_dict()["torch_compile_cache"]
    (again,) = kept.state_dict()["torch_compile_cache"]
    assert again is first, "nothing new"
    recorded("bb2", "second")
    again, second = kept.state_dict()["torch_compile_cache"]
    assert again is first
    assert second.numel() < first.numel() + 8, "not the first one once more"
    restored = keepstep_library.CompileCache()
    for _ in range(2):  # the second time as if the first step had not been whole
        restored.load_state_dict({"torch_compile_cache": [first, second]})
    found = {json.loads(path.read_bytes()) for path in tmp_path.rglob("*") if path.is_file()}
    assert found == {"first", "second"}, "where torch looks for them"
    recorded("aa1", "first")
    assert len(restored.state_dict()["torch_compile_cache"]) == 2, "it was restored"
    recorded("cc3", "third")
    assert len(restored.state_dict()["torch_compile_cache"]) == 3


def test_what_was_compiled_before_the_restore_is_in_the_next_step_too(
    recorded: Callable[[str, str], None],
) -> None:
    recorded("aa1", "first")
    state = keepstep_library.CompileCache().state_dict()
    recorded("bb2", "second")
    restored = keepstep_library.CompileCache()
    (own,) = restored.state_dict()["torch_compile_cache"]  # as restore() asks for it
    restored.load_state_dict(state)
    parts = restored.state_dict()["torch_compile_cache"]
    assert len(parts) == 2
    assert parts[0] is own


def test_compile_caches_beyond_the_limit_are_in_no_step(
    recorded: Callable[[str, str], None], caplog: pytest.LogCaptureFixture
) -> None:
    kept = keepstep_library.CompileCache(limit_bytes=1 << 20)
    recorded("aa1", "first")
    assert len(kept.state_dict()["torch_compile_cache"]) == 1
    recorded("bb2", "x" * (1 << 20))
    for _ in range(2):
        assert len(kept.state_dict()["torch_compile_cache"]) == 1
    assert len(caplog.messages) == 1
    assert "[compile_cache.unsaved]" in caplog.text


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.usefixtures("sidecar")
def test_a_run_may_begin_and_cease_to_keep_its_compile_cache(
    recorded: Callable[[str, str], None], compiled: bool
) -> None:
    saved = {"model": torch.nn.Linear(2, 2), "compiled": keepstep_library.CompileCache()}
    if compiled:
        recorded("aa1", "first")
    keep(saved)
    model = {"model": torch.nn.Linear(2, 2)}
    assert bring_back(model) is not None
    assert model["model"].weight.equal(saved["model"].weight)
    keep(model, step=1)
    again = {"model": torch.nn.Linear(2, 2), "compiled": keepstep_library.CompileCache()}
    assert bring_back(again) is not None


@pytest.mark.usefixtures("sidecar")
def test_a_component_that_only_resembles_a_compile_cache_is_not_left_out() -> None:
    model = {"model": torch.nn.Linear(2, 2)}
    keep({**model, "other": {"torch_compile_cache": [], "more": 1}})
    with pytest.raises(keepstep_library.MismatchError, match="other: in the checkpoint"):
        bring_back(model)


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize("foreign", [b"foreign", b""])
def test_a_compile_cache_that_torch_cannot_read_does_not_stop_a_restore(foreign: bytes) -> None:
    kept = keepstep_library.CompileCache()
    kept.load_state_dict({"torch_compile_cache": [torch.tensor(list(foreign), dtype=torch.uint8)]})
    assert kept.state_dict() == {"torch_compile_cache": []}


def test_a_compile_cache_that_cannot_be_written_does_not_stop_a_restore(
    recorded: Callable[[str, str], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    recorded("aa1", "first")
    state = keepstep_library.CompileCache().state_dict()
    (tmp_path / "file").touch()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "file" / "below"))
    keepstep_library.CompileCache().load_state_dict(state)
    assert "[compile_cache.unusable]" in caplog.text


def test_a_torch_without_portable_compile_caches_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(artifacts(), "need_serialize")
    with pytest.raises(UsageError, match="has no portable compile caches"):
        keepstep_library.CompileCache()


@pytest.mark.timeout(300)
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs g++ on a CPU")
def test_ranks_that_compile_at_once_and_are_killed_leave_caches_that_are_right(
    keepstep: Keepstep,
) -> None:
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    command = (PYTHON, *launch, keepstep.script("train.py", RANKS))
    with keepstep.start("run", "--restarts", "2", "--", *command) as process:
        assert process.wait(240) == 0
    assert not list(keepstep.home.glob("told-?-0-*")), "the first life died while it compiled"
    for rank in range(2):
        records = [json.loads(path.read_text()) for path in keepstep.home.glob(f"told-{rank}-*")]
        losses = {(line["life"], line["step"]): line["loss"] for line in records}
        assert sorted(losses) == [(1, 0), (1, 1), (2, 2), (2, 3)]
        assert [losses[at] for at in sorted(losses)] == undisturbed(rank)
        last = next(line for line in records if (line["life"], line["step"]) == (2, 3))
        assert last["fxgraph_cache_hit"] > 0
        assert "fxgraph_cache_miss" not in last


def undisturbed(rank: int) -> list[float]:
    """The losses of a rank of the same training, in one process that compiles nothing."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(2)), torch.nn.GELU())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for _ in range(4):
        losses = [model(torch.full((2, 16), 1.0 + of)).sum() for of in range(2)]
        (sum(losses) / 2).backward()
        found.append(losses[rank].item())
        optimizer.step()
        optimizer.zero_grad()
    return pytest.approx(found, rel=1e-5)


def test_the_compile_caches_are_private_to_the_user_and_have_the_same_path_at_each_start(
    keepstep: Keepstep,
) -> None:
    found = cache(keepstep)
    assert found.parent == keepstep.directory / "show" / "compile-cache"
    assert stat.S_IMODE(found.stat().st_mode) == 0o700
    assert cache(keepstep) == found


@pytest.mark.parametrize("name", ["TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"])
def test_a_cache_directory_that_the_user_set_is_not_changed(
    keepstep: Keepstep, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "/their/own")
    assert sorted(places(keepstep), key=str) == ["/their/own", None]


def test_a_compile_cache_size_of_0_disables_the_caches_and_deletes_them(keepstep: Keepstep) -> None:
    cache(keepstep)
    assert places(keepstep, "--compile-cache", "0") == [None, None]
    assert not (keepstep.directory / "show" / "compile-cache").exists()


def test_compile_caches_larger_than_the_limit_are_emptied(keepstep: Keepstep) -> None:
    file = cache(keepstep) / "inductor" / "ab" / "large.so"
    file.parent.mkdir(parents=True)
    file.write_bytes(os.urandom(2 << 20))
    assert cache(keepstep, "--compile-cache", "4Mi") in file.parents
    assert file.exists()
    assert cache(keepstep, "--compile-cache", "1Mi") in file.parents
    assert not file.exists()


def test_compile_caches_in_a_copied_run_directory_are_not_used(keepstep: Keepstep) -> None:
    theirs = cache(keepstep)
    (theirs / "inductor").mkdir()
    (theirs / "inductor" / "planted.so").write_text("hostile")
    kept = theirs.parent
    kept.rename(kept.with_name("original"))
    shutil.copytree(kept.with_name("original"), kept)  # as an archive that was unpacked
    ours = cache(keepstep)
    assert ours.parent == kept
    assert ours.name != theirs.name
    assert [path.name for path in kept.iterdir() if path.is_dir()] == [ours.name]
    assert not list(ours.rglob("planted.so"))


def test_foreign_files_in_the_compile_cache_directory_are_not_removed(keepstep: Keepstep) -> None:
    kept = cache(keepstep).parent
    (kept / "notes").mkdir()
    (kept / "notes" / "text").write_text("the user's\n")
    cache(keepstep)
    assert (kept / "notes" / "text").read_text() == "the user's\n"


def test_no_compile_cache_is_kept_in_a_directory_that_other_users_may_write_to(
    keepstep: Keepstep,
) -> None:
    keepstep.directory.mkdir()
    keepstep.directory.chmod(0o777)
    script = keepstep.script("show.py", SHOW)
    done = keepstep("run", "--", PYTHON, script)
    assert json.loads(done.stdout) == [None, None]
    assert f"other users may write to {keepstep.directory}" in done.stderr
    assert not (keepstep.directory / "show" / "compile-cache").exists()


@needs_root
@pytest.mark.root
def test_a_group_writable_directory_is_accepted_only_for_the_users_own_group(
    keepstep: Keepstep,
) -> None:
    keepstep.directory.mkdir()
    keepstep.directory.chmod(0o775)
    assert cache(keepstep).is_dir()
    os.chown(keepstep.directory, -1, 65532)
    assert places(keepstep) == [None, None]


def test_a_cache_that_others_may_write_to_is_refused(keepstep: Keepstep) -> None:
    cache(keepstep).chmod(0o770)
    done = keepstep("run", "--", PYTHON, keepstep.script("show.py", SHOW))
    assert json.loads(done.stdout) == [None, None]
    assert "is not this user's alone: move it away" in done.stderr


def test_a_run_without_steps_keeps_no_caches(keepstep: Keepstep) -> None:
    keepstep("run", "--", PYTHON, keepstep.script("train.py", TRAIN), "2", "-1")
    kept = keepstep.directory / "train" / "compile-cache"
    steps = [step["id"] for step in keepstep.json("steps")["steps"]]
    assert len(steps) > 1
    keepstep("rm", "--yes", *steps[:-1])
    assert kept.exists()
    keepstep("rm", "--yes", "--force", steps[-1])
    assert not kept.exists()


def test_a_drive_on_which_nothing_may_be_executed_is_refused(
    mounted: Callable[..., Path],
) -> None:
    drive = mounted("drive", "-t", "tmpfs", "-o", "noexec", "none")
    place = OpenDirectory.open_path(drive)
    with pytest.raises(StorageError, match=r"/caches may be executed \(noexec\)"):
        compile_cache.cache_variables(place, "caches")


# --- in a pod --------------------------------------------------------------------------------


def test_each_user_of_a_pod_gets_a_subdirectory_of_the_mounted_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.setenv(name, "")  # restored after the test
    monkeypatch.setenv(compile_cache.DIRECTORY_ENV, str(tmp_path))
    compile_cache.use_mounted_cache()
    inductor = tmp_path / str(os.geteuid()) / "inductor"
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(inductor)
    compile_cache.use_mounted_cache()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(inductor)


def test_an_unusable_cache_directory_in_a_pod_is_logged_and_does_not_stop_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv(compile_cache.DIRECTORY_ENV, str(tmp_path))
    (tmp_path / str(os.geteuid())).symlink_to(tmp_path)
    compile_cache.use_mounted_cache()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == ""
    assert "no compile cache is kept" in caplog.text
