from __future__ import annotations

import gc
import weakref

import mlx.core as mx
import numpy as np

from daemon.kernels.fused import fused


def test_a_chain_gives_the_same_numbers_at_every_shape() -> None:
    def chain(x: mx.array) -> mx.array:
        return mx.abs(x * 3.0 - 1.0).astype(mx.int32)

    compiled = fused(chain)

    for shape in ((4,), (3, 5), (4,), (2, 7, 3)):
        x = mx.random.normal(shape, key=mx.random.key(len(shape)))
        assert np.array_equal(np.array(compiled(x)), np.array(chain(x)))


def test_a_chain_is_traced_once_for_each_shape() -> None:
    traced = []

    def chain(x: mx.array) -> mx.array:
        traced.append(x.shape)
        return x + 1

    compiled = fused(chain)
    for shape in ((4,), (5,), (4,), (5,)):
        mx.eval(compiled(mx.zeros(shape)))

    assert traced == [(4,), (5,)]


def test_dtypes_of_one_shape_do_not_meet() -> None:
    compiled = fused(lambda x: x * 2)

    for dtype in (mx.uint8, mx.float32, mx.uint8):
        assert compiled(mx.ones((3,), dtype=dtype)).dtype == dtype


def test_a_chain_that_is_gone_leaves_nothing_behind() -> None:
    def chain(x: mx.array) -> mx.array:
        return x + 1

    compiled = fused(chain)
    mx.eval(compiled(mx.zeros((2,))))
    gone = weakref.ref(chain)
    del compiled, chain
    gc.collect()

    assert gone() is None
