"""Sizes, durations and names as people write them."""

from __future__ import annotations

import pytest

from keepstep_sidecar.config.settings import parse_duration, parse_size


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("4096", 4096),
        ("512Mi", 512 << 20),
        ("32Gi", 32 << 30),
        ("1.5Ki", 1536),
        ("10G", 10 * 10**9),
        ("10GB", 10 * 10**9),
        ("2 TiB", 2 << 40),
        ("7k", 7000),
    ],
)
def test_sizes_are_read_as_kubernetes_reads_them(text: str, size_bytes: int) -> None:
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize("text", ["", "Gi", "-1G", "1X", "1Gi2", "1e9"])
def test_an_invalid_size_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="512Mi, 32Gi or 10G"):
        parse_size(text)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90), ("15m", 900), ("2h", 7200), ("1h30m", 5400), ("1d", 86400), ("250ms", 0.25),
     ("0", 0), ("1.5", 1.5)],
)  # fmt: skip
def test_durations_are_sums_of_parts(text: str, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "m", "5 minutes", "-5s", "5x"])
def test_an_invalid_duration_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="90s, 15m or 2h"):
        parse_duration(text)
