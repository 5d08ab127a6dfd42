"""POST /v1/completions over a real socket."""

from __future__ import annotations

from typing import Any

import pytest
from openai.types import Completion

from tests.worker.fake_engine import Script
from tests.worker.live_app import TEXT, live_app
from tests.worker.small_tokenizer import small_tokenizer

REPLY = "The capital of France is Paris."


async def test_an_answer_is_what_the_openai_types_describe() -> None:
    async with live_app() as app:
        answer = await app.complete()
        document = Completion.model_validate(answer.json, strict=True)
        assert document.object == "text_completion"
        assert document.id.startswith("cmpl-")
        assert document.choices[0].text == REPLY
        assert document.choices[0].finish_reason == "stop"


async def test_stream_chunks_share_one_id_and_end_with_one_finish_reason() -> None:
    """B07."""
    async with live_app() as app:
        answer = await app.complete(stream=True)
        assert len({(event["id"], event["created"]) for event in answer.events}) == 1
        assert {event["object"] for event in answer.events} == {"text_completion"}
        assert answer.text == REPLY
        assert answer.finishes == ["stop"]
        assert answer.frames[-1] == "data: [DONE]"


async def test_the_leading_space_of_a_continuation_is_kept() -> None:
    async with live_app(Script(reply=" of France")) as app:
        assert (await app.complete()).text == " of France"
        assert (await app.complete(stream=True)).text == " of France"


@pytest.mark.parametrize(
    ("prompt", "count"),
    [("The", 1), (["The", "of"], 2), ([5, 6], 1), ([[5], [6, 7], [8]], 3)],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_all_four_forms_of_prompts(prompt: Any, count: int, stream: bool) -> None:
    async with live_app() as app:
        answer = await app.complete(prompt=prompt, stream=stream)
        assert answer.status == 200
        assert answer.finishes == ["stop"] * count
        assert len(app.engine.submitted) == count


async def test_token_ids_reach_the_engine_as_they_are() -> None:
    async with live_app() as app:
        await app.complete(prompt=[[5, 6], [7]])
        assert [request.prompt for request in app.engine.submitted] == [(5, 6), (7,)]


async def test_choices_of_one_prompt_are_adjacent() -> None:
    async with live_app() as app:
        answer = await app.complete(prompt=["The", "of"], n=2)
        assert [choice["index"] for choice in answer.json["choices"]] == [0, 1, 2, 3]
        prompts = [request.prompt for request in app.engine.submitted]
        assert prompts[0] == prompts[1] != prompts[2] == prompts[3]
        assert answer.json["usage"]["prompt_tokens"] == len(prompts[0]) + len(prompts[2])


async def test_an_empty_prompt_begins_at_the_beginning() -> None:
    async with live_app() as app:
        assert (await app.complete(prompt="")).status == 200
        assert app.engine.submitted[0].prompt == (small_tokenizer().bos_token_id,)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["The capital", [[5, 6], [7]]])
async def test_echo_puts_the_prompt_in_front(prompt: Any, stream: bool) -> None:
    """B07."""
    async with live_app() as app:
        answer = await app.complete(prompt=prompt, echo=True, stop=["capital of"], stream=stream)
        first = prompt if isinstance(prompt, str) else small_tokenizer().decode(prompt[0])
        assert answer.text == f"{first}The "


@pytest.mark.parametrize("stream", [False, True])
async def test_integer_logprobs_have_the_completions_form(stream: bool) -> None:
    """B07, B29."""
    async with live_app() as app:
        answer = await app.complete(logprobs=2, stream=stream)
        documents = answer.events if stream else [answer.json]
        found = [d["choices"][0]["logprobs"] for d in documents if d["choices"][0]["logprobs"]]
        tokens = [token for item in found for token in item["tokens"]]
        offsets = [offset for item in found for offset in item["text_offset"]]
        tops = [top for item in found for top in item["top_logprobs"]]
        assert "".join(tokens) == REPLY
        assert offsets == [len("".join(tokens[:i])) for i in range(len(tokens))]
        for token, top in zip(tokens, tops, strict=True):
            assert max(top, key=top.__getitem__) == token


async def test_logprobs_of_0_list_no_alternatives() -> None:
    async with live_app() as app:
        logprobs = (await app.complete(logprobs=0)).json["choices"][0]["logprobs"]
        assert logprobs["top_logprobs"] is None
        assert logprobs["token_logprobs"][0] == -0.5


async def test_more_sequences_than_the_server_can_hold_are_refused_for_good() -> None:
    async with live_app(max_concurrent=1, queue=2) as app:
        answer = await app.complete(prompt=["a", "b", "c", "d"])
        assert answer.status == 400
        assert "at most 3" in answer.error["message"]


async def test_the_context_of_a_long_prompt_is_full() -> None:
    async with live_app() as app:
        answer = await app.post(TEXT, {"prompt": [5] * 512})
        assert answer.error["code"] == "context_length_exceeded"
        assert answer.error["param"] == "prompt"
        assert (await app.post(TEXT, {"prompt": [5] * 511})).status == 200
