"""A real tokenizer, small enough to build in a test: byte-level BPE with a chat template."""

from __future__ import annotations

from functools import cache
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

BOS, EOS = "<|im_start|>", "<|im_end|>"
CORPUS = ["The capital of France is Paris, and the capital of Spain is Madrid. " * 4]
TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.content == 'refuse me' %}{{ raise_exception('I was told to refuse') }}{% endif %}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    "{% if shout is defined %}{{ shout }}{% endif %}"
)


@cache
def small_tokenizer() -> Any:
    """Return the tokenizer as mlx-lm wraps it."""
    from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer, TokenizerWrapper
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[BOS, EOS],
        show_progress=False,
    )
    bpe.train_from_iterator(CORPUS, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token=BOS, eos_token=EOS)
    tokenizer.chat_template = TEMPLATE
    return TokenizerWrapper(tokenizer, BPEStreamingDetokenizer)


def byte_token(value: int) -> int:
    """Return the token that stands for one byte."""
    tokenizer = small_tokenizer()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    by_byte = {byte: char for char, byte in _bytes_of(alphabet).items()}
    return int(tokenizer.convert_tokens_to_ids(by_byte[value]))


def _bytes_of(alphabet: list[str]) -> dict[str, int]:
    decoder = decoders.ByteLevel()
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(0x100) if byte not in printable]
    table = {chr(byte): byte for byte in printable} | {
        chr(0x100 + i): b for i, b in enumerate(rest)
    }
    assert set(alphabet) == set(table)
    assert decoder.decode(["Ġ"]) == " "
    return table
