"""Configurations as reading and preparing a file would leave them, without a file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from daemon.config.load import Loaded
from daemon.config.machine import Machine
from daemon.config.prepare import Blocked, Prepared, PreparedServer
from daemon.config.spec import DaemonSpec, Servers, ServerSpec
from daemon.errors import Problem
from daemon.policy.claim import Claim
from daemon.policy.spec import KvRequest

PATH = Path("servers.yaml")
KV = KvRequest(
    policy="balanced", k="int8", v="turbo4", explicit=False, boundary_v=0, boundary_mode="int8",
    boundary_k="auto", sink_tokens=4, tail_tokens=32, strict=False,
)  # fmt: skip


@dataclass(frozen=True)
class Entry:
    """Stands for the place of an entry in a file."""

    name: str

    def problem(self, path: str, message: str, hint: str | None = None) -> Problem:
        return Problem(str(PATH), 1, 1, f"{self.name}.{path}", message, hint)


def server(
    name: str,
    spec: ServerSpec,
    version: str = "1",
    blocked: Blocked | None = None,
    claim: Claim | None = None,
) -> PreparedServer:
    return PreparedServer(name, "m", spec, KV, version, version, blocked=blocked, claim=claim)


def prepared(
    *servers: PreparedServer,
    content: str = "",
    daemon: DaemonSpec | None = None,
    memory: int = 2**40,
    ends_open: bool = False,
) -> Prepared:
    return Prepared(
        path=PATH,
        daemon=daemon or DaemonSpec(),
        servers={it.name: it for it in servers},
        files=(PATH,),
        watched=(PATH,),
        warnings=(),
        content_hash=content,
        machine=Machine(memory),
        allowlist=(),
        daemon_source=Entry("daemon"),
        ends_open=ends_open,
    )


def loaded(configuration: Prepared) -> Loaded:
    specs = {name: it.spec for name, it in configuration.servers.items()}
    return Loaded(
        servers=Servers.model_construct(path=PATH, servers=specs),
        policies={},
        files=(PATH,),
        watched=(PATH,),
        warnings=(),
        content_hash=configuration.content_hash,
        sources={name: Entry(f"servers.{name}") for name in specs},
        daemon_source=Entry("daemon"),
        api_keys={},
        ends_open=configuration.ends_open,
    )
