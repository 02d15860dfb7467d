"""`keepstep-sidecar`. A pod waits for each probe of it, so a probe imports none of the rest."""

from __future__ import annotations

import sys

from keepstep_sidecar.cli.probe import probe


def main() -> None:
    """The program; `probe` ends it by itself."""
    if sys.argv[1:2] == ["probe"]:
        probe.main(sys.argv[2:], prog_name="keepstep-sidecar probe")
    from keepstep_sidecar.cli.sidecar import program

    program.main(prog_name="keepstep-sidecar")


if __name__ == "__main__":
    main()
