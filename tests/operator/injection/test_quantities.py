"""Quantities and durations as Kubernetes reads them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep_operator.api.quantities import (
    format_bytes,
    format_millicores,
    parse_bytes,
    parse_duration,
    parse_millicores,
)


@pytest.mark.parametrize(
    ("written", "size_bytes"),
    [
        ("4096", 4096),
        (4096, 4096),
        ("32Gi", 32 << 30),
        ("1.5Ki", 1536),
        (".5Mi", 512 << 10),
        ("10G", 10 * 10**9),
        ("7k", 7000),
        ("1e9", 10**9),
        ("1E3", 1000),
        ("1E", 10**18),
        ("100m", 1),
        ("1500m", 2),
    ],
)
def test_sizes_are_read_as_kubernetes_reads_them(written: str | int, size_bytes: int) -> None:
    assert parse_bytes(written) == size_bytes


@pytest.mark.parametrize(
    ("written", "millicores"), [("100m", 100), (2, 2000), ("0.5", 500), (1.5, 1500), ("100u", 1)]
)
def test_cpus_are_thousandths_rounded_up(written: str | int | float, millicores: int) -> None:
    assert parse_millicores(written) == millicores


@pytest.mark.parametrize("written", ["", "Gi", "1KB", "1 Gi", "--1", "1e", "0x1", True, "1ki"])
def test_what_is_no_quantity_is_refused_with_an_example(written: str) -> None:
    with pytest.raises(ValueError, match="512Mi, 32Gi or 10G"):
        parse_bytes(written)


@given(st.integers(0, 1 << 63))
def test_bytes_survive_being_written_and_read(size_bytes: int) -> None:
    assert parse_bytes(format_bytes(size_bytes)) == size_bytes


@given(st.integers(0, 10**7))
def test_cpus_survive_being_written_and_read(millicores: int) -> None:
    assert parse_millicores(format_millicores(millicores)) == millicores


def test_amounts_are_written_in_their_canonical_form() -> None:
    assert [format_bytes(one) for one in (0, 1000, 1 << 30, 2304 << 20)] == [
        "0",
        "1000",
        "1Gi",
        "2304Mi",
    ]
    assert [format_millicores(one) for one in (100, 2000)] == ["100m", "2"]


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("1h30m", 5400), ("168h", 604800)])
def test_durations_are_sums_of_parts(text: str, seconds: int) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "5", "1.5h", "-1s", "1d", "1 m"])
def test_what_is_no_duration_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="90s, 15m or 2h"):
        parse_duration(text)
