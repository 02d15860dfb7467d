"""The comparison sees each way in which a restart can be wrong, and no other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.conformance import wrong
from tests.conformance.compare import describe, differences
from tests.conformance.rows import every_row
from tests.conformance.table import Result
from tests.conformance.trial import Outcome, Trial, of_control, of_keepstep


@pytest.mark.parametrize("row", wrong.TABLE.rows, ids=lambda row: row.name)
def test_a_restart_with_one_deviation_is_detected(row: Any, tmp_path: Path) -> None:
    trial = Trial(row, tmp_path)
    undisturbed, control, kept = trial.undisturbed(), trial.control(), trial.keepstep()
    assert of_control(undisturbed, control) is Result.EQUAL
    expected = Result.EQUAL if row.what == "nothing" else Result.DIFFERS
    assert of_keepstep(row, undisturbed, control, kept) is expected


def _outcome(record: dict[str, str], *, codes: Any = (-9, 0), outputs: Any = ("", "")) -> Outcome:
    return Outcome(record=record, outputs=outputs, codes=codes, steps=len(record))


ROW = replace(every_row()[0], message="the layer")
PLAIN = _outcome({"a": "1", "b": "2"}, codes=(0,), outputs=("",))


@pytest.mark.parametrize(
    ("control", "kept", "expected"),
    [
        ({"a": "1", "b": "3"}, {"a": "1", "b": "3"}, Result.AS_CONTROL),
        ({"a": "3", "b": "3"}, {"a": "1", "b": "4"}, Result.DIFFERS_LESS),
        ({"a": "1", "b": "3"}, {"a": "1", "b": "4"}, Result.DIFFERS),
        ({"a": "1", "b": "3"}, {"a": "1", "b": "2"}, Result.EQUAL),
        ({"a": "1", "b": "3"}, {"a": "3", "b": "3"}, Result.DIFFERS),
        ({"a": "1", "b": "3"}, {"a": "1", "b": "2", "c": "1"}, Result.DIFFERS),
        ({"a": "1", "b": "2"}, {"a": "1"}, Result.DIFFERS),
    ],
)
def test_a_result_that_differs_as_the_control_does_counts_as_no_worse(
    control: dict[str, str], kept: dict[str, str], expected: Result
) -> None:
    assert of_keepstep(ROW, PLAIN, _outcome(control), _outcome(kept)) is expected


@pytest.mark.parametrize(
    ("codes", "outputs", "steps", "expected"),
    [
        ((1,), ("keepstep.errors.UsageError: the layer",), 0, Result.REFUSED_AT_START),
        ((1,), ("keepstep.errors.UsageError: the layer",), 1, Result.REFUSED_AT_FIRST_SAVE),
        ((1,), ("keepstep.errors.UsageError: the layer",), 2, Result.RAISES),
        ((1,), ("keepstep.errors.UsageError: something",), 0, Result.RAISES),
        ((1,), ("RuntimeError: the layer",), 0, Result.RAISES),
        ((-9, 1), ("keepstep: the layer is new", "MismatchError"), 3, Result.NAMED_AT_SAVE),
        ((-9, 1), ("something", "MismatchError: the layer"), 3, Result.RAISES),
        ((-9, 1), ("keepstep: something", "MismatchError"), 3, Result.RAISES),
        ((-11,), ("",), 3, Result.RAISES),
    ],
)
def test_a_refusal_is_accepted_only_before_the_first_step_and_with_its_cause(
    codes: tuple[int, ...], outputs: tuple[str, ...], steps: int, expected: Result
) -> None:
    kept = Outcome(record={}, outputs=outputs, codes=codes, steps=steps)
    assert of_keepstep(ROW, PLAIN, _outcome({"a": "1"}), kept) is expected


def test_a_silent_result_counts_as_worse_than_a_control_that_raises() -> None:
    control = _outcome({}, codes=(-9, 1), outputs=("", "ValueError"))
    assert of_control(PLAIN, control) is Result.RAISES
    assert of_keepstep(ROW, PLAIN, control, _outcome({"a": "1"})) is Result.DIFFERS


_ALIKE: dict[str, Callable[[], tuple[Any, Any]]] = {
    "signalling NaN": lambda: (_words(0x7FA00001), _words(0x7FE00001)),
    "complex and its conjugate": lambda: (torch.ones(2) * 1j, (torch.ones(2) * 1j).conj()),
    "a conjugate that is lazy": lambda: (
        (torch.ones(2) * 1j).conj(),
        (torch.ones(2) * 1j).conj().resolve_conj(),
    ),
    "text and bytes": lambda: ("a", b"a"),
    "1 and 1.0": lambda: (1, 1.0),
    "a number of numpy": lambda: (1.0, np.float64(1.0)),
    "int and str as keys": lambda: ({1: 0}, {"1": 0}),
    "byte order": lambda: (np.ones(2, ">i4"), np.ones(2, "<i4")),
    "memory order": lambda: (np.ones((2, 3)), np.asfortranarray(np.ones((2, 3)))),
    "a Parameter": lambda: (torch.ones(2), torch.nn.Parameter(torch.ones(2))),
    "two generators": lambda: (torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)),
    "a cycle": lambda: (_cycle(), {"n": 1, "me": {"n": 1}}),
}


def _words(*words: int) -> torch.Tensor:
    return torch.tensor(words, dtype=torch.int32).view(torch.float32)


def _cycle() -> dict[str, Any]:
    item: dict[str, Any] = {"n": 1}
    item["me"] = item
    return item


@pytest.mark.parametrize("name", _ALIKE)
def test_objects_that_compare_equal_but_differ_in_content_are_described_differently(
    name: str,
) -> None:
    first, other = _ALIKE[name]()
    assert differences(describe(first), describe(other))
    assert not differences(describe(first), describe(_ALIKE[name]()[0]))


def test_shared_objects_are_described_differently_from_equal_copies() -> None:
    item = [1]
    assert describe({"a": item, "b": item}) != describe({"a": [1], "b": [1]})
    whole = torch.ones(4)
    assert describe([whole, whole[1:]]) != describe([whole, torch.ones(5)[2:]])
    assert describe([torch.ones(3), torch.ones(3)]) == describe([torch.ones(3), torch.ones(3)])
