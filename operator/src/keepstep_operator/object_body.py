"""The type of a Kubernetes object as JSON. No code but the parsers takes such objects apart."""

from __future__ import annotations

from typing import Any

Body = dict[str, Any]
