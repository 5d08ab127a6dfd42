"""The `openai` package against a live worker, synchronous and asynchronous; nothing here knows the model."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from openai.types.chat import ChatCompletionMessageParam

from tests.clients.conftest import LiveWorker

MESSAGES: list[ChatCompletionMessageParam] = [
    {"role": "system", "content": "Answer briefly."},
    {"role": "user", "content": [{"type": "text", "text": "What is the capital of France?"}]},
]


@pytest.fixture
def client(live_worker: LiveWorker) -> Iterator[OpenAI]:
    with OpenAI(base_url=live_worker.base_url, api_key=live_worker.api_key, max_retries=0) as made:
        yield made


def test_the_models_list_has_the_server_and_its_alias(
    client: OpenAI, live_worker: LiveWorker
) -> None:
    listed = [model.id for model in client.models.list()]
    assert listed == [live_worker.model, live_worker.alias]
    assert client.models.retrieve(live_worker.model).id == live_worker.model


def test_a_chat_completion(client: OpenAI, live_worker: LiveWorker) -> None:
    answer = client.chat.completions.create(
        model=live_worker.model, messages=MESSAGES, max_tokens=5, temperature=0
    )
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content
    assert answer.choices[0].finish_reason in ("stop", "length")
    assert answer.usage is not None
    assert answer.usage.completion_tokens <= 5
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_stream_is_the_same_text_as_the_whole_answer(
    client: OpenAI, live_worker: LiveWorker
) -> None:
    whole = client.chat.completions.create(
        model=live_worker.model, messages=MESSAGES, max_tokens=6, temperature=0
    )
    chunks = list(
        client.chat.completions.create(
            model=live_worker.model,
            messages=MESSAGES,
            max_tokens=6,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    reasons = [c.choices[0].finish_reason for c in chunks if c.choices]
    assert [reason for reason in reasons if reason] == [whole.choices[0].finish_reason]
    assert chunks[-1].usage == whole.usage


def test_the_stream_helper_accumulates_the_answer(client: OpenAI, live_worker: LiveWorker) -> None:
    with client.chat.completions.stream(
        model=live_worker.model, messages=MESSAGES, max_tokens=5, temperature=0
    ) as stream:
        stream.until_done()
        answer = stream.current_completion_snapshot
    assert answer.choices[0].message.content
    assert answer.choices[0].finish_reason in ("stop", "length")


def test_log_probabilities_spell_the_answer(client: OpenAI, live_worker: LiveWorker) -> None:
    answer = client.chat.completions.create(
        model=live_worker.model,
        messages=MESSAGES,
        max_tokens=5,
        temperature=0,
        logprobs=True,
        top_logprobs=4,
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content
    spelled = b"".join(bytes(entry.bytes or []) for entry in logprobs.content)
    assert spelled.decode("utf-8", "replace").lstrip() == answer.choices[0].message.content
    for entry in logprobs.content:
        assert entry.top_logprobs[0].token == entry.token
        assert all(alternative.logprob <= 0 for alternative in entry.top_logprobs)


def test_several_choices(client: OpenAI, live_worker: LiveWorker) -> None:
    answer = client.chat.completions.create(
        model=live_worker.model, messages=MESSAGES, max_tokens=3, n=3
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2]


@pytest.mark.parametrize("prompt", ["The capital of", ["The capital of", "One, two,"], [5, 6, 7]])
def test_a_completion(
    client: OpenAI, live_worker: LiveWorker, prompt: str | list[str] | list[int]
) -> None:
    answer = client.completions.create(
        model=live_worker.model, prompt=prompt, max_tokens=4, temperature=0, logprobs=2
    )
    count = len(prompt) if isinstance(prompt, list) and isinstance(prompt[0], str) else 1
    assert len(answer.choices) == count
    for choice in answer.choices:
        assert choice.finish_reason in ("stop", "length")
        assert choice.logprobs is not None
        assert "".join(choice.logprobs.tokens or []) == choice.text


def test_a_streamed_completion(client: OpenAI, live_worker: LiveWorker) -> None:
    chunks = list(
        client.completions.create(
            model=live_worker.model, prompt="The capital of", max_tokens=4, stream=True
        )
    )
    assert "".join(chunk.choices[0].text for chunk in chunks)


def test_a_wrong_value_is_a_bad_request_that_names_the_parameter(
    client: OpenAI, live_worker: LiveWorker
) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature") as caught:
        client.chat.completions.create(model=live_worker.model, messages=MESSAGES, temperature=5)
    assert caught.value.param == "temperature"
    assert caught.value.type == "invalid_request_error"


def test_an_overlong_prompt_is_a_bad_request_with_its_code(
    client: OpenAI, live_worker: LiveWorker
) -> None:
    with pytest.raises(openai.BadRequestError, match="maximum context length") as caught:
        client.completions.create(model=live_worker.model, prompt=[5] * 20_000)
    assert caught.value.code == "context_length_exceeded"


def test_another_model_is_not_found(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="gpt-0", messages=MESSAGES)
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("org/gpt-0")


def test_a_wrong_key_is_an_authentication_error(live_worker: LiveWorker) -> None:
    with (
        OpenAI(base_url=live_worker.base_url, api_key="wrong", max_retries=0) as stranger,
        pytest.raises(openai.AuthenticationError),
    ):
        stranger.models.list()


def test_an_endpoint_that_is_not_there_is_a_not_found_error_with_a_message(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="Unknown request URL"):
        client.embeddings.create(model="any", input="text")


def test_a_busy_server_is_a_rate_limit_and_the_retry_succeeds(small_worker: LiveWorker) -> None:
    with OpenAI(base_url=small_worker.base_url, api_key=small_worker.api_key) as client:
        occupant = client.chat.completions.create(
            model=small_worker.model,
            messages=MESSAGES,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        next(occupant)
        with pytest.raises(openai.RateLimitError) as caught:
            client.with_options(max_retries=0).chat.completions.create(
                model=small_worker.model, messages=MESSAGES
            )
        assert 1 <= int(caught.value.response.headers["retry-after"]) <= 30
        occupant.close()
        answer = client.with_options(max_retries=3).chat.completions.create(
            model=small_worker.model, messages=MESSAGES
        )
        assert answer.choices[0].message.content


def test_the_asynchronous_client_runs_many_streams_at_once(live_worker: LiveWorker) -> None:
    async def one(client: AsyncOpenAI) -> tuple[str, list[str]]:
        stream = await client.chat.completions.create(
            model=live_worker.model, messages=MESSAGES, max_tokens=5, temperature=0, stream=True
        )
        text, reasons = "", []
        async for chunk in stream:
            text += chunk.choices[0].delta.content or ""
            reasons += [chunk.choices[0].finish_reason] if chunk.choices[0].finish_reason else []
        return text, reasons

    async def many() -> list[tuple[str, list[str]]]:
        async with AsyncOpenAI(
            base_url=live_worker.base_url, api_key=live_worker.api_key, max_retries=0
        ) as client:
            return await asyncio.gather(*(one(client) for _ in range(6)))

    answers = asyncio.run(many())
    assert len({text for text, _ in answers}) == 1
    assert all(len(reasons) == 1 for _, reasons in answers)


def test_the_asynchronous_client_gets_whole_answers_and_errors(live_worker: LiveWorker) -> None:
    async def scenario() -> None:
        async with AsyncOpenAI(
            base_url=live_worker.base_url, api_key=live_worker.api_key, max_retries=0
        ) as client:
            answer = await client.chat.completions.create(
                model=live_worker.alias, messages=MESSAGES, max_completion_tokens=3
            )
            assert answer.choices[0].message.content
            with pytest.raises(openai.BadRequestError) as caught:
                await client.chat.completions.create(model=live_worker.model, messages=[])
            assert caught.value.param == "messages"

    asyncio.run(scenario())
