"""What the command line and the daemon say to each other over the control socket."""

from __future__ import annotations

from typing import Literal, TypedDict

Action = Literal["start", "stop", "restart"]


class Change(TypedDict):
    """A step of a plan, for people: ``restart chat: kv.mode turbo8v4 → turbo8v3``."""

    action: str
    server: str
    changes: list[str]
    text: str


class Verdict(TypedDict):
    """What became of one reading of servers.yaml; a refusal is an error instead."""

    result: Literal["applied", "unchanged"]
    steps: list[Change]
    warnings: list[str]
