"""The command line's options about peers, as one argument `peers`: PeerSettings | None."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, Final, cast

import click

from keepstep.errors import UsageError
from keepstep_sidecar.cli.options import Command, size_option
from keepstep_sidecar.config.peers import Files, PeerSettings

_WORDS: Final = (
    "listen",
    "advertise",
    "fetch",
    "replicas",
    "bytes_per_second",
    "cert",
    "key",
    "ca",
)


def peer_options(command: Command) -> Command:
    """Add them all."""

    @functools.wraps(command)
    def with_peers(*args: Any, **options: Any) -> Any:
        told = {name: options.pop(f"peer_{name}") for name in _WORDS}
        try:
            options["peers"] = _settings(options.pop("peers"), **told)
        except UsageError as error:
            raise click.UsageError(str(error)) from error
        return command(*args, **options)

    outer = functools.reduce(lambda inner, one: one(inner), reversed(_OPTIONS), with_peers)
    return cast("Command", outer)


def _settings(
    peers: tuple[str, ...],
    *,
    listen: str | None,
    advertise: str | None,
    fetch: bool,
    replicas: int,
    bytes_per_second: int | None,
    cert: Path | None,
    key: Path | None,
    ca: Path | None,
) -> PeerSettings | None:
    files = None
    if cert and key and ca:
        files = Files(certificate=cert, key=key, authorities=ca)
    elif cert or key or ca:
        raise UsageError("--peer-cert, --peer-key and --peer-ca go together")
    if not listen:
        if peers or files:
            raise UsageError("peers need an address to listen on: --peer-listen HOST:PORT")
        return PeerSettings(listen="", replicas=0) if fetch else None
    return PeerSettings(
        listen=listen,
        advertise=advertise or "",
        peers=peers,
        replicas=replicas,
        files=files,
        bytes_per_second=bytes_per_second,
    )


_OPTIONS: Final[tuple[Any, ...]] = (
    click.option("--peer-listen", metavar="HOST:PORT", help="Serve the other pods of the run."),
    click.option(
        "--peer-advertise",
        metavar="HOST:PORT",
        help="Where they find this pod.  [default: --peer-listen]",
    ),
    click.option(
        "--peer-fetch",
        is_flag=True,
        help="Without --peer-listen: serve nobody, but fetch from whom the operator names.",
    ),
    click.option(
        "--peer",
        "peers",
        multiple=True,
        metavar="HOST:PORT",
        help="Another pod of the run, where no operator tells; may be repeated.",
    ),
    click.option(
        "--peer-replicas",
        type=click.IntRange(min=0),
        default=1,
        show_default=True,
        metavar="N",
        help="Copies of each shard on other pods, where no operator chooses them.",
    ),
    size_option("--peer-bytes-per-second", help="Limit of all copies that are sent, like 500Mi."),
    click.option(
        "--peer-cert",
        type=click.Path(path_type=Path),
        help="PEM: this pod's certificate, with keepstep://NAMESPACE/RUN/NODE-RANK as URI."
        "  [default: the operator issues one]",
    ),
    click.option("--peer-key", type=click.Path(path_type=Path), help="PEM: its key."),
    click.option(
        "--peer-ca",
        type=click.Path(path_type=Path),
        help="PEM: the only authorities that other pods are believed by.",
    ),
)
