"""Take secrets out of what leaves this machine: those that are known, and whatever looks like one."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from urllib.parse import quote

from daemon.ops.applied import HIDDEN

_SHORTEST = 4  # characters; anything shorter is all over any text, and no secret
_NAMES = r"api[_-]?key|access[_-]?key|token|secret|passw(?:or)?d|passphrase|credential|authorization|cookie"
_SECRET_NAME = re.compile(rf"(?:^|[_-])(?:key|pat|auth|{_NAMES})s?(?:$|[_-])", re.IGNORECASE)
_SHAPES = (
    # Authorization: Bearer …, Basic …
    (re.compile(r"\b(bearer|basic)(\s+)[^\s\"',;}]+", re.IGNORECASE), rf"\1\2{HIDDEN}"),
    # api_key=…, "token": "…", but not tokens_total: 3
    (
        re.compile(
            rf"\b((?:\w*[_-])?(?:{_NAMES}))(\\?[\"']?\s*[:=]\s*\\?[\"']?)(?!\s)[^\s\"',;}}\\]+",
            re.IGNORECASE,
        ),
        rf"\1\2{HIDDEN}",
    ),
    # OpenAI's, Hugging Face's, GitHub's, Amazon's keys
    (
        re.compile(r"\b(?:sk|pk|hf|gh[opsu]|github_pat|AKIA|xox[abp])[-_]?[A-Za-z0-9_-]{12,}"),
        HIDDEN,
    ),
    # the password in an address
    (re.compile(r"(://)[^\s/@:]+:[^\s/@]+@"), rf"\1{HIDDEN}@"),
)


def is_secret_name(name: str) -> bool:
    """Whether a variable called *name* holds a secret, going by its name."""
    return _SECRET_NAME.search(name) is not None


class Redaction:
    """Hides *secrets*, and what has the shape of one."""

    def __init__(self, secrets: Iterable[str]) -> None:
        known = {form for it in secrets for form in _forms(it) if len(form) >= _SHORTEST}
        self._known = sorted(known, key=len, reverse=True)  # one may contain another

    def text(self, text: str) -> str:
        """Return *text* without them."""
        for secret in self._known:
            text = text.replace(secret, HIDDEN)
        for shape, instead in _SHAPES:
            text = shape.sub(instead, text)
        return text

    def document(self, value: object) -> object:
        """Return *value*, as JSON has it, without them; keys that name a secret lose any value."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return {
                self.text(str(name)): HIDDEN
                if isinstance(it, str) and it and is_secret_name(str(name))
                else self.document(it)
                for name, it in value.items()
            }
        if isinstance(value, (list, tuple)):
            return [self.document(it) for it in value]
        return value


def _forms(secret: str) -> Iterator[str]:
    """Yield *secret* as it may stand in a text: whole, line by line, and as JSON or an address writes it."""
    for it in {secret, secret.strip(), *(line.strip() for line in secret.splitlines())}:
        yield it
        yield json.dumps(it)[1:-1]
        yield json.dumps(it, ensure_ascii=False)[1:-1]
        yield quote(it, safe="")
