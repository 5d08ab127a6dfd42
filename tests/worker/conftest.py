"""Async tests of the worker run on an event loop of their own each; models are calibrated on a short text."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterator

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a coroutine test to its end; leave the others to pytest."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = pyfuncitem._fixtureinfo.argnames
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


@pytest.fixture(scope="module", autouse=True)
def _calibrated_on_little() -> Iterator[None]:
    """A quarter of the text: tiny models are loaded many times here, and what is measured on them means nothing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("daemon.worker.calibration.CHARACTERS", 800)
        yield
