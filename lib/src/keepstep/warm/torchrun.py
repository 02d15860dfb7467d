"""torchrun as a process of a fork server: its workers come from a server of its own, which
`server.main` forks.

keepstep replaces `subprocess.Popen` in torch's elastic agent. That is an internal of torch: if it
is not the expected one, workers start cold.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import IO, Any, NoReturn

from keepstep.warm import process
from keepstep.warm.client import ColdStart, ForkServer, parse


def run(server: ForkServer) -> NoReturn:
    """Run torchrun to its end. `server`: starts its workers."""
    _replace_popen(server)
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


def _replace_popen(server: ForkServer) -> None:
    from torch.distributed.elastic.multiprocessing.subprocess_handler import (
        subprocess_handler as handler,
    )

    if getattr(handler, "Popen", None) is not subprocess.Popen:
        print("keepstep: workers start cold: this torchrun starts them otherwise", file=sys.stderr)
        return

    class Popen(subprocess.Popen[bytes]):
        """Starts a process warm if it can. Everything else is subprocess's own: the process is a
        child of this one.
        """

        def __init__(self, args: Sequence[str], **options: Any) -> None:
            self._options = options
            super().__init__(args, **options)

        def _execute_child(self, args: Sequence[str], *rest: Any) -> None:
            try:
                self.pid = _spawn(server, args, **self._options)
                self._child_created = True
            except ColdStart as error:
                print(f"keepstep: a worker starts cold: {error}", file=sys.stderr)
                super()._execute_child(args, *rest)  # type: ignore[misc]

    setattr(handler, "Popen", Popen)  # noqa: B010  # torch does not export the name


def _spawn(
    server: ForkServer,
    args: Sequence[str],
    *,
    env: Mapping[str, str],
    stdout: IO[Any] | None,
    stderr: IO[Any] | None,
    start_new_session: bool = False,
    **unknown: Any,
) -> int:
    """The pid of a worker. Raises ColdStart."""
    if unknown or args[0] != sys.executable or parse(args) is None:
        raise ColdStart(f"only exec can start {' '.join(args)}")
    files = (0, stdout.fileno() if stdout else 1, stderr.fileno() if stderr else 2)
    return server.spawn(args, env, own_session=start_new_session, files=files)


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
