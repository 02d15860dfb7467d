"""`keepstep run`: a command beside a sidecar that outlives it."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import click

from keepstep.core.retention import Retention
from keepstep.errors import KeepstepError, UsageError
from keepstep_sidecar.cli.options import (
    archive_options,
    directory_option,
    duration_option,
    keeping_options,
    run_option,
)
from keepstep_sidecar.cli.peer_options import peer_options
from keepstep_sidecar.cli.run_dir import Options, Places, Service, places_of, run_name, save_service
from keepstep_sidecar.config.archive import ArchiveConfig
from keepstep_sidecar.config.peers import PeerSettings
from keepstep_sidecar.volume.paths import Tree

_NOT_EXECUTABLE, _NOT_FOUND = 126, 127


@click.command(context_settings={"ignore_unknown_options": False, "allow_interspersed_args": False})
@directory_option
@click.option(
    "--volume",
    "volumes",
    multiple=True,
    type=click.Path(file_okay=False, path_type=Path),
    help="Directory on a local drive for durable steps; may be repeated, ranks are spread over"
    " them.  [default: DIR]",
)
@run_option(default="stem of the first *.py in COMMAND")
@keeping_options
@archive_options
@peer_options
@click.option(
    "--restarts",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    metavar="N",
    help="Start COMMAND again up to N times when it fails.",
)
@click.option(
    "--restore-from",
    metavar="[RUN/]STEP",
    default="",
    help="Go back to this step, a number or an id of `keepstep steps`, once: later steps are dead"
    " then, and further restarts go on from the newest one. RUN/STEP: begin as a fork of another"
    " run, from its step (or `latest`) in the archive; a run with steps of its own goes on from"
    " these.",
)
@duration_option(
    "--linger", default="15m", help="How long memory stays after a failure; see `keepstep stop`."
)
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED, metavar="COMMAND...")
@click.pass_context
def run(
    ctx: click.Context,
    directory: Path,
    volumes: tuple[Path, ...],
    run: str | None,
    slots: int,
    memory_limit: int | None,
    stage_every: int,
    persist_every: int,
    keep: Retention,
    capacity: int | None,
    restarts: int,
    restore_from: str,
    linger: float,
    archive: ArchiveConfig | None,
    peers: PeerSettings | None,
    command: tuple[str, ...],
) -> None:
    """Run COMMAND beside a sidecar that keeps its steps, and return its exit code.

    The sidecar outlives COMMAND: started again, it goes on from memory. When COMMAND ends with 0,
    nothing stays behind but the committed steps. A first Ctrl-C is COMMAND's; a second one kills
    it. Exit codes: COMMAND's own, 128+n when signal n killed it, 125 when the sidecar does not
    start, 126 and 127 when COMMAND cannot be executed or found.

    \b
    Examples:
      keepstep run -- python train.py
      keepstep run --restarts 3 -- torchrun --nproc-per-node 8 train.py
      keepstep run --dir /scratch/ckpt --volume /nvme0 --volume /nvme1 \\
          --memory-limit 64Gi --persist-every 10 -- torchrun train.py --lr 1e-3
    """
    program = _program(command[0])
    places = places_of(directory, run or run_name(command), volumes)
    restore_from = restore_from.removeprefix(f"{places.run}/")
    options = Options(
        slots=slots,
        memory_limit_bytes=memory_limit,
        stage_every=stage_every,
        persist_every=persist_every,
        keep=keep.last,
        keep_every=keep.every,
        capacity_bytes=capacity,
        linger_s=linger,
        archive=archive.to_plain() if archive else None,
        peers=_reachable(peers),
        restore_from=restore_from,
        restore_since=_restore_since(places, restore_from, archive),
    )
    service = Service(places=places, options=options)
    ctx.exit(_supervise(service, program=program, command=command, restarts=restarts))


def _program(name: str) -> str:
    """The file to execute. Ends this process with 126 or 127, as a shell does, when there is
    none: before a sidecar is started for nothing."""
    found = shutil.which(name)
    if found is not None:
        return found
    exists = os.path.exists(name)
    click.echo(f"keepstep: {name}: {'not executable' if exists else 'command not found'}", err=True)
    raise SystemExit(_NOT_EXECUTABLE if exists else _NOT_FOUND)


def _reachable(peers: PeerSettings | None) -> dict[str, Any] | None:
    """Raises UsageError where no operator would tell what is missing."""
    if peers is None:
        return None
    if peers.files is None:
        raise UsageError("--peer-listen needs --peer-cert, --peer-key and --peer-ca")
    return peers.to_plain()


def _restore_since(places: Places, restore_from: str, archive: ArchiveConfig | None) -> int:
    """The epoch after which a rollback has come about; a fork needs none.

    Raises UsageError when `restore_from` names no step, or one that cannot be reached.
    """
    from keepstep_sidecar.config import fork
    from keepstep_sidecar.config.restore_from import parse

    if "/" in restore_from:
        fork.require_archive(fork.parse(restore_from), archive)
    elif restore_from:
        parse(restore_from)
        return _newest_epoch(places)
    return 0


def _newest_epoch(places: Places) -> int:
    """Its number, on this machine's record; what cannot be read is the sidecar's to refuse."""
    from keepstep_sidecar.volume import run_record

    newest = 0
    for root in places.roots:
        with suppress(KeepstepError, OSError):
            record = run_record.load(Tree(root).record, run=places.run)
            newest = max([newest, *(one.id.number for one in record.epochs)])
    return newest


def _supervise(service: Service, *, program: str, command: tuple[str, ...], restarts: int) -> int:
    from keepstep_sidecar.cli import launcher
    from keepstep_sidecar.cli.supervisor import Supervisor

    _make_home(service.places)
    with launcher.supervising(service.places):
        adopted = launcher.adopt(service)
        save_service(service)
        return Supervisor(
            service, path=program, command=command, restarts=restarts, adopted=adopted
        ).run()


def _make_home(places: Places) -> None:
    try:
        places.home.mkdir(parents=True, exist_ok=True)
        _keep_out_of_git(places.home.parent)
    except OSError as error:
        raise UsageError(
            f"cannot keep a run in {places.home.parent} ({error.strerror}); choose --dir DIR"
        ) from error


def _keep_out_of_git(directory: Path) -> None:
    """The default directory lies in the user's project; its gigabytes are not for commits."""
    if directory.name == ".keepstep":
        (directory / ".gitignore").write_text("*\n")
