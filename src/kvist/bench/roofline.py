"""What a work costs, counted from the model's shape: bytes read and operations a token; and what that makes of a measured speed.

Weights are counted in the file's bytes, once a step (a prompt is one step); keys and values once for each row of a later step that
attends to them, windows included. An operation is a multiplication or an addition. Norms and activations are left out: they are
small. It knows no engine and measures nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvist.bench.workloads import Work
from kvist.config import ModelConfig
from kvist.kv.spec import KVSpec, group_layers


@dataclass(frozen=True)
class ModelCost:
    """Per token: operations of the layers' products, of the head, and of attention for each position seen in one layer; bytes of
    all weights that a step reads, and of one position's keys and values in one layer. `windows`: one a layer, None: full."""

    layer_operations: int
    head_operations: int
    attention_operations: int
    weight_bytes: int
    kv_bytes: int
    windows: tuple[int | None, ...]

    def seen(self, position: int) -> int:
        """Positions that the row at `position` attends to, added up over the layers."""
        return sum(position + 1 if window is None else min(position + 1, window) for window in self.windows)


def model_cost(config: ModelConfig, weight_bytes: int, kv_format: str) -> ModelCost:
    """The cost of a model whose matrices (without an embedding that is only looked up) take `weight_bytes`."""
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    layer = config.hidden_size * (2 * q + 2 * kv + 3 * config.intermediate_size)
    spec = KVSpec(config.num_kv_heads, config.head_dim, kv_format, 16, group_layers(config.windows))
    return ModelCost(
        layer_operations=2 * layer * config.num_layers,
        head_operations=2 * config.hidden_size * config.vocab_size,
        attention_operations=4 * q,
        weight_bytes=weight_bytes,
        kv_bytes=spec.bytes_per_token_layer,
        windows=config.windows,
    )


def token_cost(work: Work, cost: ModelCost) -> tuple[float, float]:
    """Bytes and operations for each token that the work counts (prompt tokens of a prefill work, else output tokens)."""
    prompt = sum(cost.seen(position) for position in range(work.prompt_tokens))
    prompt_operations = work.prompt_tokens * cost.layer_operations + prompt * cost.attention_operations + cost.head_operations
    if work.counts == "prefill":
        return cost.weight_bytes / work.prompt_tokens, prompt_operations / work.prompt_tokens
    # The first output token comes with the prompt; each later one is a row of its own.
    steps = work.new_tokens if work.counts == "decode" else work.new_tokens - 1
    seen = sum(cost.seen(work.prompt_tokens + step) for step in range(steps))
    operations = steps * (cost.layer_operations + cost.head_operations) + seen * cost.attention_operations
    bytes_read = steps * cost.weight_bytes / work.num_requests + seen * cost.kv_bytes
    if work.counts == "output":
        operations += prompt_operations
        bytes_read += cost.weight_bytes / work.num_requests
    return bytes_read / work.new_tokens, operations / work.new_tokens


def roofline(works: tuple[Work, ...], cost: ModelCost, medians: Mapping[str, float], bandwidth: float) -> dict[str, Any]:
    """What kvist's medians (tokens a second by work) are in bytes and operations a second, beside what the machine reads."""
    rows = []
    for work in works:
        if work.name in medians and work.counts not in ("start", "memory"):
            bytes_read, operations = token_cost(work, cost)
            rate = medians[work.name]
            rows.append(
                {
                    "work": work.name,
                    "bytes_per_token": bytes_read,
                    "operations_per_token": operations,
                    "bytes_per_second": rate * bytes_read,
                    "operations_per_second": rate * operations,
                    "share_of_bandwidth": rate * bytes_read / bandwidth,
                }
            )
    return {"read_bandwidth": bandwidth, "works": rows}
