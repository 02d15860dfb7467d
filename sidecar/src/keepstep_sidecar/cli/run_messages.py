"""The messages of `keepstep run` on stderr, one line each. Pure: values in, text out."""

from __future__ import annotations

import shlex
import signal

from keepstep.core.history import Goodput
from keepstep.core.retention import Retention
from keepstep.steps import StepId, Tier
from keepstep.wire.status import TierStatus
from keepstep_sidecar.cli.inventory import RunHoldings, step_text
from keepstep_sidecar.cli.run_dir import RunDir
from keepstep_sidecar.config.settings import format_duration
from keepstep_sidecar.config.sidecar import Config


def started_text(kept: RunDir, held: RunHoldings | None, *, adopted: bool) -> str:
    """Where the run is kept, which steps will be kept, and from where it can go on."""
    volumes = " and ".join(str(root) for root in kept.roots)
    memory = "adopted the sidecar and its memory" if adopted else f"memory in {kept.memory}"
    there = "" if held is None or held.newest_complete_step is None else f"; {_goes_on(held)}"
    return (
        f"run {kept.name!r}: {_policy(kept.config)} in {volumes}; {memory}; log {kept.log}{there}"
    )


def _policy(config: Config) -> str:
    staged = f"{interval_text(config.base_stage_interval)} is staged"
    if config.stages_by_cost:
        staged = "as many steps as cost 1 % of the training time are staged"
    persisted = "as many as pay off are made durable"
    if config.persist_every is not None:
        persisted = f"{interval_text(config.persist_grid_interval)} is made durable"
    return f"{staged}, {persisted}, {_of_volumes(config.retention)} are kept"


def _of_volumes(keep: Retention) -> str:
    newest = f"the newest {keep.last} committed steps"
    if keep.every_steps is not None:
        return f"{newest} and one every {keep.every_steps} steps"
    return (
        newest
        if keep.every_s is None
        else f"{newest} and one every {format_duration(keep.every_s)}"
    )


def interval_text(steps: int) -> str:
    """`every step`, `every 4th step`."""
    if steps == 1:
        return "every step"
    of_teens = steps // 10 % 10 == 1
    suffix = "th" if of_teens else {1: "st", 2: "nd", 3: "rd"}.get(steps % 10, "th")
    return f"every {steps}{suffix} step"


def _goes_on(held: RunHoldings) -> str:
    return f"it can go on from {_newest(held)}"


def _newest(held: RunHoldings) -> str:
    newest, committed = held.newest_complete_step, held.newest_committed
    if newest is None and has_seen_no_trainer(held):
        return f"the beginning: {_NO_TRAINER}"
    if newest is None:
        return "the beginning: no step is held by all ranks"
    text = step_text(newest)
    if committed is None:
        # a sidecar that has just begun publishes what all ranks have on its volumes
        durable = len(newest.ranks.get(Tier.LOCAL, ())) == newest.world
        return text if durable else f"{text}, nothing is committed"
    return text if committed == newest else f"{text}, committed is step {committed.id.step}"


def restarted_text(held: RunHoldings | None, *, code: int, attempt: int, restarts: int) -> str:
    """How the command ended, which restart this is, and from where the command can go on."""
    place = "the sidecar does not say what it holds" if held is None else _goes_on(held)
    return f"the command {exit_text(code)}; restart {attempt} of {restarts}; {place}"


def freed_memory_text(kept: RunDir) -> str:
    """Says that memory of an earlier run of this name was freed, because its directory is gone."""
    return (
        f"run {kept.name!r} begins at step 0: its directory was removed, so what an earlier run of"
        " that name had left in memory was freed"
    )


def removed_memory_text(kept: RunDir) -> str:
    """Says that another program removed the run's shared memory while the command runs."""
    return (
        f"{kept.memory} was removed by another program; the sidecar makes it again and the next"
        " step is kept. At a logout systemd does that (RemoveIPC=yes): `loginctl enable-linger`"
        " prevents that"
    )


