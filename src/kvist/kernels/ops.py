"""What a model asks of a machine: the `Ops` protocol, and the plain data that crosses it.

Implemented by `reference.py` (NumPy, the definition) and `cpu.py` (the native modules). This module computes nothing and knows
neither models nor requests. Invariants that every implementation keeps (law L1):

* a row's arithmetic never depends on which other rows are in the batch, nor on the number of threads;
* a reduction over K of a matrix product has one fixed order, never split by threads;
* attention reads keys and values as they were written to the cache, in spans of `SPAN` keys aligned to absolute positions,
  grouped into partitions of `PARTITION` positions that are merged in ascending order;
* nothing outside the rows, slots and `out` arrays named in a call is written.

All float arrays are C-contiguous float32 unless stated; 16-bit values travel as uint16 bit patterns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from kvist.kv.spec import KVSpec

if TYPE_CHECKING:
    from kvist.kernels.program import Array, Call
    from kvist.kernels.sampling import Adjustment, Drawn, Scores

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]

PANEL = 16
"""Columns (output features) that are stored side by side."""
GROUP = 32
"""Elements of K that share one weight scale and one activation scale in the quantized formats."""
SPAN = 64
PARTITION = 512
KEY_TILE = 16
"""Keys stored side by side in a block; `block_size` is a multiple of it."""


class PackedLinear(NamedTuple):
    """A weight matrix [n, k] (n outputs) in the kernels' layout; P = ceil(n / 16) panels, zero-padded, G = k / 32 groups.

    | format | data | scale, minimum |
    |---|---|---|
    | `f32` | float32 [P, k, 16] | |
    | `f16`, `bf16` | uint16 [P, k, 16] | |
    | `w8a8` | uint8 [P, G, 8, 16, 4]: value + 128; quad i, column, element 4i + j of the group | scale [P, G, 16] |
    | `w4a8` | uint8 [P, G, 4, 16, 4]: low nibble quad i, high nibble quad i + 4 | scale and minimum [P, G, 16] |

    A weight is scale * q (w8a8, q = stored - 128) or scale * q + minimum (w4a8, q in 0..15). `scale` and `minimum` are float16 or
    float32. Arrays may be memory-mapped and read-only.
    """

    format: str
    n: int
    k: int
    data: npt.NDArray[Any]
    scale: npt.NDArray[Any] | None = None
    minimum: npt.NDArray[Any] | None = None
    bias: F32 | None = None

    @property
    def nbytes(self) -> int:
        """Without the bias."""
        return sum(part.nbytes for part in (self.data, self.scale, self.minimum) if part is not None)


class GroupTables(NamedTuple):
    """Where one KV group's tokens are. block_table: int32 [num_seqs, max_blocks]; slot_mapping: int64 [num_tokens], the slot
    (block id * block_size + offset) that each row's key and value go to."""

    block_table: I32
    slot_mapping: I64


class ForwardBatch(NamedTuple):
    """Everything a forward pass needs of the requests. Rows of sequence s are query_start_loc[s] .. query_start_loc[s + 1]; its
    positions are consecutive and end at seq_lens[s] - 1. `logit_rows`: the rows whose logits are wanted."""

    token_ids: I32
    positions: I32
    query_start_loc: I32
    seq_lens: I32
    groups: tuple[GroupTables, ...]
    logit_rows: I32 = np.empty(0, np.int32)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


