"""The mark of tests that execute kernels on an emulation."""

from __future__ import annotations

import pytest

from tests.metalshim import compiler

_missing = compiler.missing()

needs_shim = pytest.mark.skipif(
    _missing is not None, reason=_missing or "kernels are executed here"
)
