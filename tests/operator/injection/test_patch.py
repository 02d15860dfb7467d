"""JSON patches between any two documents."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep_operator.injection import json_patch
from tests.operator.injection.json_pointer import apply

_KEYS = st.sampled_from(["a", "b/c", "d~e", "name", "mountPath"])
_LEAVES = st.none() | st.booleans() | st.integers(-3, 3) | st.text(max_size=2)
_DOCUMENTS = st.dictionaries(
    _KEYS,
    st.recursive(
        _LEAVES,
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_KEYS, inner, max_size=3),
        max_leaves=20,
    ),
    max_size=4,
)


@given(old=_DOCUMENTS, new=_DOCUMENTS)
@settings(max_examples=500)
def test_a_patch_makes_the_new_document_of_the_old_one(
    old: dict[str, Any], new: dict[str, Any]
) -> None:
    assert apply(old, json_patch(old, new)) == new


def test_what_is_put_before_and_behind_is_added_and_not_replaced() -> None:
    old = {"c": [{"name": "a", "v": 1}, {"name": "b"}]}
    new = {"c": [{"name": "x"}, {"name": "a", "v": 2}, {"name": "b"}, {"name": "y"}]}
    assert json_patch(old, new) == [
        {"op": "add", "path": "/c/0", "value": {"name": "x"}},
        {"op": "replace", "path": "/c/1/v", "value": 2},
        {"op": "add", "path": "/c/-", "value": {"name": "y"}},
    ]
