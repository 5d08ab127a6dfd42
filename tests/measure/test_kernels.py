from __future__ import annotations

from dataclasses import replace

import mlx.core as mx

from daemon.kernels import metal
from daemon.kernels.attention import REFERENCE, Attention
from daemon.measure import kernels
from tests.kernels.emulated_metal import case, emulated
from tests.metalshim.needed import needs_shim


def test_the_cases_are_every_scheme_and_every_other_property() -> None:
    cases = list(kernels.every_case())

    assert len(set(cases)) == len(cases)
    assert {(c.k.name, c.v.name) for c in cases} >= {("int8", "turbo4"), ("fp16", "turbo2")}
    assert {c.queries for c in cases} == set(range(1, 9))
    assert {c.dim_k for c in cases} == {64, 80, 96, 128, 192, 256}
    assert {c.key_mean for c in cases} == {"none", "constant", "rotary"}
    assert {c.mask for c in cases} == {"none", "boolean", "additive"}


@needs_shim
def test_a_report_says_what_runs_and_what_it_takes() -> None:
    told: list[str] = []
    good, refused = case("turbo4v4", 64), case("turbo4v4", 40)
    with emulated():
        report = kernels.run(
            told.append,
            attention=Attention("metal", metal, reading=metal.prompts),
            cases=[good, refused],
            schemes=["turbo4v4"],
            contexts=[100],
            base=replace(good, dtype=mx.float16),
        ).as_json()

    assert list(report["agreements"]) == [
        {"case": str(good), "backend": "metal", "reason": None, "failed": False},
        {
            "case": str(refused),
            "backend": "reference",
            "reason": "Metal kernels read vectors of 64, 80, 96, 128, 192, 256 values, not 40",
            "failed": False,
        },
        {"case": f"prompts, {good}", "backend": "metal", "reason": None, "failed": False},
        {
            "case": f"prompts, {refused}",
            "backend": "reference",
            "reason": "Metal kernels read vectors of 64, 80, 96, 128, 192, 256 values, not 40",
            "failed": False,
        },
    ]
    assert list(report["packing"]) == [
        {"case": "packing turbo4v4, 64/64 values", "backend": "metal", "reason": None, "failed": False},
        {
            "case": "packing turbo4v4, 40/40 values", "backend": "reference",
            "reason": "Metal kernels do not encode vectors of 40 values", "failed": False,
        },
    ]  # fmt: skip
    timings = report["timings"]
    assert isinstance(timings, list)
    assert [(t["scheme"], t["tokens"]) for t in timings] == [("turbo4v4", 100)]
    assert told[-1] == "timing: turbo4v4 at 100 tokens"


def test_without_kernels_everything_is_the_references() -> None:
    report = kernels.run(
        lambda _: None,
        attention=REFERENCE,
        cases=[case("turbo4v4")],
        schemes=["turbo0v4"],
        contexts=[64],
        base=case("turbo4v4", 64),
    )

    assert [agreement.backend for agreement in report.agreements] == ["reference"]
    assert report.timings[0].ratio > 0
