"""KV caches for mlx-lm models: token order, sinks, packed pages, tail.

`quantize_prompt_cache` is the one public function: it needs no daemon and no servers.yaml.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from daemon.cache.convert import PromptCache


def quantize_prompt_cache(
    model: Any,
    cache: Sequence[Any],
    policy: str | Mapping[str, Any] = "balanced",
    *,
    config: Mapping[str, Any] | None = None,
    allowed: str | None = None,
) -> PromptCache:
    """Return *cache*, of any mlx-lm model, with its growing KV caches packed under *policy*.

    What is in the cache is packed too, and what comes later as it comes; key biases of the checkpoint are taken
    off before that. Use the result wherever mlx-lm
    takes a `prompt_cache`. Caches that cannot be packed (windows, recurrent states) are copied as they
    are; the result says why. A few tokens run through the model, to prove that its attention works on packed
    caches. The given cache is left as it is.

    Args:
        model: a model that mlx-lm has loaded.
        cache: from `mlx_lm.models.cache.make_prompt_cache`, empty or filled.
        policy: a named policy (`balanced`), a scheme (`turbo8v4`), or a `kv:` block as in servers.yaml.
        config: the content of the model's config.json, for models that do not carry all of it.
        allowed: why keys of 4 bits or fewer may be used on this model; None: only where the allow-list says so.

    Raises:
        PolicyError: the policy is unknown or does not fit the model, or the model's architecture is unknown.
        ValueError: *cache* is not one of *model*'s, or is packed already.
    """
    # MLX and mlx-lm take seconds to import, and most of this package does without this module
    from daemon.cache import convert

    return convert.quantize_prompt_cache(model, cache, policy, config=config, allowed=allowed)
