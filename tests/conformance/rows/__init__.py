"""The rows of the table, a module for each kind."""

from __future__ import annotations

import functools

from tests.conformance.rows import data, foreign, modules, optimizers, packages, schedulers, values
from tests.conformance.table import Row

_MODULES = (optimizers, schedulers, modules, foreign, values, data, packages)


@functools.cache
def every_row() -> tuple[Row, ...]:
    return tuple(row for module in _MODULES for row in module.TABLE.rows)
