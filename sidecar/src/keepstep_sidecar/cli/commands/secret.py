"""`keepstep secret`: makes the secret that the machines of a run share without Kubernetes."""

from __future__ import annotations

import os
from pathlib import Path

import click

from keepstep.errors import UsageError


@click.command()
@click.argument("file", required=False, type=click.Path(dir_okay=False, path_type=Path))
def secret(file: Path | None) -> None:
    """Make a secret for a run, from which its machines derive their certificates.

    Writes it to FILE, which must not exist and is readable by you alone; without FILE, prints it.

    \b
    Examples:
      keepstep secret ~/gpt.secret
      export KEEPSTEP_SECRET=$(keepstep secret)
    """
    from keepstep_sidecar.tiers.peer.secret import make_secret

    if file is None:
        click.echo(make_secret())
        return
    try:
        fd = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError as error:
        raise UsageError(f"{file} exists, and no secret is replaced; name another file") from error
    except OSError as error:
        raise UsageError(f"cannot write the secret: {error}") from error
    with open(fd, "w") as opened:
        os.fchmod(fd, 0o600)
        opened.write(make_secret() + "\n")
