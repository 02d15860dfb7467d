"""`keepstep status`: one look at a run."""

from __future__ import annotations

import time
from pathlib import Path

import click

from keepstep.wire.status import DepotStatus, RankStatus, Status
from keepstep_sidecar.cli.inventory import Holdings, Step
from keepstep_sidecar.cli.options import json_option, which_run
from keepstep_sidecar.cli.quantities import format_duration, format_size
from keepstep_sidecar.cli.run_dir import Service, find_service


@click.command()
@which_run
@json_option
def status(directory: Path, run: str | None, as_json: bool) -> None:
    """Show what is staged, durable and committed, by rank, and what the run would survive.

    Peers and the archive have a table of their own: shards that were sent there and that wait, and
    for how long the oldest of them does.

    \b
    Examples:
      keepstep status
      keepstep status --dir /scratch/ckpt --run train --json
    """
    from keepstep_sidecar.cli import inventory, output

    service = find_service(directory, run)
    held = inventory.read(service.places)
    if as_json:
        output.print_json(_document(service, held))
    else:
        _print(service, held)


def _document(service: Service, held: Holdings) -> dict[str, object]:
    places = service.places
    return {
        "run": places.run,
        "running": held.live is not None,
        "committed": held.committed,
        "newest": held.newest,
        "socket": places.socket,
        "log": places.log,
        "volumes": places.roots,
        "problems": held.problems,
        "sidecar": held.live,
    }


def _print(service: Service, held: Holdings) -> None:
    from keepstep_sidecar.cli import output

    console = output.console()
    for name, text in _facts(service, held):
        console.print(f"{name:<11}{text}", soft_wrap=True)
    if held.live is not None and held.live.ranks:
        table = output.table(
            "RANK", "TRAINER", "STAGED", "DURABLE", "SLOTS", "SAVES", "LOST", "BLOCKED/SAVE",
            right=("RANK", "STAGED", "DURABLE", "SAVES", "LOST", "BLOCKED/SAVE"),
        )  # fmt: skip
        for rank in held.live.ranks:
            table.add_row(*_rank_row(rank))
        console.print(table)
    if held.live is not None and held.live.depots:
        table = output.table(
            "TIER", "WHERE", "SENT", "WAITING", "BEHIND", "TROUBLE",
            right=("SENT", "WAITING", "BEHIND"),
        )  # fmt: skip
        for depot in held.live.depots:
            table.add_row(*_depot_row(depot))
        console.print(table)
    for problem in held.problems:
        console.print(f"warning: {problem}", soft_wrap=True)


def _facts(service: Service, held: Holdings) -> list[tuple[str, str]]:
    live, places = held.live, service.places
    facts = [("run", places.run), ("sidecar", "not running" if live is None else _sidecar(live))]
    facts.append(("committed", _committed(held)))
    if live is not None:
        facts.append(("newest", _step(held.newest)))
        facts.append(("survives", ", ".join(live.survives) or "nothing yet"))
        facts.append(("memory", f"{places.memory} ({live.locked})"))
        facts += [
            ("vote", f"rank {one.rank} waits: {one.waits}") for one in live.ranks if one.waits
        ]
    facts += [("volume", text) for text in _volumes(service, live)]
    facts.append(("log", str(places.log)))
    return facts


def _sidecar(live: Status) -> str:
    age = format_duration(max(0.0, time.time() - live.started_at))
    return f"{live.sidecar}, pid {live.pid}, up {age}"


def _committed(held: Holdings) -> str:
    step, live = held.committed, held.live
    if step is None:
        return "nothing"
    ago = ""
    if live is not None and live.committed_at is not None:
        ago = f", {format_duration(max(0.0, time.time() - live.committed_at))} ago"
    return f"{_step(step)}{ago}, {step.path}"


def _step(step: Step | None) -> str:
    if step is None:
        return "no step that all ranks hold"
    return (
        f"step {step.id.step} of epoch {step.id.epoch.number} ({', '.join(map(str, step.tiers))})"
    )


def _volumes(service: Service, live: Status | None) -> list[str]:
    if live is None:
        return [str(root) for root in service.places.roots]
    texts = []
    for one in live.volumes:
        sizes = f"{format_size(one.used_bytes)} used, {format_size(one.free_bytes)} free"
        broken = f", FAILED: {one.failed}" if one.failed else ""
        aside = f", {one.quarantined} in quarantine" if one.quarantined else ""
        texts.append(f"{one.path} ({one.engine}; {sizes}{aside}{broken})")
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


def _depot_row(depot: DepotStatus) -> tuple[str, ...]:
    return (
        str(depot.tier),
        depot.where,
        f"{depot.sent} ({format_size(depot.sent_bytes)})",
        str(depot.backlog),
        format_duration(depot.behind_s) if depot.backlog else "",
        depot.trouble or "none",
    )
