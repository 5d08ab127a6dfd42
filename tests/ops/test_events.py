from __future__ import annotations

import asyncio

import pytest

from daemon.ops.events import EVENT_NAMES, EventLog


def filled(count: int, capacity: int = 100) -> EventLog:
    log = EventLog(capacity=capacity, boot="0badcafe")
    for number in range(1, count + 1):
        log.publish("server.added", "now", {"server": f"s{number}"})
    return log


def seqs(log: EventLog, after: int | None) -> list[int]:
    return [event["seq"] for event in log.after(after).events]


def test_the_names_of_events_are_what_clients_rely_on() -> None:
    assert EVENT_NAMES == (
        "server.added", "server.removed", "server.changed", "config.reloaded", "config.pending",
        "daemon.stopping", "events.missed",
    )  # fmt: skip


def test_a_client_goes_on_where_it_was() -> None:
    log = filled(5)
    assert seqs(log, 0) == [1, 2, 3, 4, 5]
    assert seqs(log, 3) == [4, 5]
    assert seqs(log, 5) == []
    assert not log.after(3).missed


def test_what_the_ring_has_forgotten_is_announced_as_missed() -> None:
    log = filled(10, capacity=4)
    assert not log.after(6).missed
    late = log.after(5)
    assert (late.missed, [it["seq"] for it in late.events]) == (True, [7, 8, 9, 10])


@pytest.mark.parametrize(
    ("event_id", "seq"),
    [
        ("0badcafe-3", 3),
        ("0badcafe-0", 0),
        ("0badcafe-99", None),  # not yet
        ("deadbeef-3", None),  # another daemon's
        ("3", None),
        ("", None),
        ("0badcafe-" + "9" * 5000, None),
        ("0badcafe-٣", None),
    ],
)
def test_an_id_means_something_only_to_the_daemon_that_gave_it(
    event_id: str, seq: int | None
) -> None:
    assert filled(5).seq_of(event_id) == seq


def test_everyone_who_waits_hears_of_an_event_and_of_the_end() -> None:
    async def work() -> None:
        log = filled(1)
        async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
            first = [tasks.create_task(log.wait(1)) for _ in range(50)]
            second = tasks.create_task(log.wait(2))
            await asyncio.sleep(0)
            assert log.waiting == 51
            log.publish("server.removed", "now", {"server": "s1"})
            await asyncio.wait(first)
            assert not second.done()
            log.close()
        assert log.waiting == 0

    asyncio.run(work())
