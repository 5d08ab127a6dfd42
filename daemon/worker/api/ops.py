"""What a worker tells about itself: models, health, readiness, properties, the cache."""

from __future__ import annotations

import importlib.metadata
from datetime import UTC, datetime

from aiohttp import hdrs, web

from daemon.metrics import worker as worker_series
from daemon.metrics.exposition import Page
from daemon.policy.schemes import REFERENCE_BITS, Scheme, parse_codec
from daemon.worker.api.body import reply
from daemon.worker.api.openai import GenerationBody, sampling
from daemon.worker.serving import Phase, Serving

SERVING = web.AppKey("serving", Serving)


async def models(request: web.Request) -> web.Response:
    """GET /v1/models: one entry for each name that requests may use; also while loading."""
    serving = request.app[SERVING]
    entries = [_model(name, serving) for name in serving.names]
    return reply(
        {
            "object": "list",
            "data": entries,
            "has_more": False,
            "first_id": entries[0]["id"],
            "last_id": entries[-1]["id"],
        }
    )


async def model(request: web.Request) -> web.Response:
    """GET /v1/models/{id}."""
    serving = request.app[SERVING]
    name = request.match_info["id"]
    serving.check_name(name)
    return reply(_model(name, serving))


async def health(request: web.Request) -> web.Response:
    """GET /health: 200 once requests are taken, in llama.cpp's form."""
    serving = request.app[SERVING]
    if serving.phase is Phase.READY:
        return reply({"status": "ok"})
    message = {
        Phase.LOADING: "Loading model",
        Phase.DRAINING: "Shutting down",
        Phase.FAILED: "Engine failed",
    }[serving.phase]
    document: dict[str, object] = {
        "status": serving.phase.value,
        "error": {"code": 503, "message": message, "type": "unavailable_error"},
    }
    if serving.phase is Phase.LOADING:
        stage, fraction = serving.progress
        document["progress"] = {"stage": stage, "fraction": fraction}
    return reply(document, status=503, headers={"Retry-After": "5"})


async def livez(request: web.Request) -> web.Response:
    """GET /livez: this process answers."""
    return reply({"status": "ok", "nonce": request.app[SERVING].spec.nonce})


async def readyz(request: web.Request) -> web.Response:
    """GET /readyz: 200 while requests are taken and the engine moves; says who answers."""
    serving = request.app[SERVING]
    ready = serving.phase is Phase.READY and not serving.stalled
    return reply(
        serving.state(),
        status=200 if ready else 503,
        headers=None if ready else {"Retry-After": "5"},
    )


async def props(request: web.Request) -> web.Response:
    """GET /props: llama.cpp's properties that hold here, and the effective KV mode."""
    serving = request.app[SERVING]
    loaded = serving.model.loaded
    stats = serving.stats()
    defaults = sampling(GenerationBody(), serving.server.sampling, loaded.vocab_size)
    return reply(
        {
            "default_generation_settings": {
                "n_ctx": loaded.max_context,
                "params": {
                    "temperature": defaults.temperature,
                    "top_p": defaults.top_p,
                    "top_k": defaults.top_k,
                    "min_p": defaults.min_p,
                    "repeat_penalty": defaults.repetition_penalty,
                    "max_tokens": serving.server.sampling.max_tokens,
                },
            },
            "total_slots": serving.server.max_concurrent,
            "model_alias": serving.spec.name,
            "model_path": serving.model_name,
            "model_type": loaded.model.model_type,
            "chat_template": loaded.tokenizer.chat_template,
            "bos_token": loaded.tokenizer.bos_token,
            "eos_token": loaded.tokenizer.eos_token,
            "modalities": {"vision": False, "audio": False},
            "build_info": f"tqd-{importlib.metadata.version('tqd')}",
            **_kv_modes(serving),
            "kv": {
                **loaded.kv.model_dump(mode="json"),
                "bytes": stats.kv_bytes,
                "tokens": stats.kv_tokens,
            },
        }
    )


async def cache_stats(request: web.Request) -> web.Response:
    """GET /v1/cache/stats: what the KV cache is and holds; mounted always, so that monitors need no branches."""
    serving = request.app[SERVING]
    stats = serving.stats()
    kv = None if serving.loaded is None else serving.loaded.kv
    return reply(
        {
            **_kv_modes(serving),
            "kv": {
                "bytes": stats.kv_bytes,
                "tokens": stats.kv_tokens,
                "bytes_per_token": None if kv is None else kv.bytes_per_token,
                "bytes_per_token_fp16": None if kv is None else kv.bytes_per_token_fp16,
                "layers_by_scheme": {} if kv is None else kv.effective,
                "backend": None if kv is None else kv.backend,
            },
            "prompt_cache": {"enabled": False},
        }
    )


async def metrics(request: web.Request) -> web.Response:
    """GET /metrics: the series of this worker, for Prometheus."""
    serving = request.app[SERVING]
    now = serving.snapshot()
    page = Page()
    worker_series.add_counters(page, now)
    if now.requests is not None:
        worker_series.add_requests(page, now.requests)
    worker_series.add_gauges(page, now)
    if serving.loaded is not None:
        worker_series.add_kv(page, serving.loaded.kv)
    written = page.render(request.headers.get(hdrs.ACCEPT, ""))
    return web.Response(body=written.body, headers={hdrs.CONTENT_TYPE: written.content_type})


def _model(name: str, serving: Serving) -> dict[str, object]:
    """Return one model entry that both OpenAI's and Anthropic's clients can read."""
    entry: dict[str, object] = {
        "id": name,
        "object": "model",
        "created": serving.created,
        "owned_by": "tqd",
        "type": "model",
        "display_name": name,
        "created_at": datetime.fromtimestamp(serving.created, UTC).isoformat(),
        "architecture": {"input_modalities": ["text"], "output_modalities": ["text"]},
    }
    loaded = serving.loaded
    if loaded is not None:
        entry["max_model_len"] = loaded.max_context
        entry["meta"] = {
            "n_ctx": loaded.max_context,
            "n_ctx_train": loaded.model.max_context,
            "n_vocab": loaded.vocab_size,
            "size": loaded.model.weights_bytes,
        }
    return entry


def _kv_modes(serving: Serving) -> dict[str, object]:
    """Return the requested and the effective KV mode; several schemes are joined, the most common first."""
    asked = serving.spec.kv
    requested = Scheme(parse_codec(asked.k, "k"), parse_codec(asked.v, "v")).name
    modes: dict[str, object] = {"kv_policy": asked.policy, "kv_cache_mode_requested": requested}
    if serving.loaded is None:
        return modes | {"kv_cache_mode": None, "kv_bits": None}
    kv = serving.loaded.kv
    schemes = sorted(kv.effective, key=lambda scheme: -kv.effective[scheme])
    modes["kv_cache_mode"] = "+".join(schemes)
    if not kv.bytes_per_token_fp16:  # recurrent layers and token budgets only: nothing grows
        return modes | {"kv_bits": None}
    bits = REFERENCE_BITS * kv.bytes_per_token / kv.bytes_per_token_fp16
    return modes | {"kv_bits": round(bits, 3)}
