"""A loop of one's own, on Fabric and on accelerate, killed where it hurts: bit-equal at the end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, DistributedType, PartialState
from accelerate.utils import FullyShardedDataParallelPlugin
from torch.utils.data import DataLoader, Dataset

import keepstep
from keepstep import Batches
from keepstep.integrations.loaders import capture_loader_generators
from tests.frameworks.conftest import LIGHTNING, TRAINER, Lives, assert_same, drawn, result

EPOCH = 15
"""Steps: 60 rows in batches of 4."""


@pytest.fixture
def loop(lives) -> Lives:
    return lives("own_loop.py", *LIGHTNING)


def assert_bit_equal(loop: Lives, kill: list[int], **options: Any) -> Path:
    """Undisturbed, and killed before three steps. Returns the folder of the former."""
    plain = loop.undisturbed(**options)
    kept, output = loop.kept(**options, kill=kill)
    assert "restored step" in output
    assert_same(plain, kept, kills=3)
    return plain


def at_the_epochs_end() -> list[int]:
    return [*drawn(range(1, EPOCH)), EPOCH, *drawn(range(EPOCH + 1, 2 * EPOCH))]


def over_the_epochs_end() -> list[int]:
    """Of steps of two micro-batches; that in the middle has one of each epoch."""
    return [*drawn(range(1, 7)), EPOCH // 2, *drawn(range(8, EPOCH))]


@pytest.mark.parametrize(
    "options",
    [
        {"augment": True},
        {"workers": 2},
        {"workers": 2, "persistent": True},
        {"stateful": True},
    ],
    ids=lambda options: "-".join(options),
)
def test_a_fabric_training_resumes_bit_equal(loop, options):
    assert_bit_equal(loop, at_the_epochs_end(), on="fabric", **options)


def test_a_fabric_training_with_accumulation_resumes_bit_equal(loop):
    assert_bit_equal(loop, over_the_epochs_end(), on="fabric", accumulate=2)


def test_a_fabric_training_on_two_ranks_resumes_bit_equal(loop):
    plain = loop.undisturbed(on="fabric", ranks=2, workers=1)
    kept, _ = loop.kept(
        on="fabric", ranks=2, workers=1, kill=[*drawn(range(1, 7)), 8, *drawn(range(9, 16))]
    )
    assert_same(plain, kept, kills=3, ranks=2)


@pytest.mark.parametrize(
    "options",
    [{"seedable": True}, {"workers": 2}],
    ids=lambda options: "-".join(options),
)
def test_an_accelerate_training_resumes_bit_equal(loop, options):
    """Eight steps an epoch, of two micro-batches each but the last."""
    kill = [*drawn(range(1, 7)), 8, *drawn(range(9, 16))]
    assert_bit_equal(loop, kill, on="accelerate", **options)


@pytest.mark.parametrize(
    "options", [{}, {"dispatched": True}], ids=lambda options: "-".join(options)
)
def test_an_accelerate_training_on_two_ranks_resumes_bit_equal(loop, options):
    """Each reads its own rows, or rank 0 those of both, two batches at a time."""
    plain = loop.undisturbed(on="accelerate", ranks=2, **options)
    kept, _ = loop.kept(on="accelerate", ranks=2, kill=[*drawn(range(1, 4)), 4, 6], **options)
    assert_same(plain, kept, kills=3, ranks=2)


@pytest.mark.parametrize(
    "options",
    [{}, {"workers": 2}, {"workers": 2, "persistent": True}, {"ranks": 2}],
    ids=lambda options: "-".join(options) or "alone",
)
def test_an_accelerate_training_with_a_stateful_loader_resumes_bit_equal(loop, options):
    """Of which it begins an epoch in prepare(): with `Batches` another one is begun after it, also
    where nothing is kept."""
    options = {"on": "accelerate", "stateful": True, **options}
    ranks = options.get("ranks", 1)
    epoch = 8 // ranks
    kill = [*drawn(range(1, epoch - 1)), epoch, *drawn(range(epoch + 1, 2 * epoch))]
    plain = loop.undisturbed(**options, bare=False)
    kept, _ = loop.kept(**options, kill=kill)
    assert_same(plain, kept, kills=3, ranks=ranks)


@pytest.mark.parametrize("options", [{"augment": True}, {"workers": 2}], ids="-".join)
def test_an_ignite_training_resumes_bit_equal(loop, options):
    """The epoch's end is in the middle of what it counts as an iteration."""
    plain = assert_bit_equal(loop, at_the_epochs_end(), on="ignite", **options)
    again, _ = loop.kept(on="ignite", **options, out="again")
    assert not (again / "losses-0").exists(), "what is over is not trained again"
    assert result(again)["progress"] == result(plain)["progress"]


def test_an_ignite_training_with_accumulation_resumes_bit_equal(loop):
    assert_bit_equal(loop, over_the_epochs_end(), on="ignite", accumulate=2)


