"""A worker outlives the reader of its output."""

from __future__ import annotations

import os

from daemon.worker.process import SurvivingStream


def test_writes_after_the_reader_is_gone_go_nowhere() -> None:
    reader, writer = os.pipe()
    with os.fdopen(writer, "w", buffering=1) as stream:
        surviving = SurvivingStream(stream)
        surviving.write("heard\n")
        assert os.read(reader, 100) == b"heard\n"
        os.close(reader)
        for _ in range(3):
            assert surviving.write("unheard\n") == 8
            surviving.flush()
