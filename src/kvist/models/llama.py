"""Llama and its kin: Llama 1 to 3, SmolLM2, Mistral, Qwen2, Qwen3. What sets them apart is in the configuration (windows, rotary
scaling, q/k norms) and in the weights (biases, a tied head).

Knows nothing of requests, files or sampling. A forward pass is a list of calls, recorded once at load and run as one program on
each step; a layer is five of them. Keys and values go to the cache before they are read.
Source: Touvron et al. 2023; grouped-query attention, Ainslie et al. 2023.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvist.config import ModelConfig
from kvist.errors import ModelFormatError
from kvist.kernels.ops import F32, AttentionParams, ForwardBatch, Linear, Ops, PackedLinear
from kvist.kernels.program import Array, Attend, Call, Embed, GatedMlp, LinearAdd, NormLinear, RopeWrite, Take
from kvist.kv.spec import KVSpec
from kvist.models.layers import rope_tables


class Layer(NamedTuple):
    attn_norm: F32
    qkv: Linear
    attention: Any
    o: Linear
    mlp_norm: F32
    gate_up: Linear
    down: Linear


class Llama:
    """A bound model. `arena` [num_blocks, spec.block_bytes] is the KV cache that its layers write to and read from."""

    def __init__(
        self,
        config: ModelConfig,
        linears: Mapping[str, PackedLinear],
        vectors: Mapping[str, F32],
        ops: Ops,
        arena: npt.NDArray[np.uint8],
        spec: KVSpec,
        *,
        max_model_len: int,
    ) -> None:
        weights = _Weights(config, linears, vectors)
        self._config, self._ops = config, ops
        self._cache = ops.bind_cache(arena, spec)
        self._tables = rope_tables(config.rope, config.head_dim, max_model_len)
        self._embed = ops.bind_linear(weights.linear("embed"))
        self._layers = [self._bind_layer(i, weights) for i in range(config.num_layers)]
        self._final_norm = weights.vector("final_norm", config.hidden_size)
        self._head = ops.bind_linear(weights.linear("head")) if "head" in linears else self._embed
        hidden, taken = Array(config.hidden_size), Array(config.hidden_size, taken=True)
        logits = Array(config.vocab_size, taken=True)
        head: list[Call] = [Take(hidden, taken), NormLinear(taken, self._final_norm, config.rms_norm_eps, self._head, logits)]
        self.program = ops.record(self._layer_calls(hidden) + head, logits)
        self._head_program = ops.record(head, logits)

    def _layer_calls(self, hidden: Array) -> list[Call]:
        """From tokens to the last layer's hidden states."""
        config, eps = self._config, self._config.rms_norm_eps
        q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        qkv, mixed = Array(q + 2 * kv), Array(q)
        calls: list[Call] = [Embed(self._embed, hidden)]
        for layer in self._layers:
            calls += [
                NormLinear(hidden, layer.attn_norm, eps, layer.qkv, qkv),
                RopeWrite(layer.attention, qkv),
                Attend(layer.attention, qkv, mixed),
                LinearAdd(mixed, layer.o, hidden),
                GatedMlp(hidden, layer.mlp_norm, eps, layer.gate_up, layer.down),
            ]
        return calls

    def _bind_layer(self, i: int, weights: _Weights) -> Layer:
        config, name, bind = self._config, f"layers.{i}.", self._ops.bind_linear

        def norm(which: str, size: int) -> F32:
            return weights.vector(name + which, size)

        params = AttentionParams(
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            scale=config.head_dim**-0.5,
            window=config.windows[i],
            cos=self._tables[0],
            sin=self._tables[1],
            q_norm=norm("q_norm", config.head_dim) if config.qk_norm else None,
            k_norm=norm("k_norm", config.head_dim) if config.qk_norm else None,
            norm_eps=config.rms_norm_eps,
        )
        return Layer(
            attn_norm=norm("attn_norm", config.hidden_size),
            qkv=bind(*(weights.linear(name + part) for part in ("q", "k", "v"))),
            attention=self._ops.bind_attention(self._cache, i, params),
            o=bind(weights.linear(name + "o")),
            mlp_norm=norm("mlp_norm", config.hidden_size),
            gate_up=bind(weights.linear(name + "gate"), weights.linear(name + "up")),
            down=bind(weights.linear(name + "down")),
        )

    def forward(self, batch: ForwardBatch) -> F32:
        """Compute the batch's rows: their keys and values go to the cache, the logits [L, vocab] of `batch.logit_rows` come back, a
        view that is valid until the next `forward` or `logits`."""
        return self.program.run(batch)

    def logits(self, batch: ForwardBatch) -> F32:
        """Logits of `batch.logit_rows` once more, or of other rows, of the batch that `forward` computed last; a view likewise."""
        return self._head_program.run(batch)


class _Weights:
    """Looks up a model's tensors by canonical name and holds each to the shape that the configuration calls for."""

    def __init__(self, config: ModelConfig, linears: Mapping[str, PackedLinear], vectors: Mapping[str, F32]) -> None:
        q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        hidden, mlp, vocab = config.hidden_size, config.intermediate_size, config.vocab_size
        self._shapes = {
            "embed": (vocab, hidden), "head": (vocab, hidden),
            "q": (q, hidden), "k": (kv, hidden), "v": (kv, hidden), "o": (hidden, q),
            "gate": (mlp, hidden), "up": (mlp, hidden), "down": (hidden, mlp),
        }  # fmt: skip
        self._linears, self._vectors = linears, vectors

    def linear(self, name: str) -> PackedLinear:
        tensor = self._linears.get(name)
        if tensor is None:
            raise ModelFormatError(f"The model has no tensor {name!r}; its files are incomplete.")
        expected = self._shapes[name.rpartition(".")[2]]
        if (tensor.n, tensor.k) != expected:
            raise ModelFormatError(f"Tensor {name!r} is {tensor.n} x {tensor.k} where the model's configuration says {expected}.")
        return tensor

    def vector(self, name: str, size: int) -> F32:
        tensor = self._vectors.get(name)
        if tensor is None:
            raise ModelFormatError(f"The model has no tensor {name!r}; its files are incomplete.")
        if tensor.shape != (size,):
            raise ModelFormatError(f"Tensor {name!r} has shape {tensor.shape} where the model's configuration says ({size},).")
        return np.ascontiguousarray(tensor, np.float32)
