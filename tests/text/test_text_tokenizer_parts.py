"""A tokenizer's parts: the same tokenizer comes of them, and where that cannot be, the document is the only part."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from text_vocabularies import byte_level, sentencepiece

from kvist.errors import ModelFormatError
from kvist.text.gguf_vocab import from_gguf
from kvist.text.tokenizer import parse_tokenizer_json
from kvist.text.tokenizer_parts import FRAME, MERGES, PIECES, join_tokenizer, split_tokenizer

DOCUMENTS = {"byte level": from_gguf(byte_level())[0], "sentencepiece": from_gguf(sentencepiece())[0]}
EXTRA = {
    "id": 10**3,
    "content": "<|new|>",
    "single_word": False,
    "lstrip": False,
    "rstrip": False,
    "normalized": False,
    "special": True,
}

TEXTS = st.lists(st.sampled_from([*"helo wrdé\n\tü漢😀▁", "<s>", "<|im_end|>", "<tool>"]) | st.text(max_size=4)).map("".join)


def changed(base: str = "byte level", model: dict[str, Any] | None = None, **fields: Any) -> bytes:
    document = json.loads(DOCUMENTS[base]) | fields
    return json.dumps(document | {"model": document["model"] | (model or {})}).encode()


@pytest.mark.parametrize("name", DOCUMENTS)
@given(text=TEXTS)
@settings(deadline=None)
def test_the_parts_are_the_same_tokenizer(name: str, text: str) -> None:
    parts = split_tokenizer(DOCUMENTS[name])
    assert set(parts) == {FRAME, PIECES, MERGES}
    assert json.loads(parts[FRAME])["model"]["vocab"] == {}
    made, whole = join_tokenizer(parts), parse_tokenizer_json(DOCUMENTS[name])
    assert made.to_str() == whole.to_str()
    assert made.encode(text, add_special_tokens=False).ids == whole.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize(
    "model",
    [{"ignore_merges": True}, {"byte_fallback": True}, {"fuse_unk": True, "unk_token": "</s>"}, {"dropout": 0.5}, {"merges": []}],
)
def test_settings_of_the_model_are_kept(model: dict[str, Any]) -> None:
    document = changed(model=model)
    parts = split_tokenizer(document)
    assert PIECES in parts
    assert join_tokenizer(parts).to_str() == parse_tokenizer_json(document).to_str()


def test_added_tokens_beyond_the_vocabulary_keep_their_ids() -> None:
    document = json.loads(DOCUMENTS["byte level"])
    size = len(document["model"]["vocab"])
    added = [*document["added_tokens"], EXTRA | {"id": size}, EXTRA | {"id": size + 1, "content": "<|next|>", "special": False}]
    parts = split_tokenizer(changed(added_tokens=added))
    assert PIECES in parts
    made = join_tokenizer(parts)
    assert [made.token_to_id(text) for text in ("<|new|>", "<|next|>")] == [size, size + 1]
    assert made.encode("hello<|next|>").ids[-1] == size + 1


def test_what_parts_cannot_say_stays_one_document() -> None:
    vocab: dict[str, int] = json.loads(DOCUMENTS["byte level"])["model"]["vocab"]
    holes = {piece: token_id + (token_id > 5) for piece, token_id in vocab.items()}
    for document in (
        changed(model={"vocab": holes, "merges": []}, added_tokens=[]),
        changed(model={"vocab": vocab | {"a\0b": len(vocab)}}),
        changed(model={"vocab": {}, "merges": []}, added_tokens=[]),
        changed(model={"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "a"}, added_tokens=[], pre_tokenizer=None),
    ):
        assert split_tokenizer(document) == {FRAME: document}
        assert join_tokenizer({FRAME: document}).to_str() == parse_tokenizer_json(document).to_str()


def test_what_is_no_tokenizer_is_refused() -> None:
    with pytest.raises(ModelFormatError, match=r"tokenizer\.json"):
        split_tokenizer(b'{"version": "1.0"}')
