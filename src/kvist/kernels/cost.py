"""What a recorded call reads and computes for a step: bytes and operations, for the roofline.

Weights count once a call, keys and values once for each sequence that attends to them, activations not at all: they stay in the
processor's caches. An operation is a multiplication or an addition of a product. It knows no models and measures nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvist.kernels.ops import AttentionParams, ForwardBatch, Linear
from kvist.kernels.program import Attend, Call, Embed, GatedMlp, LinearAdd, NormLinear, RopeWrite, Take

BYTES_PER_FLOAT = 4


@dataclass(frozen=True)
class Cost:
    """`name` is the same for calls of one kind and shape. `formats` names the weights' (or the cache's) formats."""

    name: str
    formats: tuple[str, ...]
    num_bytes: int
    operations: int


def cost_of(call: Call, batch: ForwardBatch) -> Cost:
    rows = batch.num_tokens
    match call:
        case Embed(table, _):
            return Cost("embed", table.formats, rows * table.nbytes // table.n, 0)
        case NormLinear(x, _, _, weight, _):
            return _product(f"norm_linear {weight.n} x {weight.k}", x.count(batch), weight)
        case LinearAdd(x, weight, _):
            return _product(f"linear_add {weight.n} x {weight.k}", x.count(batch), weight)
        case GatedMlp(_, _, _, gate_up, down):
            return _product(f"gated_mlp {down.k} x {gate_up.k}", rows, gate_up, down)
        case RopeWrite(attention, _):
            return Cost("rope_write", (attention.kv_format,), rows * attention.token_bytes, 0)
        case Attend(attention, _, _):
            params = attention.params
            window = "" if params.window is None else f" window {params.window}"
            keys, pairs = _seen(batch, params)
            operations = 4 * params.num_heads * params.head_dim * pairs
            return Cost(f"attend{window}", (attention.kv_format,), keys * attention.token_bytes, operations)
        case Take(x, out):
            return Cost("take", (), out.count(batch) * x.width * BYTES_PER_FLOAT, 0)


def _product(name: str, rows: int, *weights: Linear) -> Cost:
    formats = tuple(dict.fromkeys(name for weight in weights for name in weight.formats))
    num_bytes = sum(weight.nbytes for weight in weights) if rows else 0
    return Cost(name, formats, num_bytes, 2 * rows * sum(weight.n * weight.k for weight in weights))


def _seen(batch: ForwardBatch, params: AttentionParams) -> tuple[int, int]:
    """Positions that sequences attend to, each once a sequence; and pairs of row and position."""
    keys = pairs = 0
    for start, stop, length in zip(batch.query_start_loc[:-1], batch.query_start_loc[1:], batch.seq_lens, strict=True):
        first = int(length) - int(stop - start)
        positions = range(first, int(length))
        window = params.window
        keys += int(length) if window is None else min(int(length), int(stop - start) - 1 + window)
        pairs += sum(position + 1 if window is None else min(position + 1, window) for position in positions)
    return keys, pairs
