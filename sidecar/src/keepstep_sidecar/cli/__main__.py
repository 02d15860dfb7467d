"""`python -m keepstep_sidecar.cli`: the same as the `keepstep` script."""

from keepstep_sidecar.cli.main import cli

cli(prog_name="keepstep")
