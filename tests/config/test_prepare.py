from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from daemon.config.load import load
from daemon.config.machine import Machine
from daemon.config.prepare import (
    FILE_MISSING,
    MODEL_FAULT,
    MODEL_MISSING,
    Prepared,
    prepare,
    salvage,
)
from daemon.errors import ConfigError
from daemon.paths import StateDir

MakeModel = Callable[..., Path]
Ask = Callable[..., Prepared]

GIB = 2**30


@pytest.fixture(autouse=True)
def _no_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))


@pytest.fixture
def ask(tmp_path: Path) -> Ask:
    """Prepare a file of servers, written as the lines under `servers:`, on a machine of *memory* bytes."""

    def ask(
        *servers: str,
        memory: int = 64 * GIB,
        environ: dict[str, str] | None = None,
        before: Prepared | None = None,
    ) -> Prepared:
        path = tmp_path / "servers.yaml"
        path.write_text("version: 1\nservers:\n" + "".join(f"  {line}\n" for line in servers))
        loaded = load(path, environ=environ or {})
        running = None if before is None else before.servers
        state = StateDir(tmp_path / "state")
        return prepare(loaded, state=state, on=Machine(memory), before=running)

    return ask


def faults(ask: Ask, *servers: str, environ: dict[str, str] | None = None) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        ask(*servers, environ=environ)
    return [
        f"{problem.line}:{problem.col}: {problem.path}: {problem.message}"
        for problem in caught.value.problems
    ]


def test_a_server_knows_its_layers_sizes_and_identity(
    ask: Ask, make_model: MakeModel, tmp_path: Path
) -> None:
    folder = make_model(tmp_path / "m", weights=5000)
    server = ask("chat: {model: m, port: 8081, max_concurrent: 3}").servers["chat"]
    assert server.facts is not None
    assert server.facts.folder == folder
    assert server.model == "m"
    assert server.resolved is not None
    assert server.resolved.effective_counts == {"turbo8v4": 8}
    assert server.cost is not None
    # 8 layers x 2 heads of a 64-vector: 64 + 2 bytes at 8 bits, 32 + 2 at 4 bits
    assert server.cost.bytes_per_token == 8 * 2 * (66 + 34)
    assert server.max_context == 4096
    assert server.kv_bytes is not None
    assert server.weights_bytes == (folder / "model.safetensors").stat().st_size
    claim = server.claim
    assert claim is not None
    assert claim.weights_bytes == server.weights_bytes
    assert claim.needs_bytes == claim.fixed_bytes + claim.sequence_bytes
    assert claim.wants_bytes == claim.fixed_bytes + 3 * claim.sequence_bytes
    assert server.kv_bytes <= 3 * claim.sequence_bytes  # whole buffers, and a layer unpacked
    assert server.facts.fingerprint
    assert server.blocked is None


def test_a_missing_model_blocks_its_server_and_no_other(
    ask: Ask, make_model: MakeModel, tmp_path: Path
) -> None:
    make_model(tmp_path / "m")
    servers = ask(
        "here: {model: m, port: 1}",
        "hub: {model: org/absent, port: 2}",
        "path: {model: ./absent, port: 3}",
    ).servers
    assert [s.blocked and s.blocked.code for s in servers.values()] == [
        None,
        MODEL_MISSING,
        MODEL_MISSING,
    ]
    assert servers["hub"].kv.k == "int8"
    assert servers["hub"].resolved is None


def test_a_model_in_the_hub_cache_is_found(ask: Ask, make_model: MakeModel, tmp_path: Path) -> None:
    repo = tmp_path / "hub" / "models--org--name"
    folder = make_model(repo / "snapshots" / "abc123")
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("abc123")
    facts = ask("chat: {model: org/name, port: 1}").servers["chat"].facts
    assert facts is not None
    assert facts.folder == folder


