"""`keepstep status`: shows the state of a run."""

from __future__ import annotations

import contextlib
import functools
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import click

from keepstep.core.history import Goodput
from keepstep.errors import KeepstepError
from keepstep.steps import Tier
from keepstep.wire.status import RankStatus, Status, TierStatus
from keepstep_sidecar.cli import inventory, output, run_dir
from keepstep_sidecar.cli.inventory import RunHoldings
from keepstep_sidecar.cli.options import json_option, which_run
from keepstep_sidecar.cli.run_dir import RunDir
from keepstep_sidecar.cli.run_messages import badput_text, goodput_text, interval_text
from keepstep_sidecar.config.settings import format_duration, format_size

_WATCH_S: Final = 2.0


@click.command()
@which_run
@json_option
@click.option(
    "--watch",
    is_flag=True,
    help="Print it every 2 s until Ctrl-C; where stdout is no terminal, only on a change.",
)
def status(directory: Path, run: str | None, as_json: bool, watch: bool) -> None:
    """Show what is staged, durable and committed, by rank, and what the run would survive.

    Peers and the archive have a table of their own: shards that were sent there and that wait, and
    for how long the oldest of them does.

    \b
    Examples:
      keepstep status
      keepstep status --watch
      keepstep status --dir /scratch/ckpt --run train --json
    """
    kept = run_dir.find_run_to_read(directory, run)
    show = _print_json if as_json else _print
    if not watch:
        show(kept, inventory.read_holdings(kept))
        return
    with contextlib.suppress(KeyboardInterrupt):
        _watch(functools.partial(run_dir.find_run_to_read, directory, kept.name), show)


def _watch(find: Callable[[], RunDir], show: Callable[[RunDir, RunHoldings], None]) -> None:
    """Show the run every two seconds on a terminal; elsewhere when it changed, one block each
    time."""
    before: object = None
    while True:
        try:
            kept = find()
            held = inventory.read_holdings(kept)
            state, print_block = _without_times(held), functools.partial(show, kept, held)
        except KeepstepError as error:
            state, print_block = str(error), functools.partial(output.print_line, f"error: {error}")
        if sys.stdout.isatty():
            click.clear()
            print_block()
        elif state != before:
            print_block()
            click.echo()
        before = state
        time.sleep(_WATCH_S)


def _without_times(held: RunHoldings) -> object:
    """What is shown of a run, without what changes by itself: ages, and room on the volumes."""
    live = held.live
    if live is None:
        return held.steps, held.problems
    return (
        (live.pid, live.epoch, live.ranks, live.survives, live.hints, live.persist_every),
        (held.steps, held.problems),
        [(volume.path, volume.failed, volume.quarantined) for volume in live.volumes],
        [
            (at, tier.where, tier.sent, tier.backlog, tier.trouble)
            for at, tier in live.tiers.items()
        ],
    )


def _print_json(kept: RunDir, held: RunHoldings) -> None:
    goodput = inventory.run_goodput(kept, held)
    shown = ("ratio", "wall_s", "seconds", "steps", "interruptions")
    document = {
        "run": kept.name,
        "running": held.live is not None,
        "committed": inventory.step_document(held.newest_committed),
        "newest": inventory.step_document(held.newest_complete_step),
        "socket": kept.socket,
        "log": kept.log,
        "volumes": kept.roots,
        "problems": held.problems,
        "goodput": goodput and {name: getattr(goodput, name) for name in shown},
        "sidecar": held.live,
    }
    output.print_json(document)


def _print(kept: RunDir, held: RunHoldings) -> None:
    output.print_facts(_facts(kept, held), width=11)
    ranks, tiers = ((), {}) if held.live is None else (held.live.ranks, held.live.tiers)
    right = ("RANK", "STAGED", "DURABLE", "SAVES", "LOST", "BLOCKED/SAVE", "SENT", "WAITING")
    output.print_table(_RANK, map(_rank_row, ranks), right=right)
    rows = (_tier_row(tier, status) for tier, status in tiers.items())
    output.print_table(_TIER, rows, right=(*right, "BEHIND"))
    output.print_lines(f"warning: {problem}" for problem in held.problems)


_RANK = ("RANK", "TRAINER", "STAGED", "DURABLE", "SLOTS", "SAVES", "LOST", "BLOCKED/SAVE")
_APART_S = 60.0  # ranks end within a minute of each other
_TIER = ("TIER", "WHERE", "SENT", "WAITING", "BEHIND", "TROUBLE")


def _facts(kept: RunDir, held: RunHoldings) -> list[tuple[str, str]]:
    live = held.live
    up = live and f"{live.sidecar}, pid {live.pid}, up {_age(live.started_at)}"
    facts = [
        ("run", kept.name),
        ("sidecar", up or "not running"),
        ("committed", _committed(held)),
    ]
    if live is not None:
        newest = held.newest_complete_step
        none = "no step that all ranks hold"
        facts.append(("newest", none if newest is None else inventory.step_text(newest)))
        by_cost = " (at most 1 % of the training time)" if kept.config.stages_by_cost else ""
        facts.append(("stage", f"{interval_text(live.stage_every)}{by_cost}"))
        facts.append(("persist", _persist(live, auto=kept.config.persist_every is None)))
        facts.append(("survives", ", ".join(live.survives) or "nothing yet"))
        facts.append(("memory", f"{kept.memory} (pinned: {live.locked})"))
        facts += [("hint", text) for text in live.hints]
        facts += [("restart", text) for text in _restart(live)]
        facts += [
            ("vote", f"rank {rank.rank} waits: {rank.waits}") for rank in live.ranks if rank.waits
        ]
    facts += [("goodput", text) for text in _goodput(inventory.run_goodput(kept, held))]
    facts += [("volume", text) for text in _volumes(kept, live)]
    if kept.log.exists():  # a pod's sidecar writes to stderr
        facts.append(("log", str(kept.log)))
    return facts


