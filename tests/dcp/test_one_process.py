"""Stock `dcp.save`, `async_save` and `load` in one process: what is kept, and what is refused."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import (
    DefaultSavePlanner,
    _EmptyStateDictLoadPlanner,
)
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import keepstep.dcp
from keepstep.client.slot import SlotMapping
from keepstep.errors import DigestError, RestoreError, UsageError
from keepstep.state.accelerator import Accelerator
from tests.harness import eventually, layout_of

# torch warns that there is no process group; to do without one is the point here.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def save(state: dict[str, Any], step: int) -> None:
    dcp.save(state, storage_writer=keepstep.dcp.StorageWriter(step=step), no_dist=True)


def load(state: dict[str, Any], *arguments: Any, **options: Any) -> None:
    reader = keepstep.dcp.StorageReader(*arguments, **options)
    dcp.load(state, storage_reader=reader, no_dist=True)


def test_a_slot_is_erased_only_after_the_device_has_reached_the_save(sidecar, monkeypatch):
    """What is queued before may be the exchange of gradients that makes the next step everybody's;
    until then the image in the slot may be the newest of all ranks."""
    calls: list[str] = []
    for owner, name in ((Accelerator, "synchronize"), (SlotMapping, "erase")):
        real = getattr(owner, name)

        def noted(self: Any, name: str = name, real: Any = real) -> None:
            calls.append(name)
            real(self)

        monkeypatch.setattr(owner, name, noted)
    save({"a": torch.ones(4)}, 1)
    writer = keepstep.dcp.StorageWriter(step=2)
    dcp.async_save({"a": torch.ones(4)}, storage_writer=writer, no_dist=True).result()
    assert calls.count("erase") == 2
    assert all(calls[at - 1] == "synchronize" for at, call in enumerate(calls) if call == "erase")


def cause(caught: pytest.ExceptionInfo[CheckpointException]) -> BaseException:
    return caught.value.failures[0][0]


def directory(sidecar: Any, step: int) -> Path:
    [found] = sidecar.root.glob(f"0*-{step:09d}")
    return found


# --- what is kept --------------------------------------------------------------------------------


def test_a_state_dict_is_rebuilt_from_the_directory_alone(sidecar, tmp_path) -> None:
    """As dcp_to_torch_save does it: the planner knows nothing but our metadata."""
    save({"a": {"b": torch.arange(4.0), "c": "text"}, "d": [torch.ones(2), 5]}, 1)
    state: dict[str, Any] = {}
    reader = keepstep.dcp.StorageReader(directory(sidecar, 1))
    planner = _EmptyStateDictLoadPlanner()
    _load_state_dict(state, storage_reader=reader, planner=planner, no_dist=True)
    assert torch.equal(state["a"]["b"], torch.arange(4.0))
    assert state["a"]["c"] == "text"
    assert torch.equal(state["d"][0], torch.ones(2))
    assert state["d"][1] == 5


def test_no_pickled_metadata_is_written(sidecar) -> None:
    save({"w": torch.ones(2)}, 1)
    assert [path.name for path in directory(sidecar, 1).iterdir()] == [
        "rank-00000-of-00001.safetensors"
    ]


def test_the_step_is_committed_when_save_returns(sidecar) -> None:
    for step in range(3):
        save({"w": torch.full((4,), float(step))}, step)
        status = sidecar.get("/v1/status")
        assert status["watermarks"]["local"]["step"] == step


def test_a_load_begins_an_epoch_that_follows_the_loaded_step(sidecar) -> None:
    for step in (1, 2):
        save({"w": torch.full((4,), float(step))}, step)
    target = {"w": torch.zeros(4)}
    load(target, step=1)
    assert target["w"][0] == 1
    save({"w": torch.full((4,), 20.0)}, 2)
    status = sidecar.get("/v1/status")
    assert status["epoch"]["parent"]["step"] == 1
    load(target)
    assert target["w"][0] == 20


def test_cached_plans_of_the_planner_are_kept_apart_by_step(sidecar) -> None:
    if "enable_plan_caching" not in DefaultSavePlanner.__init__.__code__.co_varnames:
        pytest.skip("this torch has no plan caching")
    for step in (1, 2, 3):
        dcp.save(
            {"w": torch.full((4,), float(step))},
            storage_writer=keepstep.dcp.StorageWriter(step=step),
            planner=DefaultSavePlanner(enable_plan_caching=True),
            no_dist=True,
        )
    target = {"w": torch.zeros(4)}
    load(target)
    assert target["w"][0] == 3


# --- async ---------------------------------------------------------------------------------------


def test_a_change_right_after_async_save_is_never_in_the_image(sidecar) -> None:
    state = {"w": torch.zeros(1 << 20), "count": torch.zeros(()), "list": [0]}
    writer = keepstep.dcp.StorageWriter()
    for step in range(1, 6):
        state["w"].fill_(float(step))
        state["count"].fill_(float(step))
        state["list"][0] = step
        future = dcp.async_save(state, checkpoint_id=f"step-{step}", storage_writer=writer)
        state["w"].fill_(-1.0)
        state["count"].fill_(-1.0)
        state["list"][0] = -1
        future.result(60)
        target = {"w": torch.zeros(1 << 20), "count": torch.zeros(()), "list": [0]}
        load(target, directory(sidecar, step))
        assert torch.equal(target["w"], torch.full((1 << 20,), float(step)))
        assert (target["count"].item(), target["list"]) == (step, [step])


def test_an_async_save_that_fails_before_its_write_does_not_affect_the_next_save(sidecar) -> None:
    state = {"w": torch.zeros(1000)}
    for step, value in ((1, 1.0), (2, 2.0)):
        state["w"].fill_(value)
        writer = keepstep.dcp.StorageWriter(step=step)
        dcp.async_save(state, storage_writer=writer).result(60)
    for again in (dcp.save, dcp.async_save):
        late = dcp.async_save(state, storage_writer=keepstep.dcp.StorageWriter(step=2))
        with pytest.raises(CheckpointException):
            late.result(60)
        step = 3 if again is dcp.save else 4
        state["w"].fill_(float(step))
        done = again(state, storage_writer=keepstep.dcp.StorageWriter(step=step))
        if step == 4:
            done.result(60)
        target = {"w": torch.zeros(1000)}
        load(target, directory(sidecar, step))
        assert torch.equal(target["w"], torch.full((1000,), float(step)))


def test_async_saves_that_overtake_each_other_are_never_torn(sidecar) -> None:
    state = {"w": torch.zeros(1 << 20)}
    futures = []
    for step in range(1, 7):
        state["w"].fill_(float(step))
        writer = keepstep.dcp.StorageWriter(step=step)
        futures.append(dcp.async_save(state, storage_writer=writer))
        if step == 1:
            futures[0].result(60)
    ended = [future.exception(60) for future in futures]
    assert ended[0] is None
    state["w"].fill_(9.0)
    dcp.save(state, storage_writer=keepstep.dcp.StorageWriter(step=9))

    def kept() -> list[dict]:
        """Those that stay: the newest two."""
        steps = [step for step in sidecar.get("/v1/status")["steps"] if step["path"]]
        return steps if len(steps) <= 2 else []

    for path in eventually(kept, what="the others go"):
        target = {"w": torch.zeros(1 << 20)}
        load(target, path["path"])
        assert torch.equal(target["w"], torch.full((1 << 20,), float(path["id"]["step"])))


class _Held(DefaultSavePlanner):
    """Plans only when `go` is set."""

    def __init__(self, go: threading.Event) -> None:
        super().__init__()
        self._go = go

    def create_local_plan(self) -> SavePlan:
        assert self._go.wait(60)
        return super().create_local_plan()


def test_saves_of_one_writer_that_overlap_never_mix_their_steps(sidecar) -> None:
    state, writer = {"w": torch.full((1000,), 1.0)}, keepstep.dcp.StorageWriter()
    dcp.async_save(state, checkpoint_id="step-1", storage_writer=writer).result(60)
    futures, go = {}, {2: threading.Event(), 3: threading.Event()}
    for step, event in go.items():
        state["w"].fill_(float(step))
        futures[step] = dcp.async_save(
            state, checkpoint_id=f"step-{step}", storage_writer=writer, planner=_Held(event)
        )
    for step in go:
        go[step].set()
        assert futures[step].exception(60) is None
        target = {"w": torch.zeros(1000)}
        load(target, directory(sidecar, step))
        assert target["w"].eq(float(step)).all()


def test_an_older_save_that_a_newer_one_overtook_is_refused(sidecar) -> None:
    state, go = {"w": torch.full((1000,), 1.0)}, threading.Event()
    writer = keepstep.dcp.StorageWriter()
    dcp.async_save(state, checkpoint_id="step-1", storage_writer=writer).result(60)
    late = dcp.async_save(state, checkpoint_id="step-2", storage_writer=writer, planner=_Held(go))
    save({"w": torch.full((1000,), 3.0)}, 3)
    go.set()
    assert isinstance(late.exception(60), CheckpointException)
    target = {"w": torch.zeros(1000)}
    load(target)
    assert target["w"].eq(3.0).all()
    assert not list(sidecar.root.glob("0*-000000002"))


def test_async_save_in_another_process_is_refused(sidecar) -> None:
    with pytest.raises(UsageError, match="THREAD"):
        pickle.dumps(keepstep.dcp.StorageWriter(step=1))
    assert AsyncCheckpointerType.THREAD.value


# --- what is refused -----------------------------------------------------------------------------


def test_a_broken_byte_is_an_error_that_names_tensor_and_file_and_nothing_is_loaded(
    sidecar,
) -> None:
    save({"first": torch.ones(3 << 20), "second": torch.ones(3 << 20)}, 1)
    [path] = directory(sidecar, 1).glob("*.safetensors")
    entry = layout_of(path).entries["second"]
    fd = os.open(path, os.O_RDWR)
    os.pwrite(fd, b"\xff", entry.end - 1)
    os.close(fd)
    target = {"first": torch.zeros(3 << 20), "second": torch.zeros(3 << 20)}
    with pytest.raises(CheckpointException) as caught:
        load(target, path.parent)
    error = cause(caught)
    assert isinstance(error, DigestError)
    assert "second" in str(error)
    assert str(path) in str(error)
    assert not target["first"].any()
    assert not target["second"].any()


@pytest.mark.parametrize("step_id", ["latest", "", "out/step-", "12a"])
def test_an_id_without_a_step_is_refused(step_id: str) -> None:
    with pytest.raises(UsageError, match="step"):
        keepstep.dcp.StorageWriter().reset(step_id)


def test_a_save_without_a_step_is_refused(sidecar) -> None:
    with pytest.raises(CheckpointException) as caught:
        dcp.save({}, storage_writer=keepstep.dcp.StorageWriter(), no_dist=True)
    assert "which step" in str(cause(caught))


def test_a_save_without_a_sidecar_raises_an_error(monkeypatch) -> None:
    monkeypatch.delenv("KEEPSTEP_SOCKET", raising=False)
    with pytest.raises(CheckpointException) as caught:
        save({"w": torch.ones(1)}, 1)
    assert "keepstep run" in str(cause(caught))


def test_a_load_without_a_committed_step_raises_an_error(sidecar) -> None:
    assert keepstep.dcp.latest_step() is None
    with pytest.raises(CheckpointException, match="no committed step to load"):
        load({"w": torch.ones(1)})
    save({"w": torch.ones(1)}, 7)
    assert keepstep.dcp.latest_step() == 7
    with pytest.raises(CheckpointException, match="no committed step 6"):
        load({"w": torch.ones(1)}, step=6)


def test_a_lost_committed_step_is_an_error_and_not_a_fresh_start(sidecars, monkeypatch) -> None:
    sidecar = sidecars().start()
    monkeypatch.setenv("KEEPSTEP_SOCKET", str(sidecar.socket))
    save({"w": torch.ones(1)}, 7)
    keepstep.dcp.close()
    sidecar.kill()
    for slot in sidecar.memory.rglob("*"):
        if slot.is_file():
            slot.unlink()
    [path] = directory(sidecar, 7).glob("*.safetensors")
    path.write_bytes(path.read_bytes()[:-4096] + bytes(4096))
    sidecar.start()
    with pytest.raises(RestoreError, match="step"):
        keepstep.dcp.latest_step()


def test_a_step_that_was_only_staged_is_loaded_from_memory(sidecars, monkeypatch) -> None:
    """As a Checkpointer leaves it: here its own image, which has the same names."""
    sidecar = sidecars().start("--persist-every", "1000")
    monkeypatch.setenv("KEEPSTEP_SOCKET", str(sidecar.socket))
    part = {"w": torch.full((4,), 3.0)}
    checkpointer = keepstep.Checkpointer({"part": part})
    checkpointer.restore()
    checkpointer.save(3)
    checkpointer.wait(3, "staged")
    checkpointer._saver.close()
    target = {"part.w": torch.zeros(4)}
    load(target)
    assert torch.equal(target["part.w"], part["w"])


def test_saving_without_collectives_is_refused(sidecar) -> None:
    writer = keepstep.dcp.StorageWriter(step=1)
    with pytest.raises(UsageError, match="use_collectives"):
        writer.set_up_storage_writer(True, rank=0, use_collectives=False)


def test_a_trainer_imports_neither_the_dcp_module_nor_sidecar_dependencies() -> None:
    code = (
        "import sys, keepstep, keepstep.checkpointer\n"
        "assert not {'keepstep.dcp', 'keepstep.core.ledger', 'keepstep.core.node'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
