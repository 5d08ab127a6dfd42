"""A worker process with the fake engine instead of a model; the labels of its server say how it behaves."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from daemon.config.wire import WorkerSpec
from daemon.errors import PolicyError, WorkerExit, WorkerExitError
from daemon.worker.main import main
from tests.worker.byte_tokenizer import ByteTokenizer
from tests.worker.fake_engine import FakeEngine, FakeLoaded, Script, fake_loaded


def load(
    spec: WorkerSpec,
    /,
    *,
    progress: Callable[[str, float], None],
    on_failure: Callable[[BaseException], None],
) -> FakeLoaded:
    """Load nothing, in as many seconds as the label ``load_s`` says."""
    assert "mlx" not in sys.modules, "only the real engine may import MLX"
    labels = spec.server.labels
    progress("weights", 0.0)
    time.sleep(float(labels.get("load_s", 0)))
    match labels.get("load"):
        case "missing":
            raise WorkerExitError(WorkerExit.MODEL_MISSING, "no model there", hint="pull it")
        case "policy":
            raise PolicyError("mode", "this model cannot have it", hint="write fp16")
        case "crash":
            raise ZeroDivisionError("scripted")
    progress("weights", 1.0)
    fail_after, held_until = labels.get("fail_after"), labels.get("held_until")
    script = Script(
        step_s=float(labels.get("step_s", 0)),
        fail_after=int(fail_after) if fail_after else None,
        held=lambda tokens: bool(tokens and held_until and not Path(held_until).exists()),
    )
    engine = FakeEngine(script, on_failure=on_failure, tokenizer=ByteTokenizer())
    loaded = fake_loaded(spec, engine)
    warnings = (labels["warning"],) if "warning" in labels else ()
    return replace(loaded, kv=loaded.kv.model_copy(update={"warnings": warnings}))


if __name__ == "__main__":
    os._exit(main(loader=load))
