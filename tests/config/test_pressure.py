from __future__ import annotations

import pytest

from daemon.config.pressure import Pressure, Stalls, from_mac, judge, parse_stalls

PSI = """\
some avg10=12.50 avg60=3.20 avg300=0.85 total=123456789
full avg10=4.75 avg60=1.10 avg300=0.30 total=45678901
"""


def test_the_stalls_of_the_last_ten_seconds_count() -> None:
    assert parse_stalls(PSI) == Stalls(some=12.5, full=4.75)


def test_a_kernel_that_counts_no_stalls_has_none() -> None:
    assert parse_stalls("") == Stalls()


@pytest.mark.parametrize(
    ("available", "stalls", "said"),
    [
        (500, Stalls(), "normal"),
        (99, Stalls(), "warn"),
        (33, Stalls(), "critical"),
        (500, Stalls(some=9.9), "normal"),
        (500, Stalls(some=10.0), "warn"),
        (500, Stalls(some=40.0, full=10.0), "critical"),
        (99, Stalls(some=40.0, full=10.0), "critical"),
    ],
)
def test_a_linux_machine_is_short_when_little_is_left_or_programs_stand_still(
    available: int, stalls: Stalls, said: Pressure
) -> None:
    assert judge(available, 1000, stalls) == said


def test_a_mac_says_it_itself() -> None:
    assert [from_mac(level) for level in (1, 2, 4, 3, None)] == [
        "normal",
        "warn",
        "critical",
        None,
        None,
    ]