def backlog_text(tier: Tier, status: TierStatus) -> str:
    """Says which backlog the end of the run waits for."""
    why = f" ({status.trouble})" if status.trouble else ""
    return (
        f"waiting until {status.backlog} shards are in {tier} {status.where}{why}; Ctrl-C ends"
        " the wait, what is committed stays on the volumes"
    )


_NO_TRAINER = "no trainer has connected"
_HOW_TO_COME = (
    "a script makes a keepstep.Checkpointer and calls its restore(), a framework takes the line of"
    " docs/frameworks.md"
)


def has_seen_no_trainer(held: RunHoldings) -> bool:
    """Whether the live sidecar has seen neither a trainer nor a step of one."""
    return held.live is not None and not held.live.ranks and not held.steps


def find_stuck_restart_step(held: RunHoldings) -> StepId | None:
    """The step that the newest life went on from, if it has saved no step since; else None."""
    live = held.live
    if live is None or live.epoch is None or live.epoch.parent is None:
        return None
    saved = any(rank.staged and rank.staged.epoch == live.epoch.id for rank in live.ranks)
    return None if saved else live.epoch.parent


def ended_text(
    kept: RunDir,
    held: RunHoldings | None,
    *,
    code: int,
    freed: bool,
    goodput: Goodput | None = None,
    unused: bool = False,
    complete: StepId | None = None,
) -> str:
    """How the command ended, the newest committed step, the goodput, and the memory that remains.
    `unused`: no trainer ever connected. `complete`: see `find_stuck_restart_step`."""
    parts = [f"the command {exit_text(code)}", _NO_TRAINER if unused else _committed(held)]
    if unused and code == 0:  # otherwise the failure is what matters
        parts.append(_HOW_TO_COME)
    if complete is not None and code == 0:
        parts.append(
            f"it went on from step {complete.step} and saved nothing: if this run is complete, give"
            " a new training a name of its own (keepstep run --run NAME)"
        )
    if goodput is not None:
        parts.append(f"goodput {goodput_text(goodput)}")
    if not freed:
        parts.append(_remains(kept, held))
    return "; ".join(parts)


def _committed(held: RunHoldings | None) -> str:
    step = None if held is None else held.newest_committed
    if step is None or not step.path:
        return "no step is committed"
    return f"newest committed: step {step.id.step} of epoch {step.id.epoch.number} in {step.path}"


def _remains(kept: RunDir, held: RunHoldings | None) -> str:
    stop = shlex.join(["keepstep", "stop", "--dir", str(kept.home.parent), "--run", kept.name])
    if held is None or held.live is None:
        return f"the sidecar is down, its memory may remain in {kept.memory}: {stop}"
    newest = held.newest_complete_step
    holds = "" if newest is None else f" with step {newest.id.step}"
    return (
        f"memory{holds} stays for {format_duration(kept.config.linger_s or 0.0)}:"
        f" run it again to go on, or free it: {stop}"
    )


def goodput_text(goodput: Goodput) -> str:
    """`91.3 % of 2h`: the goodput of all lives, and their wall time."""
    return f"{100 * goodput.ratio:.1f} % of {format_duration(goodput.wall_s)}"


def badput_text(goodput: Goodput) -> str:
    """Where the rest of the time went, the largest part first; '' if nothing was lost."""
    lost = [(name, seconds) for name, seconds in goodput.badput.items() if seconds >= _WORTH_S]
    lost.sort(key=lambda pair: -pair[1])
    return ", ".join(f"{_BUCKETS[name]} {format_duration(seconds)}" for name, seconds in lost)


_WORTH_S = 0.05
_BUCKETS = {
    "training_prep": "start of processes",
    "program_startup": "slow first steps",
    "checkpoint_save": "waiting for saves",
    "checkpoint_restore": "restores",
    "wasted_progress": "steps done again or torn",
    "infrastructure_recovery": "until a process was there again",
}


def exit_text(code: int) -> str:
    """`ended with 0`, `failed with 1`, `was killed by SIGKILL (137)`."""
    if code == 0:
        return "ended with 0"
    if code > 128:
        try:
            return f"was killed by {signal.Signals(code - 128).name} ({code})"
        except ValueError:
            pass
    return f"failed with {code}"
