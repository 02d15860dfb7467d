"""The new process: does what exec and the interpreter would have done for a command line.

torchrun's workers come from a fork server of its own, which `server.main` forks. For that, keepstep
replaces `subprocess.Popen` in torch's elastic agent. That is an internal of torch: if it is not the
expected one, workers start cold.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import ctypes
import datetime
import faulthandler
import importlib
import logging
import os
import pkgutil
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import IO, Any, Final, NoReturn

from keepstep import processes
from keepstep.warm.client import ColdStart, ForkServer, PythonCommand, parse_python_command

_PR_SET_NAME: Final = 15
_THREADS: Final = "OMP_NUM_THREADS"
PATIENCE_S: Final = 30.0
_PAUSE_S: Final = 0.05
_ANSWER_S: Final = 2.0

log = logging.getLogger("keepstep")


@dataclass(frozen=True)
class ProcessSpec:
    """What a process must become.

    `ignored`: signals that the requesting process ignores (`nohup`). `files`: the descriptors of
    stdin, stdout and stderr.
    """

    argv: list[str]
    environment: dict[str, str]
    directory: str
    group: bool
    session: bool
    ignored: list[int]
    files: tuple[int, ...]


# --- what exec does ----------------------------------------------------------------------------


def apply_exec_attributes(job: ProcessSpec) -> None:
    """Set what exec would set: files, directory, environment, signals, process group and names."""
    if job.session:
        os.setsid()
    elif job.group:
        os.setpgid(0, 0)
    for target, file in enumerate(job.files):
        os.dup2(file, target)
    for file in job.files:
        if file > 2:
            os.close(file)
    os.chdir(job.directory)
    threads = os.environ.get(_THREADS)
    os.environ.clear()
    os.environ.update(job.environment)
    if os.environ.get(_THREADS) != threads:
        _set_threads()
    faults = faulthandler.is_enabled()
    faulthandler.disable()  # otherwise it would think its handlers are still installed below
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        # signals that C libraries reserve cannot be set
        with contextlib.suppress(OSError, ValueError):
            signal.signal(number, signal.SIG_IGN if number in job.ignored else signal.SIG_DFL)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # as Python's own start does
        signal.signal(number, signal.SIG_IGN)
    if signal.SIGINT not in job.ignored:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if faults:
        faulthandler.enable(file=2)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    _retitle(job.argv)


def _set_threads() -> None:
    """Set the number of threads again, because OMP_NUM_THREADS was read before torchrun set it.
    MKL's and OpenBLAS's own variables take precedence."""
    import torch

    asked = os.environ.get(_THREADS, "").partition(",")[0]
    threads = int(asked) if asked.isdigit() and int(asked) else len(os.sched_getaffinity(0))
    if not (torch.backends.mkl.is_available() and "MKL_NUM_THREADS" in os.environ):
        torch.set_num_threads(threads)
    if "numpy" in sys.modules and "OPENBLAS_NUM_THREADS" not in os.environ:
        _set_blas_threads(threads)


def _set_blas_threads(threads: int) -> None:
    """Set the threads of numpy's OpenBLAS, which reads OMP_NUM_THREADS when it is loaded."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.split(None, 5)[-1]
        if "openblas" in path and ".so" in path:
            library = ctypes.CDLL(path)
            for prefix, suffix in (("scipy_", "64_"), ("scipy_", ""), ("", "64_"), ("", "")):
                name = f"{prefix}openblas_set_num_threads{suffix}"
                if hasattr(library, name):
                    getattr(library, name)(threads)
                    return


def _retitle(argv: Sequence[str]) -> None:
    """Have ps and pgrep show this command line, as far as there is room for it where the kernel
    finds that of the fork server (proc(5): fields 48 and 49 of stat)."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, os.path.basename(argv[0]).encode()[:15], 0, 0, 0)
    stat = processes.process_stat("self")
    begin, end = (int(stat[number - 3]) for number in (48, 49)) if stat else (0, 0)
    title = os.fsencode(" ".join(argv))[: end - begin - 2] + b"\0"
    if len(title) < end - begin:
        # a last byte that is not zero tells the kernel that the rest is one string, up to a zero
        ctypes.memset(begin, 1, end - begin)
        ctypes.memmove(begin, title, len(title))


# --- what the interpreter does -----------------------------------------------------------------


def run_job(job: ProcessSpec, *, torchrun: Callable[[], NoReturn] | None = None) -> None:
    """Run `job`'s command line as the interpreter would, to its end; `torchrun` if it is that."""
    python = parse_python_command(job.argv)
    assert python is not None, "the server refuses other ones"
    _begin(python)
    sys.orig_argv = list(job.argv)
    main: Any = types.ModuleType("__main__")
    main.__builtins__ = builtins
    main.__annotations__ = {}
    sys.modules["__main__"] = main
    if python.kind == "module":
        sys.path[0] = os.getcwd()
        sys.argv = [python.what, *python.arguments]
        if torchrun is not None:
            torchrun()
        await_new_store()
        runpy._run_module_as_main(python.what)  # type: ignore[attr-defined]  # what `-m` does
        return
    await_new_store()
    sys.argv = [python.what, *python.arguments]
    if pkgutil.get_importer(python.what) is not None:  # a directory or a zip file
        sys.path[0] = os.path.abspath(python.what)
        runpy._run_module_as_main("__main__", alter_argv=False)  # type: ignore[attr-defined]
        return
    sys.path[0] = os.path.dirname(os.path.realpath(python.what))
    path = os.path.abspath(python.what)
    main.__file__, main.__cached__ = path, None
    main.__loader__ = SourceFileLoader("__main__", path)
    try:
        source = Path(path).read_bytes()
    except OSError as error:
        reason = f"[Errno {error.errno}] {error.strerror}"
        print(f"{sys.executable}: can't open file {path!r}: {reason}", file=sys.stderr)
        raise SystemExit(2) from None
    # dont_inherit: without the `from __future__ import annotations` of this file
    exec(compile(source, path, "exec", dont_inherit=True), main.__dict__)


