"""Frozen parameters are kept once, beside each step that refers to them, and come back."""

from __future__ import annotations

import os
import statistics
import time
from pathlib import Path

import pytest
import safetensors.torch
import torch

from keepstep.errors import MismatchError, RestoreError
from tests import warm
from tests.frozen.models import equal, made, train
from tests.harness import eventually, flip, inodes, matching
from tests.lib.training import begun


def components(model, optimizer):
    return {"model": model, "optimizer": optimizer}


def written(sidecar):
    """Bytes of the newest step's own shard, and the base beside it."""
    newest = max(sidecar.root.glob("0*"))
    (shard,), bases = newest.glob("rank-*"), list(newest.glob("base-*"))
    return shard.stat().st_size, bases


def test_each_step_after_the_first_writes_only_the_trained_tensors(sidecar):
    model, optimizer = made()
    frozen = sum(
        parameter.nbytes for parameter in model.parameters() if not parameter.requires_grad
    )
    with begun(components(model, optimizer), strict=True, frozen_once=True) as checkpointer:
        for step in range(5):
            train(model, optimizer)
            checkpointer.save(step)
            checkpointer.wait(step)
        size, (base,) = written(sidecar)
    assert size <= 0.02 * (frozen + size)
    assert base.stat().st_size < 1.05 * frozen
    assert len(base_files(sidecar)) == 1


def test_a_killed_run_resumes_bit_equal(sidecar):
    model, optimizer = made()
    with begun(components(model, optimizer), strict=True, frozen_once=True) as checkpointer:
        for step in range(3):
            train(model, optimizer)
            checkpointer.save(step)
    other, fresh = made(seed=1)  # with other frozen values, too
    with begun(components(other, fresh), strict=True, frozen_once=True) as checkpointer:
        assert checkpointer.epoch.parent.step == 2
        assert equal(model, other)


def lives(sidecar, *seeds, save=1, **options):
    """So many lives, each with other weights at its start; the last model."""
    step = 0
    for seed in seeds:
        model, optimizer = made(seed)
        with begun(
            components(model, optimizer), strict=True, frozen_once=True, **options
        ) as checkpointer:
            for _ in range(save):
                train(model, optimizer)
                checkpointer.save(step)
                step += 1
    return model, optimizer


def base_files(sidecar):
    """The files of bases on the drive; each counts once, whatever names it has."""
    return set(inodes(matching(sidecar.root, "*/base-*")).values())


def test_a_restarted_trainer_reuses_the_same_base(sidecar):
    lives(sidecar, 0)
    (first,) = base_files(sidecar)
    slots = set(sidecar.slots(0))
    lives(sidecar, 0, 1, 2)
    assert base_files(sidecar) == {first}
    assert slots <= set(sidecar.slots(0))


@pytest.mark.parametrize("memory", ["kept", "lost"])
def test_a_base_that_earlier_restarts_reused_is_not_replaced_by_a_different_one(
    sidecar, memory, caplog
):
    model, _ = lives(sidecar, 0, 0, 0)
    if memory == "lost":
        sidecar.kill()
        sidecar.lose_memory()
        sidecar.start()
    other, optimizer = made(1)
    before = {name: value.clone() for name, value in other.state_dict().items()}
    with pytest.raises(MismatchError, match=r"model.layers.0.base.bias.*and 4 more.*frozen_once"):
        begun(components(other, optimizer), strict=True, frozen_once=True)
    assert all(torch.equal(value, before[name]) for name, value in other.state_dict().items())
    assert "built other frozen parameters" not in caplog.text
    again, fresh = made(0)
    with begun(components(again, fresh), strict=True, frozen_once=True):
        assert equal(model, again)
    with begun(components(other, optimizer), strict=True):
        assert equal(model, other)


def test_a_restart_with_a_different_base_causes_a_warning(sidecar, caplog):
    lives(sidecar, 0)
    assert "built other frozen parameters" not in caplog.text
    lives(sidecar, 1, 1)  # neither began with what the run has
    messages = [line for line in caplog.messages if "built other frozen parameters" in line]
    assert len(messages) == 2
    assert all("model.layers.0.base.bias" in run for run in messages)


