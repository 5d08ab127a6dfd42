"""Why a worker ended: from how it was to end, and how its process did, to a word and a cause for people."""

from __future__ import annotations

from daemon.errors import WorkerExit
from daemon.supervisor.events import Exited
from daemon.supervisor.server import Cause, Worker

TAIL_LINES = 20  # of its output are kept with the end of a worker
SPAWN_TIMEOUT_S = 30.0  # an interpreter that has not said hello by then is not going to


def classify(worker: Worker, code: int) -> str:
    """Return the word for the end of *worker*, whose process ended with *code*; negative: by that signal."""
    if worker.ending is not None:
        if worker.killed:
            return "killed_after_grace"
        return "stopped" if worker.ending in ("stop", "restart", "replace") else worker.ending
    match code:
        case -9:
            return "killed_external"
        case WorkerExit.OK:
            return "exited"
        case WorkerExit.MODEL_MISSING:
            return "model_missing"
        case WorkerExit.PORT_TAKEN:
            return "port_in_use"
        case WorkerExit.ENGINE_FAILED:
            return "engine_failed"
        case WorkerExit.BAD_CONFIG:
            return "bad_config"
        case _:
            return "crashed"


def cause(worker: Worker, event: Exited, now: float) -> Cause:
    """Return why *worker* is gone although it was to run."""
    match worker.ending:
        case "protocol":
            message = f"the worker broke the protocol: {worker.ending_message}"
            hint = "worker and daemon may be of two versions: restart the daemon"
            return Cause("protocol", message, hint)
        case "stalled":
            message = f"the engine did not move for {now - worker.moved_at:.0f} s"
            return Cause("stalled", message)
        case "load_stalled":
            message = f"loading did not move on for {now - worker.moved_at:.0f} s"
            return Cause("load_stalled", message)
        case "spawn_timeout":
            return Cause("spawn_timeout", f"the worker said nothing for {SPAWN_TIMEOUT_S:.0f} s")
        case None:
            said = event.fatal or _describe(event.code)
            return Cause(classify(worker, event.code), said, event.hint)
        case _:
            raise ValueError(f"a worker that ends for {worker.ending} has not failed")


def _describe(code: int) -> str:
    if code == -9:
        return "killed from outside; the system may be out of memory"
    return f"ended by signal {-code}" if code < 0 else f"exited with {code}"
