"""A tokenizer.json in parts from which the same tokenizer is made in half the time: a pack keeps them, so each start gains.

Reading a tokenizer.json of some megabytes takes longer than anything else at a start, as the library parses vocabulary and merges
twice. Kept apart from the rest (the frame), they are handed over as they are. Invariant: parts are only made where the tokenizer
made of them is, in the library's own writing, the one of the tokenizer.json; else that file is the only part.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from kvist.text.tokenizer import parse_tokenizer_json

FRAME, PIECES, MERGES = "tokenizer.json", "tokenizer_pieces", "tokenizer_merges"
"""The document, without vocabulary and merges where these are parts of their own: the pieces in the order of their ids, with NUL
between two, and pairs of ids as native 32-bit integers. The added tokens stay in the frame, under a name of our own."""
_ADDED = "kvist_added_tokens"


def split_tokenizer(tokenizer_json: bytes) -> dict[str, bytes]:
    """The parts of what `build_tokenizer` returned. Raises ModelFormatError if the bytes are no tokenizer.json."""
    whole = parse_tokenizer_json(tokenizer_json)
    parts = _split(json.loads(whole.to_str()))
    return parts if parts is not None and join_tokenizer(parts).to_str() == whole.to_str() else {FRAME: tokenizer_json}


def _split(document: dict[str, Any]) -> dict[str, bytes] | None:
    """None where it is not a byte-pair vocabulary with ids from 0 on."""
    model = document["model"]
    if model["type"] != "BPE":
        return None
    vocab: dict[str, int] = model["vocab"]
    pieces = sorted(vocab, key=vocab.__getitem__)
    if [vocab[piece] for piece in pieces] != list(range(len(pieces))) or any("\0" in piece for piece in pieces):
        return None
    pairs = [vocab[half] for merge in model["merges"] for half in merge]
    frame = {**document, "added_tokens": [], _ADDED: document["added_tokens"], "model": {**model, "vocab": {}, "merges": []}}
    return {
        FRAME: json.dumps(frame, ensure_ascii=False).encode(),
        PIECES: "\0".join(pieces).encode(),
        MERGES: array("i", pairs).tobytes(),
    }


def join_tokenizer(parts: Mapping[str, bytes]) -> Backend:
    """The library's tokenizer of `split_tokenizer`'s parts."""
    if PIECES not in parts:
        return parse_tokenizer_json(parts[FRAME])
    frame = json.loads(parts[FRAME])
    added, model = frame.pop(_ADDED), frame["model"]
    pieces = parts[PIECES].decode().split("\0")
    halves = iter(list(map(pieces.__getitem__, memoryview(parts[MERGES]).cast("i"))))
    settings = {name: value for name, value in model.items() if name not in ("type", "vocab", "merges") and value is not None}
    backend = parse_tokenizer_json(json.dumps(frame).encode())
    backend.model = BPE(dict(zip(pieces, range(len(pieces)), strict=True)), list(zip(halves, halves, strict=True)), **settings)
    # After the vocabulary and the normalizer, by both of which the library places them.
    backend.add_tokens([AddedToken(**{name: value for name, value in token.items() if name != "id"}) for token in added])
    return backend
