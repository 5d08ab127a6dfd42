"""How the memory is divided: tables for a person to check, then what must hold for any numbers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daemon.policy.claim import Claim
from daemon.supervisor.memory import admit, admit_in_turn, divide, words

GIB = 2**30


def claim(fixed: int, sequence: int = 1, sequences: int = 4, *, limited: bool = True) -> Claim:
    return Claim(fixed, 0, 0, sequence, sequence * sequences, limited)


@pytest.mark.parametrize(
    ("budget", "claims", "shares"),
    [
        (100, {}, {}),
        (100, {"a": claim(10)}, {"a": 14}),  # no more than it has a use for
        (12, {"a": claim(10)}, {"a": 12}),
        (11, {"a": claim(10)}, {"a": 11}),  # what it needs
        (5, {"a": claim(10)}, {"a": 11}),  # over budget: still what it needs
        (26, {"a": claim(10), "b": claim(10)}, {"a": 13, "b": 13}),
        # b wants little, so a gets what b leaves
        (26, {"a": claim(10, 1, 9), "b": claim(10, 1, 2)}, {"a": 14, "b": 12}),
        (30, {"a": claim(10, 1, 9), "b": claim(10, 1, 2)}, {"a": 18, "b": 12}),
        # without a limit on its cache a server needs all that it wants
        (30, {"a": claim(10, 1, 9, limited=False), "b": claim(10)}, {"a": 19, "b": 11}),
    ],
)
def test_needs_come_first_and_the_rest_is_divided_evenly(
    budget: int, claims: dict[str, Claim], shares: dict[str, int]
) -> None:
    assert divide(budget, claims) == shares


CLAIMS = st.dictionaries(
    st.sampled_from("abcdef"),
    st.builds(claim, st.integers(0, 50), st.integers(1, 20), st.integers(1, 8)),
    max_size=6,
)


@given(budget=st.integers(0, 400), claims=CLAIMS)
def test_shares_lie_between_needs_and_wants_and_fill_the_budget(
    budget: int, claims: dict[str, Claim]
) -> None:
    shares = divide(budget, claims)
    needs = sum(it.needs_bytes for it in claims.values())
    wants = sum(it.wants_bytes for it in claims.values())
    assert shares.keys() == claims.keys()
    for name, share in shares.items():
        assert claims[name].needs_bytes <= share <= claims[name].wants_bytes
    assert sum(shares.values()) <= max(budget, needs)
    if needs <= budget:
        assert sum(shares.values()) >= min(budget, wants) - len(claims)  # to a byte each


@given(budget=st.integers(0, 200), claims=CLAIMS)
def test_whoever_is_admitted_fits_with_all_the_others_that_are(
    budget: int, claims: dict[str, Claim]
) -> None:
    refused = admit_in_turn(budget, claims.items(), {"other": 20})
    admitted = [it.needs_bytes for name, it in claims.items() if name not in refused]
    assert sum(admitted) + 20 <= budget or not admitted
    for name, refusal in refused.items():
        assert refusal.free_bytes < claims[name].needs_bytes


def test_a_refusal_has_the_numbers_and_says_who_holds_what() -> None:
    refusal = admit(8 * GIB, claim(5 * GIB, GIB), {"chat": 3 * GIB, "code": 2 * GIB})
    assert str(refusal) == (
        "it needs 6.0 GiB, and 3.0 GiB of the 8.0 GiB for all servers are free:"
        " chat holds 3.0 GiB, code holds 2.0 GiB"
    )
    assert admit(11 * GIB, claim(5 * GIB, GIB), {"chat": 3 * GIB, "code": 2 * GIB}) is None


def test_one_that_is_replaced_does_not_stand_in_its_own_way() -> None:
    assert admit_in_turn(10, [("a", claim(8))], {"a": 9}) == {}


def test_what_a_server_needs_is_taken_apart() -> None:
    assert words(Claim(4 * GIB, GIB, GIB // 2, GIB, 8 * GIB)) == (
        "weights 4.0 GiB, process 1.0 GiB, scratch 512.0 MiB, caches 1.0 GiB"
    )
