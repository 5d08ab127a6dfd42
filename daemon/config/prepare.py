"""From a loaded configuration to servers that are ready to be compared and started.

`tqd check`, `tqd diff` and the supervisor all see this result. What is wrong with a model or a policy is
refused with the place of the key that says it; what is wrong with the machine only blocks a server.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from daemon.config.effects import SERVER_EFFECTS, Effect, effect_of, leaves
from daemon.config.load import Loaded
from daemon.config.locate import ModelFaultError, ModelMissingError
from daemon.config.machine import Machine, machine
from daemon.config.models import ArchitectureError, ModelFacts, Models
from daemon.config.read import ENVIRONMENT_MISFIT
from daemon.config.source import Source
from daemon.config.spec import DaemonSpec, ServerSpec, spec_hash
from daemon.errors import ConfigError, PolicyError, Problem
from daemon.paths import StateDir
from daemon.policy.budget import KvCost, kv_bytes, kv_cost, longest_context
from daemon.policy.claim import Claim, Sizing
from daemon.policy.evidence import allowance, fewest_key_bits
from daemon.policy.request import request
from daemon.policy.resolve import resolve
from daemon.policy.resolved import ResolvedPolicy
from daemon.policy.rules import AllowEntry
from daemon.policy.spec import KvRequest
from daemon.policy.store import load_allowlist
from daemon.units import format_size

MODEL_MISSING = "model_missing"
MODEL_FAULT = "model_fault"
FILE_MISSING = "file_missing"

_CONTEXT_WITHOUT_CONFIG = 4096  # tokens, for the few models whose config.json names no limit


class Blocked(NamedTuple):
    """Why a server cannot start on this machine now, what to do about it, and the key that asks for it."""

    code: str
    message: str
    hint: str | None
    key: str = "model"


@dataclass(frozen=True, slots=True)
class PreparedServer:
    """One server with everything known about it before it runs.

    *spec_hash* changes with whatever needs another worker, *live_hash* with the rest; the latter covers
    the API key and is not for display. *model* is the model as the file names it; *hidden* are the dotted
    keys whose values must not be shown. *facts* and sizes are None while the model or its weights are
    missing, unless they were there before, when *blocked* says that they are gone: *kv_bytes* is for
    `max_concurrent` sequences of *max_context* tokens; *claim* is what the server asks of the machine's memory.
    """

    name: str
    model: str
    spec: ServerSpec
    kv: KvRequest
    spec_hash: str = ""
    live_hash: str = ""
    api_key: str | None = field(default=None, repr=False)
    facts: ModelFacts | None = None
    allowed: str | None = None
    resolved: ResolvedPolicy | None = None
    max_context: int | None = None
    cost: KvCost | None = None
    weights_bytes: int | None = None
    kv_bytes: int | None = None
    claim: Claim | None = None
    blocked: Blocked | None = None
    warnings: tuple[str, ...] = ()
    hidden: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Prepared:
    """A configuration that could run: what the supervisor compares with what runs."""

    path: Path
    daemon: DaemonSpec
    servers: Mapping[str, PreparedServer]
    files: tuple[Path, ...]
    watched: tuple[Path, ...]
    warnings: tuple[Problem, ...]
    content_hash: str
    machine: Machine
    allowlist: tuple[AllowEntry, ...]
    daemon_source: Source = field(repr=False)
    ends_open: bool = False

    @property
    def budget_bytes(self) -> int:
        """What all servers together may use."""
        return self.machine.budget_bytes(self.daemon.memory_budget)


def prepare(
    loaded: Loaded,
    *,
    state: StateDir,
    on: Machine | None = None,
    before: Mapping[str, PreparedServer] | None = None,
) -> Prepared:
    """Return *loaded* with models found, policies resolved and sizes known.

    *on* is the machine that it is for; by default this one, with models on the CPU. *before* is what runs:
    it stays comparable with an entry whose model has gone since.

    Raises:
        ConfigError: with every fault of a policy or an architecture, at the key that says it.
    """
    prepared, problems = _prepare_all(loaded, state, on, before or {})
    if problems:
        raise ConfigError(problems)
    return prepared


def salvage(loaded: Loaded, *, state: StateDir, on: Machine | None = None) -> Prepared:
    """Return *loaded*, which was accepted once, with each server blocked whose model fits it no more.

    Raises:
        ConfigError: more than the models of servers is at fault.
    """
    prepared, problems = _prepare_all(loaded, state, on, {})
    if prepared.servers.keys() != loaded.servers.servers.keys():
        raise ConfigError(problems)
    return prepared


def _prepare_all(
    loaded: Loaded, state: StateDir, on: Machine | None, before: Mapping[str, PreparedServer]
) -> tuple[Prepared, list[Problem]]:
    place = machine() if on is None else on
    models = Models((it.spec, it.facts) for it in before.values() if it.facts is not None)
    allowlist = load_allowlist(state.allowlist)
    problems: list[Problem] = []
    servers = {
        name: server
        for name in loaded.servers.servers
        if (server := _prepare(name, loaded, models, allowlist, place, problems))
    }
    prepared = Prepared(
        path=loaded.servers.path,
        daemon=loaded.servers.daemon,
        servers=servers,
        files=loaded.files,
        watched=loaded.watched,
        warnings=loaded.warnings,
        content_hash=loaded.content_hash,
        machine=place,
        allowlist=allowlist,
        daemon_source=loaded.daemon_source,
        ends_open=loaded.ends_open,
    )
    return prepared, problems


def _prepare(
    name: str,
    loaded: Loaded,
    models: Models,
    allowlist: tuple[AllowEntry, ...],
    place: Machine,
    problems: list[Problem],
) -> PreparedServer | None:
    """Return one server after adding to *problems*; None where not even its policy is known."""
    source = loaded.sources[name]
    spec = models.as_before(loaded.servers.servers[name], Path(source.place("model").file).parent)
    try:
        kv = request(spec.kv, loaded.policies)
    except PolicyError as error:
        problems.append(_kv_problem(source, error))
        return None
    server = PreparedServer(
        name=name,
        model=source.written("model") or spec.model,
        spec=spec,
        kv=kv,
        api_key=loaded.api_keys.get(name),
        warnings=kv.warnings,
        hidden=source.hidden,
    )
    fault = None
    try:
        facts = models.read(spec)
        server = _resolved(server, facts, allowlist, place)
        return _hashed(replace(server, blocked=_missing(server, facts)))
    except (ModelMissingError, ModelFaultError) as error:
        blocked = _unloadable(error, server)
    except ArchitectureError as error:
        fault = source.problem("model", error.message, error.hint)
    except PolicyError as error:
        fault = _kv_problem(source, error)
    if fault is not None:
        key = fault.path.removeprefix(f"{source.path}.")
        blocked = Blocked(MODEL_FAULT, fault.message, fault.hint, key)
    server = replace(server, blocked=blocked)
    if (was := models.before(spec)) is not None:
        with contextlib.suppress(
            PolicyError
        ):  # then the entry would not fit the model that was, either
            return _hashed(_resolved(server, was, allowlist, place))
    # a disabled server keeps it to itself, so that disabling one is a way out
    if fault is not None and spec.enabled:
        problems.append(fault)
    return _hashed(server)


def _unloadable(error: ModelMissingError | ModelFaultError, server: PreparedServer) -> Blocked:
    code = MODEL_MISSING if isinstance(error, ModelMissingError) else MODEL_FAULT
    message = error.message
    if "model" in server.hidden:
        message = message.replace(server.spec.model, server.model)
    return Blocked(code, message, error.hint)


def _kv_problem(source: Source, error: PolicyError) -> Problem:
    path = f"kv.{error.path}" if error.path else "kv"
    if source.hides(path):
        return source.problem(path, ENVIRONMENT_MISFIT)
    return source.problem(path, error.message, error.hint)


def _resolved(
    server: PreparedServer, facts: ModelFacts, allowlist: tuple[AllowEntry, ...], place: Machine
) -> PreparedServer:
    """Return *server* with the policy of each layer and its sizes; raises PolicyError."""
    architecture, spec = facts.architecture, server.spec
    allowed = allowance(
        architecture.model_type,
        allowlist,
        fingerprint=facts.fingerprint,
        key_bits=fewest_key_bits(server.kv),
        calibrated=server.kv.calibration != "none",
    )
    resolved = resolve(server.kv, architecture, allowed=allowed)
    weights_bytes = facts.weights_bytes or None
    sizing = Sizing(
        resolved,
        architecture,
        weights_bytes=facts.weights_bytes,
        device=place.device,
        value_bytes=facts.value_bytes,
    )
    context, context_warnings = _context(spec.max_context, sizing, place.budget_bytes())
    claim = sizing.claim(
        max_context=context, max_concurrent=spec.max_concurrent, kv_budget=spec.kv.budget
    )
    _check_budget(claim, sizing, context)
    return replace(
        server,
        facts=facts,
        allowed=allowed,
        resolved=resolved,
        max_context=context,
        cost=kv_cost(resolved, architecture),
        weights_bytes=weights_bytes,
        kv_bytes=kv_bytes(
            resolved,
            architecture,
            context_tokens=context,
            sequences=spec.max_concurrent,
            value_bytes=facts.value_bytes,
        ),
        claim=None if weights_bytes is None else claim,
        warnings=(*resolved.warnings, *architecture.notes, *context_warnings),
    )


def _context(wanted: int | None, sizing: Sizing, most_bytes: int) -> tuple[int, tuple[str, ...]]:
    """Return the tokens of the longest sequence, and a warning where it is not the model's own number.

    Without a wish it is lowered until one sequence fits into *most_bytes* with everything else that the
    server needs; what other servers use never counts, nor does what `daemon.memory_budget` says.
    """
    own = sizing.arch.max_context
    if wanted is not None:
        if own is not None and wanted > own:
            return wanted, (f"max_context {wanted} is more than the model's own {own}",)
        return wanted, ()
    if own is None:
        return _CONTEXT_WITHOUT_CONFIG, (
            f"config.json names no longest context: max_context {_CONTEXT_WITHOUT_CONFIG} is used",
        )
    fitting = sizing.longest_context(most_bytes, most_tokens=own)
    if fitting in (0, own):  # 0: the weights alone fill the machine, and no context would help
        return own, ()
    return fitting, (f"max_context is lowered from {own} to {fitting}: one sequence must fit here",)


def _check_budget(claim: Claim, sizing: Sizing, context: int) -> None:
    """Refuse a `kv.budget` in which not even one sequence has room; raises PolicyError."""
    if claim.most_kv_bytes >= claim.sequence_bytes:
        return
    fitting = longest_context(
        sizing.sequence_bytes, free_bytes=claim.most_kv_bytes, most_tokens=context
    )
    shorter = f", or set max_context to at most {fitting}" if fitting else ""
    raise PolicyError(
        "budget",
        f"{format_size(claim.most_kv_bytes)} hold no sequence of max_context {context} tokens, which takes"
        f" {format_size(claim.sequence_bytes)}",
        hint=f"write a larger budget{shorter}",
    )


def _missing(server: PreparedServer, facts: ModelFacts) -> Blocked | None:
    """Return what the worker would not find: the weights, its interpreter, its chat template."""
    if not facts.weights_bytes:
        return Blocked(MODEL_MISSING, "the folder holds no weights (model*.safetensors)", None)
    for key, path in (("python", server.spec.python), ("chat_template", server.spec.chat_template)):
        if path is not None and not Path(path).is_file():
            return Blocked(
                FILE_MISSING, f"the file of `{key}` is not there", f"correct `{key}`", key
            )
    return None


def _hashed(server: PreparedServer) -> PreparedServer:
    values = leaves(server.spec)
    by_effect: dict[Effect, dict[str, object]] = {effect: {} for effect in Effect}
    for path, value in values.items():
        by_effect[effect_of(path, SERVER_EFFECTS)][path] = value
    model = server.facts
    facts = [
        model and model.folder,
        model and model.fingerprint,
        server.allowed,
        server.max_context,
    ]
    return replace(
        server,
        spec_hash=spec_hash(
            _canonical(by_effect[Effect.RESTART]),
            server.kv.model_dump_json(exclude={"warnings"}),
            _canonical(facts),
        ),
        live_hash=spec_hash(_canonical(by_effect[Effect.LIVE]), server.api_key or ""),
    )


def _canonical(value: object) -> str:
    return json.dumps(value, sort_keys=True, default=str)
