"""The requests of the OpenAI API that this server understands, and what they mean to the engine.

Unknown keys are ignored, as clients send many; a documented feature that is not here is refused, never ignored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from daemon.config.spec import SamplingSpec
from daemon.worker.api.errors import ApiError, context_overflow, invalid, unavailable_feature
from daemon.worker.requests import GenerationRequest, Sampling

MAX_CHOICES = 8
MAX_STOPS = 16
MAX_STOP_CHARS = 1024  # a held-back prefix is compared for each token
MAX_LOGPROBS = 20
_SEED_MASK = 2**64 - 1

# Extensions of other servers that constrain the output: ignoring them would return what the caller cannot parse.
_CONSTRAINTS = (
    "guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs", "grammar", "json_schema",
)  # fmt: skip


def _whole(value: object) -> object:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _stops(value: object) -> object:
    listed = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(listed, list) or not all(isinstance(stop, str) for stop in listed):
        raise ValueError("write a string or a list of strings")
    if len(listed) > MAX_STOPS:
        raise ValueError(f"at most {MAX_STOPS} stop strings are possible")
    if any(len(stop) > MAX_STOP_CHARS for stop in listed):
        raise ValueError(f"a stop string has at most {MAX_STOP_CHARS} characters")
    return [stop for stop in listed if stop]


Whole = Annotated[int, BeforeValidator(_whole)]
Number = Annotated[float, Field(allow_inf_nan=False)]


class _Body(BaseModel):
    model_config = ConfigDict(extra="allow", frozen=True, strict=True)


class GenerationBody(_Body):
    """The fields that every generating endpoint shares; null is the same as absent."""

    model: str | None = None
    stream: bool | None = None
    stream_options: Any = None
    n: Annotated[Whole, Field(ge=1, le=MAX_CHOICES)] | None = None
    max_tokens: Annotated[Whole, Field(ge=1)] | None = None
    temperature: Annotated[Number, Field(ge=0, le=2)] | None = None
    top_p: Annotated[Number, Field(gt=0, le=1)] | None = None
    top_k: Annotated[Whole, Field(ge=-1)] | None = None
    min_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[Number, Field(gt=0, le=10)] | None = None
    presence_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    logit_bias: dict[str, Annotated[Number, Field(ge=-100, le=100)]] | None = None
    seed: Whole | None = None
    stop: Annotated[list[str], BeforeValidator(_stops)] = []
    ignore_eos: bool | None = None

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk of token counts."""
        return isinstance(self.stream_options, dict) and (
            self.stream_options.get("include_usage") is True
        )

    @property
    def wanted_tokens(self) -> int | None:
        """The caller's cap on generated tokens."""
        return self.max_tokens


class FunctionCall(_Body):
    """What an earlier answer called; *arguments* is JSON text on the wire."""

    name: str
    arguments: Any = None


class ToolCall(_Body):
    """One call in an earlier answer of the assistant."""

    id: str | None = None
    function: FunctionCall


class ChatMessage(_Body):
    """One message of a conversation; its content is checked where its place is known."""

    role: str
    content: Any = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None


