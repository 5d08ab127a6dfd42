from __future__ import annotations

from itertools import combinations, product

import pytest

from tests.kernels.pairwise import pairs_of, pairwise

AXES = {"a": [1, 2, 3], "b": ["x", "y"], "c": [True, False], "d": [1, 2, 3, 4]}


def test_every_two_values_of_two_properties_meet_in_few_rows() -> None:
    rows = pairwise(AXES)

    expected = {
        (one, value, other, its)
        for one, other in combinations(AXES, 2)
        for value, its in product(AXES[one], AXES[other])
    }
    assert set().union(*map(pairs_of, rows)) == expected
    assert len(rows) < 16  # of 48; no fewer than 12 can do


@pytest.mark.parametrize("refused", [(1, "x"), (3, "y")])
def test_what_is_not_allowed_is_in_no_row_and_all_else_is(refused: tuple[int, str]) -> None:
    rows = pairwise(AXES, lambda row: (row.get("a"), row.get("b")) != refused)

    met = set().union(*map(pairs_of, rows))
    assert ("a", refused[0], "b", refused[1]) not in met
    assert len(met) == len(set().union(*map(pairs_of, pairwise(AXES)))) - 1
