from __future__ import annotations

import json
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from daemon.cli.main import main
from daemon.config.load import load
from daemon.supervisor.server import Address
from daemon.supervisor.sockets import AddressTakenError

MakeModel = Callable[..., Path]
Run = Callable[..., Result]

GIB = 2**30


@pytest.fixture(autouse=True)
def _machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with 16 GiB and free ports, an empty Hugging Face cache and a state folder of its own."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("TQD_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setattr("daemon.config.machine.memory_bytes", lambda: 16 * GIB)
    monkeypatch.setattr("daemon.cli.ports.try_out", lambda address: None)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def run() -> Run:
    def run(*arguments: str) -> Result:
        result = CliRunner().invoke(main, [str(argument) for argument in arguments])
        assert result.exception is None or isinstance(result.exception, SystemExit)
        return result

    return run


def servers(*lines: str) -> str:
    text = "version: 1\nservers:\n" + "".join(f"  {line}\n" for line in lines)
    Path("servers.yaml").write_text(text)
    return text


def test_check_shows_every_layer_and_what_it_costs(
    run: Run, make_model: MakeModel, tmp_path: Path
) -> None:
    make_model(tmp_path / "m")
    servers("chat: {model: m, port: 8081, kv: {mode: turbo4, boundary_v: 1}}")
    result = run("check")
    assert result.exit_code == 0
    rows = [line.split() for line in result.output.splitlines()]
    assert ["layers", "kind", "requested", "effective", "reason"] in rows
    assert rows[3][:4] == ["0", "full", "turbo4v4", "turbo0v8"]
    assert rows[4][:4] == ["1-6", "full", "turbo4v4", "turbo0v4"]
    assert "not allowed for llama" in result.output
    assert "per token" in result.output
    assert "4,096 tokens x 8 sequences" in result.output
    assert "together:" in result.output
    assert "boundary_mode: fp16" in result.output  # what mlxcel's boundary means


def test_check_as_json_says_the_same(run: Run, make_model: MakeModel, tmp_path: Path) -> None:
    make_model(tmp_path / "m")
    servers(
        "chat: {model: m, port: 8081, kv: {mode: turbo3}}",
        "off: {model: x, port: 8082, enabled: false}",
    )
    result = run("check", "--json")
    document = json.loads(result.output)
    assert result.exit_code == 0
    assert document["ok"] is True
    assert document["problems"] == []
    chat, off = document["servers"]
    assert chat["layers"] == [
        {"first": 0, "last": 7, "kind": "full", "requested": "turbo0v3", "effective": "turbo0v3", "reason": None}
    ]  # fmt: skip
    assert chat["bytes_per_token"] == 8 * 2 * (128 + 26)
    assert chat["bytes_per_token_fp16"] == 8 * 2 * 256
    assert any("turbo3 means turbo0v3" in warning for warning in chat["warnings"])
    assert off["state"] == "disabled"
    assert document["memory"]["fits"] == "yes"


def test_check_refuses_with_every_problem(run: Run) -> None:
    servers("chat: {model: m, prot: 8081}", "code: {model: m, port: 0, kv: {mode: q8_0}}")
    result = run("check")
    assert result.exit_code == 2
    assert result.stdout == ""
    for message in (
        '3:20: servers.chat.prot: unknown key "prot"',
        "servers.code.port",
        "GGML name",
    ):
        assert message in result.stderr
    document = json.loads(run("check", "--json").stdout)
    assert document["ok"] is False
    assert [problem["line"] for problem in document["problems"]] == [3, 3, 4, 4]


def test_check_says_unresolved_where_the_model_is_missing(run: Run) -> None:
    servers("chat: {model: org/absent, port: 8081}")
    result = run("check")
    assert result.exit_code == 2
    assert "unresolved" in result.output
    assert "tqd pull" in result.output


def test_check_needs_config_only(run: Run, make_model: MakeModel, tmp_path: Path) -> None:
    make_model(tmp_path / "m", weights=None)
    servers("chat: {model: m, port: 8081}")
    result = run("check")
    assert result.exit_code == 0
    assert "no weights" in result.output
    assert "weights not here: chat" in result.output


