"""docs/ops/: alerts, dashboard and page speak of series that exist."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from daemon.metrics.catalogue import FAMILIES, Family, Source
from daemon.supervisor.server import State

ROOT = Path(__file__).parents[2]
OPS = ROOT / "docs" / "ops"
PROMTOOL = shutil.which("promtool")
RULES = [
    rule
    for group in yaml.safe_load((OPS / "alerts.yaml").read_text())["groups"]
    for rule in group["rules"]
]
BOARD = json.loads((OPS / "grafana.json").read_text())


def series() -> set[str]:
    """Every name that a query may use."""
    names = {it.name for it in FAMILIES.values() if it.kind != "histogram"}
    for family in FAMILIES.values():
        if family.kind == "histogram":
            names |= {f"{family.name}_{part}" for part in ("bucket", "sum", "count")}
    return names


def used(expression: str) -> set[str]:
    return set(re.findall(r"\btqd_\w+", expression))


def labels_of(expression: str) -> Iterator[tuple[str, set[str]]]:
    """Yield each series of *expression* that has matchers, with the labels that they name."""
    for name, matchers in re.findall(r"\b(tqd_\w+)\{([^}]*)\}", expression):
        yield name, set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", matchers))


def panels() -> list[dict[str, Any]]:
    return [panel for panel in BOARD["panels"] if panel["type"] != "row"]


def expressions() -> list[str]:
    board = [target["expr"] for panel in panels() for target in panel["targets"]]
    board += [it["expr"] for it in BOARD["annotations"]["list"]]
    return [*board, *(rule["expr"] for rule in RULES)]


@pytest.mark.parametrize("expression", expressions())
def test_every_query_uses_series_and_labels_that_exist(expression: str) -> None:
    assert used(expression) <= series()
    assert used(expression)
    for name, labels in labels_of(expression):
        family = FAMILIES.get(name) or FAMILIES[re.sub(r"_(bucket|sum|count)$", "", name)]
        assert labels <= {*family.labels, "server", "instance"}


def test_states_in_queries_are_states() -> None:
    for expression in expressions():
        for states in re.findall(r'\bstate=~?"([^"]*)"', expression):
            assert set(states.split("|")) <= {state.value for state in State}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_every_alert_says_what_has_happened_and_what_to_do(rule: dict[str, Any]) -> None:
    assert rule["labels"]["severity"] in {"critical", "warning", "info"}
    assert rule["alert"].startswith("Tqd")
    assert set(rule["annotations"]) == {"summary", "description"}
    assert len(rule["annotations"]["description"]) > 60


def test_commands_in_alerts_are_commands_of_tqd() -> None:
    from daemon.cli.main import main

    text = " ".join(rule["annotations"]["description"] for rule in RULES)
    assert set(re.findall(r"`tqd (\w+)", text)) <= set(main.commands)


def test_the_dashboard_can_be_imported_anywhere() -> None:
    """No panel is bound to the data source of whoever drew it, and none lies on another one."""
    ids = [panel["id"] for panel in BOARD["panels"]]
    assert len(ids) == len(set(ids))
    assert all(panel["datasource"]["uid"] == "${datasource}" for panel in panels())
    taken: set[tuple[int, int]] = set()
    for panel in BOARD["panels"]:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & taken
        assert at["x"] + at["w"] <= 24
        taken |= cells


def test_the_dashboard_shows_every_worker_series_that_there_is() -> None:
    shown = {re.sub(r"_(bucket|sum|count)$", "", name) for it in expressions() for name in used(it)}
    assert {it.name for it in FAMILIES.values() if it.source == "worker"} <= shown


@pytest.mark.parametrize("source", ["daemon", "server", "worker"])
def test_the_page_explains_every_series_as_the_catalogue_does(source: Source) -> None:
    page = (OPS / "README.md").read_text()
    rows = "\n".join(row(it) for it in FAMILIES.values() if it.source == source)

    assert rows in page


def row(family: Family) -> str:
    labels = " ".join(f"`{label}`" for label in family.labels)
    return (
        f"| `{family.name}` | {family.kind} |{f' {labels}' if labels else ''} | {family.meaning} |"
    )


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed")
def test_promtool_accepts_the_rules_and_what_they_fire_on(tmp_path: Path) -> None:
    for file in (OPS / "alerts.yaml", ROOT / "tests" / "ops" / "alerts.test.yaml"):
        shutil.copy(file, tmp_path)
    for check in (["check", "rules", "alerts.yaml"], ["test", "rules", "alerts.test.yaml"]):
        said = subprocess.run(
            [str(PROMTOOL), *check], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert said.returncode == 0, said.stdout + said.stderr
