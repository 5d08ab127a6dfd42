from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from daemon.config.load import Loaded, RejectedError, load
from daemon.config.spec import DaemonSpec, ServerSpec
from daemon.errors import ConfigError

GOOD = Path(__file__).parents[1] / "data" / "good"
CHAT = "version: 1\nservers:\n  chat:\n    model: ./m\n    port: 8081\n"

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(text: str, name: str = "servers.yaml") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    return write


def good(name: str, environ: Mapping[str, str] | None = None) -> Loaded:
    return load(GOOD / f"{name}.yaml", environ=environ or {})


def refused(path: Path, environ: Mapping[str, str] | None = None) -> RejectedError:
    with pytest.raises(RejectedError) as caught:
        load(path, environ=environ or {})
    return caught.value


def test_the_smallest_file_means_the_defaults(write: Write, tmp_path: Path) -> None:
    loaded = load(write(CHAT), environ={})
    assert loaded.servers.servers == {"chat": ServerSpec(model=str(tmp_path / "m"), port=8081)}
    assert loaded.servers.daemon == DaemonSpec()
    assert loaded.servers.origins == {"chat": f"{tmp_path / 'servers.yaml'}:3"}
    assert "balanced" in loaded.policies


def test_aliases_and_merge_keys_work() -> None:
    servers = good("anchors").servers.servers
    assert [(spec.port, spec.queue) for spec in servers.values()] == [
        (8081, 3),
        (8082, 3),
        (8083, 5),
    ]
    assert servers["both"].labels == {"team": "search"}


def test_defaults_merge_under_a_server_and_lists_replace() -> None:
    servers = good("defaults").servers.servers
    inherits, own = servers["inherits"], servers["own"]
    assert inherits.aliases == ("a", "b")
    assert own.aliases == ("c",)
    assert own.env == {"HF_HOME": "/other", "TOKENIZERS_PARALLELISM": "false"}
    assert (own.sampling.temperature, own.sampling.top_p) == (0.7, 0.5)
    assert own.kv == inherits.kv


def test_naming_a_policy_drops_the_inherited_scheme_and_layers() -> None:
    kv = good("defaults").servers.servers["names-policy"].kv
    assert (kv.policy, kv.mode, kv.k, kv.layers, kv.boundary_v) == ("quality", None, None, None, 2)


def test_a_servers_own_scheme_is_not_overruled_by_an_inherited_key() -> None:
    servers = good("defaults").servers.servers
    assert (servers["names-mode"].kv.mode, servers["names-mode"].kv.k) == ("fp16", None)
    assert (servers["names-codec"].kv.mode, servers["names-codec"].kv.k) == ("turbo4", "fp16")


def test_words_that_look_like_numbers_or_booleans_stay_words() -> None:
    loaded = good("words")
    chat = loaded.servers.servers["chat"]
    assert loaded.servers.daemon.reload == "off"
    assert chat.labels == {
        "on": "off", "off": "n", "y": "1:30", "sexagesimal": "1:30", "date": "2001-01-01", "octal": "0123",
    }  # fmt: skip
    assert (chat.kv.mode, chat.kv.calibration, chat.kv.compress) == ("none", "none", "chunk")
    assert chat.sampling.temperature == 1
    assert chat.restart.backoff == (0.5, 120)
    assert chat.drain_timeout == 90


ENVIRON = {"MODELS": "/models", "EMPTY": "", "ENABLED": "false", "KEY": "0042", "DRAIN": "3s"}


def test_references_are_resolved_and_take_the_type_of_their_key() -> None:
    chat = good("references", ENVIRON).servers.servers["chat"]
    assert (chat.model, chat.port, chat.enabled, chat.drain_timeout) == (
        "/models/chat",
        8081,
        False,
        3,
    )
    assert chat.api_key == "0042"
    assert chat.labels == {"empty": "", "literal": "${env:PORT}", "two": "x-y"}
    assert chat.revision == ""


def test_a_loaded_configuration_does_not_show_keys_or_environments() -> None:
    loaded = good("references", {**ENVIRON, "KEY": "hunter2"})
    assert loaded.api_keys == {"chat": "hunter2"}
    assert "hunter2" not in repr(loaded)


def test_values_from_the_environment_and_secrets_are_known_to_be_hidden() -> None:
    source = good("references", ENVIRON).sources["chat"]
    assert source.hides("model")
    assert source.hides("api_key")
    assert source.hides("labels.two")
    assert not source.hides("host")
    assert source.written("model") == "${env:MODELS}/chat"


def test_includes_bring_servers_and_defaults_reach_inward_only() -> None:
    loaded = good("include")
    servers = loaded.servers.servers
    assert {name: spec.queue for name, spec in servers.items()} == {
        "main": 7,
        "search": 7,
        "code": 9,
    }
    assert {name: spec.labels for name, spec in servers.items()} == {
        "main": {"site": "a"},
        "search": {"site": "a", "team": "search"},
        "code": {"site": "a", "team": "search"},
    }
    assert [path.name for path in loaded.files] == ["include.yaml", "search.inc", "code.inc"]


