"""POST /v1/chat/completions over a real socket: documents, fields and finish reasons."""

from __future__ import annotations

from typing import Any

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from daemon.worker.requests import Sampling
from tests.worker.fake_engine import MAX_CONTEXT, Script
from tests.worker.live_app import HELLO, LiveApp, live_app
from tests.worker.small_tokenizer import small_tokenizer

REPLY = "The capital of France is Paris."
REPLY_TOKENS = 8  # the end-of-sequence token included


async def sampling_of(app: LiveApp, **fields: Any) -> Sampling:
    """Return what the engine was asked for a request with *fields*."""
    answer = await app.chat(**fields)
    assert answer.status == 200, answer.body
    return app.engine.submitted[-1].sampling


def rendered(app: LiveApp) -> str:
    """Return the text of the last prompt that reached the engine."""
    return str(small_tokenizer().decode(list(app.engine.submitted[-1].prompt)))


async def test_an_answer_is_what_the_openai_types_describe() -> None:
    async with live_app() as app:
        answer = await app.chat(model="chat")
        document = ChatCompletion.model_validate(answer.json, strict=True)
        assert document.object == "chat.completion"
        assert document.id.startswith("chatcmpl-")
        assert document.model == "chat"
        assert document.choices[0].message.content == REPLY
        assert document.choices[0].finish_reason == "stop"
        assert document.usage is not None
        prompt = len(app.engine.submitted[0].prompt)
        assert (document.usage.prompt_tokens, document.usage.completion_tokens) == (prompt, 8)
        assert document.usage.total_tokens == prompt + REPLY_TOKENS
        assert answer.json["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


async def test_a_stream_is_what_the_openai_types_describe() -> None:
    async with live_app() as app:
        answer = await app.chat(stream=True)
        chunks = [ChatCompletionChunk.model_validate(e, strict=True) for e in answer.events]
        assert chunks[0].choices[0].delta.role == "assistant"
        assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1
        assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
        assert answer.text == REPLY


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("max_tokens", "finish"), [(64, "stop"), (3, "length")])
async def test_there_is_exactly_one_finish_reason(
    max_tokens: int, finish: str, stream: bool
) -> None:
    """B01, B03: a natural end is stop, a cut is length, streamed or not."""
    async with live_app() as app:
        answer = await app.chat(max_tokens=max_tokens, stream=stream)
        assert answer.finishes == [finish]


async def test_every_chunk_has_the_key_finish_reason() -> None:
    """B05."""
    async with live_app() as app:
        answer = await app.chat(stream=True)
        reasons = [event["choices"][0]["finish_reason"] for event in answer.events]
        assert set(reasons) == {None, "stop"}


@pytest.mark.parametrize(
    "fields",
    [
        {"max_completion_tokens": 5},
        {"max_tokens": 5},
        {"max_tokens": 100, "max_completion_tokens": 5},
        {"max_tokens": 5, "max_completion_tokens": None},
        {"max_tokens": 5.0},
    ],
)
async def test_either_name_caps_the_tokens_and_the_newer_wins(fields: dict[str, Any]) -> None:
    """B13."""
    async with live_app() as app:
        answer = await app.chat(**fields)
        assert answer.json["usage"]["completion_tokens"] == 5
        assert answer.finishes == ["length"]


@pytest.mark.parametrize("fields", [{}, {"max_tokens": None}, {"max_tokens": 10**9}])
async def test_without_a_cap_the_rest_of_the_context_is_there(fields: dict[str, Any]) -> None:
    """B14."""
    async with live_app() as app:
        answer = await app.chat(ignore_eos=True, **fields)
        usage = answer.json["usage"]
        assert usage["total_tokens"] == MAX_CONTEXT
        assert answer.finishes == ["length"]


async def test_the_server_may_have_a_default_cap() -> None:
    async with live_app(sampling={"max_tokens": 4}) as app:
        assert (await app.chat()).json["usage"]["completion_tokens"] == 4
        assert (await app.chat(max_tokens=6)).json["usage"]["completion_tokens"] == 6


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("Say hi", "Say hi"),
        ([{"type": "text", "text": "Say "}, {"type": "input_text", "text": "hi"}], "Say hi"),
        ([], ""),
    ],
)
async def test_content_is_a_string_or_parts(content: Any, text: str) -> None:
    async with live_app() as app:
        answer = await app.chat(messages=[{"role": "user", "content": content}])
        assert answer.status == 200
        assert rendered(app) == f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


