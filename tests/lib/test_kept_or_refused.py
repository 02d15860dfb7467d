"""Whatever can be kept is kept; whatever cannot is refused at `restore()`, by name: not by the log
of a night's run, and never by the end of the process."""

from __future__ import annotations

import logging
import re
import warnings
from collections import OrderedDict

import numpy as np
import pytest
import torch
from torch import nn
from torch.masked import masked_tensor
from torch.testing._internal.two_tensor import TwoTensor

import keepstep
from keepstep.client import copying
from tests.harness import torchrun
from tests.lib.training import begun, bring_back, keep


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
    with warnings.catch_warnings():  # once a process, and another test may have been first
        warnings.simplefilter("ignore")
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


REFUSED = {
    "a wrapper around what cannot be kept": (
        lambda: around(TwoTensor(torch.ones(1).expand(4), torch.ones(1).expand(4))),
        r"st\.weight\.a: .*expanded",
    ),
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
    "an object": (
        lambda: {"deep": [1, {"x": Odd()}]},
        r"st\['deep'\]\[1\]\['x'\]: .*Odd cannot.*trusted=True",
    ),
    "an object beside tensors": (
        lambda: {"t": torch.ones(1), "deep": [1, {"x": Odd()}]},
        r"st\.deep\[1\]\['x'\]: .*Odd cannot be",
    ),
    "a name that is no text": (lambda: {"\ud800": torch.ones(1)}, r"Unicode"),
    "a key that is no data": (
        lambda: {Odd(): torch.ones(1)},
        r"st: the key <.*Odd object.* of a dict: .*Odd cannot be kept as data",
    ),
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


def test_unsupported_values_are_refused_by_name_at_restore(sidecar):
    refusals = {kind: refusal({"st": make()}) for kind, (make, _) in REFUSED.items()}
    wrong = {kind: text for kind, text in refusals.items() if not re.search(REFUSED[kind][1], text)}
    assert not wrong


def test_a_failing_state_dict_is_reported_by_name_at_restore(sidecar):
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
    os.write(1, f"rank {rank} was told\\n".encode())  # in one piece: both write to one pipe
os._exit(0)
"""


def two_ranks(folder, text):
    script = folder / "script.py"
    script.write_text(text)
    return torchrun(2, script)


def test_an_unsupported_value_on_one_rank_raises_on_every_rank(sidecar, tmp_path):
    done = two_ranks(tmp_path, RANKS)
    assert sorted(done.stdout.splitlines()) == ["rank 0 was told", "rank 1 was told"], done.stderr


def test_a_state_that_becomes_unsupported_is_counted_and_logged_once_by_name(sidecar, caplog):
    state = {"n": 1, "t": torch.ones(2)}
    with begun({"st": state}) as checkpointer:
        assert checkpointer.save(0)
        state["t"] = quantized()
        with caplog.at_level(logging.WARNING, logger="keepstep"):
            assert [checkpointer.save(step) for step in (1, 2, 3)] == [False] * 3
        messages = [
            record.getMessage() for record in caplog.records if "is not kept" in record.getMessage()
        ]
        assert len(messages) == 1
        assert "st.t: a quantized tensor" in messages[0]
        assert checkpointer.stats.skipped == 3
        state["t"] = torch.ones(2)
        assert checkpointer.save(4)
        state["t"] = shrunk()
        with caplog.at_level(logging.WARNING, logger="keepstep"):
            assert not checkpointer.save(5)
        assert "st.t: this tensor has no memory of its own" in caplog.text
        state["t"] = torch.ones(2)
        assert checkpointer.save(6)
        checkpointer.wait(6, "committed")


@pytest.mark.parametrize("make", [freed, shrunk])
def test_copying_a_tensor_without_storage_raises_an_error_instead_of_crashing(make):
    there, gone = torch.zeros(1 << 20), make()
    there = there[: gone.numel()]
    assert not copying.is_plain(gone)
    for first, other in ((there, gone), (gone, there)):
        with pytest.raises(keepstep.KeepstepError, match="lost its memory"):
            copying.run_transfers(copying.Transfers(copies=[copying.TensorCopy(first, other)]))
    with pytest.raises(keepstep.KeepstepError, match="lost its memory"):
        copying.run_transfers(copying.Transfers([copying.MemoryMove(there.data_ptr(), 0, 4)]))
    assert not there.any()


def assert_same_array(first, other):
    assert (first.dtype.str, first.shape) == (other.dtype.str, other.shape)
    assert first.tobytes() == other.tobytes()
    assert first.flags.writeable
    if other.flags.forc:
        assert first.flags.fnc == other.flags.fnc


def test_an_image_is_hardly_larger_than_its_tensors(sidecar):
    state = {"replay": np.zeros(8 << 20, np.uint8), "text": "x" * (3 << 20), "n": 1}
    keep({"st": state})
    [path] = sidecar.root.glob("0*/*.safetensors")
    assert path.stat().st_size < (8 << 20) + (3 << 20) + (1 << 20) + (256 << 10)


class Wrapped(nn.Module):
    """A parameter, a buffer and a frozen weight that keep their values in other tensors; and
    state of the module's own, for which `load_state_dict` is called."""

    def __init__(self, seed, *, extra=True, own=False):
        super().__init__()
        torch.manual_seed(seed)
        self.weight = nn.Parameter(TwoTensor(torch.randn(4, 4), torch.randn(4, 4)))
        inner = TwoTensor(torch.randn(3), torch.randn(3))
        self.register_buffer("nested", TwoTensor(inner, TwoTensor(torch.randn(3), torch.randn(3))))
        self.plain = nn.Linear(2, 2)
        self.count = seed if extra else None
        if own:
            self._register_state_dict_hook(_doubled)

    def get_extra_state(self):
        return self.count

    def set_extra_state(self, state):
        self.count = state


def _doubled(module, tree, prefix, _):
    tree[f"{prefix}plain.weight"] = tree[f"{prefix}plain.weight"] * 2


def numbers(module):
    weight, nested = module.weight, module.nested
    parts = (weight.a, weight.b, nested.a.a, nested.a.b, nested.b.a, nested.b.b)
    return [part.detach().tolist() for part in parts] + [module.count]


@pytest.mark.parametrize("own", [False, True])
def test_a_module_of_tensor_subclasses_is_restored_in_place(sidecar, own):
    model = Wrapped(1, own=own)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with begun({"m": model, "o": optimizer}, strict=True) as checkpointer:
        checkpointer.save(0)
        (model.weight.sum() + model.plain.weight.sum()).backward()
        optimizer.step()
        with torch.no_grad():
            model.weight.b.add_(1)
        checkpointer.save(1)
        expected = numbers(model)
        with torch.no_grad():
            model.weight.a.add_(1)  # seen by nobody: it was copied already
    other = Wrapped(2, own=own)
    fresh = torch.optim.SGD(other.parameters(), lr=0.3)
    inner = other.weight.a
    assert bring_back({"m": other, "o": fresh}).step == 1
    assert numbers(other) == expected
    assert other.weight.a is inner
    assert type(other.weight) is TwoTensor
    scale = 2 if own else 1
    assert torch.equal(other.plain.weight, model.plain.weight * scale)


def test_tensor_subclasses_outside_of_modules_are_restored_as_new_objects(sidecar):
    nested = TwoTensor(two(), TwoTensor(torch.randn(4), torch.randn(4)))
    state = {"a": {"z": two()}, "row": [nested], "w": nn.Parameter(two()), "n": 1}
    with begun({"st": state}) as checkpointer:
        checkpointer.save(0)
        state["a"]["z"].a.add_(1)
        state["n"] = 2
        checkpointer.save(1)
        state["a"]["z"].a.add_(1)  # seen by nobody: it was copied already
    other = {"a": {"z": two()}}
    assert bring_back({"st": other}).step == 1
    assert (other["a"]["z"].a - two().a).tolist() == [1, 1, 1, 1]
    assert other["row"][0].b.a.tolist() == nested.b.a.tolist()
    assert [type(value) for value in (other["row"][0], other["row"][0].a)] == [TwoTensor] * 2
    assert isinstance(other["w"], nn.Parameter)
    assert type(other["w"].data) is TwoTensor
    assert other["n"] == 2


def test_optimizer_state_of_tensor_subclasses_is_restored(sidecar):
    class Wrapping(torch.optim.SGD):
        def step(self, closure=None):
            super().step(closure)
            for parameter in self.param_groups[0]["params"]:
                seen = self.state[parameter].get("seen")
                seen = TwoTensor(torch.zeros(4), torch.zeros(4)) if seen is None else seen
                self.state[parameter]["seen"] = seen + parameter.detach().flatten()[:4]

    def trained(steps):
        torch.manual_seed(0)
        model = nn.Linear(4, 4, bias=False)
        optimizer = Wrapping(model.parameters(), lr=0.1)
        return model, optimizer, steps(model, optimizer)

    def step(model, optimizer):
        optimizer.zero_grad()
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        return optimizer.state[model.weight]["seen"].a.tolist()

    _, _, undisturbed = trained(lambda *of: [step(*of) for _ in range(3)])

    def killed(model, optimizer):
        with begun({"m": model, "o": optimizer}) as checkpointer:
            for at in range(2):
                step(model, optimizer)
                checkpointer.save(at)

    def again(model, optimizer):
        assert bring_back({"m": model, "o": optimizer}).step == 1
        return step(model, optimizer)

    trained(killed)
    assert trained(again)[2] == undisturbed[2]


SAVES = """
import collections, os, numpy, torch, keepstep
from tests.lib.test_kept_or_refused import Wrapped
torch.distributed.init_process_group("gloo")
rank = torch.distributed.get_rank()
state = {
    "array": numpy.asfortranarray(numpy.full((200, 100), rank + 1, ">f8")),
    "wide": torch.tensor(rank + 1.5).expand(3),
    "order": collections.OrderedDict(t=torch.ones(2)),
}
checkpointer = keepstep.Checkpointer({"st": state, "m": Wrapped(rank)})
checkpointer.restore()
checkpointer.save(0)
checkpointer.close()
os._exit(0)
"""


def test_container_types_and_tensor_subclasses_are_restored_at_another_world_size(
    sidecar, tmp_path
):
    done = two_ranks(tmp_path, SAVES)
    assert done.returncode == 0, done.stderr
    live, model = {"array": np.ones(3), "wide": torch.tensor(0.0).expand(3)}, Wrapped(2)
    assert bring_back({"st": live, "m": model}).step == 0
    assert numbers(model) == numbers(Wrapped(0))
    assert live["wide"].tolist() == [1.5] * 3
    assert type(live["order"]) is OrderedDict
    assert_same_array(live["array"], np.asfortranarray(np.full((200, 100), 1, ">f8")))
