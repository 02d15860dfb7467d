"""The cluster of the soak tests: that of the end-to-end tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.cluster import ROOT, Cluster


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    made = Cluster(ROOT / "build" / "e2e")
    try:
        made.up()
        yield made
    finally:
        made.down()
