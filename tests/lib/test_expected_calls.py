"""What people know of other checkpoint managers, and try first."""

from __future__ import annotations

import logging
import random
import time

import pytest
import torch
from torch import nn

import keepstep
from tests.harness import eventually
from tests.lib.training import begun, bring_back, keep

MESSAGE = "restore_rng() was not before"


def draw():
    return torch.rand(()).item(), random.random()


def test_random_states_wait_for_restore_rng_and_are_set_once(sidecar, caplog):
    torch.manual_seed(7)
    keep({"m": nn.Linear(2, 2)})
    expected = draw()
    with caplog.at_level(logging.WARNING, logger="keepstep"):
        checkpointer = keepstep.Checkpointer({"m": nn.Linear(2, 2)})
        torch.manual_seed(8)
        untouched = torch.get_rng_state()
        assert checkpointer.restore(rng="later").step == 0
        assert torch.equal(torch.get_rng_state(), untouched)
        draw()  # as a loader's iterator does
        assert checkpointer.restore_rng() is True
        assert draw() == expected
        after = draw()
        assert checkpointer.restore_rng() is False
        assert draw() != after
        checkpointer.save(1)
        checkpointer.close()
    assert MESSAGE not in caplog.text


def test_a_save_before_restore_rng_causes_one_warning(sidecar, caplog):
    keep({"m": nn.Linear(2, 2)})
    checkpointer = keepstep.Checkpointer({"m": nn.Linear(2, 2)})
    checkpointer.restore(rng="later")
    with caplog.at_level(logging.WARNING, logger="keepstep"):
        assert checkpointer.save(1)
        assert checkpointer.save(2)
    assert caplog.text.count(MESSAGE) == 1
    checkpointer.close()


def test_restore_rng_does_nothing_when_there_was_no_step_to_restore(sidecar):
    checkpointer = keepstep.Checkpointer({"m": nn.Linear(2, 2)})
    assert checkpointer.restore(rng="later") is None
    before = torch.get_rng_state()
    assert checkpointer.restore_rng() is False
    assert torch.equal(torch.get_rng_state(), before)
    checkpointer.close()


def test_restore_rng_requires_a_restore_with_rng_later(sidecar):
    checkpointer = keepstep.Checkpointer({"m": nn.Linear(2, 2)})
    with pytest.raises(keepstep.UsageError, match=r'restore\(rng="later"\) first'):
        checkpointer.restore_rng()
    with pytest.raises(keepstep.UsageError, match='"now" or "later"'):
        checkpointer.restore(rng="soon")
    checkpointer.restore()
    with pytest.raises(keepstep.UsageError, match=r'restore\(rng="later"\) first'):
        checkpointer.restore_rng()
    checkpointer.close()
    without = keepstep.Checkpointer({"m": nn.Linear(2, 2)}, rng=False)
    with pytest.raises(keepstep.UsageError, match="made with rng=False"):
        without.restore(rng="later")
    without.close()


def test_components_can_be_given_as_keyword_arguments(sidecar):
    state, model = {"n": 1}, nn.Linear(2, 2)
    with begun({"state": state}, model=model) as checkpointer:
        checkpointer.save(0)
    other, progress = nn.Linear(2, 2), {}
    again = keepstep.Checkpointer(model=other, state=progress)
    again.restore()
    again.close()
    assert torch.equal(other.weight, model.weight)
    assert progress == {"n": 1}


def test_a_replaced_entry_of_the_components_dict_is_saved_also_beside_keywords(sidecar):
    components = {"state": {"n": 1}}
    with begun(components, model=nn.Linear(2, 2)) as checkpointer:
        components["state"] = {"n": 2}
        checkpointer.save(0)
    state = {}
    again = keepstep.Checkpointer(state=state, model=nn.Linear(2, 2))
    again.restore()
    again.close()
    assert state == {"n": 2}


def test_invalid_components_are_refused_with_a_specific_error(monkeypatch):
    monkeypatch.delenv("KEEPSTEP_SOCKET", raising=False)
    model = nn.Linear(2, 2)
    for wrong, text in (
        (lambda: keepstep.Checkpointer(), "as keywords"),
        (lambda: keepstep.Checkpointer(model, state={}), "as keywords"),
        (lambda: keepstep.Checkpointer({"m": model}, m=model), "m: named in the dict and"),
        (lambda: keepstep.Checkpointer(m=model, stric=True), "'stric' is a bool"),
        (lambda: keepstep.Checkpointer(m=model, rng={"seed": 1}), "rng= is an option"),
    ):
        with pytest.raises(keepstep.UsageError, match=text):
            wrong()


