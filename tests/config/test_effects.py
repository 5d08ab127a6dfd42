from __future__ import annotations

import pytest

from daemon.config.effects import DAEMON_EFFECTS, SERVER_EFFECTS, Effect, effect_of
from daemon.config.keys import walk
from daemon.config.spec import DaemonSpec, ServerSpec


def test_every_key_of_a_server_has_an_effect() -> None:
    assert ServerSpec.model_fields.keys() <= SERVER_EFFECTS.keys()


def test_every_key_of_the_daemon_has_an_effect() -> None:
    assert DaemonSpec.model_fields.keys() <= DAEMON_EFFECTS.keys()


def test_the_tables_hold_no_key_that_the_models_lack() -> None:
    for model, table in ((ServerSpec, SERVER_EFFECTS), (DaemonSpec, DAEMON_EFFECTS)):
        paths = {path for path, _ in walk(model)}
        known = paths | {path.rpartition(".")[0] for path in paths} | set(model.model_fields)
        assert table.keys() <= known


def test_a_key_without_an_entry_has_the_effect_of_the_key_above_it() -> None:
    assert effect_of("kv.layers", SERVER_EFFECTS) is Effect.RESTART
    assert effect_of("kv.budget", SERVER_EFFECTS) is Effect.LIVE
    assert effect_of("labels.a.b", SERVER_EFFECTS) is Effect.LIVE
    with pytest.raises(KeyError):
        effect_of("no.such.key", SERVER_EFFECTS)