def _begin(python: PythonCommand) -> None:
    """Set up what Python and torch set up at their start, and what two lives must not share."""
    unbuffered = python.unbuffered or bool(os.environ.get("PYTHONUNBUFFERED"))
    for stream, lines in ((sys.stdout, os.isatty(1)), (sys.stderr, True)):
        stream.reconfigure(  # type: ignore[union-attr]
            line_buffering=lines and not unbuffered, write_through=unbuffered
        )
    import torch

    torch.default_generator.seed()  # random in each process, unless the script seeds it
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    importlib.invalidate_caches()


def exit_without_teardown(code: int) -> NoReturn:
    """End as the interpreter does, except for taking apart what torch imported, which takes 0.2 to
    0.35 s.

    `code`: the exit code, or minus the number of the signal to die of.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


# --- a rank that is back before rank 0 has noticed ---------------------------------------------


def await_new_store(environment: Mapping[str, str] = os.environ) -> None:
    """Return when there is no store at `MASTER_ADDR`, or one in which no ranks have met yet.

    If each rank is a container of its own, rank 0's process notices the death of another rank some
    seconds late, and its store answers until it ends. A rank that is back within half a second
    would find the old store, join the dying rendezvous, and wait there for torch's timeout, half an
    hour. A cold start is too slow to meet the old store.

    This is for torch's `env://`. It does nothing for rank 0, which has the store itself, and for
    torchrun's workers, whose agent keeps the store from life to life. After 30 s, it logs a warning
    and returns.
    """
    address, port = environment.get("MASTER_ADDR", ""), environment.get("MASTER_PORT", "")
    rank = environment.get("RANK", "0")
    if not address or not port.isdecimal() or rank == "0" or "TORCHELASTIC_RUN_ID" in environment:
        return
    deadline = time.monotonic() + PATIENCE_S
    while _was_used(address, int(port)):
        if time.monotonic() >= deadline:
            log.warning(
                "keepstep: the store at %s:%s is in use for %.0f s; joining it [warm.store_in_use]",
                address,
                port,
                PATIENCE_S,
            )
            return
        time.sleep(_PAUSE_S)


def _was_used(address: str, port: int) -> bool:
    """Whether ranks have met in the store there. A store that still waits for them has a single
    key: the number of ranks that came."""
    try:
        # a plain connection first, because torch retries and logs if nothing listens
        socket.create_connection((address, port), timeout=_ANSWER_S).close()
    except OSError:
        return False
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    limit = datetime.timedelta(seconds=_ANSWER_S)
    try:
        store = TCPStore(address, port, None, False, timeout=limit, wait_for_workers=False)
        return store.num_keys() > 1
    except RuntimeError:  # the store has ended meanwhile, or it is not a store
        return False


def run_torchrun(server: ForkServer) -> NoReturn:
    """Run torchrun to its end. `server`: starts its workers."""
    _replace_popen(server)
    from torch.distributed import run as torchrun

    code: Any = 0
    try:
        least, at_most = torchrun.parse_min_max_nnodes(torchrun.parse_args(sys.argv[1:]).nnodes)
        hasten_rendezvous(alone=least == at_most == 1)
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
    exit_without_teardown(code if isinstance(code, int) else int(code is not None))


def _replace_popen(server: ForkServer) -> None:
    from torch.distributed.elastic.multiprocessing.subprocess_handler import (
        subprocess_handler as handler,
    )

    if getattr(handler, "Popen", None) is not subprocess.Popen:
        print("keepstep: workers start cold: this torchrun starts them otherwise", file=sys.stderr)
        return

    class Popen(subprocess.Popen[bytes]):
        """Starts a process warm if it can. Everything else is subprocess's own: the process is a
        child of this one."""

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
    if unknown or args[0] != sys.executable or parse_python_command(args) is None:
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