async def test_newer_and_older_role_names_reach_the_template_as_the_ones_it_knows() -> None:
    async with live_app() as app:
        messages = [
            {"role": "developer", "content": "Be brief"},
            {"role": "user", "content": "hi"},
            {"role": "function", "name": "f", "content": "1"},
        ]
        assert (await app.chat(messages=messages)).status == 200
        assert rendered(app).startswith("<|im_start|>system\nBe brief<|im_end|>")
        assert "<|im_start|>tool\n1<|im_end|>" in rendered(app)


@pytest.mark.parametrize("call_id", [{}, {"id": None}, {"id": "call_1"}])
async def test_earlier_tool_calls_can_be_replayed(call_id: dict[str, Any]) -> None:
    """B39: ids of calls may be null or absent, and content is null beside calls."""
    call = {"type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}, **call_id}
    messages = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call_id.get("id"), "content": "2"},
    ]
    async with live_app() as app:
        assert (await app.chat(messages=messages)).status == 200


async def test_variables_reach_the_template() -> None:
    async with live_app() as app:
        await app.chat(chat_template_kwargs={"shout": "LOUD", "enable_thinking": False})
        assert rendered(app).endswith("LOUD")


async def test_a_refusal_of_the_template_is_a_400_with_its_words() -> None:
    async with live_app() as app:
        answer = await app.chat(messages=[{"role": "user", "content": "refuse me"}])
        assert answer.status == 400
        assert "I was told to refuse" in answer.error["message"]
        assert answer.error["param"] == "messages"


async def test_requests_win_over_the_servers_defaults() -> None:
    async with live_app(sampling={"temperature": 0.3, "top_k": 5}) as app:
        assert (await sampling_of(app)).temperature == 0.3
        assert (await sampling_of(app, temperature=None, top_k=None)).top_k == 5
        own = await sampling_of(app, temperature=0, top_k=7)
        assert (own.temperature, own.top_k) == (0, 7)


async def test_every_sampling_field_reaches_the_engine() -> None:
    fields = {
        "temperature": 1.5, "top_p": 0.9, "top_k": 3, "min_p": 0.1, "repetition_penalty": 1.1,
        "presence_penalty": -0.5, "frequency_penalty": 0.5, "seed": 7,
    }  # fmt: skip
    async with live_app() as app:
        assert await sampling_of(app, **fields, logit_bias={"5": -100, "6": 1.5}) == Sampling(
            **fields, logit_bias=((5, -100), (6, 1.5))
        )


@pytest.mark.parametrize(
    ("seed", "meaning"), [(-1, None), (None, None), (2**64 + 5, 5), (-2, 2**64 - 2)]
)
async def test_any_seed_is_one_the_engine_can_take(seed: int | None, meaning: int | None) -> None:
    async with live_app() as app:
        assert (await sampling_of(app, seed=seed)).seed == meaning


@pytest.mark.parametrize("top_k", [-1, 0, 100_000])
async def test_a_top_k_of_the_whole_vocabulary_is_off(top_k: int) -> None:
    async with live_app() as app:
        assert (await sampling_of(app, top_k=top_k)).top_k == 0


async def test_one_seed_gives_the_same_choices_again_and_three_seeds_differ() -> None:
    """B28, as far as the HTTP side goes: the seed reaches the engine, one for each choice."""
    async with live_app(Script(reply=None)) as app:
        first = [c["message"]["content"] for c in (await app.chat(seed=1, n=3)).json["choices"]]
        again = [c["message"]["content"] for c in (await app.chat(seed=1, n=3)).json["choices"]]
        assert first == again
        assert len(set(first)) == 3
        assert {(await app.chat(seed=seed)).text for seed in (1, 20, 30)} != {first[0]}
        unseeded = {(await app.chat()).text for _ in range(3)}
        assert len(unseeded) == 3


