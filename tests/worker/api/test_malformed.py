"""Whatever a client sends, it gets an error object with a message, and the server goes on."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.worker.live_app import CHAT, HELLO, TEXT, live_app

USER = {"role": "user", "content": "hi"}


def chat(**fields: Any) -> dict[str, Any]:
    return {"messages": HELLO} | fields


def text(**fields: Any) -> dict[str, Any]:
    return {"prompt": "The"} | fields


def content(*parts: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts)}]}


IMAGE = {"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/internal"}}
CALL = {"type": "function", "function": {"name": "f"}}

TABLE: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {}, "messages"),
    (CHAT, {"messages": None}, "messages"),
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {"messages": "hi"}, "messages"),
    (CHAT, {"messages": ["hi"]}, "messages[0]"),
    (CHAT, {"messages": [USER, {"content": "hi"}]}, "messages[1].role"),
    (CHAT, {"messages": [{"role": "robot", "content": "hi"}]}, "messages[0].role"),
    (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content"),
    (CHAT, {"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    (CHAT, {"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]}, "messages[0].tool_calls[0].function.name"),
    (CHAT, content("hi"), "messages[0].content[0]"),
    (CHAT, content({"text": "hi"}), "messages[0].content[0]"),
    (CHAT, content({"type": "text"}), "messages[0].content[0].text"),
    (CHAT, content({"type": "text", "text": "hi"}, {"type": "poem"}), "messages[0].content[1].type"),
    (CHAT, content({"type": "text", "text": "see"}, IMAGE), "messages[0].content[1]"),
    (CHAT, chat(model=5), "model"),
    (CHAT, chat(stream="yes"), "stream"),
    (CHAT, chat(max_tokens=0), "max_tokens"),
    (CHAT, chat(max_tokens=-1), "max_tokens"),
    (CHAT, chat(max_tokens=1.5), "max_tokens"),
    (CHAT, chat(max_tokens="5"), "max_tokens"),
    (CHAT, chat(max_tokens=True), "max_tokens"),
    (CHAT, chat(max_completion_tokens=0), "max_completion_tokens"),
    (CHAT, chat(temperature=2.1), "temperature"),
    (CHAT, chat(temperature=-0.1), "temperature"),
    (CHAT, chat(temperature="hot"), "temperature"),
    (CHAT, chat(temperature=True), "temperature"),
    (CHAT, chat(top_p=0), "top_p"),
    (CHAT, chat(top_p=1.1), "top_p"),
    (CHAT, chat(top_k=-2), "top_k"),
    (CHAT, chat(top_k=1.5), "top_k"),
    (CHAT, chat(min_p=2), "min_p"),
    (CHAT, chat(repetition_penalty=0), "repetition_penalty"),
    (CHAT, chat(presence_penalty=3), "presence_penalty"),
    (CHAT, chat(frequency_penalty=-3), "frequency_penalty"),
    (CHAT, chat(logit_bias={"99999999": 5}), "logit_bias"),
    (CHAT, chat(logit_bias={"the": 5}), "logit_bias"),
    (CHAT, chat(logit_bias={"-1": 5}), "logit_bias"),
    (CHAT, chat(logit_bias={"5": 101}), "logit_bias.5"),
    (CHAT, chat(logit_bias=[5]), "logit_bias"),
    (CHAT, chat(seed="x"), "seed"),
    (CHAT, chat(seed=1.5), "seed"),
    (CHAT, chat(n=0), "n"),
    (CHAT, chat(n=9), "n"),
    (CHAT, chat(stop=5), "stop"),
    (CHAT, chat(stop=["a", 5]), "stop"),
    (CHAT, chat(stop=["a"] * 17), "stop"),
    (CHAT, chat(stop="x" * 2000), "stop"),
    (CHAT, chat(logprobs=5), "logprobs"),
    (CHAT, chat(top_logprobs=5), "top_logprobs"),
    (CHAT, chat(logprobs=True, top_logprobs=21), "top_logprobs"),
    (CHAT, chat(tools=[CALL]), "tools"),
    (CHAT, chat(tools=[CALL], tool_choice="auto"), "tools"),
    (CHAT, chat(tool_choice="required"), "tool_choice"),
    (CHAT, chat(tool_choice={"type": "function", "function": {"name": "f"}}), "tool_choice"),
    (CHAT, chat(functions=[{"name": "f"}]), "functions"),
    (CHAT, chat(function_call={"name": "f"}), "function_call"),
    (CHAT, chat(response_format={"type": "json_object"}), "response_format"),
    (CHAT, chat(response_format="json"), "response_format"),
    (CHAT, chat(guided_json={}), "guided_json"),
    (CHAT, chat(grammar="root ::= x"), "grammar"),
    (CHAT, chat(chat_template_kwargs=5), "chat_template_kwargs"),
    (CHAT, chat(chat_template_kwargs={"chat_template": "{{ 1 }}"}), "chat_template_kwargs.chat_template"),
    (CHAT, chat(chat_template_kwargs={"tokenize": True}), "chat_template_kwargs.tokenize"),
    (TEXT, {}, "prompt"),
    (TEXT, text(prompt=None), "prompt"),
    (TEXT, text(prompt=5), "prompt"),
    (TEXT, text(prompt=[]), "prompt"),
    (TEXT, text(prompt=[[]]), "prompt[0]"),
    (TEXT, text(prompt=[5, -1]), "prompt[1]"),
    (TEXT, text(prompt=[5, 10**9]), "prompt[1]"),
    (TEXT, text(prompt=[5, "the"]), "prompt[1]"),
    (TEXT, text(prompt=["the", 5]), "prompt[0]"),
    (TEXT, text(prompt=[True]), "prompt[0]"),
    (TEXT, text(prompt=[[5], [5, 1.5]]), "prompt[1][1]"),
    (TEXT, text(prompt=[[5], "the"]), "prompt[1]"),
    (TEXT, text(logprobs=True), "logprobs"),
    (TEXT, text(logprobs=21), "logprobs"),
    (TEXT, text(n=0), "n"),
    (TEXT, text(best_of=3), "best_of"),
    (TEXT, text(suffix="the end"), "suffix"),
    (TEXT, text(echo=True, logprobs=1), "echo"),
    (TEXT, text(echo="yes"), "echo"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "param"), TABLE)
async def test_a_bad_field_is_a_400_that_names_it(
    path: str, body: dict[str, Any], param: str
) -> None:
    async with live_app() as app:
        for stream in ({}, {"stream": True}) if "stream" not in body else ({},):
            answer = await app.post(path, body | stream)
            assert answer.status == 400, answer.body
            assert answer.error["type"] == "invalid_request_error"
            assert answer.error["param"] == param
            assert param.rpartition(".")[2].split("[")[0] in answer.error["message"]
        assert not app.engine.submitted


@pytest.mark.parametrize(
    "raw",
    [
        b"", b"{", b"[]", b"5", b"null", b'"text"', b"\xff\xfe", b'{"messages": NaN}', b'{"n": 1e999}',
        b"[" * 100_000, b'{"seed": ' + b"9" * 10_000 + b"}", b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"messages": [{"role": "user", "content": [{"type": "text", "text": "\\ud800"}]}]}',
    ],
)  # fmt: skip
@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_a_body_that_is_no_request_is_a_400(path: str, raw: bytes) -> None:
    async with live_app() as app:
        answer = await app.post(path, data=raw)
        assert answer.status == 400
        assert answer.error["message"]
        assert (await app.chat()).status == 200


async def test_half_a_surrogate_pair_in_a_name_is_echoed_as_json() -> None:
    async with live_app() as app:
        answer = await app.post(TEXT, data=b'{"model": "\\ud800"}')
        assert (answer.status, answer.error["code"]) == (404, "model_not_found")
        assert "\ud800" in answer.error["message"]


async def test_a_wrong_content_type_does_not_matter() -> None:
    async with live_app() as app:
        headers = {"Content-Type": "text/plain"}
        answer = await app.post(CHAT, data=json.dumps({"messages": HELLO}), headers=headers)
        assert answer.status == 200


async def test_a_body_that_is_not_what_its_encoding_says_is_a_400() -> None:
    async with live_app() as app:
        headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
        answer = await app.post(CHAT, data=b"this is not gzip", headers=headers)
        assert answer.status == 400
        assert answer.error["message"]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3)
    ),
    max_leaves=6,
)
FIELDS = [
    "model", "messages", "prompt", "stream", "stream_options", "n", "max_tokens", "max_completion_tokens", "temperature",
    "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "seed", "stop",
    "logprobs", "top_logprobs", "tools", "tool_choice", "functions", "function_call", "response_format", "echo", "suffix",
    "best_of", "chat_template_kwargs", "reasoning_effort", "ignore_eos",
]  # fmt: skip
message = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "tool", "x"]), "content": json_values},
    optional={"tool_calls": json_values, "name": json_values, "tool_call_id": json_values},
)
bodies = st.builds(
    lambda given, start: start | given,
    st.dictionaries(st.sampled_from(FIELDS), json_values, max_size=4),
    st.sampled_from([{}, {"messages": HELLO}, {"prompt": "The"}])
    | st.fixed_dictionaries({"messages": st.lists(message, max_size=3)}),
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(st.sampled_from([CHAT, TEXT]), bodies), min_size=1, max_size=12))
def test_no_body_fails_the_server(requests: list[tuple[str, dict[str, Any]]]) -> None:
    """B41: an answer or an error object with a message; never a 500, never a hang."""

    async def scenario() -> None:
        async with live_app() as app:
            for path, body in requests:
                answer = await app.post(path, data=json.dumps(body))
                assert answer.status in (200, 400, 404), (body, answer.body)
                if answer.status != 200:
                    assert answer.error["message"]
            assert (await app.chat()).status == 200
            assert not app.engine.open

    asyncio.run(scenario())
