"""YAML text as a tree of nodes that know where they stand.

Everything that YAML would decide behind the writer's back is taken away here: a scalar stays the text
that was written until a reader says what it wants, duplicate keys and tags are problems, aliases are
bounded. Merge keys (`<<`) are applied, because they are explicit.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import yaml

from daemon.errors import ConfigError, Problem

MAX_DEPTH = (
    24  # servers.yaml needs 7; what pydantic and we walk by recursion stays far from any limit
)
MAX_NODES = (
    400_000  # aliases counted each time they are used; 1,000 servers with every key need 60,000
)

_EXACT_CHARACTERS = 200_000  # a second's work for PyYAML's own parser
_MERGE = "<<"
_TEXT_TAGS = ("!", "tag:yaml.org,2002:str")
_UNUSABLE = re.compile("[\0\ud800-\udfff]")  # no path, variable or JSON document can hold these


@dataclass(frozen=True, slots=True)
class Place:
    """A position in a file; lines and columns count from 1."""

    file: str
    line: int
    col: int

    def problem(self, path: str, message: str, hint: str | None = None) -> Problem:
        """Return what is wrong at this place; what a terminal would act on is escaped."""
        return Problem(self.file, self.line, self.col, _visible(path), _visible(message), hint)

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


def _visible(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


@dataclass(frozen=True, slots=True)
class Scalar:
    """Text as written; *plain* (without quotes) text may also mean a number, a boolean or null."""

    place: Place
    text: str
    plain: bool
    size: int = 1
    depth: int = 0


@dataclass(frozen=True, slots=True)
class Items:
    """A sequence."""

    place: Place
    nodes: tuple[Node, ...]
    size: int = 1
    depth: int = 1


@dataclass(frozen=True, slots=True)
class Entry:
    """One key of a block: where the key stands, and its value."""

    place: Place
    node: Node


@dataclass(frozen=True, slots=True)
class Block:
    """A mapping; its own keys come first, then those of merge keys."""

    place: Place
    entries: Mapping[str, Entry]
    size: int = 1
    depth: int = 1


Node = Scalar | Items | Block


@dataclass(slots=True)
class _Open:
    """A sequence or mapping whose end has not been read yet."""

    place: Place
    anchor: str | None
    is_block: bool
    children: list[Node] = field(default_factory=list)
    size: int = 1
    depth: int = 0


def compose(text: str, file: str, problems: list[Problem]) -> Node | None:
    """Return the one document in *text*, None when it is empty.

    What can be passed over (a duplicate key, a tag) is added to *problems*.

    Raises:
        ConfigError: *text* is not YAML, or is built to exhaust a reader.
    """
    fast = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        return _composed(text, file, problems, fast)
    except yaml.YAMLError as error:
        raise ConfigError(
            [*problems, _syntax_problem(_exact(text, file) or error, text, file)]
        ) from error


def _composed(
    text: str, file: str, problems: list[Problem], loader: type[yaml.SafeLoader]
) -> Node | None:
    composer = _Composer(file, problems)
    for event in yaml.parse(text, Loader=loader):
        composer.take(event)
    return composer.root


def _exact(text: str, file: str) -> yaml.YAMLError | None:
    """Return what PyYAML's own parser says: libyaml is quick, but points and explains less exactly."""
    if len(text) > _EXACT_CHARACTERS:
        return None
    try:
        _composed(text, file, [], yaml.SafeLoader)
    except yaml.YAMLError as error:
        return error
    return None


_SYNTAX_HINTS = {
    "'\\t'": "indent with spaces, not tabs",
    "mapping values are not allowed": "quote a value that contains a colon, and check the indentation",
    "expected <block end>": "check the indentation of this line",
    "could not find expected ':'": "each line of a block is `key: value`; quote text that spans lines",
    "<stream end>": "a bracket or a quote is never closed",
    "end of stream": "a bracket or a quote is never closed",
    "'@'": "quote a value that starts with this character",
    "'`'": "quote a value that starts with this character",
    "'%'": "quote a value that starts with this character",
}


def _syntax_problem(error: yaml.YAMLError, text: str, file: str) -> Problem:
    if isinstance(error, yaml.MarkedYAMLError):
        mark = error.problem_mark or error.context_mark
        line, col = (mark.line + 1, mark.column + 1) if mark else (0, 0)
        said = error.problem or error.context or "unreadable"
        if error.context and error.context_mark and error.context_mark.line + 1 != line:
            said += f" ({error.context} that starts on line {error.context_mark.line + 1})"
    elif isinstance(error, yaml.reader.ReaderError):
        before = text[: error.position]
        line, col = before.count("\n") + 1, error.position - before.rfind("\n")
        said = "a control character is not allowed"
    else:
        line, col, said = 0, 0, str(error)
    hint = next((hint for sign, hint in _SYNTAX_HINTS.items() if sign in said), None)
    return Problem(file, line, col, "", f"not valid YAML: {said}", hint)


