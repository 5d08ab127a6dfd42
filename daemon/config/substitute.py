"""References to the environment in text values: `${env:NAME}` and `${env:NAME:-default}`."""

from __future__ import annotations

import re
from collections.abc import Mapping

_REFERENCE = re.compile(
    r"\$\$\{|\$\{(?:env:(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?P<default>:-[^}]*)?\})?"
)
_UNUSABLE = re.compile("[\0\ud800-\udfff]")


class BadReferenceError(ValueError):
    """A reference that cannot be resolved; *hint* says what to write."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


def has_reference(text: str) -> bool:
    """Return whether *text* takes anything from the environment."""
    return "${" in text.replace("$${", "")


def substitute(text: str, environ: Mapping[str, str]) -> str:
    """Return *text* with its references resolved and `$${` unescaped.

    A variable that is set but empty is a value; a default is used only where none is set.

    Raises:
        BadReferenceError: a variable is unset without a default, or a `${` starts something else. The
            message never holds a variable's value.
    """
    return _REFERENCE.sub(lambda match: _value(match, environ), text) if "${" in text else text


def _value(match: re.Match[str], environ: Mapping[str, str]) -> str:
    if match[0] == "$${":
        return "${"
    name, default = match["name"], match["default"]
    if name is None:
        raise BadReferenceError(
            "`${` starts no reference",
            "write ${env:NAME} or ${env:NAME:-default}; $${ is a literal ${",
        )
    value = environ.get(name)
    if value is None:
        if default is None:
            raise BadReferenceError(
                f"the environment variable {name} is not set",
                f"set it, or write ${{env:{name}:-default}}",
            )
        return default[2:]
    if _UNUSABLE.search(value):
        raise BadReferenceError(
            f"the environment variable {name} is not UTF-8 text", "set it to text"
        )
    return value
