"""From the text of servers.yaml to frozen specs, with a place for every problem.

Reads files and the environment, decides nothing about models or machines: that is daemon.config.prepare.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from daemon.config import checks
from daemon.config.files import UnreadableError, decode, read_file
from daemon.config.merge import under
from daemon.config.read import Problems, Read, absolute_path, read, read_text, unknown_key
from daemon.config.scalars import is_nothing, plain
from daemon.config.source import Source
from daemon.config.spec import SCHEMA_VERSION, ApiKeyFile, DaemonSpec, Servers, ServerSpec
from daemon.config.yaml_nodes import Block, Entry, Items, Node, Place, compose
from daemon.errors import ConfigError, Problem
from daemon.policy.spec import NamedPolicy
from daemon.policy.store import load_policies

POLICY_FOLDER = "policies"
MAX_FILES = 100

_TOP_KEYS = ("version", "include", "daemon", "defaults", "servers")
_SERVER_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")  # as spec.ServerName
_NAME_HINT = "a-z, 0-9, `.`, `_` and `-`, starting with a letter or digit, at most 63"


@dataclass(frozen=True, slots=True)
class Loaded:
    """A configuration that is right as text: every key known, every reference resolved.

    *files* are the files it was read from: servers.yaml, includes, the user's policies. *watched* adds
    what else a change should wake the daemon for: the policies folder and the files of API keys.
    *ends_open*: the last line of a file has no end, as in one that is still being written.
    """

    servers: Servers
    policies: Mapping[str, NamedPolicy]
    files: tuple[Path, ...]
    watched: tuple[Path, ...]
    warnings: tuple[Problem, ...]
    content_hash: str
    sources: Mapping[str, Source] = field(repr=False)
    daemon_source: Source = field(repr=False)
    api_keys: Mapping[str, str] = field(repr=False)
    ends_open: bool = False


class RejectedError(ConfigError):
    """A configuration was refused; *watched* are the files whose change may repair it."""

    def __init__(self, problems: tuple[Problem, ...], watched: tuple[Path, ...]) -> None:
        super().__init__(problems)
        self.watched = watched


def load(
    path: Path,
    *,
    environ: Mapping[str, str] | None = None,
    copies: Mapping[Path, Path] | None = None,
) -> Loaded:
    """Return the configuration in *path*, its includes and the policies folder beside it.

    *environ* answers `${env:NAME}`; by default this process's environment. *copies* are read in the
    place of the files, or of the policies folder, that they are copies of.

    Raises:
        RejectedError: with every problem found in one run.
    """
    given = os.environ if environ is None else environ  # noqa: TID251 - the one place that reads it
    return _Run(given, copies or {}).load(path)


@dataclass(frozen=True, slots=True)
class _Written:
    """A server as a file says it, with that file's defaults beneath it."""

    entry: Place
    node: Block