@pytest.mark.parametrize("memory", ["kept", "lost"])
def test_a_restarted_sidecar_restores_the_base(sidecar, memory):
    model, _ = lives(sidecar, 0)
    (first,) = base_files(sidecar)
    sidecar.kill()
    if memory == "lost":
        sidecar.lose_memory()
    sidecar.start()
    other, optimizer = made(1)
    with begun(components(other, optimizer), strict=True, frozen_once=True) as checkpointer:
        assert equal(model, other)
        train(other, optimizer)
        checkpointer.save(5)
    assert base_files(sidecar) == {first}
    again, optimizer = made(2)
    with begun(components(again, optimizer), strict=True, frozen_once=True):
        assert equal(other, again)


def test_an_adapter_of_another_rank_is_refused_and_nothing_is_changed(sidecar):
    model, _ = lives(sidecar, 0)
    other, optimizer = made(1, rank=3)
    before = {name: value.clone() for name, value in other.state_dict().items()}
    with pytest.raises(MismatchError, match=r"layers.0.down: float32\[2, 1024\] in the checkpoint"):
        begun(components(other, optimizer), strict=True, frozen_once=True)
    assert all(torch.equal(value, before[name]) for name, value in other.state_dict().items())
    again, optimizer = made(1)
    with begun(components(again, optimizer), strict=True, frozen_once=True):
        assert equal(model, again)


def test_a_trainer_continues_with_the_same_base_after_a_sidecar_restart(sidecar):
    model, optimizer = made()
    with begun(components(model, optimizer), strict=True, frozen_once=True) as checkpointer:
        checkpointer.save(0)
        checkpointer.wait(0)
        (first,) = base_files(sidecar)
        sidecar.kill()
        sidecar.start()
        eventually(lambda: checkpointer._saver.session.connected, what="its sidecar is back")
        checkpointer._strict = False
        step = iter(range(1, 1000))
        eventually(lambda: train(model, optimizer) and checkpointer.save(next(step)), every_s=0.1)
    assert base_files(sidecar) == {first}
    other, fresh = made(1)
    with begun(components(other, fresh), strict=True, frozen_once=True):
        assert equal(model, other)


@pytest.mark.parametrize("how", ["in place", "past the version", "replaced", "moved"])
def test_a_frozen_tensor_that_was_changed_is_restored_with_its_new_value(sidecar, how):
    model, optimizer = made()
    layer = model.layers[1].base
    with begun(components(model, optimizer), strict=True, frozen_once=True) as checkpointer:
        for step in range(6):
            if step == 2 and how == "in place":
                with torch.no_grad():
                    layer.weight.mul_(2)
            elif step == 2 and how == "past the version":
                layer.weight.data.mul_(2)
            elif step == 2 and how == "replaced":
                layer.weight = torch.nn.Parameter(layer.weight * 2, requires_grad=False)
            elif step == 2:
                layer.weight.data = layer.weight.data * 2
            train(model, optimizer)
            checkpointer.save(step)
            checkpointer.wait(step, "staged")
            other, fresh = made(1)
    with begun(components(other, fresh), strict=True, frozen_once=True):
        assert equal(model, other)
    size, (base,) = written(sidecar)
    assert size > layer.weight.nbytes
    assert base.stat().st_size < 4 * layer.weight.nbytes


def test_every_step_around_a_change_of_frozen_tensors_holds_its_own_values(sidecar):
    model, optimizer = made()
    with begun(components(model, optimizer), strict=True, frozen_once=True) as checkpointer:
        for step in range(4):
            if step:
                model.layers[0].base.weight.data.add_(1)
            train(model, optimizer)
            checkpointer.save(step)
            checkpointer.wait(step)
            (directory,) = sidecar.root.glob(f"0*-{step:09d}")
            found = {}
            for path in directory.glob("*.safetensors"):
                found |= safetensors.torch.load_file(path)
            for name, value in model.state_dict().items():
                assert torch.equal(found[f"model.{name}"], value), (step, name)


def test_layers_that_are_unfrozen_one_by_one_are_restored(sidecar):
    model, optimizer = made(layers=8)
    sizes = []
    with begun(components(model, optimizer), strict=True, frozen_once=True) as checkpointer:
        for step in range(3):
            if step:
                unfreeze(model.layers[step], optimizer)
            train(model, optimizer)
            checkpointer.save(step)
            checkpointer.wait(step)
            sizes.append(written(sidecar)[1][0].stat().st_size)
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(sizes)) == 3
    other, fresh = made(1, layers=8)
    for layer in other.layers[1:3]:
        unfreeze(layer, fresh)
    with begun(components(other, fresh), strict=True, frozen_once=True):
        assert equal(model, other)


