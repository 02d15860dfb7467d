"""As `keepstep run` asks a fork server: runs each command line that stdin names, and says how it
ended. A process of its own, as what the server starts becomes the child of a subreaper.

stdin: {"modules": [...], "runs": [{"argv": [...], "environment": {...}, "warm": bool}, ...]};
stdout: [[wait status as subprocess has it, stdout, stderr, ...], or ["cold", reason], ...]
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from typing import Any

from keepstep.processes import become_subreaper
from keepstep.warm.client import ColdStart, ForkServer


def _cold(argv: list[str], environment: dict[str, str], files: tuple[int, int, int]) -> int:
    streams = dict(zip(("stdin", "stdout", "stderr"), files, strict=True))
    done = subprocess.run(argv, env=environment, start_new_session=True, **streams)
    return done.returncode


def _warm(
    server: ForkServer, argv: list[str], environment: dict[str, str], files: tuple[int, int, int]
) -> int:
    pid = server.spawn(argv, environment, own_session=True, files=files)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def main() -> None:
    asked = json.load(sys.stdin)
    become_subreaper()
    server = ForkServer.start(sys.executable, os.environ, asked["modules"])
    answers: list[Any] = []
    try:
        server.wait_ready()
        for run in asked["runs"]:
            argv, environment = run["argv"], {**os.environ, **run["environment"]}
            with (
                open(os.devnull) as nothing,
                tempfile.TemporaryFile("w+") as out,
                tempfile.TemporaryFile("w+") as err,
            ):
                files = (nothing.fileno(), out.fileno(), err.fileno())
                try:
                    code = (
                        _warm(server, argv, environment, files)
                        if run["warm"]
                        else _cold(argv, environment, files)
                    )
                except ColdStart as error:
                    answers.append(["cold", str(error)])
                    continue
                out.seek(0)
                err.seek(0)
                answers.append([code, out.read(), err.read()])
    except ColdStart as error:
        answers.append(["cold", str(error)])
    server.close()
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
