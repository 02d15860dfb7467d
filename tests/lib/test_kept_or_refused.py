"""Whatever can be kept is kept; whatever cannot is refused at `restore()`, by name: not by the log
of a night's run, and never by the end of the process."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from collections import namedtuple

import pytest
import torch
from torch import nn
from torch.masked import masked_tensor
from torch.testing._internal.two_tensor import TwoTensor

import keepstep
from keepstep import copying


def two():
    return TwoTensor(torch.arange(4.0), torch.ones(4))


def freed():
    tensor = torch.ones(1 << 20)
    tensor.untyped_storage().resize_(0)
    return tensor


def shrunk():
    tensor = torch.ones(1 << 20)[8:]
    tensor.untyped_storage().resize_(64)
    return tensor


def quantized():
    with pytest.warns(UserWarning, match="deprecated"):
        return torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8)


def masked():
    with pytest.warns(UserWarning, match="prototype"):
        return masked_tensor(torch.ones(2), torch.tensor([True, False]))


def around(weight):
    model = nn.Linear(4, 4)
    model.weight = nn.Parameter(weight)
    return model


def buffered(buffer):
    model = nn.Linear(2, 2)
    model.register_buffer("scale", buffer)
    return model


def itself():
    tree = {"a": {"b": [1]}}
    tree["a"]["b"].append(tree["a"])
    return tree


class Odd:
    pass


Pair = namedtuple("Pair", "a b")

REFUSED = {
    "a wrapper around tensors as a parameter": (lambda: around(two()), r"st\.weight: a TwoTensor"),
    "a wrapper around tensors in a dict": (lambda: {"a": {"z": two()}}, r"st\.a\.z: a TwoTensor"),
    "a masked tensor": (
        lambda: {"z": masked()},
        r"st\.z: .*no memory",
    ),
    "a zero tensor": (lambda: {"z": torch._efficientzerotensor((8,))}, r"st\.z: .*no memory"),
    "a storage that was freed": (lambda: {"z": freed()}, r"st\.z: .*no memory"),
    "a storage that was cut off": (lambda: {"z": [shrunk()]}, r"st\.z\.0: .*no memory"),
    "a quantized tensor": (lambda: {"z": quantized()}, r"st\.z: a quantized tensor \(torch.quint8"),
    "a sparse tensor": (lambda: {"z": torch.eye(3).to_sparse()}, r"st\.z: only dense"),
    "a tensor on no device": (lambda: {"z": torch.ones(3, device="meta")}, r"st\.z: .*'meta'"),
    "an odd dtype": (lambda: {"z": torch.empty(2, dtype=torch.bits8)}, r"st\.z: .*bits8"),
    "an expanded buffer": (
        lambda: buffered(torch.tensor(1.5).expand(3)),
        r"st\.scale: .*share memory.*clone",
    ),
    "a lazy module": (
        lambda: nn.Sequential(nn.LazyLinear(4)),
        r"st\.0\.weight: .*one batch through the module before\s+restore",
    ),
    "a lazy buffer": (
        lambda: nn.Sequential(nn.LazyBatchNorm1d(affine=False)),
        r"st\.0\.running_mean: .*one batch",
    ),
    "a tree that contains itself": (itself, r"st\.a\.b\.1: this is st\.a again, which contains"),
    "an object": (lambda: {"deep": [1, {"x": Odd()}]}, r"st\['deep'\]\[1\]\['x'\]: .*Odd cannot"),
    "an object beside tensors": (
        lambda: {"t": torch.ones(1), "deep": [1, {"x": Odd()}]},
        r"st\.deep\[1\]\['x'\]: .*Odd cannot be",
    ),
    "a named tuple": (lambda: {"p": Pair(torch.ones(1), 2)}, r"st\['p'\]: .*Pair cannot be"),
    "a name that is no text": (lambda: {"\ud800": torch.ones(1)}, r"Unicode"),
    "a key that is no text": (lambda: {True: torch.ones(1)}, r"st: .*keys, not True"),
}


def refusal(components):
    """What `restore()` says, in one line."""
    checkpointer = keepstep.Checkpointer(components)
    try:
        checkpointer.restore()
    except keepstep.UsageError as error:
        return str(error).replace("\n", " ")
    finally:
        checkpointer.close()
    return "it is not refused"


def test_what_cannot_be_kept_is_refused_at_restore_by_name(sidecar):
    said = {kind: refusal({"st": make()}) for kind, (make, _) in REFUSED.items()}
    wrong = {kind: text for kind, text in said.items() if not re.search(REFUSED[kind][1], text)}
    assert not wrong


def test_a_state_dict_that_fails_is_named_at_restore(sidecar):
    class Loader:
        def state_dict(self):
            raise RuntimeError("no iterator yet")

        def load_state_dict(self, state):
            pass

    checkpointer = keepstep.Checkpointer({"loader": Loader()})
    with pytest.raises(keepstep.UsageError, match=r"loader: its state_dict\(\) fails: .*no iter"):
        checkpointer.restore()
    checkpointer.close()


RANKS = """
import os, torch, keepstep
torch.distributed.init_process_group("gloo")
rank = torch.distributed.get_rank()
state = {"n": 1} if rank == 0 else {"n": object()}
try:
    keepstep.Checkpointer({"st": state}).restore()