class ChatBody(GenerationBody):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Annotated[Whole, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[Whole, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    functions: list[Any] | None = None
    function_call: Any = None
    response_format: Any = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def wanted_tokens(self) -> int | None:
        """The caller's cap on generated tokens; the newer name wins."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    prompt: Any = None
    logprobs: Annotated[Whole, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool | None = None
    best_of: Whole | None = None
    suffix: str | None = None


BodyT = TypeVar("BodyT", bound=GenerationBody)


def parse(kind: type[BodyT], document: Mapping[str, object]) -> BodyT:
    """Return *document* as a request of *kind*.

    Raises:
        ApiError: a field is missing, malformed or out of range, or asks for what is not available.
    """
    try:
        body = kind.model_validate(document)
    except ValidationError as error:
        raise _refusal(error) from None
    for field in _CONSTRAINTS:
        if document.get(field) is not None:
            raise unavailable_feature(f"'{field}' is not available on this server.", field)
    return body


def refuse_unavailable_chat(body: ChatBody) -> None:
    """Refuse what chat completions document and this server does not have."""
    no_calls = body.tool_choice == "none"
    if body.tools and not no_calls:
        raise unavailable_feature(
            "Tools are not available on this server yet; leave 'tools' out.", "tools"
        )
    if body.tool_choice not in (None, "none", "auto"):
        raise unavailable_feature(
            "'tool_choice' can only be 'none' or 'auto': tools are not available on this server yet.",
            "tool_choice",
        )
    if body.functions and body.function_call != "none":
        raise unavailable_feature(
            "Functions are not available on this server yet; leave 'functions' out.", "functions"
        )
    if body.function_call not in (None, "none", "auto"):
        raise unavailable_feature(
            "'function_call' can only be 'none' or 'auto': functions are not available here.",
            "function_call",
        )
    form = body.response_format
    if form is not None and not (isinstance(form, dict) and form.get("type") == "text"):
        raise unavailable_feature(
            '\'response_format\' can only be {"type": "text"} on this server.', "response_format"
        )
    if body.top_logprobs is not None and not body.logprobs:
        raise invalid("'top_logprobs' needs 'logprobs': true.", "top_logprobs")


def refuse_unavailable_completion(body: CompletionBody) -> None:
    """Refuse what completions document and this server does not have."""
    if body.best_of not in (None, 1, body.n):
        raise unavailable_feature("'best_of' can only equal 'n' on this server.", "best_of")
    if body.suffix:
        raise unavailable_feature("'suffix' is not available on this server.", "suffix")
    if body.echo and body.logprobs is not None:
        raise unavailable_feature("'echo' together with 'logprobs' is not available.", "echo")


def sampling(body: GenerationBody, defaults: SamplingSpec, vocab_size: int) -> Sampling:
    """Return how to sample for *body*: its own values, then the server's defaults, then the API's."""
    api = Sampling()
    top_k = _first(body.top_k, defaults.top_k, api.top_k)
    return Sampling(
        temperature=_first(body.temperature, defaults.temperature, api.temperature),
        top_p=_first(body.top_p, defaults.top_p, api.top_p),
        top_k=top_k if 0 < top_k < vocab_size else 0,  # all of the vocabulary is the same as off
        min_p=_first(body.min_p, defaults.min_p, api.min_p),
        repetition_penalty=_first(
            body.repetition_penalty, defaults.repetition_penalty, api.repetition_penalty
        ),
        presence_penalty=_first(body.presence_penalty, None, api.presence_penalty),
        frequency_penalty=_first(body.frequency_penalty, None, api.frequency_penalty),
        logit_bias=_logit_bias(body.logit_bias or {}, vocab_size),
        seed=None if body.seed in (None, -1) else body.seed & _SEED_MASK,
    )


def generation_requests(
    body: GenerationBody,
    prompt: tuple[int, ...],
    *,
    top_logprobs: int | None,
    defaults: SamplingSpec,
    n_ctx: int,
    vocab_size: int,
    param: str,
) -> list[GenerationRequest]:
    """Return one sequence for each choice of *prompt*; the choices of one seed differ, and reproducibly.

    Raises:
        ApiError: a value does not fit this model, or the prompt leaves no room for a token.
    """
    shared = sampling(body, defaults, vocab_size)
    max_tokens = token_budget(
        len(prompt),
        wanted=body.wanted_tokens,
        default=defaults.max_tokens,
        n_ctx=n_ctx,
        param=param,
    )
    return [
        GenerationRequest(
            prompt=prompt,
            max_tokens=max_tokens,
            sampling=replace(shared, seed=_seed_of(shared.seed, choice)),
            top_logprobs=None if top_logprobs is None else min(top_logprobs, vocab_size),
            ignore_eos=bool(body.ignore_eos),
        )
        for choice in range(body.n or 1)
    ]


def token_budget(
    prompt_tokens: int, *, wanted: int | None, default: int | None, n_ctx: int, param: str
) -> int:
    """Return how many tokens to generate: at most *wanted*, else *default*, else what the context holds.

    Raises:
        ApiError: the prompt leaves no room for a single token.
    """
    room = n_ctx - prompt_tokens
    if room < 1:
        raise context_overflow(n_ctx, prompt_tokens, param)
    return min(_first(wanted, default, room), room)


def prompts(value: object, vocab_size: int) -> list[str | tuple[int, ...]]:
    """Return the prompts of a completion: texts, or token ids that exist.

    Raises:
        ApiError: *value* is none of the four forms of the API.
    """
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise invalid(
            "'prompt' must be a string, a list of strings, a list of token ids, or a list of those.",
            "prompt",
        )
    if all(isinstance(item, str) for item in value):
        return list(value)
    if isinstance(value[0], list):
        return [
            _token_ids(item, f"prompt[{place}]", vocab_size) for place, item in enumerate(value)
        ]
    return [_token_ids(value, "prompt", vocab_size)]


def _seed_of(seed: int | None, choice: int) -> int | None:
    return None if seed is None else (seed + choice) & _SEED_MASK


def _token_ids(value: object, param: str, vocab_size: int) -> tuple[int, ...]:
    if not isinstance(value, list) or not value:
        raise invalid(f"'{param}' must be a list of token ids, at least one.", param)
    for place, token in enumerate(value):
        if type(token) is not int or not 0 <= token < vocab_size:
            raise invalid(
                f"'{param}[{place}]' must be a token id from 0 to {vocab_size - 1}.",
                f"{param}[{place}]",
            )
    return tuple(value)


def _logit_bias(bias: Mapping[str, float], vocab_size: int) -> tuple[tuple[int, float], ...]:
    pairs = []
    for key, value in bias.items():
        token = int(key) if key.isascii() and key.isdigit() and len(key) < 12 else -1
        if not 0 <= token < vocab_size:
            raise invalid(
                f"'logit_bias' has the key {key!r}; write token ids from 0 to {vocab_size - 1}.",
                "logit_bias",
            )
        pairs.append((token, value))
    return tuple(pairs)


ValueT = TypeVar("ValueT", int, float)


def _first(own: ValueT | None, default: ValueT | None, last: ValueT) -> ValueT:
    if own is not None:
        return own
    return last if default is None else default


def _refusal(error: ValidationError) -> ApiError:
    """Return the first problem of *error* as a 400 that names the place."""
    problem = error.errors(include_url=False, include_input=False)[0]
    param = field_path(problem["loc"])
    if problem["type"] == "missing":
        return invalid(f"Missing required parameter: '{param}'.", param)
    cause = problem.get("ctx", {}).get("error")
    message = str(cause) if cause is not None else problem["msg"]
    return invalid(f"Invalid value for '{param}': {message[:1].lower()}{message[1:]}.", param)


def field_path(parts: Sequence[int | str]) -> str:
    """Return a place in the body as clients write it: ``messages[2].role``."""
    path = ""
    for part in parts:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path