@pytest.mark.parametrize("variable", ["HF_HUB_CACHE", "HF_HOME"])
def test_a_server_may_have_a_hub_cache_of_its_own(
    ask: Ask, make_model: MakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    """What `env:` tells the worker must hold for the one who looks for the worker's model."""
    monkeypatch.delenv("HF_HUB_CACHE")
    folder = make_model(tmp_path / "own" / "hub" / "models--org--name" / "snapshots" / "abc")
    value = tmp_path / "own" / "hub" if variable == "HF_HUB_CACHE" else tmp_path / "own"
    server = ask(
        f"chat: {{model: org/name, revision: abc, port: 1, env: {{{variable}: {value}}}}}"
    ).servers["chat"]
    assert server.facts is not None
    assert server.facts.folder == folder


def test_a_config_without_weights_is_planned_but_cannot_start(
    ask: Ask, make_model: MakeModel, tmp_path: Path
) -> None:
    make_model(tmp_path / "m", weights=None)
    server = ask("chat: {model: m, port: 1}").servers["chat"]
    assert server.resolved is not None
    assert server.kv_bytes
    assert server.weights_bytes is None
    assert server.claim is None
    assert server.blocked is not None
    assert server.blocked.code == MODEL_MISSING


@pytest.mark.parametrize("key", ["python", "chat_template"])
def test_a_file_that_the_worker_would_miss_blocks(
    ask: Ask, make_model: MakeModel, tmp_path: Path, key: str
) -> None:
    make_model(tmp_path / "m")
    assert (
        ask(f"chat: {{model: m, port: 1, {key}: {sys.executable}}}").servers["chat"].blocked is None
    )
    blocked = ask(f"chat: {{model: m, port: 1, {key}: absent}}").servers["chat"].blocked
    assert blocked is not None
    assert blocked.code == FILE_MISSING
    assert key in blocked.message
    assert blocked.key == key


def test_an_architecture_that_cannot_be_served_is_a_fault_at_the_model(
    ask: Ask, make_model: MakeModel, tmp_path: Path
) -> None:
    make_model(tmp_path / "odd", model_type="no_such_family")
    [found] = faults(ask, "odd: {model: odd, port: 1}")
    assert found.startswith("3:16: servers.odd.model: ")
    assert "no_such_family" in found


def test_damaged_files_of_a_model_block_its_server_and_no_other(
    ask: Ask, make_model: MakeModel, tmp_path: Path
) -> None:
    make_model(tmp_path / "m")
    (make_model(tmp_path / "broken") / "config.json").write_text("{")
    weights = make_model(tmp_path / "short") / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    found = ask(
        "here: {model: m, port: 1}",
        "broken: {model: broken, port: 2}",
        "short: {model: short, port: 3}",
    ).servers
    broken, short = found["broken"].blocked, found["short"].blocked
    assert found["here"].blocked is None
    assert broken is not None
    assert short is not None
    assert (broken.code, short.code) == (MODEL_FAULT, MODEL_FAULT)
    assert "config.json is not JSON" in broken.message
    assert "model.safetensors are damaged" in short.message


def test_a_model_that_has_gone_is_blocked_and_known_as_it_was(
    ask: Ask, make_model: MakeModel, tmp_path: Path
) -> None:
    """What runs of it stays comparable: an edit of another entry must not restart or refuse it."""
    folder = make_model(tmp_path / "m")
    before = ask("chat: {model: m, port: 1}")
    folder.rename(tmp_path / "away")

    after = ask("chat: {model: m, port: 1, labels: {a: b}}", before=before).servers["chat"]
    was = before.servers["chat"]
    assert after.blocked is not None
    assert after.blocked.code == MODEL_MISSING
    assert (after.spec_hash, after.claim, after.facts) == (was.spec_hash, was.claim, was.facts)

    assert after.blocked.message == f"there is no folder {folder}"  # no hub id, which it is without

    other = ask("chat: {model: n, port: 1}", before=before).servers["chat"]
    assert other.facts is None


@pytest.mark.parametrize("now", ["{", '{"model_type": "no_such_family"}'])
def test_a_model_that_was_damaged_or_replaced_is_known_as_it_was(
    ask: Ask, make_model: MakeModel, tmp_path: Path, now: str
) -> None:
    folder = make_model(tmp_path / "m")
    before = ask("chat: {model: m, port: 1}")
    (folder / "config.json").write_text(now)
    after = ask("chat: {model: m, port: 1}", before=before).servers["chat"]
    assert after.blocked is not None
    assert after.blocked.code == MODEL_FAULT
    assert after.spec_hash == before.servers["chat"].spec_hash


def test_an_entry_that_fits_the_model_of_before_and_not_that_of_now_is_no_fault_of_the_edit(
    ask: Ask, make_model: MakeModel, tmp_path: Path
) -> None:
    rule = 'chat: {model: m, port: 1, kv: {layers: [{match: "6-7", mode: fp16}]}}'
    make_model(tmp_path / "m").rename(tmp_path / "eight")
    (tmp_path / "m").symlink_to("eight")
    before = ask(rule)
    make_model(tmp_path / "four", num_hidden_layers=4)
    (tmp_path / "m").unlink()
    (tmp_path / "m").symlink_to("four")
    after = ask(rule, before=before).servers["chat"]
    assert after.blocked is not None
    assert (after.blocked.code, after.blocked.key) == (MODEL_FAULT, "kv.layers.0.match")
    assert after.spec_hash == before.servers["chat"].spec_hash

    wrong = rule.replace("6-7", "8-9")
    with pytest.raises(ConfigError, match="no such layers"):
        ask(wrong, before=before)


def test_what_was_accepted_once_is_salvaged_server_by_server(
    make_model: MakeModel, tmp_path: Path
) -> None:
    make_model(tmp_path / "m")
    make_model(tmp_path / "odd", model_type="no_such_family")
    path = tmp_path / "servers.yaml"
    path.write_text(
        "version: 1\nservers:\n  here: {model: m, port: 1}\n  odd: {model: odd, port: 2}\n"
    )
    found = salvage(load(path, environ={}), state=StateDir(tmp_path / "state")).servers
    odd = found["odd"].blocked
    assert found["here"].blocked is None
    assert odd is not None
    assert odd.code == MODEL_FAULT
    assert "no_such_family" in odd.message


def test_a_policy_that_is_none_cannot_be_salvaged(make_model: MakeModel, tmp_path: Path) -> None:
    make_model(tmp_path / "m")
    path = tmp_path / "servers.yaml"
    path.write_text("version: 1\nservers:\n  a: {model: m, port: 1, kv: {policy: balanced}}\n")
    loaded = replace(load(path, environ={}), policies={})  # as another tqd might know them
    with pytest.raises(ConfigError, match=r"servers\.a\.kv\.policy"):
        salvage(loaded, state=StateDir(tmp_path / "state"))


def test_faults_of_policies_stand_at_their_key(
    ask: Ask, make_model: MakeModel, tmp_path: Path
) -> None:
    make_model(tmp_path / "m")
    found = faults(
        ask,
        'rule: {model: m, port: 1, kv: {layers: [{match: "6-9", mode: fp16}]}}',
        "strict: {model: m, port: 2, kv: {mode: turbo4, strict: true}}",
    )
    assert found[0].startswith("3:51: servers.rule.kv.layers.0.match: no such layers")
    assert found[1].startswith("4:58: servers.strict.kv.strict: 8 layers cannot have the scheme")


def test_disabling_a_server_is_a_way_out_of_a_broken_model(
    ask: Ask, make_model: MakeModel, tmp_path: Path
) -> None:
    make_model(tmp_path / "odd", model_type="no_such_family")
    blocked = ask("odd: {model: odd, port: 1, enabled: false}").servers["odd"].blocked
    assert blocked is not None
    assert blocked.code == MODEL_FAULT


def test_the_context_is_lowered_until_one_sequence_fits(
    ask: Ask, make_model: MakeModel, tmp_path: Path
) -> None:
    make_model(tmp_path / "m", max_position_embeddings=10_000_000)
    memory = 800 * 2**20
    servers = ask("a: {model: m, port: 1}", "b: {model: m, port: 2}", memory=memory).servers
    lowered, other = servers["a"], servers["b"]
    assert lowered.max_context is not None
    assert 1000 < lowered.max_context < 10_000_000
    assert lowered.claim is not None
    assert lowered.claim.needs_bytes <= Machine(memory).budget_bytes()
    assert other.max_context == lowered.max_context  # never depends on other servers
    assert any("lowered from 10000000" in warning for warning in lowered.warnings)


def test_a_context_that_was_asked_for_is_kept(
    ask: Ask, make_model: MakeModel, tmp_path: Path
) -> None:
    make_model(tmp_path / "m")
    servers = ask(
        "a: {model: m, port: 1, max_context: 512}", "b: {model: m, port: 2, max_context: 8192}"
    ).servers
    assert [server.max_context for server in servers.values()] == [512, 8192]
    assert servers["a"].warnings == ()
    assert any("more than the model's own 4096" in warning for warning in servers["b"].warnings)


def test_a_budget_for_caches_must_hold_one_sequence_and_the_hint_says_which_would(
    ask: Ask, make_model: MakeModel, tmp_path: Path
) -> None:
    make_model(tmp_path / "m")
    with pytest.raises(ConfigError) as caught:
        ask("chat: {model: m, port: 1, kv: {budget: 4MiB}}")
    (problem,) = caught.value.problems
    assert problem.path == "servers.chat.kv.budget"
    assert problem.message.startswith("4.0 MiB hold no sequence of max_context 4096 tokens")
    assert problem.hint is not None
    fitting = int(problem.hint.rpartition(" ")[2])
    line = f"chat: {{model: m, port: 1, max_context: {fitting}, kv: {{budget: 4MiB}}}}"
    claim = ask(line).servers["chat"].claim
    assert claim is not None
    assert claim.most_kv_bytes == 2**22


def test_a_budget_for_caches_is_live_and_so_is_that_of_the_machine(
    ask: Ask, make_model: MakeModel, tmp_path: Path
) -> None:
    make_model(tmp_path / "m")
    auto, bounded = (
        ask(f"chat: {{model: m, port: 1, kv: {{budget: {budget}}}}}").servers["chat"]
        for budget in ("auto", "20MiB")
    )
    assert auto.spec_hash == bounded.spec_hash
    assert auto.live_hash != bounded.live_hash


def test_an_allowlist_entry_of_this_machine_counts(
    ask: Ask, make_model: MakeModel, tmp_path: Path
) -> None:
    make_model(tmp_path / "m")
    line = "chat: {model: m, port: 1, kv: {mode: turbo4}}"
    before = ask(line).servers["chat"]
    assert before.allowed is None
    (tmp_path / "state").mkdir()
    entry = {"fingerprint": before.facts.fingerprint, "evidence": "measured here"}
    (tmp_path / "state" / "allowlist.yaml").write_text(json.dumps({"entries": [entry]}))
    after = ask(line).servers["chat"]
    assert after.allowed == "measured here"
    assert after.resolved is not None
    assert after.resolved.effective_counts == {"turbo4v4": 8}
    assert after.spec_hash != before.spec_hash


def test_keys_and_environments_are_not_shown(
    ask: Ask, make_model: MakeModel, tmp_path: Path
) -> None:
    make_model(tmp_path / "m")
    prepared = ask(
        "chat: {model: m, port: 1, api_key: '${env:KEY}', env: {T: '${env:KEY}'}}",
        environ={"KEY": "hunter2"},
    )
    assert prepared.servers["chat"].api_key == "hunter2"
    assert "hunter2" not in repr(prepared)


def test_a_model_from_the_environment_is_shown_as_it_was_written(ask: Ask) -> None:
    server = ask("chat: {model: '${env:M}', port: 1}", environ={"M": "/secret/m"}).servers["chat"]
    assert server.model == "${env:M}"
    assert server.blocked is not None
    assert server.blocked.message == "there is no folder ${env:M}"


def test_preparing_twice_gives_the_same(ask: Ask, make_model: MakeModel, tmp_path: Path) -> None:
    make_model(tmp_path / "m")
    line = "chat: {model: m, port: 1, kv: {policy: compact}}"
    assert ask(line).servers == ask(line).servers
