"""Decide when servers.yaml is read, and what becomes of what was read: a pure step function.

    at rest ── a look differs ──▶ moving ── two equal looks ──▶ Read
    Read ──▶ Refuse · Keep · Apply · suspect ── 5 s without a newer file ──▶ Apply

A suspect edit may be half of a file being written: it takes very much away, or ends in the middle of a
line. One reading is out at a time; whatever asks for one meanwhile gets one more after it, together: no
request is lost, none queues.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from daemon.config import diff as differ
from daemon.config.load import Loaded
from daemon.config.prepare import Prepared, PreparedServer
from daemon.errors import ConfigError, Problem
from daemon.supervisor import edits, memory
from daemon.supervisor.plan import Fleet

POLL_S = 1.0
SETTLE_S = 0.3  # an editor is done when two looks this far apart agree
LEAST_S = 0.1  # between two looks, however busy the folder is
CONFIRM_S = 5.0

_DISABLE = "write `enabled: false` for this server, and the rest of the edit is applied without it"
_TAKE_BACK = (
    "take the change of this server back, and the rest of the edit is applied while it runs on"
)

Stat = tuple[int, int, int, int] | None
Look = Mapping[Path, Stat]


@dataclass(frozen=True, slots=True)
class Reading:
    """What one reading of the files has given.

    *problems*, or *loaded* and what it means; *prepared* is None when that is in force already. *seen* is
    a look at the files from before they were read, *still* whether they looked the same afterwards.
    """

    seen: Look
    still: bool = True
    loaded: Loaded | None = None
    prepared: Prepared | None = None
    problems: tuple[Problem, ...] = ()


@dataclass(frozen=True, slots=True)
class Suspect:
    """An edit that is applied at *until* if no newer file appears."""

    reading: Reading
    until: float


@dataclass(frozen=True, slots=True)
class Intake:
    """Where reading stands. The files of *seen* are the ones to look at, next at *look_at*."""

    seen: Look = field(default_factory=dict)
    look_at: float = 0.0
    looked_at: float = float("-inf")
    moving: Look | None = None
    """The newest look, which differs from *seen* and may differ from the next."""
    reading: bool = False
    rested: bool = False
    """Whether the reading that is out is of files at rest, which must not have moved before its end."""
    pending: Literal["read", "compare"] | None = None
    suspect: Suspect | None = None


@dataclass(frozen=True, slots=True)
class Facts:
    """What a reading is held against."""

    applied: Prepared
    fleet: Fleet
    desired: edits.DesiredOf


@dataclass(frozen=True, slots=True)
class Nudged:
    """The system says that something happened in a folder of the files."""


@dataclass(frozen=True, slots=True)
class Looked:
    """The files were looked at."""

    look: Look


@dataclass(frozen=True, slots=True)
class Asked:
    """Somebody wants the files read, whatever their dates say."""


@dataclass(frozen=True, slots=True)
class Arrived:
    """The answer to `Read`."""

    reading: Reading


@dataclass(frozen=True, slots=True)
class Compared:
    """The answer to `Compare`."""

    reading: Reading


@dataclass(frozen=True, slots=True)
class Read:
    """Read the files and prepare what they say."""


@dataclass(frozen=True, slots=True)
class Compare:
    """Read the files to show what a reload would do; nothing is applied."""


@dataclass(frozen=True, slots=True)
class Refuse:
    """Keep everything as it is, and say what is wrong."""

    problems: tuple[Problem, ...]


@dataclass(frozen=True, slots=True)
class Keep:
    """What was read is in force already."""

    loaded: Loaded


@dataclass(frozen=True, slots=True)
class Doubt:
    """The edit may be half of one, for a *reason*: say that it waits for a newer file."""

    reason: str


@dataclass(frozen=True, slots=True)
class Apply:
    """Put the edit in force, whole, if its addresses can be had."""

    loaded: Loaded
    prepared: Prepared
    steps: tuple[differ.Step, ...]


@dataclass(frozen=True, slots=True)
class Show:
    """`daemon.reload` is manual: say what `tqd reload` would do."""

    steps: tuple[differ.Step, ...]


Event = Nudged | Looked | Asked | Arrived | Compared
Effect = Read | Compare | Refuse | Keep | Doubt | Apply | Show

Result = tuple[Intake, tuple[Effect, ...]]


def step(intake: Intake, event: Event, facts: Facts, now: float) -> Result:
    """Return *intake* after *event*, and what must be done about it, in order."""
    match event:
        case Nudged():
            return _nudged(intake, now), ()
        case Looked(look):
            return _looked(replace(intake, looked_at=now), look, facts, now)
        case Asked():
            return _want(intake, "read")
        case Arrived(reading) | Compared(reading) if _has_moved(intake, reading):
            later = now + SETTLE_S
            return _next(replace(intake, reading=False, rested=False, look_at=later), ())
        case Arrived(reading):
            intake = _followed(intake, reading, now)
            intake, verdict = _judge(intake, reading, facts, now)
            return _next(intake, verdict)
        case Compared(reading):
            intake = _followed(intake, reading, now)
            return _next(intake, (compare(reading, facts),))


def _nudged(intake: Intake, now: float) -> Intake:
    if intake.moving is not None:
        return intake  # the second look keeps its distance from the first
    soon = max(now, intake.looked_at + LEAST_S)
    return replace(intake, look_at=min(intake.look_at, soon))


def _looked(intake: Intake, look: Look, facts: Facts, now: float) -> Result:
    later = replace(intake, look_at=now + POLL_S)
    mode = facts.applied.daemon.reload
    if mode == "off" or intake.reading or facts.fleet.closing:
        return later, ()
    if look == intake.seen:
        return _confirm(replace(later, moving=None), facts, now)
    if look != intake.moving:
        return replace(intake, moving=look, look_at=now + SETTLE_S), ()
    rested = replace(later, seen=look, moving=None, rested=True)
    if intake.suspect is not None:
        return _next(replace(rested, suspect=None, pending="read"), ())
    return _want(rested, "read" if mode == "auto" else "compare")


def _confirm(intake: Intake, facts: Facts, now: float) -> Result:
    """Apply the suspect edit when its time has come; nothing newer has."""
    suspect = intake.suspect
    if suspect is None:
        return intake, ()
    if now < suspect.until:
        return replace(intake, look_at=min(intake.look_at, suspect.until)), ()
    verdict = _verdict(suspect.reading, facts)
    return _next(replace(intake, suspect=None), (verdict,))


def _has_moved(intake: Intake, reading: Reading) -> bool:
    """Whether somebody wrote again between the last look and the end of the reading: it may be half a file."""
    same = all(reading.seen.get(path) == stat for path, stat in intake.seen.items())
    return intake.rested and not (same and reading.still)


def _want(intake: Intake, what: Literal["read", "compare"]) -> Result:
    pending = what if intake.pending != "read" else "read"
    return _next(replace(intake, pending=pending), ())


def _next(intake: Intake, verdict: tuple[Effect, ...]) -> Result:
    """Begin what is pending, unless a reading is out or waits for a newer file."""
    if intake.pending is None or intake.reading or intake.suspect is not None:
        return intake, verdict
    effect: Effect = Read() if intake.pending == "read" else Compare()
    return replace(intake, pending=None, reading=True), (*verdict, effect)


def _followed(intake: Intake, reading: Reading, now: float) -> Intake:
    """Return *intake* as it waits for something newer than *reading*."""
    return replace(
        intake,
        seen=reading.seen,
        moving=None,
        reading=False,
        rested=False,
        suspect=None,
        look_at=now + POLL_S,
    )


def _judge(
    intake: Intake, reading: Reading, facts: Facts, now: float
) -> tuple[Intake, tuple[Effect, ...]]:
    verdict = _verdict(reading, facts)
    doubt = _doubt(verdict, facts) if isinstance(verdict, Apply) else None
    if doubt is None:
        return intake, (verdict,)
    return replace(intake, suspect=Suspect(reading, now + CONFIRM_S)), (Doubt(doubt),)


def _verdict(reading: Reading, facts: Facts) -> Refuse | Keep | Apply:
    loaded, prepared = reading.loaded, reading.prepared
    if facts.fleet.closing:
        late = "the daemon is shutting down: nothing is applied any more"
        return Refuse((Problem(str(facts.applied.path), 0, 0, "", late),))
    if loaded is None:
        return Refuse(reading.problems)
    if prepared is None:
        return Keep(loaded)
    try:
        differ.refuse_daemon_changes(facts.applied, prepared)
    except ConfigError as error:
        return Refuse(error.problems)
    steps = edits.steps(facts.applied.servers, prepared.servers, facts.fleet)
    starting = edits.to_run(steps, facts.desired)
    problems = (
        *_blocked(loaded, starting, facts),
        *_collisions(loaded, starting, steps, facts),
        *_unfit(loaded, prepared, starting, steps, facts),
    )
    return Refuse(problems) if problems else Apply(loaded, prepared, steps)


def _blocked(loaded: Loaded, starting: Sequence[PreparedServer], facts: Facts) -> Iterator[Problem]:
    """Yield a problem for each server that would need a new worker and could not have one."""
    for server in edits.newly_blocked(starting, facts.applied.servers, facts.fleet):
        if (blocked := server.blocked) is not None:
            way_out = _TAKE_BACK if edits.runs(server.name, facts.fleet) else _DISABLE
            hint = f"{blocked.hint}; or {way_out}" if blocked.hint else way_out
            yield loaded.sources[server.name].problem(blocked.key, blocked.message, hint)


def _collisions(
    loaded: Loaded, starting: Sequence[PreparedServer], steps: Sequence[differ.Step], facts: Facts
) -> Iterator[Problem]:
    """Yield a problem for each server that would move to where a rolled back one still listens."""
    kept = edits.kept_addresses(steps, facts.fleet)
    for server in edits.newly_addressed(starting, facts.applied.servers):
        owner = kept.get(edits.address(server))
        if owner is not None:
            yield loaded.sources[server.name].problem(
                "port",
                f"port {server.spec.port} is used by {owner}, whose new section failed",
                f"correct servers.{owner} in the same edit",
            )


def _unfit(
    loaded: Loaded,
    prepared: Prepared,
    starting: Sequence[PreparedServer],
    steps: Sequence[differ.Step],
    facts: Facts,
) -> Iterator[Problem]:
    """Yield a problem for each server that could not have the memory it needs, before anything is stopped for it."""
    unfit = edits.unfit(
        starting, steps, facts.applied.servers, facts.fleet.servers, prepared.budget_bytes
    )
    for name, refusal in unfit.items():
        yield loaded.sources[name].problem("", f"it does not fit: {refusal}", memory.HINT)


def _doubt(edit: Apply, facts: Facts) -> str | None:
    if _removes_much(edit, facts):
        return "it removes much"
    # who never ends the last line is taken at their word
    if edit.steps and edit.loaded.ends_open and not facts.applied.ends_open:
        return "its last line has no end"
    return None


def _removes_much(edit: Apply, facts: Facts) -> bool:
    if facts.applied.servers and not edit.prepared.servers:
        return True  # even if none runs: what the user wants of each is kept with its entry
    running = [it.name for it in facts.fleet.servers.values() if it.serving]
    return edits.removes_much(edit.steps, running)


def compare(reading: Reading, facts: Facts) -> Refuse | Show:
    """Return what a reload of *reading* would do, addresses aside."""
    match _verdict(reading, facts):
        case Apply(steps=steps):
            return Show(steps)
        case Keep():
            return Show(())
        case refusal:
            return refusal