class _Composer:
    """Builds nodes from parser events without recursion, so that no text can exhaust the stack."""

    def __init__(self, file: str, problems: list[Problem]) -> None:
        self._file = file
        self._problems = problems
        self._open: list[_Open] = []
        self._anchors: dict[str, Node] = {}
        self._documents = 0
        self.root: Node | None = None

    def take(self, event: yaml.Event) -> None:
        """Add *event* to the tree."""
        match event:
            case yaml.DocumentStartEvent():
                self._documents += 1
                if self._documents > 1:
                    self._fail(
                        event,
                        "a second document starts here",
                        "write one document; remove the `---`",
                    )
            case yaml.SequenceStartEvent() | yaml.MappingStartEvent():
                self._refuse_tag(event)
                is_block = isinstance(event, yaml.MappingStartEvent)
                self._open.append(_Open(self._place(event), event.anchor, is_block))
                if len(self._open) > MAX_DEPTH:
                    self._fail(event, f"nested more than {MAX_DEPTH} levels deep")
            case yaml.SequenceEndEvent() | yaml.MappingEndEvent():
                done = self._open.pop()
                build = self._block if done.is_block else _items
                self._add(event, build(done), done.anchor)
            case yaml.ScalarEvent():
                self._refuse_tag(event)
                self._add(event, self._scalar(event), event.anchor)
            case yaml.AliasEvent():
                self._add(event, self._target(event), None)
            case _:
                pass  # the ends of the stream and of the document

    def _place(self, event: yaml.Event) -> Place:
        mark = event.start_mark
        return (
            Place(self._file, mark.line + 1, mark.column + 1) if mark else Place(self._file, 0, 0)
        )

    def _fail(self, event: yaml.Event, message: str, hint: str | None = None) -> None:
        raise ConfigError([*self._problems, self._place(event).problem("", message, hint)])

    def _refuse_tag(self, event: yaml.NodeEvent) -> None:
        tag = getattr(event, "tag", None)
        if tag and tag not in _TEXT_TAGS:
            shown = tag.replace("tag:yaml.org,2002:", "!!")
            self._problems.append(
                self._place(event).problem("", f"the tag {shown} is not allowed", "remove it")
            )

    def _scalar(self, event: yaml.ScalarEvent) -> Scalar:
        place = self._place(event)
        if _UNUSABLE.search(event.value):
            self._problems.append(place.problem("", "a NUL or a lone surrogate is not text"))
            return Scalar(place, "", plain=False)
        return Scalar(place, event.value, plain=event.style in (None, "") and event.tag is None)

    def _target(self, event: yaml.AliasEvent) -> Node:
        node = self._anchors.get(event.anchor or "")
        if node is None:
            message = f"the alias *{event.anchor} names no anchor that is complete above it"
            raise ConfigError([*self._problems, self._place(event).problem("", message)])
        return node

    def _add(self, event: yaml.Event, node: Node, anchor: str | None) -> None:
        if anchor is not None:
            self._anchors[anchor] = node
        if not self._open:
            self.root = node
            return
        parent = self._open[-1]
        parent.children.append(node)
        parent.size += node.size
        parent.depth = max(parent.depth, node.depth)
        if parent.size > MAX_NODES:
            self._fail(event, f"aliases included, this holds more than {MAX_NODES:,} values")
        if parent.depth + len(self._open) > MAX_DEPTH:
            self._fail(event, f"nested more than {MAX_DEPTH} levels deep")

    def _block(self, done: _Open) -> Block:
        entries: dict[str, Entry] = {}
        merged: list[Block] = []
        for key, node in zip(done.children[::2], done.children[1::2], strict=True):
            if not isinstance(key, Scalar):
                self._problems.append(
                    key.place.problem("", "a key must be text, not a list or a mapping")
                )
            elif key.text in entries:
                first = entries[key.text].place.line
                self._problems.append(
                    key.place.problem(
                        "", f'duplicate key "{key.text}"; it is first on line {first}', "keep one"
                    )
                )
            elif key.text == _MERGE and key.plain:
                merged.extend(self._merged(node))
            else:
                entries[key.text] = Entry(key.place, node)
        for block in merged:
            for name, entry in block.entries.items():
                entries.setdefault(name, entry)
        return Block(done.place, entries, done.size, done.depth + 1)

    def _merged(self, node: Node) -> Iterable[Block]:
        for candidate in node.nodes if isinstance(node, Items) else (node,):
            if isinstance(candidate, Block):
                yield candidate
            else:
                self._problems.append(
                    candidate.place.problem("", "`<<` merges mappings only", "write `<<: *anchor`")
                )


def _items(done: _Open) -> Items:
    return Items(done.place, tuple(done.children), done.size, done.depth + 1)
