"""What the counts make of whole stories, told to the real state machine."""

from __future__ import annotations

from dataclasses import replace

import pytest

from daemon.config.spec import ServerSpec
from daemon.supervisor import events
from daemon.supervisor.counts import Counts
from daemon.supervisor.exits import SPAWN_TIMEOUT_S
from daemon.supervisor.lifecycle import step
from daemon.supervisor.server import Cause, Server

SPEC = ServerSpec(model="m", port=1)


class Story:
    """One server, its events and the counts of them."""

    def __init__(self, spec: ServerSpec = SPEC) -> None:
        self.server = Server("a", spec, "h")
        self.counts = Counts()
        self.now = 100.0

    def tell(self, *news: events.Event) -> None:
        for event in news:
            after, _ = step(self.server, event, self.now)
            self.counts.changed(self.server, after)
            self.server = after

    def launch(self, load_s: float = 3.0) -> None:
        """Bring the server from queued to ready."""
        self.tell(events.Grant("n"))
        launch = self.server.launches
        self.tell(events.Spawned(launch, 1), events.Hello(launch, "n", 1))
        self.now += load_s
        assert self.server.worker is not None
        self.tell(events.Ready(launch, "n", self.server.worker.spec_hash))

    def exit(self, code: int) -> None:
        self.tell(events.Exited(self.server.launches, code))

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.tell(events.Tick())

    @property
    def restarts(self) -> dict[str, int]:
        return dict(self.counts.of("a").restarts)


@pytest.fixture
def story() -> Story:
    story = Story()
    story.tell(events.Start())
    story.launch()
    return story


def test_a_first_start_is_no_restart_and_its_load_is_timed(story: Story) -> None:
    loads = story.counts.of("a").load_s.read()
    assert story.restarts == {}
    assert (sum(loads.counts), loads.sum) == (1, 3.0)


@pytest.mark.parametrize(("code", "reason"), [(1, "crash"), (-11, "crash"), (-9, "oom")])
def test_a_worker_that_ends_by_itself_is_a_crash_or_was_killed(
    story: Story, code: int, reason: str
) -> None:
    story.exit(code)
    assert story.restarts == {reason: 1}
    story.wait(10)
    story.launch()
    assert story.restarts == {reason: 1}
    assert sum(story.counts.of("a").load_s.read().counts) == 2


def test_an_edit_and_a_command_are_told_apart(story: Story) -> None:
    story.tell(events.Replace(SPEC, "h2"))
    story.exit(0)
    story.launch()
    story.tell(events.Restart())
    story.exit(0)
    assert story.restarts == {"config": 1, "manual": 1}


def test_a_server_that_was_stopped_has_not_been_restarted(story: Story) -> None:
    story.tell(events.Stop())
    story.exit(0)
    story.tell(events.Start())
    story.launch()
    assert story.restarts == {}


def test_one_that_gives_up_is_not_counted_as_restarted() -> None:
    never = Story(
        SPEC.model_copy(update={"restart": SPEC.restart.model_copy(update={"policy": "never"})})
    )
    never.tell(events.Start())
    never.launch()
    never.exit(1)
    assert never.restarts == {}


def test_a_stall_is_one_failed_probe_and_one_restart(story: Story) -> None:
    probe = story.server.spec.probe
    story.wait(probe.stall + 1)
    assert story.counts.of("a").probe_failures == 1
    story.wait(10 * probe.interval)
    story.exit(-9)
    assert (story.counts.of("a").probe_failures, story.restarts) == (1, {"probe": 1})


def test_a_worker_that_says_nothing_or_stops_loading_fails_its_probe(story: Story) -> None:
    story.exit(1)
    story.wait(10)
    story.tell(events.Grant("n"), events.Spawned(2, 1))
    story.wait(SPAWN_TIMEOUT_S + 1)
    assert story.counts.of("a").probe_failures == 1
    story.exit(-15)
    assert story.restarts == {"crash": 1, "probe": 1}


def test_a_start_refused_for_memory_is_counted_once_for_each_reason(story: Story) -> None:
    story.exit(1)
    blocked = replace(story.server, cause=Cause("insufficient_memory", "8 GiB are missing"))
    story.counts.changed(story.server, blocked)
    fewer = replace(blocked, cause=Cause("insufficient_memory", "7 GiB are missing"))
    story.counts.changed(blocked, fewer)
    assert story.counts.refused_for_memory == {"insufficient_memory": 1}


def test_counts_go_on_when_a_server_comes_back_to_the_file(story: Story) -> None:
    story.exit(1)
    story.server = Server("a", SPEC, "h3")
    story.tell(events.Start())
    story.launch()
    story.exit(1)
    assert story.restarts == {"crash": 2}
