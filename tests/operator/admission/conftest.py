"""A certificate on disk, and admission on a free port beside a small API server."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from keepstep_operator.admission.checkpoint_run_reader import ExistingRunReader
from keepstep_operator.admission.metrics import AdmissionMetrics
from keepstep_operator.admission.namespace_limits import NamespaceLimitsReader
from keepstep_operator.admission.policy_lookup import Policies
from keepstep_operator.admission.server import Admission
from keepstep_operator.certificates.pki import KeyPair, make_server
from keepstep_operator.injection import InjectionDefaults
from keepstep_operator.kube.client import KubeClient
from keepstep_operator.serving import serve_application
from keepstep_operator.tls_reload import ServerTls, read_mounted_pair
from tests.operator.admission.reviews import NAME, ApiServersWebhook, write_pair
from tests.operator.apiserver import ApiServer
from tests.operator.injection.pods import DEFAULTS

DAY = timedelta(days=1)


@dataclass(kw_only=True)
class Running:
    """Admission, the API server it reads from, and a client of its webhook."""

    server: ApiServer
    admission: Admission
    metrics: AdmissionMetrics
    webhook: ApiServersWebhook
    defaults: InjectionDefaults | None

    def count(self, result: str, reason: str) -> float:
        labels = {"result": result, "reason": reason}
        value = self.metrics.registry.get_sample_value("keepstep_admission_reviews_total", labels)
        return value or 0.0


Start = Callable[..., AbstractAsyncContextManager[Running]]


@pytest.fixture
def pair() -> KeyPair:
    return make_server((NAME,), now=datetime.now(UTC), life=DAY)


@pytest.fixture
def started(tmp_path: Path, pair: KeyPair) -> Start:
    """`async with started(...) as running`."""

    @asynccontextmanager
    async def start(
        *,
        deadline_s: float = 3.5,
        patience_s: float = 1.5,
        path: str = "/inject",
    ) -> AsyncIterator[Running]:
        async with AsyncExitStack() as stack:
            server = await stack.enter_async_context(ApiServer().running())
            client = await stack.enter_async_context(KubeClient(server.access))
            metrics = AdmissionMetrics()
            admission = Admission(
                policies=Policies(client, patience_s=patience_s),
                records=ExistingRunReader(client),
                rooms=NamespaceLimitsReader(client),
                defaults=lambda: running.defaults,
                metrics=metrics,
                deadline_s=deadline_s,
                path=lambda: path,
            )
            directory = write_pair(tmp_path / "tls", pair)
            context = ServerTls(lambda: read_mounted_pair(directory)).context
            app = admission.application(str)
            port = await stack.enter_async_context(
                serve_application(app, port=0, host="127.0.0.1", ssl_context=context, shutdown_s=1)
            )
            webhook = await stack.enter_async_context(
                ApiServersWebhook(port, bundle=pair.certificate)
            )
            running = Running(
                server=server,
                admission=admission,
                metrics=metrics,
                webhook=webhook,
                defaults=DEFAULTS,
            )
            yield running

    return start