def test_an_ignite_training_on_two_ranks_resumes_bit_equal(loop):
    options = {"on": "ignite", "ranks": 2, "sampler": True}
    plain = loop.undisturbed(**options)
    kept, _ = loop.kept(**options, kill=[*drawn(range(1, 7)), 8, *drawn(range(9, 16))])
    assert_same(plain, kept, kills=3, ranks=2)


@pytest.mark.parametrize(
    "options", [{"zero": 2}, {"zero": 3}, {"fsdp2": True}], ids=["zero-2", "zero-3", "fsdp2"]
)
def test_accelerate_plugins_that_shard_a_model_resume_bit_equal(lives, options):
    loop = lives("own_loop.py", *TRAINER)
    plain = loop.undisturbed(ranks=2, on="accelerate", **options)
    kill = drawn(range(1, 4), range(5, 8))
    kept, output = loop.kept(ranks=2, on="accelerate", **options, kill=kill)
    assert "restored step" in output
    assert_same(plain, kept, kills=2, ranks=2)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (DistributedType.MEGATRON_LM, "accelerate's Megatron-LM plugin: use FSDP2"),
        (DistributedType.FSDP, "set fsdp_version: 2"),
    ],
)
def test_unsupported_accelerate_sharding_is_refused_by_name(monkeypatch, kind, message):
    """Accelerate itself has none of them on a CPU: there it says what it would elsewhere."""
    loading = Accelerator(cpu=True).prepare(DataLoader(torch.arange(6), batch_size=2))
    monkeypatch.setitem(PartialState._shared_state, "distributed_type", kind)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=1)
    monkeypatch.setitem(AcceleratorState._shared_state, "fsdp_plugin", plugin)
    with pytest.raises(keepstep.UsageError, match=message):
        Batches(loading)
    monkeypatch.setattr(plugin, "fsdp_version", 2)
    if kind is DistributedType.FSDP:
        assert Batches(loading).epoch == 0


class Noise(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, at):
        return torch.randn(2)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("prepared", [False, True])
def test_a_dataset_that_draws_random_numbers_during_prefetch_causes_one_warning(
    sidecar, caplog, prepared
):
    """Accelerate does that; a loader alone does not."""
    loader = DataLoader(Noise())
    batches = Batches(Accelerator(cpu=True).prepare(loader) if prepared else loader)
    checkpointer = keepstep.Checkpointer(batches=batches)
    checkpointer.restore()
    for _ in range(2):
        assert len(list(batches)) == 8
    assert caplog.text.count("draws from the random generators") == prepared


def test_an_epoch_that_was_left_early_starts_over_at_its_first_batch():
    batches = Batches(DataLoader(torch.arange(6), batch_size=2))
    checkpointer = keepstep.Checkpointer(batches=batches)
    checkpointer.restore()
    assert next(iter(batches)).tolist() == [0, 1]
    assert [len(list(batches)), batches.epoch] == [3, 1]


@pytest.mark.parametrize("dataset", [torch.arange(8), Noise()], ids=type)
def test_the_remaining_batches_of_two_loaders_follow_the_restored_random_states(sidecar, dataset):
    def life(seed):
        torch.manual_seed(seed)
        loaders = [DataLoader(dataset, batch_size=2, shuffle=True) for _ in range(2)]
        first, second = map(Batches, loaders)
        checkpointer = keepstep.Checkpointer(first=first, second=second)
        checkpointer.restore()
        return checkpointer, zip(first, second, strict=True)

    checkpointer, left = life(0)
    next(left)
    checkpointer.save(0)
    expected = repr([*left, torch.rand(2)])
    checkpointer.close()
    checkpointer, left = life(1)
    assert repr([*left, torch.rand(2)]) == expected
    checkpointer.close()


@pytest.mark.filterwarnings("ignore")
def test_a_save_between_two_epochs_with_persistent_workers_resumes_bit_equal(sidecar):
    def life(seed):
        torch.manual_seed(seed)
        lasting = {"num_workers": 1, "persistent_workers": True}
        batches = Batches(DataLoader(torch.arange(8), batch_size=2, shuffle=True, **lasting))
        checkpointer = keepstep.Checkpointer(batches=batches)
        checkpointer.restore()
        return batches, checkpointer

    batches, checkpointer = life(0)
    list(batches)
    checkpointer.save(0)
    expected = repr([*batches, torch.rand(2)])
    checkpointer.close()
    batches, checkpointer = life(1)
    assert repr([*batches, torch.rand(2)]) == expected
    checkpointer.close()


@pytest.mark.parametrize("rng", [True, False])
def test_finished_batches_of_a_list_are_skipped_after_a_restart(sidecar, rng):
    for done in range(3):
        batches = Batches([10, 11, 12])
        with keepstep.Checkpointer(batches=batches, rng=rng) as checkpointer:
            checkpointer.restore()
            assert next(iter(batches)) == 10 + done
            checkpointer.save(done)


def test_samplers_with_a_reference_cycle_are_visited_once() -> None:
    loader = DataLoader(torch.arange(8), batch_size=2, shuffle=True)
    loader.batch_sampler.sampler.sampler = loader.batch_sampler
    assert capture_loader_generators([loader]) == []
