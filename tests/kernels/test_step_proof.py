"""Steps of several rows run only after they have agreed with the reference, on rows of every kind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import mlx.core as mx
import pytest

from daemon.kernels import packing, proof, step_proof
from daemon.kernels.attention import Attention
from daemon.kernels.backend import Choice
from daemon.kernels.case import Case
from daemon.policy.schemes import parse_scheme
from tests.kernels.fake_kernels import FakeKernels
from tests.kernels.fake_stepping import FakeStepping

SCHEME = parse_scheme("turbo8v4")
CASE = Case(
    SCHEME.k, SCHEME.v, 64, 64, n_heads=4, n_kv_heads=2, queries=1, dtype=mx.float16,
    scaled_keys=True, key_mean="rotary", learned_sinks=True,
)  # fmt: skip


def chosen(stepping: FakeStepping, rows: int) -> Choice:
    return Attention("cuda", FakeKernels(), stepping=stepping).step_choice(CASE, rows)


@pytest.mark.parametrize("rows", [1, 2, 8])
def test_steps_that_agree_with_the_reference_run(rows: int) -> None:
    assert chosen(FakeStepping(), rows) == Choice("cuda")


def test_the_sample_has_rows_of_many_lengths_one_of_them_all_in_full_precision() -> None:
    given = step_proof.sample(proof.sample(CASE), 5)

    assert len({span.length for span in given.spans}) == 5
    assert {span.packed_to > 0 for span in given.spans} == {True, False}
    assert {span.left > 0 for span in given.spans} == {True, False}
    assert mx.any(mx.isnan(given.plain)).item()  # where a token has left


def not_compiled(out: mx.array, plain: mx.array) -> tuple[mx.array, mx.array]:
    raise RuntimeError("[cuda] nvrtc: error: identifier is undefined\n  in line 7")


def last_row(x: mx.array) -> mx.array:
    return (mx.arange(x.shape[0]) == x.shape[0] - 1).reshape(-1, *[1] * (x.ndim - 1))


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (not_compiled, r"fail to take decode steps on this device (RuntimeError: [cuda] nvrtc: error"),
        (lambda out, plain: (mx.where(last_row(out), 1.1 * out, out), plain), "disagree with the reference"),
        (lambda out, plain: (mx.where(last_row(out), mx.nan, out), plain), "not finite"),
        (lambda out, plain: (out, mx.where(last_row(plain), 0, plain)), "lose tokens"),
        (lambda out, plain: (out, mx.roll(plain, 1, axis=3)), "lose tokens"),
        (lambda out, plain: (out[:, :2], plain), "return mlx.core.float16"),
    ],
    ids=["do not compile", "a row off", "a row nan", "no tokens", "another slot", "a shape"],
)  # fmt: skip
def test_steps_that_are_wrong_in_one_row_never_run(
    spoil: Callable[[mx.array, mx.array], tuple[mx.array, mx.array]], reason: str
) -> None:
    choice = chosen(FakeStepping(spoil=spoil), 2)

    assert (choice.backend, choice.failed) == ("reference", True)
    assert reason in (choice.reason or "")


def test_folds_that_are_wrong_never_run() -> None:
    layout = packing.native_layout(CASE.k, CASE.v, 64, 64)

    def zeroed(tiles: mx.array) -> mx.array:
        at = layout.side("k").code_words // 2
        return mx.concatenate([tiles[..., :at], mx.zeros_like(tiles[..., at:])], axis=-1)

    choice = chosen(FakeStepping(spoil_tiles=zeroed), 2)

    assert choice.failed
    assert "disagree with the reference about" in (choice.reason or "")


def test_more_rows_than_there_is_room_for_go_one_by_one_and_that_is_no_failure() -> None:
    assert chosen(FakeStepping(), 9) == Choice("reference")


def test_steps_of_a_case_that_the_kernels_refuse_are_not_asked_for() -> None:
    stepping = FakeStepping()
    attention = Attention("cuda", FakeKernels(refuse=lambda _: "not here"), stepping=stepping)

    assert attention.step_choice(CASE, 1) == Choice("reference")
    assert stepping.calls == []
    assert (
        attention.stepper(CASE, packing.native_layout(CASE.k, CASE.v, 64, 64), None, 1.0, 1) is None
    )


@pytest.mark.parametrize("name", ["turbo0v4", "turbo4v4", "int8", "affine4", "turbo4v3t"])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (96, 96)], ids=str)
def test_cases_that_have_no_steps_on_a_device_are_none_that_failed(
    name: str, dims: tuple[int, int]
) -> None:
    scheme = parse_scheme(name)

    class NoSteps(FakeStepping):
        def stepper(self, *_: object) -> None:  # type: ignore[override]  # a device that has none for it
            return None

    case = replace(CASE, k=scheme.k, v=scheme.v, dim_k=dims[0], dim_v=dims[1])
    attention = Attention("cuda", FakeKernels(), stepping=NoSteps())

    assert attention.step_choice(case, 2) == Choice("cuda")
    assert (
        attention.stepper(case, packing.native_layout(case.k, case.v, *dims), None, 1.0, 2) is None
    )


def test_a_proof_that_cannot_be_made_is_no_reason_not_to_serve(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_memory(*_: object) -> None:
        raise ValueError("[malloc] cannot allocate")

    monkeypatch.setattr(step_proof, "sample", no_memory)
    choice = chosen(FakeStepping(), 2)

    assert (choice.backend, choice.failed) == ("reference", True)
    assert choice.reason == (
        "the cuda kernels fail to take decode steps on this device (ValueError: [malloc] cannot allocate)"
    )


def test_each_room_proves_itself_once() -> None:
    stepping = FakeStepping()
    attention = Attention("cuda", FakeKernels(), stepping=stepping)

    for rows in (1, 1, 3, 8, 2):
        attention.step_choice(CASE, rows)

    assert stepping.calls == [1, 3]
    assert set(attention.step_choices) == {(CASE, 1), (CASE, 8)}
