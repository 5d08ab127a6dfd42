"""An edit on its way from the file into force, with a real reconciler and no processes."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path

import pytest

from daemon.paths import StateDir
from daemon.supervisor.desired import DesiredState
from daemon.supervisor.last_good import LastGood
from daemon.supervisor.plan import Close, Fleet
from daemon.supervisor.reconcile import Reconciler
from daemon.supervisor.reload import Configuration
from daemon.supervisor.sockets import Sockets
from tests.conftest import MakeModel

PATIENCE_S = 60.0


class Site:
    """A configuration and its reconciler; *told* is what was visible when the fleet changed: servers, generation."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "servers.yaml"
        self.told: list[tuple[set[str], int]] = []
        state, sockets = StateDir(folder / "state"), Sockets(time.monotonic)
        self.reconciler = Reconciler(
            sockets=sockets,
            profiles=state.profiles,
            log_path=lambda name, daemon: folder / name,
            clock=time.monotonic,
            leftovers={},
            launched={},
            changed=self._changed,
            turned=lambda: None,
            recheck=lambda: None,
        )
        self.configuration = Configuration(
            self.file,
            state=state,
            environ={},
            reconciler=self.reconciler,
            sockets=sockets,
            desired=DesiredState(state.desired),
            clock=time.monotonic,
            busy=lambda busy: None,
            adopted=lambda daemon: None,
            concluded=lambda conclusion: None,
            waiting=lambda steps: None,
        )

    def write(self, *names: str) -> None:
        servers = "".join(
            f"  {name}: {{model: ./m, port: {8081 + number}, enabled: false}}\n"
            for number, name in enumerate(names)
        )
        self.file.write_text(f"version: 1\nservers:\n{servers}")

    def _changed(self, before: Fleet, after: Fleet) -> None:
        if before.servers.keys() != after.servers.keys():
            self.told.append((set(after.servers), self.configuration.status.generation))


def test_servers_and_the_generation_they_belong_to_change_in_one_moment_however_slow_the_disk_is(
    tmp_path: Path, make_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A status that showed the servers of an edit as those of the one before would add up to nothing."""
    saving, saved = threading.Event(), threading.Event()
    save = LastGood.save

    def slowly(*arguments: object) -> bool:
        saving.set()
        assert saved.wait(PATIENCE_S)
        return save(*arguments)  # type: ignore[arg-type]  # as it was called

    make_model(tmp_path / "m")
    site = Site(tmp_path)
    site.write("a")

    async def edit() -> None:
        configuration, reconciler = site.configuration, site.reconciler
        reconciling = asyncio.create_task(reconciler.run())
        await configuration.read_first()
        await configuration.start_first()
        monkeypatch.setattr(LastGood, "save", slowly)
        reading = asyncio.create_task(configuration.run())
        site.write("a", "b")
        reloading = asyncio.create_task(configuration.reload())
        assert await asyncio.to_thread(saving.wait, PATIENCE_S)
        loaded = set(configuration.loaded.servers.servers)
        saved.set()
        assert (await reloading).generation == 2
        assert loaded == {"a", "b"}
        reading.cancel()
        reconciler.tell(Close())
        await reconciling

    asyncio.run(edit())

    assert site.told == [({"a"}, 1), ({"a", "b"}, 2)]
