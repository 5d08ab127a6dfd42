"""Where the keys of one server (or of the daemon block) stand in the files that say them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from daemon.config.keys import SECRETS
from daemon.config.spec import ServerSpec
from daemon.config.substitute import has_reference
from daemon.config.yaml_nodes import Block, Items, Node, Place, Scalar
from daemon.errors import Problem

_STEP = re.compile(r"[^.\[\]]+")
_SECRET_KEYS = frozenset(name for model, name in SECRETS if model is ServerSpec)


@dataclass(frozen=True)
class Source:
    """One entry with its defaults merged under it; *path* is its dotted key in the file."""

    path: str
    entry: Place
    node: Block

    def problem(self, path: str, message: str, hint: str | None = None) -> Problem:
        """Return what is wrong at the key *path* of this entry."""
        where = f"{self.path}.{path}" if path else self.path
        return self.place(path).problem(where, message, hint)

    def place(self, path: str) -> Place:
        """Return where the value at *path* stands, or the nearest key above it that was written."""
        node, place = self._find(path)
        return node.place if node is not None else place

    def place_of(self, path: str) -> Place | None:
        """Return where the value at *path* was written; None when it is a default."""
        node, place = self._find(path)
        return None if node is None else place

    def written(self, path: str) -> str | None:
        """Return the text at *path* as it was written, references unresolved."""
        node, _ = self._find(path)
        return node.text if isinstance(node, Scalar) else None

    @cached_property
    def hidden(self) -> frozenset[str]:
        """The paths whose values must not be shown: secrets, and what the environment gave."""
        return frozenset(_hidden(self.node, ""))

    def hides(self, path: str) -> bool:
        """Return whether the value at *path* must not be shown."""
        first = path.partition(".")[0]
        return first in _SECRET_KEYS or path in self.hidden

    def _find(self, path: str) -> tuple[Node | None, Place]:
        """Return the node at *path*, or None and the place of the nearest key above."""
        node: Node = self.node
        place = self.entry
        for step in _STEP.findall(path):
            if isinstance(node, Block) and step in node.entries:
                entry = node.entries[step]
                node, place = entry.node, entry.place
            elif isinstance(node, Items) and step.isdigit() and int(step) < len(node.nodes):
                node = node.nodes[int(step)]
                place = node.place
            else:
                return None, place
        return (node, place) if path else (None, place)


def _hidden(node: Node, path: str) -> Iterator[str]:
    match node:
        case Scalar():
            if has_reference(node.text):
                yield path
        case Items():
            for index, item in enumerate(node.nodes):
                yield from _hidden(item, f"{path}.{index}")
        case Block():
            for name, entry in node.entries.items():
                yield from _hidden(entry.node, f"{path}.{name}" if path else name)
