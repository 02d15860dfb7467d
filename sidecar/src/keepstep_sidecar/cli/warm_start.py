"""The fork server of a run: started beside the sidecar, asked at each start of the command."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from keepstep.warm.client import ColdStart, ForkServer
from keepstep.warm.command import interpreter, parse


class WarmStart:
    """`path`, `command`: what is to be started warm. `modules`: what else to import for it.

    A server that has died, or whose imports have changed on disk, is replaced for the next start;
    one that could not import what it should is not, as the next one could not either.
    """

    def __init__(self, path: str, command: Sequence[str], modules: Sequence[str]) -> None:
        self._path = path
        self._command = tuple(command)
        self._modules = tuple(modules)
        self._server: ForkServer | None = None

    @property
    def pids(self) -> tuple[int, ...]:
        """Processes that are not the command's."""
        return () if self._server is None else (self._server.pid,)

    @property
    def importing(self) -> bool:
        """Whether there is a server that cannot be asked yet."""
        server = self._server
        return server is not None and not server.ready and not server.closed

    def start(self, environment: Mapping[str, str]) -> Callable[[], None]:
        """Start a server; the result waits until it can be asked. Both raise ColdStart."""
        found = interpreter(self._path)
        if found is None or parse((self._path, *self._command[1:])) is None:
            raise ColdStart(f"only `python FILE`, `python -m` and torchrun can, not {self._path}")
        try:
            self._server = ForkServer.start(found, environment, self._modules)
        except OSError as error:
            raise ColdStart(f"{found}: {error.strerror}") from error
        return self._server.wait_ready

    def spawn(self, environment: Mapping[str, str], *, own_group: bool) -> int:
        """The pid of the started command, a child of ours. Raises ColdStart."""
        if self._server is None:
            raise ColdStart("there is no fork server")
        return self._server.spawn(
            (self._path, *self._command[1:]), environment, own_group=own_group
        )

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