def test_steps_are_listed_before_restore_and_after(sidecar):
    components = {"m": nn.Linear(2, 2)}
    fresh = keepstep.Checkpointer(components)
    assert (fresh.latest_step(), fresh.all_steps()) == (None, [])
    assert not fresh.should_save(0)
    fresh.restore()
    for step in (0, 4):
        assert fresh.should_save(step)
        assert fresh.save(step)
        fresh.wait(step)
        assert not fresh.should_save(step)
    fresh.close()
    assert not fresh.should_save(9)
    again = keepstep.Checkpointer(components)
    assert (again.latest_step(), again.all_steps()) == (4, [0, 4])
    assert again.restore().step == 4
    assert again.all_steps() == [0, 4]
    again.close()


def test_a_step_in_shared_memory_alone_is_listed(sidecars, monkeypatch):
    monkeypatch.setenv("KEEPSTEP_SOCKET", str(sidecars().start("--persist-every", "100").socket))
    checkpointer = begun({"m": nn.Linear(2, 2)})
    checkpointer.save(3)
    checkpointer.wait(3, "staged")
    assert checkpointer.all_steps() == [3]
    checkpointer.close()


def test_no_steps_are_listed_without_a_sidecar(monkeypatch, tmp_path):
    monkeypatch.delenv("KEEPSTEP_SOCKET", raising=False)
    assert keepstep.Checkpointer(m=nn.Linear(2, 2)).all_steps() == []
    monkeypatch.setenv("KEEPSTEP_SOCKET", str(tmp_path / "none"))
    with pytest.raises(keepstep.SidecarAbsent):
        keepstep.Checkpointer(m=nn.Linear(2, 2)).latest_step()


def test_should_save_is_true_only_for_steps_of_the_stage_interval(sidecars, monkeypatch):
    monkeypatch.setenv("KEEPSTEP_SOCKET", str(sidecars().start("--stage-every", "3").socket))
    checkpointer = begun({"m": nn.Linear(2, 2)})
    due = [checkpointer.should_save(step) for step in range(5)]
    assert due == [True, False, False, True, False]
    assert due == [checkpointer.save(step) for step in range(5)]
    checkpointer.close()


def test_saving_a_staged_step_again_returns_true_and_does_not_overwrite_it(sidecar, caplog):
    state = {"n": 1}
    checkpointer = begun({"state": state}, strict=True)
    with caplog.at_level(logging.WARNING, logger="keepstep"):
        for step in range(48):
            state["n"] = step
            assert checkpointer.save(step)
            state["n"] = -1
            assert checkpointer.save(step)
    assert not caplog.records
    assert checkpointer.stats.saves == 48
    assert not checkpointer.stats.reasons
    checkpointer.close()
    again = keepstep.Checkpointer({"state": state})
    assert again.restore().step == 47
    assert state == {"n": 47}
    assert again.save(47), "it is the step that was restored"
    again.close()


def test_saving_a_step_again_that_was_not_staged_returns_false(sidecar, caplog):
    state = {"n": object()}
    kept = {"n": 1}
    components = {"state": kept}
    checkpointer = begun(components)
    components["state"] = state
    with caplog.at_level(logging.WARNING, logger="keepstep"):
        with pytest.raises(keepstep.UsageError, match=r"state\['n'\]"):
            checkpointer.save(0)  # the first save of a life
        components["state"] = kept
        assert not checkpointer.save(0)
    checkpointer.close(timeout=5) if checkpointer.save(1) else pytest.fail("step 1 is not kept")


def test_a_rollback_step_must_be_a_whole_number_and_requires_a_sidecar(sidecar, monkeypatch):
    checkpointer = keepstep.Checkpointer({"m": nn.Linear(2, 2)})
    for wrong in ("3", -1, 1.5, True):
        with pytest.raises(keepstep.UsageError, match="a step is a whole number"):
            checkpointer.restore(step=wrong)
    with pytest.raises(keepstep.RestoreError, match="going back to step 3 was asked for"):
        checkpointer.restore(step=3)
    checkpointer.close()
    monkeypatch.delenv("KEEPSTEP_SOCKET")
    with pytest.raises(keepstep.RestoreError, match="no rank has a sidecar"):
        keepstep.Checkpointer({"m": nn.Linear(2, 2)}).restore(step=3)


