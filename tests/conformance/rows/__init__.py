"""The rows of the table, a module for each kind."""

from __future__ import annotations

import functools

from tests.conformance.rows import modules, optimizers, schedulers
from tests.conformance.table import Row

_MODULES = (optimizers, schedulers, modules)


@functools.cache
def every_row() -> tuple[Row, ...]:
    return tuple(row for module in _MODULES for row in module.TABLE.rows)