@pytest.mark.parametrize("stream", [False, True])
async def test_n_gives_as_many_choices(stream: bool) -> None:
    async with live_app() as app:
        answer = await app.chat(n=3, stream=stream, stream_options={"include_usage": True})
        assert answer.finishes == ["stop"] * 3
        last = answer.events[-1] if stream else answer.json
        assert last["usage"]["completion_tokens"] == 3 * REPLY_TOKENS
        assert last["usage"]["prompt_tokens"] == len(app.engine.submitted[0].prompt)
        if stream:
            indices = [c["index"] for event in answer.events for c in event["choices"]]
            assert {indices.count(index) for index in (0, 1, 2)} == {len(indices) // 3}


@pytest.mark.parametrize("stop", ["of France", ["nowhere", "of France"], ["", "of France"]])
@pytest.mark.parametrize("stream", [False, True])
async def test_stop_strings_end_the_text_and_the_sequence(stop: Any, stream: bool) -> None:
    async with live_app(Script(step_s=0.001)) as app:
        answer = await app.chat(stop=stop, stream=stream, ignore_eos=True)
        assert answer.text == "The capital "
        assert answer.finishes == ["stop"]
        assert app.engine.aborted == 1


@pytest.mark.parametrize("stop", [None, "", [], ["", ""]])
async def test_empty_stop_strings_are_ignored(stop: Any) -> None:
    async with live_app() as app:
        assert (await app.chat(stop=stop)).text == REPLY


@pytest.mark.parametrize("stream", [False, True])
async def test_log_probabilities_have_the_openai_form(stream: bool) -> None:
    """B29: bytes decode to the text, alternatives are a distribution, the likeliest comes first."""
    async with live_app() as app:
        answer = await app.chat(logprobs=True, top_logprobs=3, stream=stream)
        documents = answer.events if stream else [answer.json]
        kind: Any = ChatCompletionChunk if stream else ChatCompletion
        entries = []
        for document in documents:
            choice = kind.model_validate(document, strict=True).choices[0]
            entries += choice.logprobs.content if choice.logprobs else []
        assert b"".join(bytes(entry.bytes or []) for entry in entries).decode() == REPLY
        for entry in entries:
            assert entry.top_logprobs[0].token == entry.token
            assert len(entry.top_logprobs) == 3


async def test_log_probabilities_without_alternatives_are_of_the_sampled_token_only() -> None:
    async with live_app() as app:
        content = (await app.chat(logprobs=True)).json["choices"][0]["logprobs"]["content"]
        assert {len(entry["top_logprobs"]) for entry in content} == {0}
        assert app.engine.submitted[0].top_logprobs == 0


async def test_without_logprobs_the_engine_computes_none() -> None:
    async with live_app() as app:
        answer = await app.chat(logprobs=False)
        assert answer.json["choices"][0]["logprobs"] is None
        assert app.engine.submitted[0].top_logprobs is None


@pytest.mark.parametrize(
    ("options", "expected"),
    [({"include_usage": True}, 1), ({"include_usage": False}, 0), ({}, 0), (None, 0), ("wrong", 0)],
)
async def test_usage_comes_exactly_when_asked_for(options: Any, expected: int) -> None:
    """B06: once, behind the finish reason, and equal to the one of an answer that does not stream."""
    async with live_app() as app:
        answer = await app.chat(stream=True, stream_options=options)
        usages = [event["usage"] for event in answer.events if "usage" in event]
        whole = await app.chat()
        assert usages == [whole.json["usage"]] * expected
        if expected:
            assert answer.events[-1]["choices"] == []


@pytest.mark.parametrize("model", ["chat", "small", "org/small-model", None])
async def test_every_name_of_the_server_is_a_model(model: str | None) -> None:
    async with live_app() as app:
        answer = await app.chat(model=model)
        assert answer.json["model"] == "chat"


async def test_another_model_is_not_found() -> None:
    async with live_app() as app:
        answer = await app.chat(model="gpt-4")
        assert (answer.status, answer.error["code"]) == (404, "model_not_found")
        assert "'chat', 'small'" in answer.error["message"]


async def test_a_full_context_is_refused_in_the_words_that_clients_look_for() -> None:
    async with live_app() as app:
        answer = await app.chat(messages=[{"role": "user", "content": "x" * 2000}])
        assert answer.status == 400
        tokens = answer.error["n_prompt_tokens"]
        assert answer.error["message"] == (
            f"This model's maximum context length is {MAX_CONTEXT} tokens. "
            f"However, your messages resulted in {tokens} tokens."
        )
        assert answer.error["code"] == "context_length_exceeded"
        assert answer.error["n_ctx"] == MAX_CONTEXT
        assert not app.engine.submitted


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [], "tool_choice": "auto"},
        {"tools": [{"type": "function"}], "tool_choice": "none"},
        {"response_format": {"type": "text"}},
        {
            "user": "u",
            "store": True,
            "metadata": {},
            "service_tier": "auto",
            "parallel_tool_calls": False,
        },
        {"a_key_of_tomorrow": {"deep": [1]}},
    ],
)
async def test_what_changes_nothing_is_accepted(fields: dict[str, Any]) -> None:
    async with live_app() as app:
        assert (await app.chat(**fields)).status == 200
