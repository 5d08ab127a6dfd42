from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from daemon.config.diff import Live, Replace, Start, Stop, diff, refuse_daemon_changes
from daemon.config.effects import SERVER_EFFECTS, Effect, effect_of
from daemon.config.keys import walk
from daemon.config.load import load
from daemon.config.machine import Machine
from daemon.config.prepare import Prepared, prepare
from daemon.config.spec import ServerSpec
from daemon.errors import ConfigError
from daemon.paths import StateDir

MakeModel = Callable[..., Path]
Ask = Callable[..., Prepared]


@pytest.fixture
def ask(tmp_path: Path, make_model: MakeModel, monkeypatch: pytest.MonkeyPatch) -> Ask:
    """Prepare a whole file; the models m and n are there."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    for name in ("m", "n"):
        make_model(tmp_path / name, vocab_size=len(name) + ord(name))

    def ask(text: str, environ: dict[str, str] | None = None) -> Prepared:
        path = tmp_path / "servers.yaml"
        path.write_text("version: 1\n" + text)
        loaded = load(path, environ=environ or {})
        return prepare(loaded, state=StateDir(tmp_path / "state"), on=Machine(2**36))

    return ask


def steps(before: Prepared, after: Prepared) -> list[str]:
    return [str(step) for step in diff(before.servers, after.servers)]


CHAT = "servers:\n  chat: {model: m, port: 8081%s}\n"


def test_another_way_to_write_the_same_is_an_empty_plan(ask: Ask) -> None:
    before = ask("servers:\n  a: {model: m, port: 1, queue: 64}\n  b: {model: n, port: 2}\n")
    after = ask(
        "# comment\nservers:\n\n  b:\n    port: 2   # moved\n    model: ./n/../n\n"
        "    kv: {policy: balanced}\n    drain_timeout: 0.5m\n  a: {port: 1, model: m}\n"
    )
    assert diff(before.servers, after.servers) == ()


def test_stops_come_first_and_live_changes_last(ask: Ask) -> None:
    before = ask(
        "servers:\n  live: {model: m, port: 1}\n  gone: {model: m, port: 2}\n  new-model: {model: m, port: 3}\n"
    )
    after = ask(
        "servers:\n  live: {model: m, port: 1, queue: 3}\n  new: {model: m, port: 2}\n  new-model: {model: n, port: 3}\n"
    )
    plan = diff(before.servers, after.servers)
    assert [(type(step), step.name) for step in plan] == [
        (Stop, "gone"),
        (Replace, "new-model"),
        (Start, "new"),
        (Live, "live"),
    ]
    assert str(plan[0]) == "stop gone"
    assert str(plan[2]) == "start new"
    assert str(plan[3]) == "live live: queue 64 → 3"


def test_a_change_names_its_key_and_both_values(ask: Ask) -> None:
    before = ask(CHAT % ", kv: {mode: turbo8v4}, idle_unload: null, labels: {team: a}")
    after = ask(CHAT % ", kv: {mode: turbo8v3}, aliases: [x, y], labels: {site: b}")
    assert steps(before, after) == [
        'restart chat: aliases [] → ["x", "y"]; kv.mode turbo8v4 → turbo8v3;'
        " labels.team a → null; labels.site null → b"
    ]


def test_disabling_stops_and_enabling_starts(ask: Ask) -> None:
    on, off = ask(CHAT % ""), ask(CHAT % ", enabled: false")
    assert steps(on, off) == ["stop chat: enabled true → false"]
    assert steps(off, on) == ["start chat: enabled false → true"]
    stopped = diff(on.servers, off.servers)[0]
    assert isinstance(stopped, Stop)
    assert stopped.server == off.servers["chat"]


def test_disabled_servers_come_and_go_without_a_step(ask: Ask) -> None:
    off, none = ask(CHAT % ", enabled: false"), ask("servers: {}\n")
    assert diff(off.servers, none.servers) == ()
    assert diff(none.servers, off.servers) == ()


def test_secrets_only_say_that_they_changed(ask: Ask) -> None:
    text = (
        CHAT
        % ", api_key: '${env:K}', env: {TOKEN: '${env:K}'}, labels: {a: '${env:K}'}, aliases: ['${env:K}']"
    )
    before, after = ask(text, {"K": "hunter2"}), ask(text, {"K": "hunter3"})
    plan = steps(before, after)
    assert plan == [
        "restart chat: aliases «changed»; api_key «changed»; env.TOKEN «changed»; labels.a «changed»"
    ]
    (step,) = diff(before.servers, after.servers)
    assert "hunter" not in repr(step.changes)


def test_a_new_key_in_the_same_file_is_a_live_change(ask: Ask, tmp_path: Path) -> None:
    text = CHAT % ", api_key: {file: key}"
    (tmp_path / "key").write_text("one")
    before = ask(text)
    (tmp_path / "key").write_text("two")
    assert steps(before, ask(text)) == ["live chat: api_key «changed»"]


def test_another_text_of_the_named_policy_restarts_its_servers(ask: Ask, tmp_path: Path) -> None:
    policy = tmp_path / "policies" / "mine.yaml"
    policy.parent.mkdir()
    content = "description: d\nsource: s\nmode: fp16\nbits_per_value: {64: 16.0, 128: 16.0, 256: 16.0}\nsink_tokens: %d\n"
    text = (
        "servers:\n  mine: {model: m, port: 1, kv: {policy: mine}}\n  other: {model: m, port: 2}\n"
    )
    policy.write_text(content % 4)
    before = ask(text)
    policy.write_text(content % 8)
    assert steps(before, ask(text)) == ["restart mine: kv.sink_tokens 4 → 8"]


def test_other_files_under_the_same_model_restart_it(ask: Ask, tmp_path: Path) -> None:
    before = ask(CHAT % "")
    (tmp_path / "m" / "tokenizer.json").write_text("[]")
    assert steps(before, ask(CHAT % ""))[0].startswith("restart chat: model files ")


OTHER_VALUES = {
    "model": "n", "revision": "v1", "host": "localhost", "port": "8099", "aliases": "[x]", "autostart": "false",
    "max_context": "512", "max_concurrent": "3", "queue": "3", "api_key": "k", "cors_origins": "[]",
    "allowed_hosts": "[]", "sampling.temperature": "1", "sampling.top_p": "0.5", "sampling.top_k": "4",
    "sampling.min_p": "0.1", "sampling.repetition_penalty": "1.1", "sampling.max_tokens": "9",
    "chat_template": "t", "python": "p", "env": "{A: b}", "labels": "{a: b}",
    "kv.policy": "quality", "kv.mode": "int8", "kv.k": "int8", "kv.v": "int8", "kv.cache_type_k": "int8",
    "kv.cache_type_v": "int8", "kv.boundary_v": "1", "kv.boundary_mode": "fp16", "kv.boundary_k": "1",
    "kv.sink_tokens": "8", "kv.tail_tokens": "64", "kv.fold_tokens": "128", "kv.compress": "first_decode", "kv.strict": "true", "kv.calibration.text": "./t", "kv.calibration.profile": "./p", "kv.layers": "[{match: all, mode: fp16}]",
    "restart.policy": "never", "restart.max": "1", "restart.window": "1m", "restart.backoff": "[2s, 3s]",
    "restart.stable_after": "1m", "probe.interval": "1s", "probe.stall": "1s", "probe.load_stall": "1s",
    "drain_timeout": "1s", "stop_grace": "1s",
}  # fmt: skip


def settable() -> set[str]:
    """The keys that a file can set to something else today; `enabled` has tests of its own."""
    later = {"kv.budget"}
    return {
        path
        for path, key in walk(ServerSpec)
        if not key.later and path not in later and not path.startswith("prompt_cache.")
    } - {"enabled"}


def test_every_key_that_can_change_has_a_value_to_change_to() -> None:
    assert OTHER_VALUES.keys() == settable()


@pytest.mark.parametrize("path", OTHER_VALUES)
def test_a_changed_key_takes_what_the_table_says(ask: Ask, path: str) -> None:
    """The restart hash and the live hash, the plan and the table never disagree."""
    value = OTHER_VALUES[path]
    for part in reversed(path.split(".")[1:]):
        value = f"{{{part}: {value}}}"
    top = path.partition(".")[0]
    base = {"model": "m", "port": "8081"}
    before, after = (
        ask(f"servers:\n  chat: {{{', '.join(f'{k}: {v}' for k, v in one.items())}}}\n").servers[
            "chat"
        ]
        for one in (base, {**base, top: value})
    )
    (step,) = diff({"chat": before}, {"chat": after})
    restart = effect_of(path, SERVER_EFFECTS) is Effect.RESTART
    assert isinstance(step, Replace if restart else Live)
    assert (before.spec_hash != after.spec_hash) is restart
    assert (before.live_hash != after.live_hash) is not restart
    assert path in [change.path.removesuffix(".A").removesuffix(".a") for change in step.changes]


@pytest.mark.parametrize(
    ("block", "path"),
    [
        ("control: /tmp/s.sock", "daemon.control"),
        ("status: 127.0.0.1:9000", "daemon.status"),
        ("status: null", "daemon.status"),
        ("log: {dir: /var/log/x}", "daemon.log.dir"),
        ("log: {format: json}", "daemon.log.format"),
    ],
)
def test_an_address_of_the_daemon_cannot_change_live(ask: Ask, block: str, path: str) -> None:
    before, after = ask("servers: {}\n"), ask(f"daemon: {{{block}}}\nservers: {{}}\n")
    with pytest.raises(ConfigError, match="needs a daemon restart") as caught:
        refuse_daemon_changes(before, after)
    assert [(problem.path, problem.line) for problem in caught.value.problems] == [(path, 2)]
    with pytest.raises(ConfigError, match="needs a daemon restart"):
        refuse_daemon_changes(after, before)


def test_the_rest_of_the_daemon_block_changes_live(ask: Ask) -> None:
    before = ask("servers: {}\n")
    after = ask(
        "daemon: {max_parallel_loads: 2, reload: manual, log: {level: debug, max_size: 1MiB, backups: 1}}\nservers: {}\n"
    )
    refuse_daemon_changes(before, after)
