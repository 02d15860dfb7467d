"""Routes of the page for several viewers and namespaces, and refusals."""

from __future__ import annotations

import re
import shlex
from collections import OrderedDict
from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any, Final

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from keepstep_operator import names
from keepstep_operator.bodies import Body
from keepstep_operator.journal import warn
from keepstep_operator.kube import CHECKPOINTS, RUNS, Client, KubeError
from keepstep_operator.ui.pages import ClusterPages, RunPage, view_of
from keepstep_operator.ui.viewers import UnknownViewer, Viewer, Viewers
from keepstep_page.access import only_get, sign
from keepstep_page.board import Board
from keepstep_page.server import STATIC_ROUTE, Site, application, html

EVERY_S: Final = 2.0
"""The time between two lists of a namespace that is being viewed. Statuses are not written more
often."""
_SITES: Final = 256
_let_in: ContextVar[tuple[str, Site[RunPage]]] = ContextVar("let in")
"""The viewer's name and the site that they see, in the task that answers them."""
_LABEL: Final = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_ACCOUNT: Final = re.compile(r"system:serviceaccount:([^:]+:[^:]+)")


def page(client: Client, viewers: Viewers) -> web.Application:
    """The application. It shows what `client` may list to the viewers whom `viewers` admits."""
    return _Gate(client, viewers).application()


class _Gate:
    def __init__(self, client: Client, viewers: Viewers) -> None:
        self._client, self._viewers = client, viewers
        self._sites: OrderedDict[str, Site[RunPage]] = OrderedDict()

    def application(self) -> web.Application:
        return application(
            lambda _: _let_in.get()[1],
            middleware=self._middleware(),
            sign=sign,
            who=lambda _: _let_in.get()[0],
            still=self._still,
        )

    def _middleware(self) -> Middleware:
        @web.middleware
        async def guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
            if (answer := only_get(request)) is not None:
                return answer
            if request.path.startswith(f"{STATIC_ROUTE}/"):  # public: part of the package
                return await handler(request)
            try:
                if (refused := await self._refusal(request)) is not None:
                    return refused
                return await handler(request)
            except KubeError as error:
                warn("the API server did not answer as it should", reason=str(error))
                said = f"The API server did not answer the page: {error}"
                return _refused(503, "Not now", said)

        return guarded

    async def _refusal(self, request: web.Request) -> web.Response | None:
        """The refusal of a request; None if the viewer may look, and then `_let_in` is set. Raises
        KubeError."""
        namespace = request.headers.get(names.UI_NAMESPACE_HEADER, "")
        if not _LABEL.fullmatch(namespace):
            text = f"{namespace!r} is no namespace: its name has small letters, digits and hyphens."
            return _refused(400, "No such namespace", text)
        try:
            viewer = await self._viewers.who(_token(request))
        except UnknownViewer as error:
            text = f"{error}. Sign in to the cluster again, and then reload this page."
            return _refused(401, "Who are you?", text, namespace=namespace)
        if missing := await self._viewers.missing(viewer, namespace):
            text = (
                f"{viewer.name} may not list {' and '.join(missing)} in namespace {namespace}: the"
                f" verb list on API group {names.GROUP}. The cluster's role view has it."
            )
            command = _binding(viewer, namespace)
            return _refused(403, "Not allowed", text, namespace=namespace, command=command)
        _let_in.set((viewer.name, self._site(namespace)))
        return None

    async def _still(self, request: web.Request) -> bool:
        """Whether an admitted viewer would still be admitted now."""
        try:
            return await self._refusal(request) is None
        except KubeError:
            return False  # the browser asks again by itself

    def _site(self, namespace: str) -> Site[RunPage]:
        """The site of a namespace, one for all its viewers. The sites that were not asked for the
        longest are dropped."""
        if (site := self._sites.get(namespace)) is None:
            site = self._sites[namespace] = _site_of(self._client, namespace)
        self._sites.move_to_end(namespace)
        while len(self._sites) > _SITES:
            self._sites.popitem(last=False)
        return site


def _site_of(client: Client, namespace: str) -> Site[RunPage]:
    found: dict[str, RunPage] = {}

    async def listed() -> Sequence[str]:
        runs = [one async for one in client.list(RUNS, namespace=namespace)]
        steps: dict[str, list[Body]] = {}
        async for one in client.list(CHECKPOINTS, namespace=namespace):
            steps.setdefault(str(one["spec"]["run"]), []).append(one)
        before = dict(found)
        found.clear()
        for run in sorted(runs, key=lambda one: str(one["metadata"]["name"])):
            name = str(run["metadata"]["name"])
            found[name] = view_of(run, steps.get(name, []), before.get(name))
        return [*found]

    async def seen(name: str) -> RunPage:
        return found.get(name) or RunPage(name=name, error="it is not there any more")

    board = Board(
        listed, seen, lambda name, error: RunPage(name=name, error=error), every_s=EVERY_S
    )
    return Site(board, ClusterPages(namespace))


def _token(request: web.Request) -> str:
    """The bearer token; '' without one, which is then refused."""
    kind, _, token = request.headers.get("Authorization", "").partition(" ")
    return token.strip() if kind.lower() == "bearer" else ""


def _binding(viewer: Viewer, namespace: str) -> str:
    """The shell command that gives the viewer the right."""
    account = _ACCOUNT.fullmatch(viewer.name)
    who = f"--serviceaccount={account[1]}" if account else f"--user={viewer.name}"
    words = "kubectl", "create", "rolebinding", "keepstep-view", "-n", namespace
    return shlex.join([*words, "--clusterrole=view", who])


def _refused(
    status: int, title: str, text: str, *, namespace: str = "", **more: Any
) -> web.Response:
    return html(ClusterPages(namespace).refused(title, text, **more), status=status)