def test_relative_paths_start_from_the_file_that_holds_them() -> None:
    """An inherited path keeps the folder of the file that says it."""
    servers = good("include").servers.servers
    assert servers["search"].model == str(GOOD / "teams" / "search" / "m")
    assert servers["code"].model == str(GOOD / "teams" / "m")
    assert servers["code"].chat_template == str(GOOD / "teams" / "search" / "chat.jinja")


def test_a_hub_id_stays_one_unless_there_is_such_a_folder(write: Write, tmp_path: Path) -> None:
    (tmp_path / "models" / "here").mkdir(parents=True)
    path = write(
        "version: 1\nservers:\n"
        "  a: {model: models/here, port: 1}\n"
        "  b: {model: models/absent, port: 2}\n"
        "  c: {model: models/a/b, port: 3}\n"
        "  d: {model: ~/m, port: 4}\n"
        "  e: {model: a b/c, port: 5}\n"
    )
    models = [spec.model for spec in load(path, environ={}).servers.servers.values()]
    assert models == [
        str(tmp_path / "models" / "here"),
        "models/absent",
        str(tmp_path / "models" / "a" / "b"),
        str(Path.home() / "m"),
        str(tmp_path / "a b" / "c"),
    ]


def test_paths_do_not_depend_on_the_working_directory(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(CHAT)
    monkeypatch.chdir(tmp_path.parent)
    loaded = load(Path(tmp_path.name) / "servers.yaml", environ={})
    assert loaded.servers.servers["chat"].model == str(tmp_path / "m")


def test_unicode_and_spaces_in_paths(write: Write, tmp_path: Path) -> None:
    loaded = load(write(CHAT.replace("./m", '"./mödel ü/ x"'), "dír ü/servers.yaml"), environ={})
    assert loaded.servers.servers["chat"].model == str(tmp_path / "dír ü" / "mödel ü" / " x")


def test_a_byte_order_mark_and_windows_line_ends_do_not_matter(write: Write) -> None:
    path = write("")
    path.write_bytes(b"\xef\xbb\xbf" + CHAT.replace("\n", "\r\n").encode())
    assert load(path, environ={}).servers.servers["chat"].port == 8081


def test_a_last_line_without_an_end_is_noticed_also_in_an_include(write: Write) -> None:
    whole = "version: 1\ninclude: [b.yaml]\nservers: {a: {model: x/y, port: 8081}}\n"
    more = "servers: {b: {model: x/y, port: 8082}}\n"
    for main, other, ends_open in (
        (whole, more, False),
        (whole[:-1], more, True),
        (whole, more[:-1], True),
    ):
        write(other, "b.yaml")
        assert load(write(main)).ends_open is ends_open


def test_a_key_file_is_read_and_watched_but_not_copied(write: Write, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("secret\nnot this\n")
    key.chmod(0o600)
    loaded = load(write(CHAT + "    api_key: {file: key}\n"), environ={})
    assert loaded.api_keys == {"chat": "secret"}
    assert key in loaded.watched
    assert key not in loaded.files
    assert loaded.warnings == ()


def test_a_key_file_for_everyone_is_a_warning(write: Write, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("secret")
    (tmp_path / "key").chmod(0o644)
    loaded = load(write(CHAT + "    api_key: {file: key}\n"), environ={})
    assert [warning.path for warning in loaded.warnings] == ["servers.chat.api_key.file"]


def test_an_empty_key_file_is_refused(write: Write, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("\nsecret")
    assert "first line of the file is empty" in str(
        refused(write(CHAT + "    api_key: {file: key}\n"))
    )


def test_the_content_hash_follows_files_includes_policies_and_keys(
    write: Write, tmp_path: Path
) -> None:
    path = write(
        CHAT.replace("servers:", "include: [other.yaml]\nservers:") + "    api_key: {file: key}\n"
    )
    write("servers: {}\n", "other.yaml")
    write("secret", "key")
    seen = [load(path, environ={}).content_hash]
    assert load(path, environ={}).content_hash == seen[0]
    policy = (
        "description: d\nsource: s\nmode: fp16\nbits_per_value: {64: 16.0, 128: 16.0, 256: 16.0}\n"
    )
    for name, text in (
        ("other.yaml", "servers: {}\n\n"),
        ("key", "other"),
        ("policies/mine.yaml", policy),
    ):
        write(text, name)
        seen.append(load(path, environ={}).content_hash)
    assert len(set(seen)) == 4


def test_policies_beside_the_file_are_known_and_watched(write: Write, tmp_path: Path) -> None:
    policy = write(
        "description: d\nsource: s\nmode: fp16\nbits_per_value: {64: 16.0, 128: 16.0, 256: 16.0}\n",
        "policies/mine.yaml",
    )
    loaded = load(write(CHAT + "    kv: {policy: mine}\n"), environ={})
    assert loaded.policies["mine"].mode == "fp16"
    assert policy in loaded.files
    assert policy.parent in loaded.watched


def test_a_folder_of_policies_that_is_not_there_yet_is_watched(
    write: Write, tmp_path: Path
) -> None:
    assert tmp_path / "policies" in load(write(CHAT), environ={}).watched


def test_a_broken_policy_and_a_broken_server_are_refused_together(write: Write) -> None:
    write("mode: fp17\n", "policies/mine.yaml")
    error = refused(write(CHAT + "    prot: 1\n"))
    assert {Path(problem.file).name for problem in error.problems} == {"mine.yaml", "servers.yaml"}


@pytest.mark.parametrize(
    "content",
    [b"\x00", b"a: \x01", b"\xff", b"[" * 2000, b"mode: 2001-99-99", b"mode: !!python/name:os", b"a: *b", b"? [a]\n: b"],
)  # fmt: skip
def test_no_content_of_a_policy_file_breaks_the_loader(write: Write, content: bytes) -> None:
    write("", "policies/mine.yaml").write_bytes(content)
    assert refused(write(CHAT)).problems


def test_a_missing_file_says_how_to_make_one(tmp_path: Path) -> None:
    error = refused(tmp_path / "servers.yaml")
    assert (
        str(error) == f"{tmp_path / 'servers.yaml'}: there is no such file\n"
        "  hint: put it back, or name another with -c; `tqd init` writes a first one"
    )
    assert tmp_path / "servers.yaml" in error.watched


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    assert str(refused(tmp_path)) == f"{tmp_path}: a folder, not a file"


def test_a_named_pipe_does_not_hang_the_loader(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "servers.yaml")
    assert "not a regular file" in str(refused(tmp_path / "servers.yaml"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_forbidden_file_is_refused_not_empty(write: Write) -> None:
    path = write(CHAT)
    path.chmod(0)
    assert "permission" in str(refused(path))


def test_the_file_may_be_a_link_and_paths_start_from_the_link(write: Write, tmp_path: Path) -> None:
    """Links into a data folder are how configuration is mounted in containers."""
    target = write(CHAT, "..data/servers.yaml")
    (tmp_path / "servers.yaml").symlink_to(target)
    loaded = load(tmp_path / "servers.yaml", environ={})
    assert loaded.servers.servers["chat"].model == str(tmp_path / "m")


def test_a_thousand_servers_load(write: Write) -> None:
    rows = [f"  s{i}: {{model: ./m, port: {10000 + i}, aliases: [a{i}]}}\n" for i in range(1000)]
    loaded = load(write("version: 1\nservers:\n" + "".join(rows)), environ={})
    assert len(loaded.servers.servers) == 1000


TWO_SERVERS = """\
version: 1
servers:
  a:
    model: ./models/first   # é
    port: 8001
    kv: {mode: "turbo8v4", layers: [{match: [0, 1], mode: fp16}]}
  b:
    model: org/second
    port: 8002
    api_key: ${env:KEY}
"""


def test_no_prefix_of_a_file_breaks_the_loader(write: Write) -> None:
    """An editor that writes in place shows every prefix of a file for a moment."""
    content = TWO_SERVERS.encode()
    path = write("")
    outcomes = set()
    for length in range(len(content) + 1):
        path.write_bytes(content[:length])
        with contextlib.suppress(ConfigError):
            outcomes.add(len(load(path, environ={"KEY": "k"}).servers.servers))
    assert outcomes == {1, 2}


# text made of what YAML and servers.yaml are made of reaches deeper than any text
FRAGMENTS = st.lists(
    st.sampled_from(
        ["version: 1", "servers:", "defaults:", "daemon:", "include:", "\n", "\n  ", "\n    ", "a:", "kv:", "model: m",
         "port: 1", "&x ", "*x", "<<: ", "- ", "[", "]", "{", "}", ",", ": ", "'", '"', "|\n", "?", "!!str ", "---", "#",
         "${env:X}", "${", "~", "null", "1:30", "off", "layers: ", "match: all", "mode: fp16", "api_key: ", "file: /", "\\x00"]
    ),
    max_size=24,
).map("".join)  # fmt: skip


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    max_examples=300,
)
@given(text=st.one_of(FRAGMENTS, st.text()))
@example(text='version: 1\nservers: {a: {model: "\\0", port: 1}}')
@example(text='version: 1\nservers: {a: {model: "\\ud800", port: 1}}')
@example(text="version: 1\nservers: {a: {model: ~nobody-of-that-name/m, port: 1}}")
@example(text="version: 1\nservers: {a: {model: " + "x" * 5000 + ", port: " + "9" * 5000 + "}}")
@example(text="version: 1\ninclude: [.]\nservers: {}")
def test_no_text_breaks_the_loader(write: Write, text: str) -> None:
    path = write("")
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    with contextlib.suppress(ConfigError):
        load(path, environ={"X": "1"})
