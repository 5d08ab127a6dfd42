"""The group of all commands."""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys

import click
import pytest
from click.testing import CliRunner

from daemon import cli
from daemon.cli.main import FAMILIES, main


def test_every_command_of_every_module_is_in_the_table() -> None:
    modules = [
        importlib.import_module(f"daemon.cli.{it.name}")
        for it in pkgutil.iter_modules(cli.__path__)
    ]
    families = {
        module.__name__.rpartition(".")[2]: tuple(command.name for command in module.COMMANDS)
        for module in modules
        if hasattr(module, "COMMANDS")
    }
    assert families == FAMILIES


@pytest.mark.parametrize("name", sorted(name for names in FAMILIES.values() for name in names))
def test_every_command_has_help(name: str) -> None:
    shown = CliRunner().invoke(main, [name, "--help"])
    assert shown.exit_code == 0
    assert shown.stdout.startswith(f"Usage: main {name}")


def test_a_command_that_does_not_exist_is_refused() -> None:
    refused = CliRunner().invoke(main, ["stat"])
    assert (refused.exit_code, "No such command" in refused.stderr) == (2, True)
    assert isinstance(main, click.Group)


@pytest.mark.parametrize("name", ["status", "start"])
def test_what_talks_to_a_daemon_imports_nothing_that_reads_configurations(name: str) -> None:
    program = f"""
import sys
from daemon.cli.main import main
main.get_command(None, {name!r})
print([it for it in ("pydantic_core", "structlog", "yaml", "psutil") if it in sys.modules])
"""
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() in ("[]", "['pydantic_core']")
