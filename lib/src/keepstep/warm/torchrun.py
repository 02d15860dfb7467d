"""torchrun as a process of a fork server: its workers come from a server of its own.

The agent forks that server while it still has one thread. keepstep then replaces `subprocess.Popen`
in torch's elastic agent. That is an internal of torch: if it is not the expected one, workers start
cold.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import IO, Any, NoReturn

from keepstep.processes import become_subreaper
from keepstep.warm import process
from keepstep.warm.client import ColdStart, ForkServer, pair
from keepstep.warm.command import parse
from keepstep.warm.server import serve, stamps


def run() -> NoReturn:
    """Run torchrun to its end."""
    _replace_popen(_fork_server())
    from torch.distributed import run as torchrun

    code: Any = 0
    try:
        one, at_most = torchrun.parse_min_max_nnodes(torchrun.parse_args(sys.argv[1:]).nnodes)
        hasten_rendezvous(alone=one == at_most == 1)
        torchrun.main()
    except SystemExit as ended:
        code = ended.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
    except Exception as error:
        trace = error.__traceback__
        trace = trace.tb_next if trace else None
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        code = 1
    process.end(code if isinstance(code, int) else int(code is not None))


def _fork_server() -> ForkServer:
    """Fork a server below this process. This process becomes the parent of what the server
    starts.
    """
    ours, theirs = pair()
    pid = os.fork()
    if pid == 0:
        ours.close()
        os.setsid()  # keeps the agent's signals from the server
        raise process.Unwind(serve(theirs, dict(os.environ), stamps()))
    theirs.close()
    become_subreaper()
    server = ForkServer(ours, pid)
    server.ready = True
    return server


def _replace_popen(server: ForkServer) -> None:
    from torch.distributed.elastic.multiprocessing.subprocess_handler import (
        subprocess_handler as handler,
    )

    if getattr(handler, "Popen", None) is not subprocess.Popen:
        print("keepstep: workers start cold: this torchrun starts them otherwise", file=sys.stderr)
        return

    def popen(args: Sequence[str], **options: Any) -> Worker | subprocess.Popen[bytes]:
        try:
            return Worker(server, args, **options)
        except ColdStart as error:
            print(f"keepstep: a worker starts cold: {error}", file=sys.stderr)
        return subprocess.Popen(args, **options)

    setattr(handler, "Popen", popen)  # noqa: B010  # torch does not export the name


def hasten_rendezvous(*, alone: bool) -> None:
    """Skip what a rendezvous does not need, a third of a second of a restart.

    For events that nothing records, torch looks up the names of its methods with `inspect.stack`,
    which goes through all modules. `alone`: whether there is only one node. Then it need not wait a
    random part of 0.3 s, which keeps several nodes from joining at the same moment.
    """
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous as rendezvous

    # these are internals of torch; one that no longer exists need not be replaced
    if hasattr(rendezvous, "get_method_name"):

        def method_name(depth: int = 2) -> str:
            return sys._getframe(depth).f_code.co_name

        setattr(rendezvous, "get_method_name", method_name)  # noqa: B010
    if alone and hasattr(rendezvous, "_delay"):
        wait = rendezvous._delay

        def delay(seconds: float | tuple[float, float]) -> None:
            if not isinstance(seconds, tuple):
                wait(seconds)

        setattr(rendezvous, "_delay", delay)  # noqa: B010


class Worker:
    """The part of `subprocess.Popen` that torch's agent uses. Raises ColdStart."""

    def __init__(
        self,
        server: ForkServer,
        args: Sequence[str],
        *,
        env: Mapping[str, str],
        stdout: IO[Any] | None,
        stderr: IO[Any] | None,
        start_new_session: bool = False,
        **unknown: Any,
    ) -> None:
        if unknown or args[0] != sys.executable or parse(args) is None:
            raise ColdStart(f"only exec can start {' '.join(args)}")
        files = (0, stdout.fileno() if stdout else 1, stderr.fileno() if stderr else 2)
        self.args = args
        self.returncode: int | None = None
        self.pid = server.spawn(args, env, own_session=start_new_session, files=files)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        delay = 0.0005
        while (code := self.poll()) is None:
            if deadline is not None and timeout is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(list(self.args), timeout)
            delay = min(2 * delay, 0.02)
            time.sleep(delay)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)
