from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from daemon.cli.main import main
from daemon.paths import StateDir
from daemon.supervisor.rotation import rotate

Run = Callable[..., Result]


@pytest.fixture
def state(tmp_path: Path) -> StateDir:
    return StateDir(tmp_path / "state")


@pytest.fixture
def run(state: StateDir, tmp_path: Path) -> Run:
    def run(*arguments: str) -> Result:
        place = ("--config", str(tmp_path / "servers.yaml"), "--state-dir", str(state.root))
        return CliRunner().invoke(main, [*place, "logs", *arguments])

    return run


def write(state: StateDir, *lines: str) -> None:
    path = state.server_log("chat")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines))


def ago(minutes: int) -> str:
    return (datetime.now(UTC) - timedelta(minutes=minutes)).isoformat()


def test_fifty_lines_by_default_as_many_as_asked_for_and_into_the_past(
    run: Run, state: StateDir
) -> None:
    write(state, *(f"old {number}" for number in range(30)))
    rotate(state.server_log("chat"), backups=2)
    write(state, *(f"new {number}" for number in range(30)))
    assert run("chat").stdout.splitlines()[0] == "old 10"
    assert run("chat", "-n", "1").stdout == "new 29\n"
    assert run("chat", "-n", "1000").stdout.splitlines()[0] == "old 0"


def test_since_shows_everything_from_then_on_and_a_count_the_last_of_it(
    run: Run, state: StateDir
) -> None:
    lines = [f"{ago(minutes)} line {minutes}" for minutes in (30, 20, 5, 1)]
    write(state, *lines)
    assert run("chat", "--since", "10m").stdout.splitlines() == lines[2:]
    assert run("chat", "--since", ago(25)).stdout.splitlines() == lines[1:]
    assert run("chat", "--since", "1h", "-n", "1").stdout.splitlines() == lines[3:]


def test_what_is_no_time_is_refused_with_what_would_be(run: Run, state: StateDir) -> None:
    write(state, "a")
    refused = run("chat", "--since", "yesterday")
    assert refused.exit_code == 2
    assert "neither a duration such as 10m nor a time such as 2026-01-31T08:00" in refused.stderr


def test_a_server_without_a_log_is_named_with_the_place_it_would_have(
    run: Run, state: StateDir
) -> None:
    missing = run("chat")
    assert missing.exit_code == 1
    assert str(state.server_log("chat")) in missing.stderr
    assert "hint: `tqd status chat`" in missing.stderr
