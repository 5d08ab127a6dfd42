"""The table of complaints names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]


def test_every_test_in_the_table_of_complaints_exists() -> None:
    named = set(re.findall(r"`(test_\w+)`", (TESTS / "complaints.md").read_text()))
    written = {
        name
        for file in TESTS.rglob("test_*.py")
        for name in re.findall(r"^ *(?:async )?def (test_\w+)", file.read_text(), re.MULTILINE)
    }
    assert len(named) > 20
    assert named <= written
