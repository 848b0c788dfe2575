"""Quantities read as people write them, and a wrong one names what was expected."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fenno import units
from fenno.errors import UsageError


@pytest.mark.parametrize(
    ("read", "text", "value"),
    [
        (units.duration, "800ms", 0.8),
        (units.duration, "0.8s", 0.8),
        (units.duration, ".5 s", 0.5),
        (units.duration, "250us", 250e-6),
        (units.duration, "250µs", 250e-6),
        (units.duration, "15m", 900),
        (units.duration, "15 min", 900),
        (units.duration, "2h", 7200),
        (units.duration, "1d", 86400),
        (units.duration, 30, 30),
        (units.duration, "0", 0),
        (units.share, "85%", 0.85),
        (units.share, "0.85", 0.85),
        (units.share, "100%", 1),
        (units.share, 1, 1),
        (units.size, "40GiB", 40 * 2**30),
        (units.size, "1.5 GiB", 3 * 2**29),
        (units.size, "80GB", 80 * 10**9),
        (units.size, "512", 512),
        (units.count, "2k", 2000),
        (units.count, "2Ki", 2048),
        (units.count, "1.5k", 1500),
        (units.count, 7, 7),
        (units.tokens, 8192, 8192),
        (units.tokens, "8k", 8000),
        (units.tokens, "8K", 8192),
        (units.tokens, "25.6k", 25600),
        (units.tokens, "1G", 2**30),
        (units.memory, "85%", 0.85),
        (units.memory, "0.85", 0.85),
        (units.memory, "1", 1),
        (units.memory, "40GiB", 40 * 2**30),
    ],
)
def test_a_quantity_is_read_as_people_write_it(read: Callable[[object], float], text: object, value: float) -> None:
    assert read(text) == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize(
    ("read", "text", "expected"),
    [
        (units.duration, "fast", "a duration such as 800ms"),
        (units.duration, "10 parsecs", "a duration such as 800ms"),
        (units.duration, "-1s", "a duration such as 800ms"),
        (units.duration, "", "a duration such as 800ms"),
        (units.duration, None, "a duration such as 800ms"),
        (units.duration, "nan", "a duration such as 800ms"),
        (units.share, "0", "a share such as 85%"),
        (units.share, "120%", "a share such as 85%"),
        (units.share, "85", "a share such as 85%"),
        (units.share, "1GiB", "a share such as 85%"),
        (units.size, "40 boxes", "a size such as 40GiB"),
        (units.size, "85%", "a size such as 40GiB"),
        (units.count, "1.5", "a count such as 2048"),
        (units.count, "2%", "a count such as 2048"),
        (units.tokens, "auto", "a whole number such as 8192"),
        (units.tokens, "-1", "a whole number such as 8192"),
        (units.tokens, "1.5K", "a whole number such as 8192"),
        (units.tokens, "1.5", "a whole number such as 8192"),
        (units.memory, "120%", "a share such as 85%"),
        (units.memory, "plenty", "a size such as 40GiB"),
    ],
)
def test_a_wrong_one_is_repeated_and_names_what_was_expected(read: Callable[[object], float], text: object, expected: str) -> None:
    with pytest.raises(UsageError, match=expected) as caught:
        read(text)
    assert repr(str(text)) in str(caught.value)
    assert caught.value.exit_code == 2


def test_a_share_may_be_nothing_only_where_that_has_a_meaning() -> None:
    assert units.share("0%", or_zero=True) == units.share("0", or_zero=True) == 0
    with pytest.raises(UsageError, match="'101%' is not a share"):
        units.share("101%", or_zero=True)


# An alphabet of its own: the table of all Unicode takes a second to build.
@given(st.text("0123456789.,-+_eE%kKmMgGTiBsh nainf²½٣−\0\n", max_size=12))
def test_any_text_is_a_quantity_or_a_usage_error(text: str) -> None:
    for read in (units.duration, units.share, units.size, units.count, units.tokens, units.memory):
        try:
            value = read(text)
        except UsageError:
            continue
        assert 0 <= value < float("inf")


@pytest.mark.parametrize(
    ("read", "text"), [(units.memory, "²"), (units.size, "9" * 400), (units.count, "9" * 400), (units.tokens, "9" * 400)]
)
def test_digits_that_are_no_number_are_a_usage_error(read: Callable[[object], float], text: str) -> None:
    with pytest.raises(UsageError):
        read(text)


@given(st.integers(min_value=0, max_value=10**9))
def test_a_bare_number_is_itself(number: int) -> None:
    assert units.duration(number) == units.size(str(number)) == units.count(number) == units.tokens(number) == number


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0.8, "800 ms"),
        (0.00025, "0.25 ms"),
        (1, "1 s"),
        (12.34, "12.3 s"),
        (60, "1 min"),
        (75, "1 min 15 s"),
        (3600, "1 h"),
        (5400, "1 h 30 min"),
        (0.9996, "1 s"),
        (59.96, "1 min"),
        (3599.7, "1 h"),
    ],
)
def test_a_duration_is_shown_in_its_own_unit(seconds: float, shown: str) -> None:
    assert units.show_duration(seconds) == shown


@given(st.floats(min_value=1e-6, max_value=1e6))
def test_a_shown_duration_is_close_to_the_true_one(seconds: float) -> None:
    factors = {"ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
    words = units.show_duration(seconds).split()
    again = sum(float(number) * factors[unit] for number, unit in zip(words[::2], words[1::2], strict=True))
    assert again == pytest.approx(seconds, rel=0.01)


@pytest.mark.parametrize(("limit", "shown"), [(0.85, "85 %"), (1, "100 %"), (40 * 2**30, "40.0 GiB")])
def test_a_memory_limit_is_shown_as_it_is_read(limit: float, shown: str) -> None:
    assert units.show_memory(limit) == shown


@pytest.mark.parametrize(
    ("text", "found"),
    [("10.0.0.1:81", "10.0.0.1:81"), ("gpu-1.local", "gpu-1.local:8000"), ("[fd00::1]:8001", "[fd00::1]:8001"), ("h", "h:8000")],
)
def test_an_address_is_a_host_and_a_port(text: str, found: str) -> None:
    assert str(units.address(text, 8000)) == found


@pytest.mark.parametrize("text", ["", "a b", "http://h:80", "h:0", "h:65536", "h:x", "fd00::1", "h;", "h:80 down", "h/x", "8080"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is no address"):
        units.address(text, 8000)
