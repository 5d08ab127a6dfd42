"""Whether a measurement allows few-bit keys on a model, and the allow-list entry that says so."""

from __future__ import annotations

from collections.abc import Sequence

import yaml

from daemon.policy.rules import AllowEntry, Allowlist, Gate, Measured

_HEADER = """\
# Written by `tqd eval --record`: policies that were measured on this machine's own models.
# Remove an entry to forget it; `tqd reload` makes a running daemon read the file again.
"""


def objection(measured: Measured, gate: Gate) -> str | None:
    """Return why *measured* is not within *gate*; None: it is."""
    checks = (
        ("natural text", measured.kld, gate.kld),
        ("the copy test", measured.copy_kld, gate.copy_kld),
    )
    # `not <=` and not `>`: a divergence that is no number is no evidence
    over = [
        f"{value:.4f} nats on {name}, at most {most:g}"
        for name, value, most in checks
        if not value <= most
    ]
    if measured.positions < gate.positions:
        over.append(f"{measured.positions} positions scored, at least {gate.positions}")
    return "; ".join(over) or None


def entry(fingerprint: str, key_bits: float, measured: Measured) -> AllowEntry:
    """Return the entry that allows keys of *key_bits* or more on the model of that *fingerprint*."""
    versions = ", ".join(f"{name} {version}" for name, version in measured.versions.items())
    return AllowEntry(
        fingerprint=fingerprint,
        key_bits=key_bits,
        evidence=(
            f"measured on this machine: {measured.policy}, KL divergence {measured.kld:.5f} nats on"
            f" {measured.text} and {measured.copy_kld:.5f} on the copy test, {measured.positions}"
            f" positions each; {versions}; {measured.date}"
        ),
        measured=measured,
    )


def with_entry(entries: Sequence[AllowEntry], new: AllowEntry) -> tuple[AllowEntry, ...]:
    """Return *entries* with *new* in the place of what was known of the same model and policy.

    The entry with the fewest key bits of a model comes first, because it allows the most.
    """
    assert new.measured is not None
    others = [
        old
        for old in entries
        if old.fingerprint != new.fingerprint
        or old.measured is None
        or old.measured.policy != new.measured.policy
    ]
    return tuple(sorted((*others, new), key=lambda it: (it.fingerprint or "", it.key_bits or 0)))


def to_yaml(entries: Sequence[AllowEntry]) -> str:
    """Return the text of a local allowlist.yaml."""
    document = Allowlist(entries=tuple(entries)).model_dump(mode="json", exclude_none=True)
    return _HEADER + yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=100)