class _Run:
    """One reading of a configuration: collects files, servers and problems as it goes."""

    def __init__(self, environ: Mapping[str, str], copies: Mapping[Path, Path]) -> None:
        self._copies = copies
        self._problems = Problems()
        self._environ = environ
        self._contents: dict[Path, bytes] = {}
        self._watched: dict[Path, None] = {}
        self._included: dict[Path, Place] = {}
        self._written: dict[str, _Written] = {}
        self._warnings: list[Problem] = []

    def load(self, path: Path) -> Loaded:
        """Return the configuration in *path*."""
        path = Path(os.path.abspath(path))  # noqa: PTH100 - resolve() would follow the link that names the folder
        start = Place(str(path), 0, 0)
        self._included[path] = start
        root = self._top_block(path, start)
        folder = path.parent / POLICY_FOLDER
        self._watched[folder] = None
        if root is None or not self._version_fits(root, start, required=True):
            raise self._rejected()
        daemon, daemon_source = self._daemon(root, start)
        self._take(root, path, start, None, is_main=True)
        policies = self._policies(folder)
        sources = {
            name: Source(f"servers.{name}", written.entry, written.node)
            for name, written in self._written.items()
        }
        servers = {
            name: server
            for name, source in sources.items()
            if (server := self._read_server(source)) is not None
        }
        keys = self._check(servers, sources, daemon, policies)
        if self._problems.found:
            raise self._rejected()
        return Loaded(
            servers=Servers(
                path=path,
                daemon=daemon,
                servers={name: server.model for name, server in servers.items()},
                origins={name: str(source.entry) for name, source in sources.items()},
            ),
            policies=policies,
            files=tuple(self._contents),
            watched=tuple({**dict.fromkeys(self._contents), **self._watched}),
            warnings=tuple(self._warnings),
            content_hash=self._content_hash(path.parent, keys),
            sources=sources,
            daemon_source=daemon_source,
            api_keys=keys,
            ends_open=any(text and not text.endswith(b"\n") for text in self._contents.values()),
        )

    def _rejected(self) -> RejectedError:
        order = {str(path): index for index, path in enumerate(self._included)}
        found = sorted(
            self._problems.found, key=lambda p: (order.get(p.file, len(order)), p.line, p.col)
        )
        watched = {**self._included, **dict.fromkeys(self._contents), **self._watched}
        return RejectedError(tuple(found), tuple(watched))

    def _top_block(self, path: Path, asked: Place) -> Block | None:
        """Return the mapping in *path*; *asked* is where the file was named."""
        try:
            self._contents[path] = content = read_file(self._copies.get(path, path))
            text = decode(content)
        except UnreadableError as error:
            if asked.line:
                self._problems.add(asked, "include", f"the included file: {error}")
            else:
                hint = (
                    "put it back, or name another with -c; `tqd init` writes a first one"
                    if not path.exists()
                    else None
                )
                self._problems.add(asked, "", str(error), hint)
            return None
        passed_over: list[Problem] = []
        try:
            node = compose(text, str(path), passed_over)
        except ConfigError as error:
            self._problems.extend(error.problems)
            return None
        self._problems.extend(passed_over)
        if isinstance(node, Block):
            return node
        if node is None or is_nothing(node):
            self._problems.add(
                Place(str(path), 0, 0),
                "",
                "the file is empty",
                f"it starts with `version: {SCHEMA_VERSION}`",
            )
        else:
            self._problems.add(node.place, "", f"expected a mapping with {', '.join(_TOP_KEYS)}")
        return None

    def _take(
        self, root: Block, path: Path, start: Place, inherited: Block | None, *, is_main: bool
    ) -> None:
        """Collect the servers of one file and of what it includes."""
        for name, entry in root.entries.items():
            if name not in _TOP_KEYS:
                self._problems.add(entry.place, name, *unknown_key(name, _TOP_KEYS))
            elif name == "daemon" and not is_main:
                self._problems.add(
                    entry.place,
                    name,
                    "an included file has no daemon block",
                    "move it into the main file",
                )
        defaults = inherited
        if own := self._optional_block(root, "defaults"):
            self._check_defaults(own, root.entries["defaults"].place)
            defaults = under(inherited, own)
        self._take_servers(root, start, defaults, is_main=is_main)
        for node in self._include_items(root):
            self._include(node, path, defaults)

    def _version_fits(self, root: Block, start: Place, *, required: bool) -> bool:
        """Return whether to read on: in another version, whatever else is strange may be right."""
        reads = f"this build reads version {SCHEMA_VERSION}"
        entry = root.entries.get("version")
        if entry is None:
            if required:
                self._problems.add(
                    start,
                    "version",
                    'the key "version" is missing',
                    f"add `version: {SCHEMA_VERSION}`",
                )
            return True
        version = plain(entry.node)
        if version == SCHEMA_VERSION and type(version) is int:
            return True
        if type(version) is int:
            self._problems.add(
                entry.node.place, "version", f"version {version} is not known: {reads}"
            )
        else:
            self._problems.add(
                entry.node.place, "version", f"expected the number {SCHEMA_VERSION}: {reads}"
            )
        return False

    def _optional_block(self, root: Block, name: str) -> Block | None:
        """Return the block *name*; one whose keys are all commented out counts as left out."""
        entry = root.entries.get(name)
        if entry is None or is_nothing(entry.node):
            return None
        if isinstance(entry.node, Block):
            return entry.node
        self._problems.add(entry.node.place, name, "expected a mapping")
        return None

    def _daemon(self, root: Block, start: Place) -> tuple[DaemonSpec, Source]:
        block = self._optional_block(root, "daemon") or Block(start, {})
        entry = root.entries["daemon"].place if "daemon" in root.entries else start
        source = Source("daemon", entry, block)
        result = read(block, DaemonSpec, "daemon", self._environ, self._problems)
        daemon = result.model if result else DaemonSpec(status=None)
        self._problems.extend(checks.daemon_problems(daemon, source))
        return daemon, source

    def _check_defaults(self, block: Block, entry: Place) -> None:
        result = read(block, ServerSpec, "defaults", self._environ, self._problems)
        if result is not None:
            source = Source("defaults", entry, block)
            self._problems.extend(checks.kv_problems(result.model.kv, source, result.refused))

    def _take_servers(
        self, root: Block, start: Place, defaults: Block | None, *, is_main: bool
    ) -> None:
        entry = root.entries.get("servers")
        if entry is None:
            if is_main and "include" not in root.entries:
                self._problems.add(
                    start, "servers", 'the key "servers" is missing', "add `servers: {}` for none"
                )
            return
        if not isinstance(entry.node, Block):
            empty = is_nothing(entry.node)
            message = (
                "there is no server under it" if empty else "expected a mapping of names to servers"
            )
            hint = "write `servers: {}` for none" if empty else "name: {model: ..., port: ...}"
            self._problems.add(
                entry.node.place if not empty else entry.place, "servers", message, hint
            )
            return
        for name, server in entry.node.entries.items():
            self._take_server(name, server, defaults)

    def _take_server(self, name: str, server: Entry, defaults: Block | None) -> None:
        path = f"servers.{name}"
        if not _SERVER_NAME.fullmatch(name):
            self._problems.add(server.place, path, "this is no name of a server", _NAME_HINT)
        elif not isinstance(server.node, Block):
            self._problems.add(
                server.place, path, "expected a mapping", "model: ... and port: ... under it"
            )
        elif (first := self._written.get(name)) is not None:
            self._problems.add(
                server.place, path, f"the server is already defined at {first.entry}"
            )
        else:
            self._written[name] = _Written(server.place, under(defaults, server.node))

    def _include_items(self, root: Block) -> tuple[Node, ...]:
        entry = root.entries.get("include")
        if entry is None or is_nothing(entry.node):
            return ()
        if isinstance(entry.node, Items):
            return entry.node.nodes
        self._problems.add(entry.node.place, "include", "expected a list of files", "[other.yaml]")
        return ()

    def _include(self, node: Node, including: Path, defaults: Block | None) -> None:
        text = read_text(node, "include", self._environ, self._problems)
        if text is None:
            return
        try:
            path = Path(absolute_path(text, including.parent))
        except ValueError as error:
            self._problems.add(node.place, "include", str(error))
            return
        if path in self._included:
            first = self._included[path]
            said = f"first at {first}" if first.line else "it is the file this one belongs to"
            self._problems.add(node.place, "include", f"the file is included twice ({said})")
        elif len(self._included) >= MAX_FILES:
            self._problems.add(node.place, "include", f"more than {MAX_FILES} files")
        else:
            self._included[path] = node.place
            root = self._top_block(path, node.place)
            start = Place(str(path), 0, 0)
            if root is not None and self._version_fits(root, start, required=False):
                self._take(root, path, start, defaults, is_main=False)

    def _policies(self, folder: Path) -> Mapping[str, NamedPolicy]:
        for path in sorted(folder.glob("*.y*ml")) if folder.is_dir() else ():
            self._watched[path] = None
        try:
            store = load_policies(self._copies.get(folder, folder))
        except ConfigError as error:
            self._problems.extend(error.problems)
            return {}
        for path in store.files.values():
            if path.parent == self._copies.get(folder, folder):
                self._contents[folder / path.name] = read_file(path)
        self._warnings += [Problem(str(folder), 0, 0, "", text) for text in store.warnings]
        return store.policies

    def _check(
        self,
        servers: Mapping[str, Read[ServerSpec]],
        sources: Mapping[str, Source],
        daemon: DaemonSpec,
        policies: Mapping[str, NamedPolicy],
    ) -> dict[str, str]:
        """Check servers one by one and together; return their API keys."""
        keys: dict[str, str] = {}
        for name, server in servers.items():
            spec, source = server.model, sources[name]
            self._problems.extend(checks.server_problems(spec, source, server.refused))
            if policies:  # none at all: a policy file is broken, and is reported itself
                self._problems.extend(checks.policy_problems(spec.kv, source, tuple(policies)))
            if isinstance(spec.api_key, ApiKeyFile) and "api_key.file" not in server.refused:
                keys[name] = self._api_key(Path(spec.api_key.file), source)
            elif isinstance(spec.api_key, str):
                keys[name] = spec.api_key
        specs = {name: server.model for name, server in servers.items()}
        self._problems.extend(checks.name_problems(specs, sources))
        with_port = {name: specs[name] for name in specs if "port" not in servers[name].refused}
        self._problems.extend(checks.port_problems(with_port, sources, daemon))
        return keys

    def _read_server(self, source: Source) -> Read[ServerSpec] | None:
        return read(
            source.node, ServerSpec, source.path, self._environ, self._problems, entry=source.entry
        )

    def _api_key(self, path: Path, source: Source) -> str:
        self._watched[path] = None
        try:
            key = decode(read_file(path)).partition("\n")[0].strip()
            exposed = path.stat().st_mode & stat.S_IROTH
        except (OSError, UnreadableError) as error:
            self._problems.extend([source.problem("api_key.file", f"the file of the key: {error}")])
            return ""
        if exposed:
            self._warnings.append(
                source.problem(
                    "api_key.file", "every user of this machine can read the key", "chmod 600"
                )
            )
        if not key:
            self._problems.extend(
                [source.problem("api_key.file", "the first line of the file is empty")]
            )
        return key

    def _content_hash(self, folder: Path, keys: Mapping[str, str]) -> str:
        digest = hashlib.sha256()
        for path, content in self._contents.items():
            for part in (os.fsencode(os.path.relpath(path, folder)), content):
                digest.update(len(part).to_bytes(8, "little") + part)
        for key in keys.values():
            digest.update(hashlib.sha256(key.encode()).digest())
        return digest.hexdigest()
