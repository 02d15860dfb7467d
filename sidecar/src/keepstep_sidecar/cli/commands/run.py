"""`keepstep run`, `start` and `stop`: the sidecar of a run, with a command beside it or without."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import click

from keepstep.errors import SidecarError, StorageError, UsageError
from keepstep.processes import Process
from keepstep_sidecar.cli import (
    calls,
    compile_caches,
    inventory,
    output,
    run_dir,
    run_messages,
    sidecar_launcher,
)
from keepstep_sidecar.cli.options import directory_option, json_option, which_run
from keepstep_sidecar.cli.run_dir import RunDir, create_run_directory
from keepstep_sidecar.cli.slurm import read_node_settings
from keepstep_sidecar.config.settings import parse_size, parsing_callback
from keepstep_sidecar.config.sidecar import SETTINGS, Config, setting_options

_FOR_RUN: Final = [setting for setting in SETTINGS if setting.for_run]
_NAME: Final = "stem of the first *.py in COMMAND"
_LINGER_S: Final = 900.0
_LINGER_OF_START_S: Final = 300.0
_DYING_S: Final = 10.0
"""How long trainers of a killed command may take to end."""
_START_S: Final = 60.0
"""How long to wait for another `keepstep start` of the run: if every rank of a machine calls it,
one starts the sidecar and the others wait."""


# --- run -------------------------------------------------------------------------------------


@click.command(context_settings={"ignore_unknown_options": False, "allow_interspersed_args": False})
@directory_option
@setting_options(_FOR_RUN, run=_NAME, volumes="DIR", linger="15m")
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
@click.option(
    "--compile-cache",
    "compile_cache_bytes",
    metavar="SIZE",
    default="4Gi",
    show_default=True,
    callback=parsing_callback(parse_size),
    help="Keep what torch.compile and Triton compile in DIR/RUN for the next start; caches of more"
    " than SIZE start empty. 0: keep none.",
)
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED, metavar="COMMAND...")
@click.pass_context
def run(
    ctx: click.Context,
    directory: Path,
    values: dict[str, Any],
    restarts: int,
    warm: bool,
    preload: tuple[str, ...],
    compile_cache_bytes: int,
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
    from keepstep.warm.client import CommandStarter
    from keepstep_sidecar.cli.run_supervisor import Supervisor, note

    if preload and not warm:
        raise click.UsageError("--preload has no effect without --warm")
    program = _program(command[0])
    kept = _kept(directory, values, command)
    if sidecar_launcher.free_removed(kept, orphans=True):
        note(run_messages.freed_memory_text(kept))
    create_run_directory(kept)
    with sidecar_launcher.hold_supervision(kept):
        sidecar_launcher.require_idle(kept, timeout_s=_DYING_S)
        supervisor = Supervisor(
            kept,
            path=program,
            command=command,
            restarts=restarts,
            adopted=sidecar_launcher.adopt_sidecar(kept),
            starter=CommandStarter(program, command, preload, note) if warm else None,
            variables=_compile_cache(kept, compile_cache_bytes, note),
        )
        ctx.exit(supervisor.run())


def _compile_cache(kept: RunDir, limit_bytes: int, report: Callable[[str], None]) -> dict[str, str]:
    """The variables for COMMAND; none, and a line that says why, if no caches can be kept."""
    try:
        return compile_caches.cache_variables(kept, os.environ, limit_bytes=limit_bytes)
    except (OSError, StorageError) as error:
        report(f"the compile cache is not kept for the next start: {error}")
        return {}


def _program(name: str) -> str:
    """The file to execute. If there is none, ends this process with 126 or 127, as a shell does,
    before a sidecar is started for nothing."""
    found = shutil.which(name)
    if found is not None:
        return found
    exists = os.path.exists(name)
    click.echo(f"keepstep: {name}: {'not executable' if exists else 'command not found'}", err=True)
    raise SystemExit(126 if exists else 127)


def _kept(directory: Path, values: dict[str, Any], command: Sequence[str]) -> RunDir:
    """The run as the options ask for it. Raises UsageError."""
    given = {"linger_s": _LINGER_S, **values}
    if "nodes" not in given:
        given = {**read_node_settings(os.environ), **given}
    name = given.pop("run", None) or run_dir.derive_name_from_command(command)
    config = (kept := RunDir.of(directory, name, **given)).config
    if config.persist_every is not None and config.persist_every % config.base_stage_interval:
        raise UsageError(
            f"--persist-every {config.persist_every} is no multiple of --stage-every"
            f" {config.stage_every}, and only a staged step can be made durable; for example"
            f" --persist-every {config.persist_grid_interval}"
        )
    given |= _secret_id(config)
    kept = RunDir.of(directory, name, **given)
    if config.rollback_request is None:
        return kept
    # the rollback has happened once an epoch newer than this began from its step; forks need none
    newest = max((epoch.id.number for epoch in inventory.recorded_epochs(kept)), default=0)
    return RunDir.of(directory, name, **given, restore_since=newest)


def _secret_id(config: Config) -> dict[str, str]:
    """What names the secret of a run of several machines. Raises UsageError."""
    if config.nodes == 1:
        return {}
    from keepstep_sidecar.tiers.peer.secret import read_secret, secret_id

    return {"secret_id": secret_id(read_secret(config.secret_file), config.run)}


# --- start -----------------------------------------------------------------------------------


@click.command(context_settings={"allow_interspersed_args": False})
@directory_option
@setting_options(_FOR_RUN, run=_NAME, volumes="DIR", linger="5m")
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="[COMMAND...]")
def start(directory: Path, values: dict[str, Any], command: tuple[str, ...]) -> None:
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
    given = {"linger_s": _LINGER_OF_START_S, **values}
    name = given.pop("run", None) or (
        run_dir.derive_name_from_command(command) if command else None
    )
    if name is None:
        raise UsageError("the run has no name: give it one with --run NAME")
    if given.get("restore_from"):
        raise UsageError("--restore-from goes with `keepstep run`; or call restore(step=) yourself")
    kept = RunDir.of(directory, name, **given)
    kept = RunDir.of(directory, name, **given, **_secret_id(kept.config))
    # without a sidecar, a trainer may still live: this command then brings the sidecar back
    if sidecar_launcher.free_removed(kept, orphans=False):
        output.print_line(run_messages.freed_memory_text(kept), err=True)
    create_run_directory(kept)
    with sidecar_launcher.hold_supervision(kept, timeout_s=_START_S):
        sidecar_launcher.require_idle_or_same(kept)
        if sidecar_launcher.adopt_sidecar(kept) is None and (end := _start(kept)) is not None:
            raise SidecarError(f"the sidecar does not start; {end}", code="absent")
    output.print_line(str(kept.socket))


def _start(kept: RunDir) -> str | None:
    """Start the run's sidecar, and wait until it answers. Returns the end of its log if it does
    not."""
    process = Process.of(sidecar_launcher.launch_sidecar(kept))
    if sidecar_launcher.wait_for_sidecar(kept, process):
        return None
    return f"the end of {kept.log}:\n{sidecar_launcher.log_tail(kept.log)}"


# --- stop ------------------------------------------------------------------------------------


@click.command()
@which_run
@json_option
def stop(directory: Path, run: str | None, as_json: bool) -> None:
    """Make the newest steps durable, end the sidecar of a run and free its memory.

    For a sidecar that stays after a failed command. One whose command still runs ends with it. Also
    frees the memory of a run whose directory was removed.

    \b
    Examples:
      keepstep stop
      keepstep stop --dir /scratch/ckpt --run train
    """
    for removed in run_dir.find_runs_without_record(directory, run):
        if sidecar_launcher.free_removed(removed, orphans=True):
            output.print_line(
                f"run {removed.name!r}: its directory was removed; its memory is freed now"
            )
            return
    kept = run_dir.find_run(directory, run)
    with sidecar_launcher.hold_supervision(kept):
        stopped = _stop(kept)
    if sidecar_launcher.has_leftover_slots(kept):
        raise StorageError(
            f"run {kept.name!r} stopped, but no volume accepted its newest steps: they"
            f" stay in {kept.memory}. The end of {kept.log} shows the reason; fix it, then run"
            " `keepstep stop` again, or delete that directory to give them up"
        )
    step = inventory.read_holdings(kept).newest_committed
    if as_json:
        committed = inventory.step_document(step)
        output.print_json({"run": kept.name, "stopped": stopped, "committed": committed})
        return
    what = "stopped" if stopped else "was not running"
    left = "nothing is committed" if step is None else f"step {step.id.step} is in {step.path}"
    output.print_line(f"run {kept.name!r} {what}; {left}")


def _stop(kept: RunDir) -> bool:
    """End the run's sidecar; returns whether there was anything to end.

    If a killed sidecar left slots, a new sidecar adopts them first, as they may hold the newest
    steps. Raises UsageError while the run is training, SidecarError.
    """
    sidecar_launcher.require_idle(kept)
    live = calls.ask_status(kept.socket)
    for tier, status in live.tiers.items() if live is not None else ():
        if status.backlog:
            output.print_line(run_messages.backlog_text(tier, status), err=True)
    if sidecar_launcher.end_sidecar(kept):
        return True
    if not sidecar_launcher.has_leftover_slots(kept):
        return False
    if (end := _start(kept)) is not None:
        raise SidecarError(
            f"slots are left in {kept.memory}, but no sidecar starts to save them; delete that"
            f" directory to give them up; {end}"
        )
    return sidecar_launcher.end_sidecar(kept)