def unfreeze(layer, optimizer):
    layer.base.requires_grad_(True)
    optimizer.add_param_group({"params": list(layer.base.parameters())})


def test_a_frozen_average_of_the_weights_is_not_stored_in_the_base(sidecar):
    model, optimizer = made()
    average, _ = made(1)
    average.requires_grad_(False)
    state = {**components(model, optimizer), "average": average}
    with begun(state, strict=True, frozen_once=True) as checkpointer:
        for step in range(3):
            train(model, optimizer)
            with torch.no_grad():
                for mine, theirs in zip(average.parameters(), model.parameters(), strict=True):
                    mine.lerp_(theirs, 0.1)
            checkpointer.save(step)
            checkpointer.wait(step)
    assert len(base_files(sidecar)) == 1
    other, fresh = made(2)
    held, _ = made(3)
    held.requires_grad_(False)
    with begun({**components(other, fresh), "average": held}, strict=True, frozen_once=True):
        assert equal(average, held)
        assert equal(model, other)


def test_tied_frozen_weights_stay_tied(sidecar):
    def tied(seed):
        model, optimizer = made(seed)
        model.head = torch.nn.Linear(1024, 1024, bias=False)
        model.head.weight = model.layers[0].base.weight
        return model, optimizer

    model, optimizer = tied(0)
    with begun(components(model, optimizer), strict=True, frozen_once=True) as checkpointer:
        checkpointer.save(0)
    other, fresh = tied(1)
    with begun(components(other, fresh), strict=True, frozen_once=True):
        assert equal(model, other)
        assert other.head.weight is other.layers[0].base.weight
    assert written(sidecar)[0] < 2 << 20


def test_a_model_that_is_trained_as_a_whole_has_no_base(sidecar):
    model, optimizer = made()
    model.requires_grad_(True)
    with begun(components(model, optimizer), strict=True, frozen_once=True) as checkpointer:
        checkpointer.save(0)
    assert not base_files(sidecar)


def test_a_base_is_deleted_with_its_last_step(sidecar):
    sidecar.kill()
    sidecar.start("--keep", "2")
    model, optimizer = made()
    with begun(components(model, optimizer), strict=True, frozen_once=True) as checkpointer:
        for step in range(8):
            if step == 3:
                model.layers[0].base.weight.data.add_(1)
            checkpointer.save(step)
            checkpointer.wait(step)
        at_last = eventually(lambda: len(base_files(sidecar)) == 1 and base_files(sidecar))
        newest = max(sidecar.root.glob("0*"))
        assert at_last == {next(newest.glob("base-*")).stat().st_ino}
    assert not list(sidecar.root.glob("spare/base-*"))


def lost_memory(sidecar):
    sidecar.kill()
    sidecar.lose_memory()


