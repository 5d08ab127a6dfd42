"""Whether a measurement allows few-bit keys on a model, and the allow-list entry that says so."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import yaml

from daemon.policy.rules import AllowEntry, Allowlist, Gate, Measured
from daemon.policy.schemes import parse_codec, parse_scheme
from daemon.policy.spec import KvRequest

_HEADER = """\
# Written by `tqd eval --record`: policies that were measured on this machine's own models.
# Remove an entry to forget it; `tqd reload` makes a running daemon read the file again.
"""


def allowance(
    model_type: str,
    entries: Iterable[AllowEntry],
    *,
    fingerprint: str | None = None,
    key_bits: float | None = None,
    calibrated: bool = True,
) -> str | None:
    """Return why keys of 4 bits or fewer are allowed for a model; None: they are not.

    An entry for exactly this model (its *fingerprint*) comes before one for a family of them. One that
    was measured with keys of more than *key_bits*, the fewest that are asked for, does not count, nor
    does one that was measured on calibrated keys where they are not to be *calibrated*.
    """
    by_family: str | None = None
    for entry in entries:
        if key_bits is not None and entry.key_bits is not None and key_bits < entry.key_bits:
            continue
        if entry.calibrated and not calibrated:
            continue
        if fingerprint is not None and entry.fingerprint == fingerprint:
            return entry.evidence
        if by_family is None and entry.model_type and model_type.startswith(entry.model_type):
            by_family = entry.evidence
    return by_family


def fewest_key_bits(request: KvRequest) -> float:
    """Return the least precision, in bits, that *request* asks for the keys of any layer."""
    named = [parse_scheme(rule.mode).k for rule in request.layers if rule.mode and not rule.k]
    named += [parse_codec(rule.k, "k") for rule in request.layers if rule.k]
    return min(codec.precision for codec in (parse_codec(request.k, "k"), *named))


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


def entry(fingerprint: str, key_bits: float, measured: Measured, *, calibrated: bool) -> AllowEntry:
    """Return the entry that allows keys of *key_bits* or more, *calibrated* or not, on the model of that *fingerprint*."""
    versions = ", ".join(f"{name} {version}" for name, version in measured.versions.items())
    return AllowEntry(
        fingerprint=fingerprint,
        key_bits=key_bits,
        calibrated=calibrated,
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
