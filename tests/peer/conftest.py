"""Pods with certificates of one authority."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.peer.authority import Authority
from tests.peer.nodes import Node


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "certificates")


@pytest.fixture
def node(tmp_path: Path, authority: Authority) -> Callable[..., Node]:
    """Makes pods by node rank; `running` ends them."""

    def make(node_rank: int, **options: Any) -> Node:
        return Node(tmp_path / "drives", node_rank, authority.files(node_rank), **options)

    return make


@pytest.fixture
def pair(node: Callable[..., Node]) -> tuple[Node, Node]:
    """A pod, and its buddy."""
    here, buddy = node(0), node(1)
    here.knows(buddy, buddies=(buddy,))
    return here, buddy
