"""`daemon.memory_budget`: a size, a share, or auto; and back to what a file would say."""

from __future__ import annotations

from pathlib import Path

import pytest

from daemon.config.load import RejectedError, load
from daemon.units import format_budget, parse_budget


@pytest.mark.parametrize(
    ("written", "means", "shown"),
    [
        ("auto", "auto", "auto"),
        ("75%", 0.75, "75%"),
        ("12.5 %", 0.125, "12.5%"),
        ("100%", 1.0, "100%"),
        ("48GiB", 48 * 2**30, 48 * 2**30),
        (5000, 5000, 5000),
    ],
)
def test_it_is_a_size_a_share_or_auto(written: object, means: object, shown: object) -> None:
    assert parse_budget(written) == means
    assert format_budget(parse_budget(written)) == shown


@pytest.mark.parametrize("written", ["0%", "101%", "half", "", "-1", 0, 1.5, True, None, "0GiB"])
def test_anything_else_is_refused_with_what_to_write(written: object) -> None:
    with pytest.raises(
        ValueError, match="write auto, a share such as 75%, or a size such as 48GiB"
    ):
        parse_budget(written)


def test_a_file_is_refused_at_its_line_with_one_problem(tmp_path: Path) -> None:
    path = tmp_path / "servers.yaml"
    path.write_text("version: 1\ndaemon:\n  memory_budget: 150%\nservers: {}\n")
    with pytest.raises(RejectedError) as caught:
        load(path, environ={})
    (problem,) = caught.value.problems
    assert (problem.line, problem.path) == (3, "daemon.memory_budget")
    assert "'150%' is not a memory budget" in problem.message


def test_a_share_may_come_from_the_environment(tmp_path: Path) -> None:
    path = tmp_path / "servers.yaml"
    path.write_text("version: 1\ndaemon: {memory_budget: '${env:SHARE}'}\nservers: {}\n")
    assert load(path, environ={"SHARE": "50%"}).servers.daemon.memory_budget == 0.5
