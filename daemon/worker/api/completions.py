"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from daemon.worker.api.answers import Choice, Job, Usage
from daemon.worker.api.errors import invalid
from daemon.worker.api.logprobs import completion_logprobs
from daemon.worker.api.openai import (
    CompletionBody,
    generation_requests,
    parse,
    prompts,
    refuse_unavailable_completion,
)
from daemon.worker.requests import FinishReason
from daemon.worker.serving import Model, Serving
from daemon.worker.text import Piece, Shown, TextStream
from daemon.worker.vocabulary import Vocabulary


async def completion_job(document: Mapping[str, object], serving: Serving, model: Model) -> Job:
    """Return what *document* asks for; the choices of one prompt are adjacent.

    Raises:
        ApiError: it cannot be done.
    """
    body = parse(CompletionBody, document)
    serving.check_name(body.model)
    refuse_unavailable_completion(body)
    given = prompts(body.prompt, model.loaded.vocab_size)
    choices = body.n or 1
    _check_count(len(given) * choices, serving)
    encoded = [
        await model.prompts.text(prompt, "prompt") if isinstance(prompt, str) else prompt
        for prompt in given
    ]
    requests = [
        request
        for prompt in encoded
        for request in generation_requests(
            body,
            prompt,
            top_logprobs=body.logprobs,
            defaults=serving.server.sampling,
            n_ctx=model.loaded.max_context,
            vocab_size=model.loaded.vocab_size,
            param="prompt",
        )
    ]
    echoes = await _echoes(given, model) if body.echo else [""] * len(given)
    return Job(
        requests=requests,
        texts=[
            TextStream(
                model.loaded.tokenizer.detokenizer,
                vocab=model.vocabulary.size,
                stop=body.stop,
                context=request.prompt[-1:],
            )
            for request in requests
        ],
        prompt_tokens=sum(map(len, encoded)),
        dialect=_Text(
            serving.heading("cmpl"),
            model.vocabulary,
            tuple(echo for echo in echoes for _ in range(choices)),
            body.logprobs,
        ),
        stream=bool(body.stream),
        include_usage=body.include_usage,
    )


def _check_count(count: int, serving: Serving) -> None:
    """Refuse more sequences than running and waiting places together: they could never all be admitted."""
    places = serving.server.max_concurrent + serving.server.queue
    if count > places:
        raise invalid(
            f"{count} sequences are more than this server can hold; send at most {places} at once.",
            "prompt",
        )


async def _echoes(given: Sequence[str | tuple[int, ...]], model: Model) -> list[str]:
    return [
        prompt if isinstance(prompt, str) else await model.prompts.decode(prompt)
        for prompt in given
    ]


@dataclass(frozen=True, slots=True)
class _Text:
    """The documents of one completion; *echoes* stand in front of the choices' texts."""

    common: Mapping[str, object]
    vocabulary: Vocabulary
    echoes: tuple[str, ...]
    top: int | None

    def opening(self, index: int) -> Mapping[str, object] | None:
        return (
            self._chunk([self._choice(index, self.echoes[index])]) if self.echoes[index] else None
        )

    def delta(self, index: int, piece: Piece) -> Mapping[str, object]:
        return self._chunk([self._choice(index, piece.text, tokens=piece.tokens)])

    def closing(self, index: int, finish: FinishReason) -> Mapping[str, object]:
        return self._chunk([self._choice(index, "", finish=finish)])

    def usage(self, usage: Usage) -> Mapping[str, object]:
        return self._chunk([]) | {"usage": usage.document()}

    def whole(self, choices: Sequence[Choice], usage: Usage) -> Mapping[str, object]:
        listed = [
            self._choice(
                choice.index,
                self.echoes[choice.index] + choice.text,
                tokens=choice.tokens,
                finish=choice.finish,
            )
            for choice in choices
        ]
        return self._chunk(listed) | {"usage": usage.document()}

    def _chunk(self, choices: list[Mapping[str, object]]) -> dict[str, object]:
        return {**self.common, "object": "text_completion", "choices": choices}

    def _choice(
        self,
        index: int,
        text: str,
        *,
        tokens: Sequence[Shown] = (),
        finish: FinishReason | None = None,
    ) -> Mapping[str, object]:
        logprobs = (
            completion_logprobs(tokens, self.vocabulary, top=self.top)
            if self.top is not None and tokens
            else None
        )
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}
