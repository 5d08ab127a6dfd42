"""The service under systemd."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from daemon.service.host import ASK_TIMEOUT_S, Answer, Condition, ask, refusal
from daemon.service.unit import Installed, Paths, Scope, read_systemd, systemd_unit

UNIT = "tqd.service"
SYSTEM_UNITS = Path("/etc/systemd/system")

_PROPERTIES = ("LoadState", "ActiveState", "SubState", "UnitFileState", "MainPID", "Result")


@dataclass(frozen=True, slots=True)
class Systemd:
    """systemd's services of *scope*; *home* is where a user's configuration is by default."""

    scope: Scope
    config_home: Path
    system_units: Path = SYSTEM_UNITS
    kind: str = "systemd"

    @property
    def path(self) -> Path:
        """Where the unit is."""
        if self.scope is Scope.SYSTEM:
            return self.system_units / UNIT
        return self.config_home / "systemd" / "user" / UNIT

    def render(self, paths: Paths) -> str:
        """Return what the unit should say."""
        return systemd_unit(paths, self.scope)

    def read(self, text: str) -> Installed:
        """Return what the unit *text* runs."""
        return read_systemd(text)

    def install(self) -> None:
        """Read the unit, and start it at every login or boot."""
        self._must("daemon-reload")
        self._must("enable", UNIT)

    def start(self) -> None:
        """Start the unit; systemd waits until the daemon says that it is ready."""
        self._ask("reset-failed", UNIT)  # whoever asks has seen to what made it give up
        self._must("start", UNIT)

    def remove(self, timeout_s: float) -> None:
        """Stop and disable the unit."""
        self._must("disable", "--now", UNIT, timeout_s=timeout_s)

    def forget(self) -> None:
        """Read the units again, without this one."""
        self._must("daemon-reload")

    def condition(self) -> Condition:
        """Return how the unit is."""
        names = ",".join(_PROPERTIES)
        answer = self._must("show", UNIT, f"--property={names}")
        found = dict(line.partition("=")[::2] for line in answer.output.splitlines())
        pid = int(found.get("MainPID") or 0)
        active, sub = found.get("ActiveState", "unknown"), found.get("SubState", "")
        detail = f"{active} ({sub})" if sub and sub != active else active
        if found.get("Result", "success") != "success":
            detail += f", {found['Result']}"
        return Condition(
            enabled=found.get("UnitFileState") in ("enabled", "enabled-runtime", "linked"),
            running=active in ("active", "activating", "reloading", "deactivating") and pid > 0,
            pid=pid or None,
            detail=detail,
        )

    def advice(self) -> str | None:
        """Return what a user's services need to run without a login."""
        if self.scope is Scope.SYSTEM:
            return None
        return "it starts when you log in; `loginctl enable-linger` makes it start with the machine"

    def _ask(self, *arguments: str, timeout_s: float = ASK_TIMEOUT_S) -> Answer:
        return ask(self._command(*arguments), timeout_s=timeout_s)

    def _must(self, *arguments: str, timeout_s: float = ASK_TIMEOUT_S) -> Answer:
        answer = self._ask(*arguments, timeout_s=timeout_s)
        if answer.code != 0:
            raise refusal(self._command(*arguments), answer, self._hint(answer))
        return answer

    def _command(self, *arguments: str) -> tuple[str, ...]:
        scope = ("--user",) if self.scope is Scope.USER else ()
        return ("systemctl", *scope, *arguments)

    def _hint(self, answer: Answer) -> str:
        if "bus" in answer.error.lower() and self.scope is Scope.USER:
            return "your services run only where you are logged in; `tqd service install --system` needs no login"
        if self.scope is Scope.SYSTEM:
            return "services of the machine are root's: use sudo"
        return f"`journalctl --user -u {UNIT}` may say more"
