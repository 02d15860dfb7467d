"""The control page: what is sealed reads back, and one changed byte is enough to say no."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.errors import FormatError, TornError
from keepstep.image import PAGE_BYTES, ControlPage
from keepstep.steps import Epoch, EpochId, StepId

PAGE = ControlPage(
    run="demo",
    layout="0" * 32,
    epoch=Epoch(EpochId(3, "1f9c2d7a")),
    rank=0,
    world=2,
    step=1200,
    extras_bytes=17,
    staged_at=1.5,
)


def is_name(text: str) -> bool:
    """Of a run: it becomes a directory, and is printed."""
    return text.isprintable() and "/" not in text and text not in ("", ".", "..")


hexes = st.binary(min_size=16, max_size=16).map(bytes.hex)
epochs = st.builds(
    EpochId, st.integers(0, 999_999_999), st.binary(min_size=4, max_size=4).map(bytes.hex)
)
times = st.floats(0, 1e11)


@settings(max_examples=100)
@given(
    run=st.text(max_size=60).filter(is_name),
    layout=hexes,
    epoch=st.builds(
        Epoch, epochs, st.none() | st.builds(StepId, epochs, st.integers(0, 10**18 - 1))
    ),
    step=st.integers(0, 10**18 - 1),
    staged_at=times,
    written_at=st.none() | times,
    root=st.none() | hexes,
    sections=st.none() | st.dictionaries(st.sampled_from(["params", "rest"]), hexes),
)
def test_a_control_page_survives_a_round_trip(**values: object) -> None:
    page = replace(PAGE, **values)
    data = page.to_bytes()
    assert len(data) == PAGE_BYTES
    assert ControlPage.from_bytes(memoryview(data)) == page
    assert ControlPage.from_bytes(data).step_id == StepId(page.epoch.id, page.step)


def test_one_changed_bit_anywhere_breaks_the_seal() -> None:
    honest = PAGE.to_bytes()
    for at in {*range(32), *range(PAGE_BYTES - 40, PAGE_BYTES), *range(0, PAGE_BYTES, 97)}:
        data = bytearray(honest)
        data[at] ^= 1 << random.Random(at).randrange(8)
        with pytest.raises(TornError):
            ControlPage.from_bytes(data)


@pytest.mark.parametrize("sectors", range(1, 8))
def test_a_partly_overwritten_control_page_has_no_valid_seal(sectors: int) -> None:
    older, newer = PAGE.to_bytes(), replace(PAGE, step=1201, run="demo2").to_bytes()
    cut = 512 * sectors
    for torn in (newer[:cut] + older[cut:], older[:cut] + newer[cut:]):
        with pytest.raises(TornError):
            ControlPage.from_bytes(torn)


def test_a_run_whose_name_does_not_fit_is_refused() -> None:
    with pytest.raises(FormatError, match="too long"):
        replace(PAGE, run="x" * 5000).to_bytes()
