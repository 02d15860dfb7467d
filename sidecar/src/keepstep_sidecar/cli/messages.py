"""What `keepstep run` says on stderr: one line each time. Pure: values in, text out."""

from __future__ import annotations

import shlex
import signal

from keepstep_sidecar.cli.inventory import Holdings, Step
from keepstep_sidecar.cli.quantities import format_duration, parse_duration
from keepstep_sidecar.cli.run_dir import Options, Places, Service


def started(service: Service, held: Holdings | None, *, adopted: bool) -> str:
    """Where things are, what will be kept, and what is there already."""
    places, options = service.places, service.options
    volumes = " and ".join(str(root) for root in places.roots)
    memory = "adopted the sidecar and its memory" if adopted else f"memory in {places.memory}"
    there = "" if held is None or held.newest is None else f"; {_goes_on(held)}"
    return f"run {places.run!r}: {_kept(options)} in {volumes}; {memory}; log {places.log}{there}"


def _kept(options: Options) -> str:
    staged = _every(options.stage_every, "staged")
    persisted = _every(options.persist_every, "made durable")
    return f"{staged}, {persisted}, {_of_volumes(options)} are kept"


def _of_volumes(options: Options) -> str:
    newest, every = f"the newest {options.keep} committed steps", options.keep_every
    if every is None:
        return newest
    span = f"{every} steps" if every.isdecimal() else format_duration(parse_duration(every))
    return f"{newest} and one every {span}"


def _every(steps: int, what: str) -> str:
    return f"every step is {what}" if steps == 1 else f"every {steps}th step is {what}"


def _goes_on(held: Holdings) -> str:
    return f"it can go on from {_newest(held)}"


def _newest(held: Holdings) -> str:
    newest, committed = held.newest, held.committed
    if newest is None:
        return "the beginning: no step is held by all ranks"
    tiers = " and ".join(map(str, newest.tiers))
    text = f"step {newest.id.step} of epoch {newest.id.epoch.number} ({tiers})"
    if committed is None:
        return f"{text}, nothing is committed"
    return text if committed == newest else f"{text}, committed is step {committed.id.step}"


def restarted(held: Holdings | None, *, code: int, attempt: int, restarts: int) -> str:
    """How the command ended, and from where it can go on."""
    place = "the sidecar does not say what it holds" if held is None else _goes_on(held)
    return f"the command {ended_how(code)}; restart {attempt} of {restarts}; {place}"


def sidecar_replaced(places: Places) -> str:
    """The sidecar died and is being started again."""
    return f"the sidecar ended and is started again; training goes on (why: {places.log})"


def memory_removed(places: Places) -> str:
    """Somebody removed the run's shared memory while the command runs."""
    return (
        f"{places.memory} was removed by another program; the sidecar makes it again and the next"
        " step is kept. At a logout systemd does that (RemoveIPC=yes): `loginctl enable-linger`"
        " keeps it from it"
    )


def ended(service: Service, held: Holdings | None, *, code: int, freed: bool) -> str:
    """How the command ended, the newest committed step, and what is left."""
    parts = [f"the command {ended_how(code)}", _committed(held)]
    if not freed:
        parts.append(_remains(service, held))
    return "; ".join(parts)


def _committed(held: Holdings | None) -> str:
    step: Step | None = None if held is None else held.committed
    if step is None or step.path is None:
        return "no step is committed"
    return (
        f"newest committed: step {step.id.step} of epoch {step.id.epoch.number} in {step.path}"
        " (safetensors files; read them with safetensors.safe_open, or all ranks with"
        " torch.distributed.checkpoint.HuggingFaceStorageReader)"
    )


def _remains(service: Service, held: Holdings | None) -> str:
    places = service.places
    stop = shlex.join(["keepstep", "stop", "--dir", str(places.home.parent), "--run", places.run])
    if held is None or held.live is None:
        return f"the sidecar is down, its memory may remain in {places.memory}: {stop}"
    newest = held.newest
    holds = "" if newest is None else f" with step {newest.id.step}"
    return (
        f"memory{holds} stays for {format_duration(service.options.linger_s)}:"
        f" run it again to go on, or free it: {stop}"
    )


def ended_how(code: int) -> str:
    """`ended with 0`, `failed with 1`, `was killed by SIGKILL (137)`."""
    if code == 0:
        return "ended with 0"
    if code > 128:
        try:
            return f"was killed by {signal.Signals(code - 128).name} ({code})"
        except ValueError:
            pass
    return f"failed with {code}"
