"""Whether a sidecar answers. Imports as little as it can: a kubelet waits for each probe."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import click

from keepstep.errors import UsageError
from keepstep_sidecar.config.settings import duration_option

_PROBE_EVERY_S = 0.02


def sidecar_health(path: Path, *, timeout_s: float = 2.0) -> str | None:
    """What keeps the sidecar on `path` from its work; "" when it is healthy; None when no sidecar
    answers."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(timeout_s)
        try:
            connection.connect(str(path))
            connection.sendall(b"GET /healthz HTTP/1.0\r\n\r\n")
            answer = b"".join(iter(lambda: connection.recv(1 << 16), b""))
        except OSError:
            return None
    head, _, text = answer.decode(errors="replace").partition("\r\n\r\n")
    match head.split(maxsplit=2):
        case [_, "200", *_]:
            return ""
        case [version, _, *_] if version.startswith("HTTP/"):
            return text.strip()
    return None


def is_answering(path: Path, *, timeout_s: float = 2.0) -> bool:
    """Whether a sidecar answers on `path`, healthy or not."""
    return sidecar_health(path, timeout_s=timeout_s) is not None


@click.command(context_settings={"max_content_width": 100})
@click.option(
    "--config",
    envvar="KEEPSTEP_CONFIG",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="TOML that names memory_dir, where neither flag nor environment does.",
)
@click.option(
    "--memory-dir",
    envvar="KEEPSTEP_MEMORY_DIR",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Directory in shared memory, for slots and the socket.",
)
@duration_option(
    "--timeout",
    "timeout_s",
    envvar="KEEPSTEP_PROBE_TIMEOUT",
    default="3s",
    show_default=True,
    help="How long to wait for it.",
)
@click.option(
    "--healthy", is_flag=True, help="Also fail when a scan or a volume of it does, and say why."
)
@click.option("--started", is_flag=True, help="Exit with 0 in any case: the start hook of a pod.")
def probe(
    config: Path | None, memory_dir: Path | None, timeout_s: float, healthy: bool, started: bool
) -> None:
    """Exit with 0 when the sidecar of --memory-dir answers in time.

    \b
    Examples:
      keepstep-sidecar probe
      keepstep-sidecar probe --healthy
      keepstep-sidecar probe --started --timeout 120s
    """
    found = None
    try:
        path = (memory_dir or _configured(config)) / "sidecar.sock"
        found = _answer(path, timeout_s)
        text = f"no sidecar answers on {path} within {timeout_s:g} s" if found is None else found
    except Exception as error:
        if not started:
            raise
        text = f"cannot tell whether the sidecar has started: {error!r}"
    if started:
        # If the start hook fails, the kubelet ends the sidecar, and no trainer starts before the
        # sidecar has. So an error is printed here but never keeps the training from starting.
        click.echo(f"{text or 'the sidecar answers'}; training begins", err=True)
    elif found is None or (healthy and found):
        raise click.ClickException(text)
    elif healthy:
        click.echo("ok")


def _configured(file: Path | None) -> Path:
    """The memory directory that `file` names."""
    from keepstep_sidecar.config.sidecar import given_values  # slow to import

    try:
        values = {} if file is None else given_values("--config", str(file))
    except UsageError as error:
        raise click.UsageError(str(error)) from error
    if "memory_dir" not in values:
        raise click.UsageError("Missing option '--memory-dir' (or KEEPSTEP_MEMORY_DIR).")
    found: Path = values["memory_dir"]
    return found


def _answer(path: Path, timeout_s: float) -> str | None:
    """Like `sidecar_health`, but retries until the timeout: the sidecar may still be starting."""
    deadline = time.monotonic() + timeout_s
    while (found := sidecar_health(path)) is None and time.monotonic() < deadline:
        time.sleep(_PROBE_EVERY_S)
    return found
