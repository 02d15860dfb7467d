"""The type of a Kubernetes object as JSON, which must not travel past a parser."""

from __future__ import annotations

from typing import Any

Body = dict[str, Any]
