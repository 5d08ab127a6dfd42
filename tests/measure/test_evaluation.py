"""A whole evaluation, on tiny models whose caches are not just a list of growing ones."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from daemon.config.evaluation import Contender, EvalJob
from daemon.errors import TqdError
from daemon.measure import evaluation, serving
from daemon.policy.request import request
from daemon.policy.spec import KvSpec
from daemon.policy.store import load_policies
from tests.policy.tiny_configs import tiny_config
from tests.worker.tiny_model import write_tiny_model

VOCAB = 320  # of the small tokenizer


def config_of(family: str) -> dict[str, Any]:
    config = tiny_config(family)
    text = {"text_config": {**config["text_config"], "vocab_size": VOCAB}} if "text_config" in config else {}  # fmt: skip
    return {**config, "vocab_size": VOCAB, **text}


@pytest.mark.parametrize(
    ("family", "mode", "bits"),
    [
        ("deepseek_v3", "int8", (8 * 24 + 16 + 16 * 8) / 32),  # latents packed, rotary keys not
        ("llama4", "turbo8v4", 7.0),  # runs one sequence at a time
    ],
)
@pytest.mark.filterwarnings("ignore:`rope_scaling` is deprecated")
def test_what_is_reported_as_packed_was_packed_when_it_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, mode: str, bits: float
) -> None:
    monkeypatch.setattr(serving, "PROMPTS", (40, 24))
    monkeypatch.setattr(serving, "TOKENS", 5)
    config = config_of(family)
    folder = write_tiny_model(
        tmp_path / "m", **{k: v for k, v in config.items() if k != "model_type"}, family=family
    )
    text = tmp_path / "text.txt"
    text.write_text("".join(f"Country {i} has city {i * 37 % 101}.\n" for i in range(400)))
    kv = request(KvSpec(mode=mode, calibration="none"), load_policies().policies)

    report = evaluation.run(
        EvalJob(
            model=family,
            model_path=str(folder),
            contenders=(Contender(label=mode, kv=kv),),
            windows=2,
            context=120,
            text=str(text),
        ),
        lambda what, share: None,
    )

    (policy,) = report.policies
    assert policy.bits_per_value == pytest.approx(bits)
    assert policy.bytes_per_token < policy.bytes_per_token_fp16
    for figures in (policy.natural, policy.copy_test):
        assert math.isfinite(figures.kld_mean)
        assert figures.kld_mean != 0
    assert policy.served.same_as_alone == policy.served.sequences


def test_a_text_that_is_too_short_is_refused_before_keys_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(*_: object) -> None:
        raise AssertionError("measuring takes minutes")

    monkeypatch.setattr(evaluation, "enter", measured)
    text = tmp_path / "text.txt"
    text.write_text("A sentence.")
    kv = request(KvSpec(), load_policies().policies)
    job = EvalJob(
        model="m",
        model_path=str(write_tiny_model(tmp_path / "m")),
        contenders=(Contender(label="balanced", kv=kv),),
        windows=1,
        context=120,
        text=str(text),
    )

    with pytest.raises(TqdError, match=r"text\.txt has \d+ tokens; --windows 1 needs"):
        evaluation.run(job, lambda what, share: None)
