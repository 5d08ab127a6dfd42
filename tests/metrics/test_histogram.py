from __future__ import annotations

import pytest
from pydantic import ValidationError

from daemon.config.wire import Histogram
from daemon.metrics.histogram import Observations


def test_an_observation_counts_in_the_first_bucket_that_is_not_below_it() -> None:
    seen = Observations((1.0, 2.0))
    for value in (0.0, 1.0, 1.5, 2.0, 3.0, 99.0):
        seen.observe(value)

    assert seen.read() == Histogram(bounds=(1.0, 2.0), counts=(2, 2, 2), sum=106.5)


def test_what_was_read_does_not_change_any_more() -> None:
    seen = Observations((1.0,))
    before = seen.read()
    seen.observe(0.5)

    assert before.counts == (0, 0)


def test_a_histogram_without_a_count_for_each_bound_is_refused() -> None:
    """A worker of another version must not break a scrape of the daemon."""
    with pytest.raises(ValidationError, match="one count more than it has bounds"):
        Histogram(bounds=(1.0, 2.0), counts=(1, 2), sum=3.0)