def test_check_refuses_what_does_not_fit_together(
    run: Run, make_model: MakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_model(tmp_path / "m", weights=20_000_000)
    servers("a: {model: m, port: 1}", "b: {model: m, port: 2}")
    verdicts = {}
    for mib in (500, 1100, 10_000):
        monkeypatch.setattr("daemon.config.machine.memory_bytes", lambda mib=mib: mib * 2**20)
        result = run("check", "--json")
        verdicts[json.loads(result.output)["memory"]["fits"]] = result.exit_code
    assert verdicts == {"no": 2, "not all at once": 0, "yes": 0}
    monkeypatch.setattr("daemon.config.machine.memory_bytes", lambda: 500 * 2**20)
    output = run("check").output
    assert "does not fit" in output
    assert "needs 3" in output
    assert "gets 375.0 MiB" in output or "does not fit beside" in output


def test_check_sees_a_port_that_somebody_else_has(
    run: Run, make_model: MakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_model(tmp_path / "m")
    servers("a: {model: m, port: 8081}", "b: {model: m, port: 8082}")

    def stranger(address: Address) -> None:
        if address.port != 8082:
            raise AddressTakenError(f"port {address.port} is in use by pid 7 (nc)", hint="end it")

    monkeypatch.setattr("daemon.cli.ports.try_out", stranger)
    result = run("check", "--json")
    assert result.exit_code == 2
    document = json.loads(result.stdout)
    a, b = document["servers"]
    assert (a["state"], a["reason"], a["hint"]) == (
        "blocked",
        "port 8081 is in use by pid 7 (nc)",
        "end it",
    )
    assert b["state"] == "ok"
    endpoint, nobody_asked = document["warnings"]
    assert "daemon.status: port 8700 is in use by pid 7 (nc): the daemon would run" in endpoint
    assert f"no daemon of {tmp_path / 'state'} runs" in nobody_asked
    assert "port 8081 is in use" in run("check").stdout


def test_check_says_both_where_model_and_port_are_missing(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers("chat: {model: org/absent, port: 8081}")

    def stranger(address: Address) -> None:
        raise AddressTakenError(f"port {address.port} is in use")

    monkeypatch.setattr("daemon.cli.ports.try_out", stranger)
    (chat,) = json.loads(run("check", "--json").stdout)["servers"]
    assert chat["state"] == "unresolved"
    assert "hub id; port 8081 is in use" in chat["reason"]


def test_check_reads_names_as_text_not_as_markup(
    run: Run, make_model: MakeModel, tmp_path: Path
) -> None:
    make_model(tmp_path / "[red]m")
    servers("chat: {model: '[red]m', port: 8081}")
    assert "[red]m" in run("check").output


def test_check_without_a_file_says_how_to_make_one(run: Run) -> None:
    result = run("-c", "absent.yaml", "check")
    assert result.exit_code == 2
    assert "absent.yaml: there is no such file" in result.stderr
    assert "tqd init" in result.stderr


def test_schema_prints_json(run: Run) -> None:
    result = run("schema")
    assert result.exit_code == 0
    assert json.loads(result.output)["additionalProperties"] is False


def test_init_writes_a_private_file_that_checks(
    run: Run, make_model: MakeModel, tmp_path: Path
) -> None:
    make_model(tmp_path / "m")
    result = run("init", "--model", "m")
    path = tmp_path / "servers.yaml"
    assert result.exit_code == 0
    assert str(path.name) in result.output
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert load(path, environ={}).servers.servers["chat"].model == str(tmp_path / "m")
    assert run("check").exit_code == 0


def test_init_never_overwrites(run: Run) -> None:
    Path("servers.yaml").write_text("mine")
    result = run("init")
    assert result.exit_code == 1
    assert "servers.yaml exists" in result.stderr
    assert Path("servers.yaml").read_text() == "mine"


@pytest.mark.parametrize(
    "model", ["org/name", "true", "123", "a b: c", "${env:HOME}", "ü", "o'x\"y"]
)
def test_init_writes_any_model_so_that_it_is_read_back(run: Run, model: str) -> None:
    assert run("init", "new.yaml", "--model", model).exit_code == 0
    source = load(Path("new.yaml"), environ={}).sources["chat"]
    assert source.written("model") == model.replace("${", "$${")


def test_init_follows_the_named_configuration(run: Run, tmp_path: Path) -> None:
    assert run("-c", "other.yaml", "init").exit_code == 0
    assert (tmp_path / "other.yaml").exists()


def test_init_refuses_a_folder_that_is_not_there(run: Run) -> None:
    result = run("init", "--model", "./absent")
    assert result.exit_code == 1
    assert "no folder ./absent" in result.stderr
    assert not Path("servers.yaml").exists()


def test_init_into_a_folder_that_is_not_there(run: Run) -> None:
    result = run("init", "absent/servers.yaml")
    assert result.exit_code == 1
    assert "cannot be written" in result.stderr
