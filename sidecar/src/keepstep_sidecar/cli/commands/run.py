"""`keepstep run`: runs a command beside a sidecar that outlives it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import click

from keepstep.errors import UsageError
from keepstep_sidecar.cli import inventory
from keepstep_sidecar.cli.options import directory_option
from keepstep_sidecar.cli.run_dir import RunDir, checked_name, make_home, run_name
from keepstep_sidecar.config.sidecar import SETTINGS, options

_NOT_EXECUTABLE, _NOT_FOUND = 126, 127
_LINGER_S: Final = 900.0
_DYING_S: Final = 10.0
"""How long trainers of a killed command may take to end."""


@click.command(context_settings={"ignore_unknown_options": False, "allow_interspersed_args": False})
@directory_option
@options(
    [one for one in SETTINGS if one.for_run],
    run="stem of the first *.py in COMMAND",
    volumes="DIR",
    linger="15m",
)
@click.option(
    "--restarts",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    metavar="N",
    help="Start COMMAND again up to N times when it fails, unless the next start would end in the"
    " same error.",
)
@click.option(
    "--warm",
    is_flag=True,
    help="Start COMMAND (`python FILE`, `python -m` or torchrun) from a process that has imported"
    " torch: a restart takes tenths of a second, for 220 MiB of memory.",
)
@click.option(
    "--preload",
    multiple=True,
    metavar="MODULE",
    help="With --warm, import this one too, once for all starts; several by repeating.",
)
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED, metavar="COMMAND...")
@click.pass_context
def run(
    ctx: click.Context,
    values: dict[str, Any],
    directory: Path,
    restarts: int,
    warm: bool,
    preload: tuple[str, ...],
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
      keepstep run --restarts 3 --warm --preload transformers -- torchrun train.py
      keepstep run --dir /scratch/ckpt --volume /nvme0 --volume /nvme1 \\
          --memory-limit 64Gi --persist-every 10 -- torchrun train.py --lr 1e-3
    """
    if preload and not warm:
        raise click.UsageError("--preload has no effect without --warm")
    program = _program(command[0])
    kept = _kept(directory, values, command)
    modules = preload if warm else None
    ctx.exit(_supervise(kept, program=program, command=command, restarts=restarts, modules=modules))


def _kept(directory: Path, values: dict[str, Any], command: Sequence[str]) -> RunDir:
    """The run as the options ask for it. Raises UsageError."""
    given = {"linger_s": _LINGER_S, **values}
    name = checked_name(given.pop("run", None) or run_name(command))
    kept = RunDir.of(directory, name, **given)
    config = kept.config
    if config.persist_every is not None and config.persist_every % config.stage_every:
        raise UsageError(
            f"--persist-every {config.persist_every} is no multiple of --stage-every"
            f" {config.stage_every}, and only a staged step can be made durable; for example"
            f" --persist-every {config.persist_base}"
        )
    if config.wish is None:
        return kept
    # the rollback has happened once an epoch newer than this began from its step; forks need none
    newest = max((epoch.id.number for epoch in inventory.epochs(kept)), default=0)
    return RunDir.of(directory, name, **given, restore_since=newest)


def _program(name: str) -> str:
    """The file to execute. If there is none, ends this process with 126 or 127, as a shell does,
    before a sidecar is started for nothing."""
    found = shutil.which(name)
    if found is not None:
        return found
    exists = os.path.exists(name)
    click.echo(f"keepstep: {name}: {'not executable' if exists else 'command not found'}", err=True)
    raise SystemExit(_NOT_EXECUTABLE if exists else _NOT_FOUND)


def _supervise(
    kept: RunDir,
    *,
    program: str,
    command: Sequence[str],
    restarts: int,
    modules: Sequence[str] | None,
) -> int:
    """Supervise the command; returns the exit code. `modules`: what to import for warm starts; None
    for cold starts."""
    from keepstep.warm.client import Starter
    from keepstep_sidecar.cli import launcher, messages
    from keepstep_sidecar.cli.supervisor import Supervisor, say

    if launcher.free_removed(kept, orphans=True):
        say(messages.freed_removed(kept))
    make_home(kept)
    with launcher.supervising(kept):
        launcher.require_idle(kept, timeout_s=_DYING_S)
        adopted = launcher.adopt(kept)
        return Supervisor(
            kept,
            path=program,
            command=command,
            restarts=restarts,
            adopted=adopted,
            starter=None if modules is None else Starter(program, command, modules, say),
        ).run()
