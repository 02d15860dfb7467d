"""`keepstep start`: starts a sidecar without a command, for scripts and notebooks."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import click

from keepstep.errors import SidecarError, UsageError
from keepstep_sidecar.cli.options import directory_option
from keepstep_sidecar.cli.run_dir import RunDir, checked_name, make_home, run_name
from keepstep_sidecar.config.sidecar import SETTINGS, options

_LINGER_S: Final = 300.0
_START_S: Final = 60.0
"""How long to wait for another `keepstep start` of the run: if every rank of a machine calls it,
one starts the sidecar and the others wait."""


@click.command(context_settings={"allow_interspersed_args": False})
@directory_option
@options(
    [one for one in SETTINGS if one.for_run],
    run="stem of the first *.py in COMMAND",
    volumes="DIR",
    linger="5m",
)
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="[COMMAND...]")
def start(values: dict[str, Any], directory: Path, command: tuple[str, ...]) -> None:
    """Start the sidecar of a run in the background, if it is not there, and print its socket.

    For notebooks, and for scripts that are not started by `keepstep run`. COMMAND only names the
    run, as `keepstep run` would; nothing else is started. The sidecar ends by itself, with the
    newest steps on its volumes, when no trainer was there for --linger; `keepstep stop` ends it
    now. Nothing starts it again when it dies: `keepstep run` does.

    \b
    Examples:
      export KEEPSTEP_SOCKET=$(keepstep start --run notebook)
      keepstep start --dir /scratch/ckpt --keep 5 -- train.py
    """
    from keepstep_sidecar.cli import launcher, messages, output

    given = {"linger_s": _LINGER_S, **values}
    name = given.pop("run", None) or (run_name(command) if command else None)
    if name is None:
        raise UsageError("the run has no name: give it one with --run NAME")
    if given.get("restore_from"):
        raise UsageError("--restore-from goes with `keepstep run`; or call restore(step=) yourself")
    kept = RunDir.of(directory, checked_name(name), **given)
    # without a sidecar, a trainer may still live: this command then brings the sidecar back
    if launcher.free_removed(kept, orphans=False):
        output.echo(messages.freed_removed(kept), err=True)
    make_home(kept)
    _ensure(kept)
    output.echo(str(kept.socket))


def _ensure(kept: RunDir) -> None:
    """Start a sidecar for this run unless it has one. Raises SidecarError, UsageError."""
    from keepstep.processes import Process
    from keepstep_sidecar.cli import launcher

    with launcher.supervising(kept, timeout_s=_START_S):
        launcher.require_idle_or_same(kept)
        if launcher.adopt(kept) is not None:
            return
        process = Process.of(launcher.launch(kept))
        if not launcher.wait_up(kept, process):
            tail = launcher.log_tail(kept.log)
            raise SidecarError(
                f"the sidecar does not start; the end of {kept.log}:\n{tail}", code="absent"
            )
