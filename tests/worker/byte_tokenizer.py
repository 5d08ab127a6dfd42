"""A tokenizer whose tokens are bytes: all that a worker uses of one, without the second that importing transformers takes."""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence

BOS, EOS = 256, 257
SPECIAL = {"<|im_start|>": BOS, "<|im_end|>": EOS}


class ByteDetokenizer:
    """Implements daemon.worker.text.Detokenizer."""

    def __init__(self) -> None:
        self.reset()

    @property
    def last_segment(self) -> str:
        segment, self._unseen = self._unseen, ""
        return segment

    def add_token(self, token: int) -> None:
        if token < BOS:
            self._unseen += self._decoder.decode(bytes([token]))

    def finalize(self) -> None:
        self._unseen += self._decoder.decode(b"", final=True)

    def reset(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._unseen = ""


class ByteTokenizer:
    """Implements daemon.worker.api.prompts.Tokenizer."""

    has_chat_template = True
    chat_template = "the contents of the messages, one a line"
    bos_token, bos_token_id = "<|im_start|>", BOS
    eos_token, eos_token_id = "<|im_end|>", EOS

    @property
    def detokenizer(self) -> ByteDetokenizer:
        return ByteDetokenizer()

    def encode(self, text: str, /, *, add_special_tokens: bool) -> list[int]:
        return [BOS] * add_special_tokens + list(text.encode())

    def decode(self, token_ids: list[int], /) -> str:
        return bytes(token for token in token_ids if token < BOS).decode(errors="replace")

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, object]], /, **kwargs: object
    ) -> str:
        return "".join(f"{message['content']}\n" for message in messages)

    def get_added_vocab(self) -> Mapping[str, int]:
        return SPECIAL

    def __len__(self) -> int:
        return BOS + len(SPECIAL)
