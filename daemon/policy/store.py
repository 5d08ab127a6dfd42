"""Load the named policies and the allow-list: those that ship with tqd, and the user's.

The shipped folder always counts. A user's folder adds named policies; one that has a shipped name
wins, with a warning. Every refusal names the file and, where the text allows it, the line.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from daemon.errors import ConfigError, PolicyError, Problem
from daemon.policy.files import load, located, refused
from daemon.policy.matching import check_fold, check_rules, check_tail
from daemon.policy.rules import AllowEntry, Allowlist, Gate
from daemon.policy.schemes import Scheme, UnknownSchemeError, parse_scheme
from daemon.policy.spec import NamedPolicy
from daemon.resources import shipped

RULE_FILES = frozenset({"architectures", "allowlist"})
HEAD_DIMS = (64, 128, 256)  # the lengths that a policy states its bits per value for

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")


@dataclass(frozen=True, slots=True)
class PolicySet:
    """The named policies by name, the files they come from, and what a user should know."""

    policies: dict[str, NamedPolicy]
    files: dict[str, Path]
    warnings: tuple[str, ...] = ()


def load_policies(user_folder: Path | None = None) -> PolicySet:
    """Return the shipped policies and those of *user_folder*, which need not exist.

    Raises:
        ConfigError: with every problem of every file.
    """
    policies: dict[str, NamedPolicy] = {}
    files: dict[str, Path] = {}
    warnings: list[str] = []
    problems: list[Problem] = []
    ours = [path for path in _policy_files(shipped("policies")) if path.stem not in RULE_FILES]
    for path in [*ours, *_user_files(user_folder)]:
        name = path.stem
        try:
            policy = _load_policy(path)
        except ConfigError as error:
            problems += error.problems
            continue
        if name in files:
            warnings.append(f'policy "{name}" of {path} is used instead of {files[name]}')
        policies[name], files[name] = policy, path
    if problems:
        raise ConfigError(problems)
    return PolicySet(policies, files, tuple(warnings))


def load_allowlist(local: Path | None = None) -> tuple[AllowEntry, ...]:
    """Return the shipped allow-list and the entries of *local*, which need not exist."""
    entries = load(shipped("policies") / "allowlist.yaml", Allowlist).entries
    return entries if local is None else entries + load_entries(local)


def load_entries(local: Path) -> tuple[AllowEntry, ...]:
    """Return the entries of *local*, which need not exist."""
    return load(local, Allowlist).entries if local.exists() else ()


def load_gate() -> Gate:
    """Return the most that a policy may diverge for `tqd eval --record` to write an entry."""
    path = shipped("policies") / "allowlist.yaml"
    gate = load(path, Allowlist).gate
    if gate is None:
        raise refused(path, "it has no gate")
    return gate


def _policy_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.suffix in (".yaml", ".yml"))


def _user_files(folder: Path | None) -> list[Path]:
    """Return the files of the user's folder; none when it is the shipped one, as in a checkout."""
    if folder is None or not folder.is_dir() or folder.samefile(shipped("policies")):
        return []
    return _policy_files(folder)


def _load_policy(path: Path) -> NamedPolicy:
    if path.stem in RULE_FILES:
        raise refused(path, f"{path.name} is a rule file of tqd", "give the policy another name")
    if not _NAME.fullmatch(path.stem):
        raise refused(
            path, "not a policy name", "use a-z, 0-9, '.', '_' and '-', starting with a-z or 0-9"
        )
    policy = load(path, NamedPolicy)
    try:
        scheme = parse_scheme(policy.mode)
        check_tail(policy.tail_tokens, "tail_tokens")
        check_fold(policy.fold_tokens, "fold_tokens")
        check_rules(policy.layers)
        _check_bits(policy, scheme)
    except UnknownSchemeError as error:
        raise located(path, "mode", str(error), error.hint) from error
    except PolicyError as error:
        raise located(path, error.path, error.message, error.hint) from error
    return policy


def _check_bits(policy: NamedPolicy, scheme: Scheme) -> None:
    """Refuse a policy whose stated bits per value are not those of its scheme."""
    exact = {head_dim: scheme.bits_per_value(head_dim, head_dim) for head_dim in HEAD_DIMS}
    if policy.bits_per_value != exact:
        raise PolicyError(
            "bits_per_value",
            f"not the bits per value of {scheme.name}",
            hint=f"write {{{', '.join(f'{dim}: {bits:g}' for dim, bits in exact.items())}}}",
        )
