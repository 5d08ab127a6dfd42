"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from daemon.worker.api.answers import Choice, Job, Usage
from daemon.worker.api.logprobs import chat_logprobs
from daemon.worker.api.openai import (
    ChatBody,
    generation_requests,
    parse,
    refuse_unavailable_chat,
)
from daemon.worker.api.prompts import template_messages, template_variables
from daemon.worker.requests import FinishReason
from daemon.worker.serving import Model, Serving
from daemon.worker.text import Piece, Shown, TextStream
from daemon.worker.vocabulary import Vocabulary


async def chat_job(document: Mapping[str, object], serving: Serving, model: Model) -> Job:
    """Return what *document* asks for.

    Raises:
        ApiError: it cannot be done.
    """
    body = parse(ChatBody, document)
    serving.check_name(body.model)
    refuse_unavailable_chat(body)
    messages = template_messages(body.messages)
    variables = template_variables(body.chat_template_kwargs, body.reasoning_effort)
    prompt = await model.prompts.chat(messages, variables)
    requests = generation_requests(
        body,
        prompt,
        top_logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        defaults=serving.server.sampling,
        n_ctx=model.loaded.max_context,
        vocab_size=model.loaded.vocab_size,
        param="messages",
    )
    return Job(
        requests=requests,
        texts=[
            TextStream(
                model.loaded.tokenizer.detokenizer, vocab=model.vocabulary.size, stop=body.stop
            )
            for _ in requests
        ],
        prompt_tokens=len(prompt),
        dialect=_Chat(serving.heading("chatcmpl"), model.vocabulary, bool(body.logprobs)),
        stream=bool(body.stream),
        include_usage=body.include_usage,
    )


@dataclass(frozen=True, slots=True)
class _Chat:
    """The documents of one chat completion; all its stream chunks share id, time and model."""

    common: Mapping[str, object]
    vocabulary: Vocabulary
    logprobs: bool

    def opening(self, index: int) -> Mapping[str, object]:
        return self._chunk([self._choice(index, {"role": "assistant", "content": ""})])

    def delta(self, index: int, piece: Piece) -> Mapping[str, object]:
        return self._chunk(
            [self._choice(index, {"content": piece.text}, logprobs=self._logprobs(piece.tokens))]
        )

    def closing(self, index: int, finish: FinishReason) -> Mapping[str, object]:
        return self._chunk([self._choice(index, {}, finish=finish)])

    def usage(self, usage: Usage) -> Mapping[str, object]:
        return self._chunk([]) | {"usage": usage.document()}

    def whole(self, choices: Sequence[Choice], usage: Usage) -> Mapping[str, object]:
        return {
            **self.common,
            "object": "chat.completion",
            "choices": [
                {
                    "index": choice.index,
                    "message": {"role": "assistant", "content": choice.text, "refusal": None},
                    "logprobs": self._logprobs(choice.tokens),
                    "finish_reason": choice.finish,
                }
                for choice in choices
            ],
            "usage": usage.document(),
        }

    def _chunk(self, choices: list[Mapping[str, object]]) -> dict[str, object]:
        return {**self.common, "object": "chat.completion.chunk", "choices": choices}

    def _choice(
        self,
        index: int,
        delta: Mapping[str, object],
        *,
        logprobs: Mapping[str, object] | None = None,
        finish: FinishReason | None = None,
    ) -> Mapping[str, object]:
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}

    def _logprobs(self, tokens: Sequence[Shown]) -> Mapping[str, object] | None:
        return chat_logprobs(tokens, self.vocabulary) if self.logprobs else None
