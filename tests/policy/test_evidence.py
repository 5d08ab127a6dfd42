from __future__ import annotations

from pathlib import Path

import pytest

from daemon.policy import evidence
from daemon.policy.evidence import allowance
from daemon.policy.request import request
from daemon.policy.rules import AllowEntry, Gate, Measured
from daemon.policy.schemes import parse_scheme
from daemon.policy.spec import KvSpec
from daemon.policy.store import load_allowlist, load_gate, load_policies

GATE = Gate(kld=0.02, copy_kld=0.05, positions=512, source="a test")


def measured(policy: str = "turbo4v4", kld: float = 0.002, copy_kld: float = 0.01) -> Measured:
    return Measured(
        policy=policy, kld=kld, copy_kld=copy_kld, positions=1024, text="some: text # of \u00fcs",
        versions={"tqd": "0.1.0", "mlx": "0.32.4"}, date="2026-01-02",
    )  # fmt: skip


def test_only_what_is_within_both_limits_passes() -> None:
    assert evidence.objection(measured(kld=0.02, copy_kld=0.05), GATE) is None
    assert (
        evidence.objection(measured(kld=0.021), GATE) == "0.0210 nats on natural text, at most 0.02"
    )
    assert "copy test" in str(evidence.objection(measured(copy_kld=0.06), GATE))


def test_a_few_positions_are_no_evidence() -> None:
    few = measured().model_copy(update={"positions": 128})
    assert evidence.objection(few, GATE) == "128 positions scored, at least 512"


def test_a_divergence_that_is_no_number_never_passes() -> None:
    assert evidence.objection(measured(kld=float("nan")), GATE) is not None


def test_the_shipped_gate_says_where_it_comes_from() -> None:
    assert load_gate().kld == pytest.approx(0.02)
    assert "copy test" in load_gate().source


def test_an_entry_survives_its_file_and_allows_its_model(tmp_path: Path) -> None:
    made = evidence.entry("abc", 4, measured(), calibrated=True)
    path = tmp_path / "allowlist.yaml"
    path.write_text(evidence.to_yaml([made]), encoding="utf-8")
    entries = load_allowlist(path)
    assert entries[-1] == made
    said = allowance("llama", entries, fingerprint="abc", key_bits=4)
    assert said is not None
    assert "0.00200 nats" in said
    assert "2026-01-02" in said


def test_a_measurement_allows_no_fewer_bits_than_it_had() -> None:
    """2-bit keys diverge a hundred times more than the 4-bit ones that were measured."""
    entries = [evidence.entry("abc", 4, measured(), calibrated=True)]
    allowed = {
        bits: allowance("llama", entries, fingerprint="abc", key_bits=bits) for bits in (2, 3.5, 4)
    }
    assert [bits for bits, why in allowed.items() if why] == [4]


@pytest.mark.parametrize(
    ("measured_on", "allows"),
    [("turbo3tv3t", ["turbo3t", "turbo3.5"]), ("turbo3v3", ["turbo3", "turbo3t", "turbo3.5"])],
)
def test_a_trellis_stands_between_3_and_3_5_bits(measured_on: str, allows: list[str]) -> None:
    key_bits = parse_scheme(measured_on).k.precision
    entries = [evidence.entry("abc", key_bits, measured(), calibrated=True)]

    def allowed(keys: str) -> bool:
        asked = request(KvSpec(mode=f"{keys}v4"), load_policies().policies)
        bits = evidence.fewest_key_bits(asked)
        return allowance("llama", entries, fingerprint="abc", key_bits=bits) is not None

    assert [keys for keys in ("turbo3", "turbo3t", "turbo3.5") if allowed(keys)] == allows


def test_a_measurement_of_calibrated_keys_says_nothing_of_uncalibrated_ones() -> None:
    entries = [
        evidence.entry("calibrated", 4, measured(), calibrated=True),
        evidence.entry("plain", 4, measured(), calibrated=False),
    ]

    def allowed(fingerprint: str, calibrated: bool) -> bool:
        said = allowance("llama", entries, fingerprint=fingerprint, calibrated=calibrated)
        return said is not None

    assert allowed("calibrated", calibrated=True)
    assert not allowed("calibrated", calibrated=False)
    assert allowed("plain", calibrated=True)
    assert allowed("plain", calibrated=False)


def test_measuring_again_replaces_the_entry_of_the_same_policy_only() -> None:
    handwritten = AllowEntry(fingerprint="abc", evidence="by hand")
    entries: tuple[AllowEntry, ...] = (handwritten,)
    for policy, bits in (("turbo4v4", 4), ("turbo3v3", 3), ("turbo4v4", 4)):
        entries = evidence.with_entry(
            entries, evidence.entry("abc", bits, measured(policy), calibrated=True)
        )
    assert handwritten in entries
    policies = [entry.measured.policy for entry in entries if entry.measured]
    assert sorted(policies) == ["turbo3v3", "turbo4v4"]
