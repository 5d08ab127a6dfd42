"""The worker's end of the channel, over a real socket pair."""

from __future__ import annotations

import queue
import socket
from collections.abc import Iterator

import pytest

from daemon.config.wire import Ack, Drain, Live, Snapshot, encode, from_worker
from daemon.errors import WorkerExitError
from daemon.worker.channel import Channel
from tests.worker.specs import worker_spec

NUMBERS = dict.fromkeys(Snapshot.model_fields.keys() - {"type", "requests", "open"}, 0)


@pytest.fixture
def pair() -> Iterator[tuple[Channel, socket.socket]]:
    """A channel and the supervisor's end of it."""
    ours, theirs = socket.socketpair()
    channel = Channel(theirs)
    with ours, theirs:
        ours.settimeout(10)
        yield channel, ours
        channel.close(1)


def test_the_first_line_is_the_spec_key_included(pair: tuple[Channel, socket.socket]) -> None:
    channel, ours = pair
    spec = worker_spec(api_key="s3cret", drain_timeout="5s")
    ours.sendall(encode(spec))
    assert channel.read_spec() == spec


def test_an_end_before_the_spec_is_no_error(pair: tuple[Channel, socket.socket]) -> None:
    channel, ours = pair
    ours.shutdown(socket.SHUT_WR)
    assert channel.read_spec() is None


def test_a_line_that_is_no_spec_says_what_to_do(pair: tuple[Channel, socket.socket]) -> None:
    channel, ours = pair
    ours.sendall(b'{"type": "spec", "protocol": 1}\n')
    with pytest.raises(WorkerExitError, match="restart the daemon"):
        channel.read_spec()


def test_messages_arrive_in_order_bad_ones_are_skipped_and_the_end_is_told(
    pair: tuple[Channel, socket.socket],
) -> None:
    channel, ours = pair
    received: queue.Queue[object] = queue.Queue()
    channel.listen(received.put, lambda: received.put("lost"))
    live = Live(spec_hash="a", server=worker_spec().server)
    ours.sendall(encode(live) + b"rubbish\n" + b'{"type": "of tomorrow"}\n')
    ours.sendall(encode(worker_spec()) + encode(Drain(timeout_s=1)))
    ours.shutdown(socket.SHUT_WR)
    assert [received.get(timeout=10) for _ in range(3)] == [live, Drain(timeout_s=1), "lost"]


def test_what_is_sent_before_the_end_arrives(pair: tuple[Channel, socket.socket]) -> None:
    channel, ours = pair
    for number in range(100):
        channel.send(Ack(spec_hash=str(number)))
    channel.close(10)
    lines = ours.makefile("rb")
    assert [from_worker.validate_json(lines.readline()) for _ in range(100)] == [
        Ack(spec_hash=str(number)) for number in range(100)
    ]


def test_a_peer_that_reads_nothing_never_blocks_and_loses_only_snapshots(
    pair: tuple[Channel, socket.socket],
) -> None:
    channel, ours = pair
    for number in range(20_000):
        channel.send(Snapshot(**(NUMBERS | {"generation": number})))
    channel.send(Ack(spec_hash="last"))
    lines = 0
    for line in ours.makefile("rb"):
        lines += 1
        if b'"last"' in line:
            break
    assert lines < 20_000
