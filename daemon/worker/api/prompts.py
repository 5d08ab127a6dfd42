"""Conversations and texts to token ids.

Templates and tokenizers are CPU-heavy and not known to be safe to share, so one thread of their own runs them.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

from daemon.worker.api.errors import ApiError, invalid, unavailable_feature
from daemon.worker.api.openai import ChatMessage
from daemon.worker.text import Detokenizer
from daemon.worker.vocabulary import SpellingTokenizer

# developer is OpenAI's newer word for system, function its older one for tool; templates know the right-hand ones
_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
_TEXT_PARTS = ("text", "input_text", "output_text")
# Arguments of apply_chat_template that are ours; everything else reaches the template as a variable.
_RESERVED = frozenset({
    "messages", "conversation", "tools", "documents", "chat_template", "add_generation_prompt", "continue_final_message",
    "tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask",
    "tokenizer_kwargs",
})  # fmt: skip


class Tokenizer(SpellingTokenizer, Protocol):
    """What we use of mlx-lm's tokenizer."""

    @property
    def has_chat_template(self) -> bool:
        """Whether the model came with a chat template."""
        ...

    @property
    def chat_template(self) -> object:
        """The model's chat template: text, several by name, or None."""
        ...

    @property
    def bos_token(self) -> str | None:
        """The spelling of the token that begins a text."""
        ...

    @property
    def bos_token_id(self) -> int | None:
        """The token that begins a text."""
        ...

    @property
    def eos_token(self) -> str | None:
        """The spelling of the token that ends a text."""
        ...

    @property
    def detokenizer(self) -> Detokenizer:
        """A fresh streaming detokenizer."""
        ...

    def encode(self, text: str, /, *, add_special_tokens: bool) -> list[int]:
        """Return the token ids of *text*."""
        ...

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, object]], /, **kwargs: object
    ) -> str:
        """Return *messages* as the text that the model was trained on."""
        ...


ResultT = TypeVar("ResultT")


class Prompts:
    """Makes token ids, one request after the other."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="prompts")

    async def chat(
        self, messages: Sequence[Mapping[str, object]], variables: Mapping[str, object]
    ) -> tuple[int, ...]:
        """Return the token ids of a conversation, up to where the assistant's answer begins.

        Raises:
            ApiError: there is no template, or it refuses these messages.
        """
        return await self._run(lambda: self._encode(self._render(messages, variables), "messages"))

    async def text(self, prompt: str, param: str) -> tuple[int, ...]:
        """Return the token ids of *prompt* as a model sees a text from its beginning."""
        return await self._run(lambda: self._encode(prompt, param, begin=True))

    async def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of *tokens*."""
        return await self._run(lambda: self._tokenizer.decode(list(tokens)))

    def close(self) -> None:
        """Let the thread go."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _run(self, work: Callable[[], ResultT]) -> ResultT:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _render(
        self, messages: Sequence[Mapping[str, object]], variables: Mapping[str, object]
    ) -> str:
        if not self._tokenizer.has_chat_template and self._tokenizer.chat_template is None:
            raise invalid(
                "This model has no chat template; use /v1/completions, or set chat_template for this server.",
                "messages",
            )
        try:
            return self._tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True, **variables
            )
        except Exception as error:  # noqa: BLE001 - a template is the model's program: it may raise anything, and does so about these messages
            raise invalid(
                f"The model's chat template refused these messages: {error}", "messages"
            ) from None

    def _encode(self, text: str, param: str, *, begin: bool = False) -> tuple[int, ...]:
        try:
            text.encode()
        except UnicodeEncodeError:
            raise invalid(f"'{param}' has half of a surrogate pair in it.", param) from None
        tokens = tuple(self._tokenizer.encode(text, add_special_tokens=begin))
        if tokens:
            return tokens
        if self._tokenizer.bos_token_id is None:
            raise invalid(f"'{param}' is empty, and this model has no token to begin with.", param)
        return (self._tokenizer.bos_token_id,)


def template_variables(
    given: Mapping[str, object] | None, reasoning_effort: str | None
) -> dict[str, object]:
    """Return the variables that a request hands to the chat template.

    Raises:
        ApiError: one of them is an argument of ours.
    """
    for name in given or {}:
        if name in _RESERVED:
            param = f"chat_template_kwargs.{name}"
            raise invalid(f"'{param}' cannot be set by a request.", param)
    effort = {} if reasoning_effort is None else {"reasoning_effort": reasoning_effort}
    return effort | dict(given or {})


def template_messages(messages: Sequence[ChatMessage]) -> list[dict[str, object]]:
    """Return *messages* as chat templates expect them: plain text, known roles, arguments as objects.

    Raises:
        ApiError: a role is unknown or a content is not text.
    """
    return [_template_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _template_message(message: ChatMessage, where: str) -> dict[str, object]:
    role = _ROLES.get(message.role)
    if role is None:
        choices = ", ".join(_ROLES)
        raise invalid(f"Unknown role '{message.role}'; write one of {choices}.", f"{where}.role")
    if message.content is None and role in ("system", "user"):
        raise invalid(f"A message of the role '{message.role}' needs content.", f"{where}.content")
    rendered: dict[str, object] = {
        "role": role,
        "content": _content(message.content, f"{where}.content"),
    }
    for key in ("name", "reasoning_content", "tool_call_id"):
        value = getattr(message, key)
        if value is not None:
            rendered[key] = value
    if message.tool_calls:
        rendered["tool_calls"] = [
            {
                **({} if call.id is None else {"id": call.id}),
                "type": "function",
                "function": {
                    "name": call.function.name,
                    "arguments": _arguments(call.function.arguments),
                },
            }
            for call in message.tool_calls
        ]
    return rendered


def _content(content: object, where: str) -> str:
    """Return *content* as text; templates that join strings cannot take null."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid(f"'{where}' must be a string or a list of parts.", where)
    return "".join(_part(part, f"{where}[{i}]") for i, part in enumerate(content))


def _part(part: object, where: str) -> str:
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        raise invalid(f"'{where}' must be an object with a type, such as text.", where)
    kind = part["type"]
    key = "refusal" if kind == "refusal" else "text"
    if kind != "refusal" and kind not in _TEXT_PARTS:
        raise _unreadable_part(kind, where)
    text = part.get(key)
    if not isinstance(text, str):
        raise invalid(f"'{where}.{key}' must be a string.", f"{where}.{key}")
    return text


def _unreadable_part(kind: str, where: str) -> ApiError:
    if "image" in kind or "audio" in kind or "video" in kind or "file" in kind:
        return unavailable_feature(
            f"This model takes text only; '{where}' is of the type '{kind}'.", where
        )
    return invalid(f"Unknown type '{kind}' of '{where}'; write text.", f"{where}.type")


def _arguments(arguments: object) -> object:
    """Return the arguments of a call as an object, which most templates need; what is no JSON stays text."""
    if not isinstance(arguments, str):
        return {} if arguments is None else arguments
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