class AttentionParams(NamedTuple):
    """One layer's attention. `cos` and `sin` are [positions, rotary_dim / 2]; pairs are (i, i + rotary_dim / 2) within a head.
    `q_norm` and `k_norm` (RMS norms over a head, before the rotation) are [head_dim] or None."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None
    cos: F32
    sin: F32
    q_norm: F32 | None = None
    k_norm: F32 | None = None
    norm_eps: float = 1e-6


class Linear(Protocol):
    """One or more packed matrices over one input, whose outputs stand side by side."""

    @property
    def n(self) -> int: ...
    @property
    def k(self) -> int: ...
    @property
    def nbytes(self) -> int:
        """Weights, scales and minimums, as stored."""

    @property
    def formats(self) -> tuple[str, ...]:
        """Of the segments, each once."""


class Program(Protocol):
    """Recorded calls over workspace arrays; see `program.py`."""

    @property
    def calls(self) -> tuple[Call, ...]: ...

    def run(self, batch: ForwardBatch) -> F32:
        """Make all calls; the result array's rows, a view that is valid until the next run. A batch that comes again may hold other
        numbers, but its arrays are the same ones."""

    def run_timed(self, batch: ForwardBatch) -> tuple[F32, I64]:
        """`run`, and the nanoseconds that each call took, valid as long."""


class Ops(Protocol):
    """A machine. `bind_*` make handles once, at load; the others run on each step. A handle is opaque to the caller, of the
    machine's own type, and good for that machine only: hence `Any`."""

    @property
    def isa(self) -> str:
        """The instruction-set build: "avx512bf16", "avx512", "avx2", "portable" or "numpy"."""

    @property
    def profile(self) -> str:
        """What decides the bits besides weights and KV format: build and kernel version."""

    @property
    def num_threads(self) -> int: ...

    def bind_linear(self, *segments: PackedLinear) -> Linear:
        """Segments share k; output columns are concatenated in order."""

    def bind_cache(self, arena: npt.NDArray[np.uint8], spec: KVSpec) -> Any:
        """`arena` [num_blocks, spec.block_bytes]. A block holds its group's layers one after the other, each K then V."""

    def bind_attention(self, cache: Any, layer: int, params: AttentionParams) -> Any:
        """Attention of model layer `layer` over the cache; finds the layer's group and place by the spec."""

    def bind_batch(self, batch: ForwardBatch) -> Any:
        """One step's batch, for `rope_write` and `attend`."""

    def embed(self, table: Any, token_ids: I32, out: F32) -> None:
        """out[t] = row token_ids[t] of the table, dequantized; out [T, table.k]."""

    def norm_linear(self, x: F32, norm: F32, eps: float, weight: Any, out: F32) -> None:
        """out = rms_norm(x) @ weight.T + bias; x [T, k], out [T, n]."""

    def linear_add(self, x: F32, weight: Any, residual: F32) -> None:
        """residual += x @ weight.T + bias; x [T, k], residual [T, n]."""

    def gated_mlp(self, x: F32, norm: F32, eps: float, gate_up: Any, down: Any) -> None:
        """x += (silu(h @ gate.T) * (h @ up.T)) @ down.T with h = rms_norm(x); `gate_up` has two segments; x [T, hidden]."""

    def rope_write(self, batch: Any, attention: Any, qkv: F32) -> None:
        """qkv [T, (heads + 2 kv_heads) * head_dim]: norms (if any) and rotates q and k in place, writes k and v to the slots."""

    def attend(self, batch: Any, attention: Any, qkv: F32, out: F32) -> None:
        """out [T, heads * head_dim] = attention of each row over the cached keys up to its own position."""

    def record(self, calls: Sequence[Call], result: Array) -> Program:
        """A program of these calls, whose runs give the rows of `result`. Handles must be this machine's."""

    def bind_sampling(self, rows: npt.NDArray[Any]) -> Any:
        """How to draw from as many rows of logits (dtype ROW of `sampling.py`). What they say may change from draw to draw."""

    def sample(self, logits: F32, sampling: Any, adjustments: Mapping[int, Adjustment]) -> Drawn:
        """A token for each row of logits [R, vocabulary], row i after adjustments[i] where there is one. Defined in
        `reference_sampling.py`; the logits stay as they are."""

    def score(self, logits: F32, rows: I32, token_ids: I32, tops: I32) -> Scores:
        """Token token_ids[s] in the distribution of logits row rows[s], with its tops[s] likeliest tokens; s in [0, S)."""