def _goodput(found: Goodput | None) -> list[str]:
    """The goodput of all lives of the run here, and where the rest of the time went."""
    if found is None:
        return []
    lost = badput_text(found)
    times = {0: "", 1: "; interrupted once"}.get(
        found.interruptions, f"; interrupted {found.interruptions} times"
    )
    return [f"{goodput_text(found)} were steps that count{times}{lost and f'; lost: {lost}'}"]


def _restart(live: Status) -> list[str]:
    """The newest restart, as the rank saw it for which it took longest."""
    restarts = [(rank.restart, rank.rank) for rank in live.ranks if rank.restart is not None]
    latest = max((restart.at for restart, _ in restarts), default=0.0)
    of_latest = [
        (restart.total_s, restart, rank)
        for restart, rank in restarts
        if latest - restart.at < _APART_S
    ]
    for total_s, restart, rank in sorted(of_latest, key=lambda found: -found[0])[:1]:
        return [
            f"{_age(restart.at)} ago, {total_s:.1f} s on rank {rank}:"
            f" {restart.detection_s:.1f} until a process was there, {restart.start_s:.1f} its"
            f" start, {restart.restore_s:.1f} the restore, {restart.first_step_s:.1f} the first"
            " step"
        ]
    return []


def _age(at: float) -> str:
    return format_duration(max(0.0, time.time() - at))


def _committed(held: RunHoldings) -> str:
    step, live = held.newest_committed, held.live
    if step is None:
        return "nothing"
    ago = ""
    if live is not None and live.committed_at is not None:
        ago = f", {_age(live.committed_at)} ago"
    return f"{inventory.step_text(step)}{ago}, {step.path}"


_LIMITS = {
    "step": "none is left out",
    "write": "as the drive takes them",
    "stall": "so that 1 % of the training time is lost at most",
    "failures": "which loses least to failures and to writing",
    "trial": "for a moment, to see what a write costs",
    "wear": "so that the drives do not wear sooner",
}


def _persist(live: Status, *, auto: bool) -> str:
    """How often a step is made durable, why, and the measurements behind that."""
    often = interval_text(live.persist_every)
    interval, measured = live.persist_interval, live.persist_measured
    if not auto or interval is None or measured is None:
        return f"{often} ({'too early to choose' if auto else 'as asked for'})"
    why = _LIMITS.get(interval.limit, interval.limit)
    if live.persist_every > interval.steps:
        why = "the drive does not keep up"
    elif live.persist_every < interval.steps:
        often += f", soon {interval_text(interval.steps)}"
    lost = "" if measured.stall_s is None else f"{measured.stall_s:.3g} s"
    mean = f", one in {format_duration(measured.mtbf_s)}" if measured.mtbf_s else ""
    facts = [
        f"a step takes {measured.step_s:.3g} s",
        f"its write {measured.write_s:.3g} s for {format_size(measured.image_bytes)}",
        f"time lost to a write {lost or 'unknown'}",
        f"{measured.failures} failures{mean}",
    ]
    if measured.drive_bytes and measured.drive_writes_per_day:
        drives = format_size(measured.drive_bytes)
        facts.append(f"drives of {drives} written {measured.drive_writes_per_day:g} times a day")
    return f"{often}, {why} ({'; '.join(facts)})"


def _volumes(kept: RunDir, live: Status | None) -> list[str]:
    if live is None:
        return [str(root) for root in kept.roots]
    texts = []
    for volume in live.volumes:
        sizes = f"{format_size(volume.used_bytes)} used, {format_size(volume.free_bytes)} free"
        broken = f", FAILED: {volume.failed}" if volume.failed else ""
        aside = f", {volume.quarantined} in quarantine" if volume.quarantined else ""
        texts.append(f"{volume.path} ({volume.engine}; {sizes}{aside}{broken})")
    return texts


def _rank_row(rank: RankStatus) -> tuple[str, ...]:
    sealed = sum(slot.state == "sealed" for slot in rank.slots)
    blocked = f"{1000 * rank.blocked_s / rank.saves:.1f} ms" if rank.saves else ""
    return (
        f"{rank.rank} of {rank.world}",
        f"pid {rank.pid}" if rank.alive else "none",
        "" if rank.staged is None else str(rank.staged.step),
        "" if rank.durable is None else str(rank.durable.step),
        f"{sealed} of {len(rank.slots)} x {format_size(rank.slot_bytes)}",
        str(rank.saves),
        str(rank.skipped + rank.discarded),
        blocked,
    )


def _tier_row(tier: Tier, status: TierStatus) -> tuple[str, ...]:
    return (
        str(tier),
        status.where,
        f"{status.sent} ({format_size(status.sent_bytes)})",
        str(status.backlog),
        format_duration(status.behind_s) if status.backlog else "",
        status.trouble or "none",
    )