@pytest.mark.parametrize("how", ["gone", "cut", "changed"])
def test_a_step_whose_base_is_lost_is_not_offered_and_an_older_one_is(sidecar, how):
    model, optimizer = made()
    with begun(components(model, optimizer), strict=True, frozen_once=True) as checkpointer:
        checkpointer.save(0)
        checkpointer.wait(0)
        model.layers[0].base.weight.data.add_(1)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        checkpointer.save(1)
        checkpointer.wait(1)
        model.layers[1].base.weight.data.add_(1)  # so step 2 has a base of its own
        checkpointer.save(2)
    lost_memory(sidecar)
    (base,) = max(sidecar.root.glob("0*")).glob("base-*")
    if how == "gone":
        base.unlink()
    elif how == "cut":
        os.truncate(base, base.stat().st_size - 4096)
    else:
        flip(base, base.stat().st_size // 2)
    sidecar.start()
    other, fresh = made(1)
    with begun(components(other, fresh), strict=True, frozen_once=True) as checkpointer:
        assert checkpointer.epoch.parent.step == 1
        for name, value in before.items():
            assert torch.equal(other.state_dict()[name], value), name
    assert base.name in sidecar.text()


def test_a_missing_base_of_the_only_step_is_an_error_that_names_the_base(sidecar):
    lives(sidecar, 0)
    lost_memory(sidecar)
    (base,) = sidecar.root.glob("*/base-*")
    base.unlink()
    sidecar.start()
    with pytest.raises(RestoreError, match=r"quarantine|base-00000-of-00001"):
        begun(components(*made(1)))


def test_a_trainer_killed_at_random_moments_has_the_losses_of_an_uninterrupted_run(
    sidecars, tmp_path
):
    def life(sidecar, out):
        words = [str(Path(__file__).with_name("train.py")), "25", str(out)]
        variables = {**os.environ, "KEEPSTEP_SOCKET": str(sidecar.socket), "OMP_NUM_THREADS": "1"}
        with (tmp_path / "trainer.log").open("ab") as log:
            return warm.Process(words, stdout=log, env=variables)

    def losses(out):
        return [line.split() for line in out.read_text().splitlines()] if out.exists() else []

    quiet, killed = tmp_path / "quiet", tmp_path / "killed"
    undisturbed = sidecars("other", memory=tmp_path / "memory").start()
    assert life(undisturbed, quiet).wait(60) == 0
    sidecar = sidecars().start()
    for lines in (3, 11, 12, 20):
        run = life(sidecar, killed)
        eventually(lambda lines=lines: len(losses(killed)) >= lines, every_s=0.001)
        run.kill()
        run.wait()
        if lines == 11:
            sidecar.kill()
            sidecar.lose_memory()
            sidecar.start()
    assert life(sidecar, killed).wait(60) == 0, (tmp_path / "trainer.log").read_text()
    seen = losses(killed)
    assert dict(seen) == dict(losses(quiet)), "the last loss of each step"
    assert all(loss == dict(losses(quiet))[step] for step, loss in seen)
    assert len(base_files(sidecar)) == 1


@pytest.mark.parametrize("times", [1, 5])
def test_an_undetectable_change_is_restored_if_the_script_announces_it(sidecar, times):
    model, optimizer = made()
    weight = model.layers[2].base.weight
    with begun(components(model, optimizer), strict=True, frozen_once=True) as checkpointer:
        checkpointer.save(0)
        for step in range(1, 1 + times):
            with checkpointer.mutating():
                weight.data[0, 100 + step] = 7.0  # between the samples of the fingerprint
            checkpointer.save(step)
            checkpointer.wait(step, "staged")
    other, fresh = made(1)
    with begun(components(other, fresh), strict=True, frozen_once=True):
        assert equal(model, other)
        assert (other.layers[2].base.weight[0, 101 : 101 + times] == 7).all()


def test_a_sparse_change_that_bypasses_the_version_counter_is_found_some_saves_later(
    sidecar, caplog
):
    model, optimizer = made()
    weight = model.layers[2].base.weight
    with begun(components(model, optimizer), strict=True, frozen_once=True) as checkpointer:
        for step in range(8):
            if step == 2:
                weight.data[0, 101] = 7.0  # between the samples of the fingerprint
            train(model, optimizer)
            checkpointer.save(step)
            checkpointer.wait(step)
    other, fresh = made(1)
    with begun(components(other, fresh), strict=True, frozen_once=True):
        assert equal(model, other)
    messages = [
        message for message in caplog.messages if "past torch's version counters" in message
    ]
    assert len(messages) == 1
    assert "layers.2.base.weight" in messages[0]


def test_repeated_undetected_changes_disable_bases_until_the_next_restart(sidecar):
    model, optimizer = made(layers=14)
    bases = []
    with begun(components(model, optimizer), strict=True, frozen_once=True) as checkpointer:
        for step in range(24):
            for layer in model.layers:
                layer.base.weight.data[0, 101] += 1  # between the samples of the fingerprint
            checkpointer.save(step)
            checkpointer.wait(step)
            if (base := checkpointer._frozen.base) not in bases:
                bases.append(base)
    assert bases[-1] is None
    assert len(bases) <= 1 + 6, "the first, five after it, and none"


def test_comparing_a_slice_costs_less_than_one_percent_of_a_step_of_100_ms(sidecar):
    model, optimizer = made(width=2048)
    with begun(components(model, optimizer), strict=True, frozen_once=True) as checkpointer:
        for step in range(2):
            checkpointer.save(step)
            checkpointer.wait(step)
        base = checkpointer._frozen.base
        assert base.mapping is not None
        took = []
        for _ in range(2 * len(base._runs[None])):
            began = time.perf_counter()
            assert not base.differing_in_next_slice()
            took.append(time.perf_counter() - began)
    assert statistics.median(took) < 1e-3


def test_a_checkpointer_with_eager_copies_uses_no_base(sidecar):
    lives(sidecar, 0, lazy=False)
    assert not base_files(sidecar)
