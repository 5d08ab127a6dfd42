"""`tqd eval` and `tqd advise` as a user runs them; eval really measures, on a tiny model."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from daemon.cli.evaluation import contenders
from daemon.cli.main import main
from daemon.cli.target import Target
from daemon.config.evaluation import EvalReport
from daemon.config.locate import Located
from daemon.config.spec import ServerSpec
from daemon.errors import TqdError
from daemon.measure import plots
from daemon.policy.architecture import read_architecture
from daemon.policy.spec import KvSpec
from daemon.policy.store import load_policies
from tests.conftest import LLAMA

Run = Callable[..., Result]
MakeModel = Callable[..., Path]

# 25 windows of 252 prompt tokens, 21 scored: 525 positions, more than the gate asks for
QUICK = ("--context", "252", "--windows", "25")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("TQD_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]), prepend=os.pathsep)
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> Result:
        result = CliRunner().invoke(main, list(arguments))
        assert result.exception is None or isinstance(result.exception, SystemExit)
        return result

    return run


@pytest.fixture
def model(run: Run, tmp_path: Path) -> str:
    """A server `chat` on a tiny model that asks for 4-bit keys, and a text beside it."""
    from tests.worker.tiny_model import write_tiny_model

    folder = write_tiny_model(tmp_path / "m")
    sentences = (f"The capital of country {i} is city {i * 37 % 101}.\n" for i in range(900))
    (tmp_path / "text.txt").write_text("".join(sentences))
    (tmp_path / "servers.yaml").write_text(
        "version: 1\nservers:\n  chat: {model: m, port: 8081, kv: {mode: turbo4v4}}\n"
    )
    return str(folder)


def in_force(run: Run) -> str:
    (server,) = json.loads(run("check", "--json").stdout)["servers"]
    return str(server["layers"][0]["effective"])


def test_a_measured_policy_is_recorded_and_then_allowed(
    run: Run, model: str, tmp_path: Path
) -> None:
    assert in_force(run) == "turbo0v4"

    result = run("eval", "chat", "--text", "text.txt", *QUICK, "--record", "--json", "report.json")

    assert result.exit_code == 0, result.output
    assert "allow-list is ignored" in result.stderr
    assert "copy KLD" in result.stdout
    report = json.loads((tmp_path / "report.json").read_text())
    (policy,) = report["policies"]
    assert policy["layers"][0]["effective"] == "turbo4v4"
    assert policy["natural"]["positions"] == 525
    assert 0 < policy["natural"]["kld_mean"] < 0.02
    assert policy["bits_per_value"] == pytest.approx(4 + 16 / 32)
    assert [needle["depth"] for needle in policy["needles"]] == [10, 50, 90]
    path = tmp_path / "state" / "allowlist.yaml"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert "text.txt" in path.read_text()
    assert "Python's documentation" in policy["calibration"]
    assert len(list((tmp_path / "state" / "profiles").glob("*.safetensors"))) == 1
    assert in_force(run) == "turbo4v4"
    (server,) = json.loads(run("check", "--json").stdout)["servers"]
    assert "measured on this machine: turbo4v4" in server["allowlist"]


def test_what_is_over_the_gate_is_not_recorded(run: Run, model: str, tmp_path: Path) -> None:
    result = run(
        "eval", "m/", "--policy", "turbo2v2", "--policy", "turbo8v4", "--text", "text.txt",
        "--context", "96", "--windows", "2", "--record", "--json", "-",
    )  # fmt: skip

    assert result.exit_code == 1
    labels = [policy["label"] for policy in json.loads(result.stdout)["policies"]]
    assert labels == ["turbo2v2", "turbo8v4"]
    assert "turbo2v2 is over the gate" in result.stderr
    assert "16 positions scored, at least 512" in result.stderr
    assert "turbo8v4: nothing to record" in result.stderr
    assert not (tmp_path / "state" / "allowlist.yaml").exists()


def test_what_cannot_be_measured_is_refused_with_the_reason(run: Run, model: str) -> None:
    refusals = {
        ("eval", "chat", "--policy", "turbo9"): (2, "neither|unknown scheme"),
        ("eval", "nobody"): (4, "neither a server nor the folder of a model"),
        ("eval", "./absent"): (1, "there is no folder ./absent"),
        ("eval", "org/absent"): (1, "org/absent: no such folder"),
        ("eval", "chat", "--text", "servers.yaml"): (1, "needs"),
        ("eval", "chat", "--plot", "plot.gif"): (1, "names no format"),
        ("eval", "chat", "--json", "absent/report.json"): (1, "there is no folder absent"),
        ("advise", "nobody"): (4, "neither a server"),
    }
    for arguments, (code, words) in refusals.items():
        result = run(*arguments)
        assert result.exit_code == code, arguments
        assert any(word in result.stderr for word in words.split("|")), result.stderr
        assert result.stdout == ""


def test_a_damaged_model_is_one_message(run: Run, model: str) -> None:
    weights = Path(model) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    result = run("eval", "m/")
    assert result.exit_code == 2
    assert "model.safetensors are damaged" in result.stderr
    assert "Traceback" not in result.output


def test_advice_needs_config_only(run: Run, make_model: MakeModel, tmp_path: Path) -> None:
    make_model(tmp_path / "m", weights=None, max_position_embeddings=131072)
    document = json.loads(run("advise", "m/", "--json").stdout)
    assert [row["suggest"]["scheme"] for row in document["rows"]] == ["fp16", "int8", "turbo8v4"]
    shown = run("advise", str(tmp_path / "m")).stdout
    assert "kv: {policy: balanced}" in shown
    assert "nothing changes by itself" in shown


def test_advice_for_a_server_is_about_its_model(run: Run, model: str) -> None:
    document = json.loads(run("advise", "chat", "--json").stdout)
    assert document["model"] == "m"
    assert [row["label"] for row in document["rows"]] == ["short, up to 4k"]


class TestContenders:
    """What is measured under which name."""

    def target(self, **kv: object) -> Target:
        server = ServerSpec(model="m", port=1, kv=KvSpec.model_validate(kv)) if kv else None
        return Target(
            "m", Located(Path("m")), read_architecture(LLAMA), load_policies().policies, server
        )

    def test_without_names_it_is_the_servers_own_policy(self) -> None:
        (own,) = contenders(self.target(mode="turbo8v3", sink_tokens=8), ())
        assert (own.label, own.kv.k, own.kv.v, own.kv.sink_tokens) == (
            "turbo8v3",
            "int8",
            "turbo3",
            8,
        )
        (named,) = contenders(self.target(policy="quality"), ())
        assert (named.label, named.kv.v) == ("quality", "int8")
        assert contenders(self.target(), ())[0].label == "balanced"

    def test_a_scheme_keeps_the_servers_sinks_but_not_its_rules(self) -> None:
        target = self.target(
            k="fp16", sink_tokens=8, layers=[{"match": "first:1", "mode": "fp16"}], boundary_v=1
        )
        scheme, policy = contenders(target, ("turbo4v4", "quality", "turbo4v4"))
        assert (scheme.kv.k, scheme.kv.sink_tokens, scheme.kv.boundary_v) == ("turbo4", 8, 1)
        assert scheme.kv.layers == ()
        assert (policy.kv.v, policy.kv.sink_tokens) == ("int8", 4)


def test_a_plot_is_drawn_in_the_asked_format(run: Run, model: str, tmp_path: Path) -> None:
    """By the command itself, and in another format from the report that it wrote."""
    pytest.importorskip("matplotlib")
    result = run(
        "eval", "m/", "--text", "text.txt", "--context", "96", "--windows", "1",
        "--plot", "plot.png", "--json", "report.json",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG\r")

    report = EvalReport.model_validate_json((tmp_path / "report.json").read_text())
    plots.draw_report(tmp_path / "plot.svg", report)
    assert (tmp_path / "plot.svg").read_bytes().startswith(b"<?xml")


def test_a_plot_without_matplotlib_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(TqdError) as refusal:
        plots.require(tmp_path / "plot.png")
    assert "tqd[plots]" in str(refusal.value.hint)
