"""The numbers of a worker."""

from __future__ import annotations

import pytest

from daemon.worker.serving import Rates


def test_rates_are_over_the_last_minute() -> None:
    rates = Rates(window_s=60)
    assert rates.sample(0, 0, 0) == (0, 0)
    assert rates.sample(10, 100, 50) == (10, 5)
    for second in range(11, 71):
        rates.sample(second, 100, 50)
    assert rates.sample(71, 100, 50) == (0, 0)


def test_rates_of_one_moment_are_zero() -> None:
    rates = Rates()
    rates.sample(5, 10, 10)
    assert rates.sample(5, 20, 20) == (0, 0)


def test_a_long_idle_worker_keeps_few_samples() -> None:
    rates = Rates(window_s=60)
    for second in range(0, 1000, 10):
        rates.sample(second, second, 2 * second)
    assert rates.sample(1000, 1000, 2000) == pytest.approx((1, 2))
    assert len(rates._samples) <= 8
