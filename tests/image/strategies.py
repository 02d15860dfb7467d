"""Layouts and states, as Hypothesis finds them."""

from __future__ import annotations

import datetime
import decimal
from collections import Counter, OrderedDict, defaultdict, deque

from hypothesis import strategies as st

from keepstep.image import ELEMENT_BYTES, FlatBox, TensorRole, TensorSpec

names = st.text(st.characters(exclude_categories=("Cs",)), max_size=12).filter(
    lambda name: name != "__metadata__" and not name.startswith("keepstep.")
)
shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@st.composite
def specs(draw: st.DrawFn) -> TensorSpec:
    """A tensor: whole, or a box of a larger one; perhaps a vector that is used in another shape, or
    whose elements are those of a box."""
    shape = draw(shapes)
    name, dtype = draw(names), draw(st.sampled_from(sorted(ELEMENT_BYTES)))
    section = draw(st.sampled_from(TensorRole))
    before = tuple(draw(st.integers(0, 3)) for _ in shape)
    after = [draw(st.integers(0, 3)) for _ in shape]
    whole = tuple(a + b + c for a, b, c in zip(before, shape, after, strict=True))
    used = (1, *whole) if len(whole) == 1 and draw(st.booleans()) else None
    flat = None
    if len(whole) == 1 and used is None and draw(st.booleans()):
        flat = FlatBox((2, 0), (1, *whole), (4, *whole))
    box = () if whole == shape else (before, whole)
    return TensorSpec(name, dtype, shape, section, *box, unflattened=used, flat=flat)


tensor_lists = st.lists(specs(), max_size=12, unique_by=lambda spec: spec.name)

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([(1 << 63) - 1, 1 << 63, -(1 << 63), 1 - (1 << 63), 7 << 900]),
    st.floats(),
    st.text(st.characters(exclude_categories=())),
    st.binary(max_size=20),
    st.complex_numbers(),
    st.sampled_from(["!tuple", "!", "\ud83d\ude00", "\ud800", ""]),
    st.dates(),
    st.times(),
    st.datetimes(timezones=st.none() | st.just(datetime.timezone.utc) | st.timezones()),
    st.timedeltas(),
    st.fractions(),
    st.sampled_from([decimal.Decimal("-0.10"), decimal.Decimal("1E+9"), decimal.Decimal("Inf")]),
    st.sampled_from([range(3, 1 << 70, 2), range(0, -9, -4)]),
)
numbers = st.one_of(
    st.lists(st.floats(), min_size=60, max_size=70),
    st.lists(st.integers(-(1 << 63), (1 << 63) - 1), min_size=60, max_size=70),
    st.lists(st.tuples(st.integers(0, 9), st.floats()), min_size=60, max_size=70),
    st.lists(st.tuples(st.floats(), st.floats()).map(list), min_size=60, max_size=70),
    st.lists(
        st.fixed_dictionaries({"step": st.integers(0, 9), "!loss": st.floats()}),
        min_size=60,
        max_size=70,
    ),
    st.lists(st.floats() | st.integers() | st.booleans(), min_size=60, max_size=70),
    st.dictionaries(st.integers(), st.floats(), min_size=60, max_size=70),
)
"""Long enough to be packed, or nearly."""

hashables = st.recursive(
    scalars, lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3), max_leaves=4
)
states = st.recursive(
    scalars | numbers,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(st.text(max_size=4), inner, max_size=4),
        st.dictionaries(hashables, inner, max_size=4),
        st.sets(hashables, max_size=3),
        st.builds(deque, st.lists(inner, max_size=3), st.sampled_from([None, 2, 9])),
        st.builds(OrderedDict, st.lists(st.tuples(hashables, inner), max_size=3)),
        st.builds(Counter, st.dictionaries(hashables, st.integers(), max_size=3)),
        st.builds(
            defaultdict,
            st.sampled_from([None, int, list, Counter]),
            st.dictionaries(hashables, inner, max_size=3),
        ),
    ),
    max_leaves=20,
)
