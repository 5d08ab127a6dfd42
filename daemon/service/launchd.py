"""The service under launchd.

``bootstrap`` and ``bootout`` only: ``kickstart -k`` kills without a grace, and a killed worker can leave wired
memory behind until the machine is started again.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from daemon.service.host import ASK_TIMEOUT_S, Answer, Condition, ask, refusal
from daemon.service.unit import Installed, Paths, Scope, launchd_plist, read_launchd

LABEL = "org.tqd.daemon"
SYSTEM_DAEMONS = Path("/Library/LaunchDaemons")

_ALREADY_LOADED = (5, 37, 17)  # EIO as launchctl says it, "operation already in progress", EEXIST
_TRIES = 10  # bootout returns before the old job is gone
_PAUSE_S = 0.5
_EXIT_TIMEOUT_S = 600.0  # a job that is booted out may take its ExitTimeOut


@dataclass(frozen=True, slots=True)
class Launchd:
    """launchd's jobs of *scope*; *home* and *uid* are the user's."""

    scope: Scope
    home: Path
    uid: int
    system_daemons: Path = SYSTEM_DAEMONS
    kind: str = "launchd"
    pause: Callable[[float], None] = field(default=time.sleep, repr=False)

    @property
    def path(self) -> Path:
        """Where the property list is."""
        if self.scope is Scope.SYSTEM:
            return self.system_daemons / f"{LABEL}.plist"
        return self.home / "Library" / "LaunchAgents" / f"{LABEL}.plist"

    def render(self, paths: Paths) -> str:
        """Return what the property list should say."""
        return launchd_plist(paths, self.scope)

    def read(self, text: str) -> Installed:
        """Return what the property list *text* runs."""
        return read_launchd(text)

    def install(self) -> None:
        """Let launchd load the property list at every login or boot; loading it now is `start`."""
        self._must("enable", f"{self._domain()}/{LABEL}")

    def start(self) -> None:
        """Load the property list, which starts the daemon; one that is loaded is loaded anew."""
        domain = self._domain()
        command = ("bootstrap", domain, str(self.path))
        answer = self._ask(*command)
        if answer.code in _ALREADY_LOADED:
            self._ask("bootout", f"{domain}/{LABEL}", timeout_s=_EXIT_TIMEOUT_S)
            for _ in range(_TRIES):
                answer = self._ask(*command)
                if answer.code not in _ALREADY_LOADED:
                    break
                self.pause(_PAUSE_S)
        if answer.code != 0:
            raise refusal(self._command(*command), answer, self._hint())

    def remove(self, timeout_s: float) -> None:
        """End the job and forget the property list until it is loaded again."""
        command = ("bootout", f"{self._domain()}/{LABEL}")
        answer = self._ask(*command, timeout_s=timeout_s)
        if answer.code != 0 and self._loaded():
            raise refusal(self._command(*command), answer, self._hint())

    def forget(self) -> None:
        """There is nothing to do: launchd reads the folder at the next login or boot."""

    def condition(self) -> Condition:
        """Return how the job is."""
        domain = self._domain()
        job = self._ask("print", f"{domain}/{LABEL}")
        disabled = self._ask("print-disabled", domain).output
        enabled = re.search(rf'"{re.escape(LABEL)}" => (?:true|disabled)', disabled) is None
        if job.code != 0:
            return Condition(enabled, running=False, detail="not loaded")
        pid = re.search(r"^\s*pid = (\d+)", job.output, re.MULTILINE)
        state = re.search(r"^\s*state = (.+)", job.output, re.MULTILINE)
        last = re.search(r"^\s*last exit code = (.+)", job.output, re.MULTILINE)
        detail = state[1] if state else "loaded"
        if last and pid is None:
            detail += f", last exit code {last[1]}"
        return Condition(enabled, pid is not None, int(pid[1]) if pid else None, detail)

    def advice(self) -> str | None:
        """Return what an agent of a user needs to run."""
        if self.scope is Scope.SYSTEM:
            return None
        return "it runs while you are logged in; `tqd service install --system` starts it with the machine"

    def _loaded(self) -> bool:
        return self._ask("print", f"{self._domain()}/{LABEL}").code == 0

    def _domain(self) -> str:
        """Return the domain of the jobs: that of the desktop, where there is one."""
        if self.scope is Scope.SYSTEM:
            return "system"
        desktop = f"gui/{self.uid}"
        return desktop if self._ask("print", desktop).code == 0 else f"user/{self.uid}"

    def _ask(self, *arguments: str, timeout_s: float = ASK_TIMEOUT_S) -> Answer:
        return ask(self._command(*arguments), timeout_s=timeout_s)

    def _must(self, *arguments: str) -> Answer:
        answer = self._ask(*arguments)
        if answer.code != 0:
            raise refusal(self._command(*arguments), answer, self._hint())
        return answer

    def _command(self, *arguments: str) -> tuple[str, ...]:
        return ("launchctl", *arguments)

    def _hint(self) -> str:
        if self.scope is Scope.SYSTEM:
            return "services of the machine are root's: use sudo"
        return f"`launchctl print user/{self.uid}/{LABEL}` may say more"