except keepstep.UsageError as error:
    assert "object cannot be kept" in str(error) and "st['n']" in str(error), error
    print(f"rank {rank} was told", flush=True)
os._exit(0)
"""


def test_every_rank_is_told_of_what_one_of_them_cannot_keep(sidecar, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(RANKS)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", str(script)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert sorted(done.stdout.splitlines()) == ["rank 0 was told", "rank 1 was told"], done.stderr


def test_a_state_that_becomes_unkeepable_is_counted_and_logged_once_by_name(sidecar, caplog):
    state = {"n": 1, "t": torch.ones(2)}
    with keepstep.Checkpointer({"st": state}) as checkpointer:
        checkpointer.restore()
        assert checkpointer.save(0)
        state["t"] = two()
        with caplog.at_level(logging.WARNING, logger="keepstep"):
            assert [checkpointer.save(step) for step in (1, 2, 3)] == [False] * 3
        said = [one.getMessage() for one in caplog.records if "is not kept" in one.getMessage()]
        assert len(said) == 1
        assert "st.t: a TwoTensor" in said[0]
        assert checkpointer.stats.skipped == 3
        state["t"] = torch.ones(2)
        assert checkpointer.save(4)
        checkpointer.wait(4, "committed")


@pytest.mark.parametrize("make", [freed, shrunk])
def test_memory_that_is_gone_is_an_error_and_no_signal(make):
    there, gone = torch.zeros(1 << 20), make()
    there = there[: gone.numel()]
    assert not copying.is_plain(gone)
    for one, other in ((there, gone), (gone, there)):
        with pytest.raises(keepstep.KeepstepError, match="lost its memory"):
            copying.run(copying.Transfers(copies=[copying.Copy(one, other)]))
    with pytest.raises(keepstep.KeepstepError, match="lost its memory"):
        copying.run(copying.Transfers([copying.Move(there.data_ptr(), 0, 4)]))
    assert not there.any()


def bring_back(components):
    checkpointer = keepstep.Checkpointer(components, strict=True)
    try:
        return checkpointer.restore()
    finally:
        checkpointer.close()


def keep(components, step=0):
    with keepstep.Checkpointer(components, strict=True) as checkpointer:
        checkpointer.restore()
        checkpointer.save(step)


def test_an_expanded_tensor_of_a_dict_comes_back_with_its_values(sidecar):
    keep({"st": {"z": torch.tensor(1.5).expand(3), "a": torch.ones(2)}})
    a, live = torch.zeros(2), {"z": torch.tensor(7.0).expand(3)}
    live["a"] = a
    assert bring_back({"st": live}).step == 0
    assert live["z"].tolist() == [1.5] * 3
    assert live["a"] is a
    assert a.tolist() == [1, 1]