def test_a_rollback_step_that_exists_only_in_memory_becomes_durable(sidecars, monkeypatch):
    """What is newer, and has taken its place on the volume, is dead from then on."""
    sidecar = sidecars().start("--slots", "3")
    monkeypatch.setenv("KEEPSTEP_SOCKET", str(sidecar.socket))
    state = {"n": 0}
    checkpointer = begun({"state": state})
    for step in range(6):
        state["n"] = step
        checkpointer.save(step)
        checkpointer.wait(step)
    checkpointer.close()
    eventually(lambda: sidecar.published() == [4, 5], what="older steps go")
    back = min(checkpointer.all_steps())
    assert back not in sidecar.published()
    checkpointer = keepstep.Checkpointer({"state": state})
    assert checkpointer.restore(step=back).step == back
    eventually(lambda: back in sidecar.published(), what=f"step {back} on the volume")
    sidecar.kill()
    sidecar.lose_memory()
    sidecar.start()
    checkpointer.close()
    assert bring_back({"state": state}).step == back
    assert state == {"n": back}


def life(state, *, asked=None, last):
    """One life of a script: what `restore` gave; then it saves up to step `last`."""
    checkpointer = keepstep.Checkpointer({"state": state})
    at = checkpointer.restore(step=asked)
    for step in range(at.step + 1 if at else 0, last + 1):
        state["n"] = step
        checkpointer.save(step)
        checkpointer.wait(step)
    checkpointer.close()
    return at.step if at else None


def test_the_latest_rollback_request_replaces_an_earlier_one(sidecar):
    sidecar.kill()
    sidecar.start("--keep", "2", "--persist-every", "1")
    state = {"n": -1}
    life(state, last=9)
    assert life(state, asked=9, last=14) == 9
    assert life(state, asked=14, last=20) == 14
    assert life(state, asked=14, last=20) == 14
    eventually(lambda: 9 not in sidecar.published(), what="it goes")


def test_the_step_that_a_script_requests_is_kept_across_a_rollback_to_another_step(sidecar):
    sidecar.kill()
    sidecar.start("--keep", "2", "--persist-every", "1")
    state = {"n": -1}
    life(state, last=9)
    assert life(state, asked=9, last=14) == 9
    sidecar.kill()
    sidecar.start("--keep", "2", "--persist-every", "1", "--restore-from", "13")
    assert life(state, asked=9, last=20) == 13
    assert life(state, asked=9, last=20) == 9


# --- objects with state_dict() and load_state_dict() ---------------------------------------------


class Loader:
    """Like a loader that begins anew once it was asked for its state before it was loaded."""

    def __init__(self):
        self.calls, self.at = [], 0

    def state_dict(self):
        self.calls.append("asked")
        return {"at": self.at}

    def load_state_dict(self, state):
        self.calls.append("loaded")
        if self.calls[0] == "loaded":
            self.at = state["at"]


def test_load_state_dict_of_an_object_is_called_before_its_state_dict(sidecar):
    first = Loader()
    with begun({"loader": first, "m": nn.Linear(2, 2)}) as checkpointer:
        assert set(first.calls) == {"asked"}, "what cannot be kept is found before the first step"
        first.at = 7
        checkpointer.save(0)
    second = Loader()
    with begun({"loader": second, "m": nn.Linear(2, 2)}) as checkpointer:
        assert second.calls == ["loaded"]
        assert second.at == 7
        checkpointer.save(1)
        assert second.calls == ["loaded", "asked"]


class Refusing(nn.Linear):
    """Like a quantized layer that gives more than it takes."""

    def _save_to_state_dict(self, state, prefix, keep_vars):
        super()._save_to_state_dict(state, prefix, keep_vars)
        state[f"{prefix}weight.absmax"] = self.weight.detach().abs().max()


def test_a_module_that_cannot_load_its_own_state_is_refused_before_the_first_step(sidecar):
    checkpointer = keepstep.Checkpointer({"m": nn.Sequential(Refusing(2, 2))})
    with pytest.raises(keepstep.UsageError, match=r"m: load_state_dict\(\) refuses.*absmax"):
        checkpointer.restore()
    checkpointer.close()


