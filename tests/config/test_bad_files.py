"""Every file of tests/data/bad is refused with exactly the problems listed here.

A line that starts with a number stands in the file itself. Hints are left out: they are tested where
they are made.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from daemon.config.load import RejectedError, load
from daemon.errors import Problem

FOLDER = Path(__file__).parents[1] / "data" / "bad"
SECRET = "hunter2"
EXPECTED = {
    'alias_of_itself': [
        '2:22: the alias *all names no anchor that is complete above it',
    ],
    'alias_undefined': [
        '2:10: the alias *nowhere names no anchor that is complete above it',
    ],
    'aliases': [
        '3:44: servers.chat.aliases.0: alias "code" is already the name of servers.code',
        '3:56: servers.chat.aliases.2: alias "qwen" is already an alias of servers.chat',
        '4:44: servers.code.aliases.0: alias "qwen" is already an alias of servers.chat',
        '4:50: servers.code.aliases.1: an alias is empty',
    ],
    'backoff': [
        '6:24: servers.chat.restart.backoff: the first delay is longer than the longest',
    ],
    'billion_laughs': [
        '7:20: aliases included, this holds more than 400,000 values',
    ],
    'boolean_words': [
        '6:14: servers.chat.enabled: expected true or false, found "yes"',
        '7:16: servers.chat.kv.mode: expected text, found a boolean of YAML 1.1',
        '8:20: servers.chat.labels.team: expected text, found a boolean of YAML 1.1',
        '9:23: servers.chat.restart.policy: expected on-failure, always or never, found "off"',
    ],
    'colon': [
        '4:13: not valid YAML: mapping values are not allowed here',
    ],
    'complex_key': [
        '3:3: a key must be text, not a list or a mapping',
    ],
    'control_character': [
        '4:16: not valid YAML: a control character is not allowed',
    ],
    'deep': [
        '2:33: nested more than 24 levels deep',
    ],
    'deep_block': [
        '2:33: nested more than 24 levels deep',
    ],
    'defaults_once': [
        '2:19: defaults.queue: expected at least 0, found the number -1',
        '2:34: defaults.kv.mode: unknown scheme "tq5"',
        '2:40: defaults.drian_timeout: unknown key "drian_timeout"',
    ],
    'duplicate_keys': [
        '6:5: duplicate key "port"; it is first on line 5',
        '7:22: duplicate key "mode"; it is first on line 7',
        '8:3: duplicate key "chat"; it is first on line 3',
    ],
    'empty': [
        'the file is empty',
    ],
    'hosts': [
        '3:40: servers.open.host: other machines can reach this host, and there is no api_key',
        '4:45: servers.with-port.host: expected an IP address or a host name',
        '5:46: servers.no-address.host: expected an IP address or a host name',
        '6:48: servers.empty-key.api_key: the key is empty',
    ],
    'include_cycle': [
        '2:31: include: the file is included twice (first at include_cycle.yaml:2)',
        'included/cycle.inc:1:11: include: the file is included twice (it is the file this one belongs to)',
    ],
    'include_missing': [
        '2:11: include: the included file: there is no such file',
        '2:30: include: expected text, found the number 7',
        'included/daemon.inc:1:1: daemon: an included file has no daemon block',
        'included/daemon.inc:2:19: defaults.queue: expected an integer, found "lots"',
    ],
    'include_same_server': [
        'included/chat.inc:3:3: servers.chat: the server is already defined at include_same_server.yaml:4',
    ],
    'include_text': [
        '2:10: include: expected a list of files',
    ],
    'key_file_missing': [
        '6:21: servers.chat.api_key.file: the file of the key: there is no such file',
    ],
    'key_file_without_path': [
        '3:43: servers.chat.api_key: the key "file" is missing',
        '4:50: servers.code.api_key.file: expected a path, found nothing',
        '4:54: servers.code.api_key.zzz: unknown key "zzz"',
        '4:80: servers.code.kv.boundary_k: expected at least 0, found the number -1',
    ],
    'layer_rules': [
        '7:20: servers.chat.kv.tail_tokens: 40 is not a multiple of 32: the tail folds one tile of 32 tokens at a time and holds up to 31 tokens more',
        '9:19: servers.chat.kv.layers.0.match: "middle" means no layers',
        '10:11: servers.chat.kv.layers.1: the rule sets nothing',
        '11:11: servers.chat.kv.layers.2: the key "match" is missing',
        '12:23: servers.chat.kv.layers.3.match.1: expected an integer, found "x"',
    ],
    'log_size': [
        "2:26: daemon.log.max_size: '50 megs' is not a size; write bytes or a number with B, KB, MB, GB, TB, KiB, MiB, GiB, TiB, such as 4GiB",
        '2:44: daemon.log.backups: expected at least 0, found the number -1',
    ],
    'merge_of_text': [
        '3:14: `<<` merges mappings only',
    ],
    'model_empty': [
        '6:17: servers.code.model: expected a path, found nothing',
    ],
    'not_utf8': [
        'not UTF-8 text (line 3)',
    ],
    'not_yet_available': [
        '2:10: daemon.gateway: not yet available',
        '3:12: defaults.idle_unload: not yet available',
        '8:5: servers.chat.adapter: not yet available',
        '9:5: servers.chat.trust_remote_code: not yet available',
        '10:5: servers.chat.distributed: not yet available',
        '11:20: servers.chat.prompt_cache.capacity: not yet available',
        '11:65: servers.chat.prompt_cache.snapshots.max_entries: not yet available',
    ],
    'only_comments': [
        'the file is empty',
    ],
    'policy_unknown': [
        '6:18: servers.chat.kv.policy: unknown policy "balance"',
    ],
    'port_of_the_status_endpoint': [
        '6:28: servers.code.port: port 8700 is already used by daemon.status',
    ],
    'ports': [
        '3:28: servers.zero.port: expected at least 1, found the number 0',
        '4:29: servers.large.port: expected at most 65535, found the number 70000',
        '5:28: servers.text.port: expected an integer, found "eighty"',
        '6:30: servers.quoted.port: expected an integer, found "8081"',
        '7:35: servers.sexagesimal.port: expected an integer, found "1:30"',
        '8:34: servers.underscore.port: expected an integer, found "80_81"',
        '9:29: servers.octal.port: expected an integer, found "08081"',
        '10:29: servers.float.port: expected an integer, found the number 8081.0',
        '11:31: servers.boolean.port: expected an integer, found the boolean true',
        '12:31: servers.nothing.port: expected an integer, found nothing',
    ],
    'ranges': [
        '6:29: servers.chat.sampling.temperature: expected at most 2, found the number 3',
        '6:39: servers.chat.sampling.top_p: expected more than 0, found the number 0',
        '6:49: servers.chat.sampling.top_k: expected an integer, found the number 1.5',
        '6:61: servers.chat.sampling.min_p: expected a number, found ".nan"',
        '7:21: servers.chat.max_concurrent: expected at least 1, found the number 0',
        '8:18: servers.chat.max_context: expected an integer, found the number 1e5',
        '9:12: servers.chat.queue: expected an integer, found the number 99999999999999999999',
    ],
    'references': [
        '6:14: servers.chat.api_key: the environment variable TQD_TEST_UNSET is not set',
        '7:15: servers.chat.revision: `${` starts no reference',
        '8:47: servers.chat.labels.b: `${` starts no reference',
    ],
    'required_missing': [
        '3:3: servers.chat: the key "model" is missing',
        '3:3: servers.chat: the key "port" is missing',
    ],
    'schemes': [
        '7:13: servers.chat.kv.mode: "q8_0" is a GGML name, not a scheme of tqd',
        '8:10: servers.chat.kv.k: unknown codec "tq5" for k',
        '10:30: servers.chat.kv.layers.0.mode: unknown scheme "turbo4v5"',
        '11:27: servers.chat.kv.layers.1.v: "q4_0" is a GGML name, not a codec of tqd',
        '12:30: servers.chat.kv.layers.2.mode: "turbo2" does not say which side has 2 bits',
        '13:45: servers.code.kv.mode: unknown scheme "turbo8v9"',
        '13:69: servers.code.kv.cache_type_k: "q8_0" is a GGML name, not a cache type of tqd',
        '13:89: servers.code.kv.cache_type_v: unknown cache type "turbo9"',
    ],
    'second_document': [
        '6:1: a second document starts here',
    ],
    'secrets': [
        '5:11: servers.chat.port: expected an integer, found "${env:TQD_TEST_SECRET}"',
        "6:16: servers.chat.kv.mode: the environment's value does not fit",
        "6:50: servers.chat.kv.policy: the environment's value does not fit",
        '7:14: servers.chat.api_key: expected text or a mapping, found a list',
        '8:18: servers.chat.env.TOKEN: expected text, found a number',
        '8:27: servers.chat.env: this is no name of a variable',
        '8:41: servers.chat.env.ON: expected text, found a boolean of YAML 1.1',
        '9:41: servers.chat.aliases.1: this alias is already an alias of servers.chat',
        "11:20: servers.chat.drain_timeout: the environment's value does not fit",
    ],
    'server_empty': [
        '3:3: servers.chat: expected a mapping',
    ],
    'server_names': [
        '3:3: servers.Chat: this is no name of a server',
        '4:3: servers.../etc: this is no name of a server',
        '5:3: servers.: this is no name of a server',
    ],
    'servers_empty': [
        '2:1: servers: there is no server under it',
    ],
    'servers_list': [
        '3:3: servers: expected a mapping of names to servers',
    ],
    'servers_missing': [
        'servers: the key "servers" is missing',
    ],
    'status_no_endpoint': [
        '2:18: daemon.status: expected host:port, such as 127.0.0.1:8700',
    ],
    'status_open_to_the_network': [
        '2:18: daemon.status: the ops endpoint has no keys, so it listens on a loopback address only',
    ],
    'status_without_host': [
        '2:18: daemon.status: expected text, found the number 8700',
    ],
    'tab': [
        "3:1: not valid YAML: found character '\\t' that cannot start any token",
    ],
    'tags': [
        '6:15: the tag !!python/object:os.system is not allowed',
        '7:29: the tag !custom is not allowed',
    ],
    'top_level_list': [
        '1:1: expected a mapping with version, include, daemon, defaults, servers',
    ],
    'two_servers_one_port': [
        '4:28: servers.code.port: port 8081 is already used by servers.chat (two_servers_one_port.yaml:3)',
        '6:27: servers.all.port: port 8081 is already used by servers.chat (two_servers_one_port.yaml:3)',
    ],
    'unclosed': [
        "4:1: not valid YAML: expected ',' or '}', but got '<stream end>' (while parsing a flow mapping that starts on line 3)",
    ],
    'units': [
        "6:20: servers.chat.drain_timeout: '30' is not a duration; write a number with ms, s, m or h, such as 30s",
        "7:17: servers.chat.stop_grace: '1.5' is not a duration; write a number with ms, s, m or h, such as 30s",
        "8:23: servers.chat.restart.window: '10 minutes' is not a duration; write a number with ms, s, m or h, such as 30s",
        '8:44: servers.chat.restart.backoff: the list is too short',
        "8:64: servers.chat.restart.stable_after: '-5m' is not a duration; write a number with ms, s, m or h, such as 30s",
        '9:23: servers.chat.probe.interval: expected more than 0s',
    ],
    'unknown_kv_keys': [
        '6:10: servers.chat.kv.boundry_v: unknown key "boundry_v"',
        '6:58: servers.chat.kv.layers.0.sink: unknown key "sink"',
        '6:69: servers.chat.kv.zzz: unknown key "zzz"',
    ],
    'unknown_server_key': [
        '6:5: servers.chat.prot: unknown key "prot"',
    ],
    'unknown_top_key': [
        '6:1: sever: unknown key "sever"',
    ],
    'version_missing': [
        'version: the key "version" is missing',
    ],
    'version_of_the_future': [
        '1:10: version: version 2 is not known: this build reads version 1',
    ],
    'version_text': [
        '1:10: version: expected the number 1: this build reads version 1',
    ],
    'wrong_types': [
        '6:14: servers.chat.aliases: expected a list (text each), found "qwen"',
        '7:12: servers.chat.queue: expected an integer, found "many"',
        '8:20: servers.chat.labels.team: expected text, found the number 7',
        '9:15: servers.chat.sampling: expected a mapping, found a list',
        '10:9: servers.chat.kv: expected a mapping, found "balanced"',
        '11:15: servers.chat.revision: expected text, found a list',
        '12:19: servers.chat.cors_origins: expected a list (text each), found a mapping',
    ],
}  # fmt: skip


def refusal(name: str) -> RejectedError:
    with pytest.raises(RejectedError) as caught:
        load(FOLDER / f"{name}.yaml", environ={"TQD_TEST_SECRET": SECRET})
    return caught.value


def short(problem: Problem, name: str) -> str:
    text = str(problem).partition("\n  hint: ")[0].replace(f"{FOLDER}/", "")
    return text.removeprefix(f"{name}.yaml:").strip()


def test_every_bad_file_has_its_messages_here() -> None:
    assert {path.stem for path in FOLDER.glob("*.yaml")} == EXPECTED.keys()


@pytest.mark.parametrize("name", EXPECTED)
def test_a_bad_file_is_refused_with_every_problem_in_it(name: str) -> None:
    assert [short(problem, name) for problem in refusal(name).problems] == EXPECTED[name]


@pytest.mark.parametrize("name", EXPECTED)
def test_no_message_holds_a_secret(name: str) -> None:
    assert SECRET not in str(refusal(name))


def test_what_was_read_is_watched_although_it_was_refused() -> None:
    """The broken file may be an include: mending it must wake the daemon."""
    watched = refusal("include_missing").watched
    assert FOLDER / "include_missing.yaml" in watched
    assert FOLDER / "included" / "daemon.inc" in watched
    assert FOLDER / "no-such-file.yaml" in watched