# --- models that change --------------------------------------------------------------------------


def grown():
    model = nn.Sequential(nn.Linear(2, 2))
    return {"m": model, "o": torch.optim.SGD(model.parameters(), lr=0.1)}


def grow(components):
    components["m"].append(nn.Linear(2, 2))
    components["o"].add_param_group({"params": list(components["m"][1].parameters())})


def test_state_that_a_restart_must_build_first_is_logged_once_at_the_save(sidecar, caplog):
    components = grown()
    with caplog.at_level(logging.WARNING, logger="keepstep"), begun(components) as checkpointer:
        assert checkpointer.save(0)
        assert "Build this before restore()" not in caplog.text
        grow(components)
        components["ema"] = nn.Linear(2, 2)
        assert checkpointer.save(1)
        assert checkpointer.save(2)
    messages = [
        record.getMessage()
        for record in caplog.records
        if "Build this before restore()" in record.getMessage()
    ]
    assert len(messages) == 1
    assert "m.1.weight is new (torch.float32(2, 2))" in messages[0]
    assert "ema is new (a component)" in messages[0]
    assert "latest_step()" in messages[0]


def test_growing_dicts_and_modules_with_their_own_loading_cause_no_warning(sidecar, caplog):
    class Window(nn.Module):
        def __init__(self):
            super().__init__()
            self.rows = [torch.zeros(1)]

        def _save_to_state_dict(self, state, prefix, keep_vars):
            state[f"{prefix}rows"] = list(self.rows)

        def _load_from_state_dict(self, state, prefix, *_):
            self.rows = state[f"{prefix}rows"]

    components = {"m": Window(), "st": {"a": torch.ones(1)}}
    with caplog.at_level(logging.WARNING, logger="keepstep"), begun(components) as checkpointer:
        checkpointer.save(0)
        components["st"]["b"] = torch.ones(3)
        components["m"].rows.append(torch.ones(2))
        checkpointer.save(1)
    assert "Build this before restore()" not in caplog.text
    live = {"m": Window(), "st": {}}
    bring_back(live)
    assert [row.tolist() for row in live["m"].rows] == [[0], [1, 1]]


def test_the_automatic_stage_interval_limits_the_cost_of_saving_to_one_percent(
    sidecars, monkeypatch
):
    """The image takes some 10 ms to copy, a step of the training two."""
    sidecar = sidecars().start("--stage-every", "auto", "--persist-every", "1024")
    monkeypatch.setenv("KEEPSTEP_SOCKET", str(sidecar.socket))
    state = {"x": torch.zeros(8 << 20)}
    with begun({"state": state}, lazy=False, strict=True) as checkpointer:
        kept = []
        for step in range(300):
            state["x"][0] = step
            time.sleep(0.002)
            due = checkpointer.should_save(step)
            assert checkpointer.save(step) is due
            if due:
                checkpointer.wait(step, "staged")
                kept.append(step)
        assert kept[:10] == list(range(10)), "until enough is known"
        assert len([step for step in kept if step >= 100]) <= 25
        assert checkpointer.stats.staging_cost > 0.08
        with pytest.raises(keepstep.NotDurableError, match=r"one in \d+ steps is"):
            checkpointer.wait(299, "staged")
    assert sidecar.get("/v1/status")["stage_every"] >= 8
    restored = {"x": torch.zeros(8 << 20)}
    with begun({"state": restored}) as again:
        assert again.epoch.parent.step == 299, "close() keeps the last one"
        assert again.should_save(1024)
        assert not again.should_save(301), "the next life begins with what is known"
    assert restored["x"][0] == 299


def test_an_interval_that_changes_between_should_save_and_save_holds_from_the_next_step(sidecar):
    """What a script collects where `should_save` is true belongs to the step that is then saved."""
    with begun({"m": nn.Linear(2, 2)}) as checkpointer:
        assert checkpointer.should_save(1)
        checkpointer._saver.stage_every = 8
        assert checkpointer.save(1), "as should_save said"
        assert not checkpointer.should_save(2)
        checkpointer._saver.stage_every = 1
        assert not checkpointer.save(2)
        assert checkpointer.should_save(3)
        assert checkpointer.save(3)
