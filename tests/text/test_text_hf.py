"""Hugging Face folders: which ids begin and end a text, whatever file says so, and the same ids as from GGUF."""

from __future__ import annotations

import json
from typing import Any

import pytest
from text_vocabularies import Source, byte_level, make, merged_id, sentencepiece

from kvist.errors import InvalidRequestError, ModelFormatError, UnsupportedModelError
from kvist.text.build import build_tokenizer
from kvist.text.gguf_vocab import from_gguf
from kvist.text.hf_vocab import from_hf
from kvist.text.info import TokenizerInfo
from kvist.text.tokenizer import load_tokenizer

NAMES = {"bos_token": "<s>", "eos_token": {"content": "</s>", "special": True}}
ADDS_BOS = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
    "special_tokens": {"<s>": {"id": "<s>", "ids": [0], "tokens": ["<s>"]}},
}


def document(**changes: Any) -> bytes:
    fields = json.loads(from_gguf(byte_level())[0]) | changes
    return json.dumps(fields).encode()


def test_ends_from_every_file() -> None:
    _, info = from_hf(document(), NAMES, eos_token_ids=[2, 3])
    assert (info.bos_token_id, info.eos_token_ids) == (0, (1, 2, 3))
    assert info.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}


def test_known_turn_ends_count_where_they_are_special() -> None:
    assert from_hf(document(), NAMES)[1].eos_token_ids == (1, 2)
    added = json.loads(document())["added_tokens"]
    added[2]["special"] = False
    assert from_hf(document(added_tokens=added), NAMES)[1].eos_token_ids == (1,)


def test_ids_of_the_models_configuration_where_the_tokenizers_is_silent() -> None:
    _, info = from_hf(document(), {}, eos_token_ids=[1], bos_token_id=0)
    assert (info.bos_token_id, info.eos_token_ids) == (0, (1, 2))
    assert info.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.mark.parametrize(
    ("post_processor", "config", "expected"),
    [
        (None, {}, False),
        (ADDS_BOS, {}, True),
        (ADDS_BOS, {"add_bos_token": False}, False),
        (None, {"add_bos_token": True}, True),
        (None, {"add_bos_token": None}, False),
    ],
)
def test_who_adds_bos(post_processor: Any, config: dict[str, Any], expected: bool) -> None:
    tokenizer = load_tokenizer(*from_hf(document(post_processor=post_processor), NAMES | config))
    assert tokenizer.info.add_bos is expected
    he = merged_id("he")
    assert tokenizer.encode("he") == ([0, he] if expected else [he])
    assert tokenizer.encode("<s>he") == [0, he]
    assert tokenizer.encode_chat("he") == [he]


def test_same_ids_and_text_as_from_gguf() -> None:
    text = "hello world<|im_end|> é 日本 <tool>\n"
    for vocab in (byte_level(add_bos=True), sentencepiece(), sentencepiece(add_space_prefix=False)):
        gguf = make(vocab)
        config = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True}
        hf = load_tokenizer(*from_hf(from_gguf(vocab)[0], config))
        assert hf.encode(text) == gguf.encode(text)
        assert hf.decode(hf.encode(text)) == gguf.decode(gguf.encode(text))
        assert hf.info.style == gguf.info.style
        assert hf.info.strips_leading_space == gguf.info.strips_leading_space
        assert hf.info.add_bos
        assert gguf.info.add_bos


def test_truncation_and_padding_of_the_file_are_off() -> None:
    truncation = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    tokenizer = load_tokenizer(*from_hf(document(truncation=truncation), NAMES))
    assert len(tokenizer.encode("hello world hello world")) == 5


def test_added_tokens_that_only_the_configuration_has() -> None:
    new = {"content": "<think>", "special": False, "normalized": False}
    tokenizer = load_tokenizer(*from_hf(document(), NAMES | {"added_tokens_decoder": {"271": new}}))
    assert tokenizer.encode("he<think>") == [merged_id("he"), 271]
    assert (tokenizer.vocab_size, tokenizer.decode([271])) == (272, "<think>")


def test_added_tokens_without_room_are_refused() -> None:
    with pytest.raises(ModelFormatError, match="'<think>' the id 400"):
        from_hf(document(), NAMES | {"added_tokens_decoder": {"400": {"content": "<think>"}}})


@pytest.mark.parametrize(
    "declared", [{"x": {"content": "<a>"}}, {"271": "<a>"}, {"271": {"content": 5}}, {"-1": {"content": "<a>"}}]
)
def test_declarations_that_are_no_tokens_are_refused(declared: Any) -> None:
    with pytest.raises(ModelFormatError, match=r"has no token at '.*' of added_tokens_decoder"):
        from_hf(document(), NAMES | {"added_tokens_decoder": declared})


@pytest.mark.parametrize(
    ("decoder", "style", "strips"),
    [
        ({"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}, "byte_level", False),
        ({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": False}, "sentencepiece", True),
        ({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "never", "split": False}, "sentencepiece", False),
    ],
)
def test_styles(decoder: Any, style: str, strips: bool) -> None:
    _, info = from_hf(document(decoder=decoder), NAMES)
    assert (info.style, info.strips_leading_space) == (style, strips)


@pytest.mark.parametrize("decoder", [None, {"type": "WordPiece", "prefix": "##", "cleanup": True}])
def test_other_decoders_are_refused(decoder: Any) -> None:
    with pytest.raises(UnsupportedModelError, match=r"decoder .* is not supported"):
        from_hf(document(decoder=decoder), NAMES)


@pytest.mark.parametrize("data", [b"", b"{}", b"not json", b"\xff\xfe"])
def test_a_damaged_file(data: bytes) -> None:
    with pytest.raises(ModelFormatError, match=r"tokenizer\.json cannot be read"):
        from_hf(data, NAMES)


def test_build_takes_either_kind() -> None:
    assert build_tokenizer(Source(gguf=byte_level()))[1].bos_token_id == 0
    assert build_tokenizer(Source(tokenizer_json=document(), config=dict(NAMES)), eos_token_ids=[2])[1].eos_token_ids == (1, 2)
    with pytest.raises(ModelFormatError, match="no tokenizer"):
        build_tokenizer(Source())


def test_info_survives_json() -> None:
    info = make(sentencepiece(eot_token_id=5)).info
    assert TokenizerInfo.from_json(info.to_json()) == info


def test_text_that_is_not_unicode_is_the_clients_mistake() -> None:
    tokenizer = make(byte_level())
    with pytest.raises(InvalidRequestError, match="unpaired surrogate"):
        tokenizer.encode("he\ud800")
    with pytest.raises(InvalidRequestError, match="must be a string, not int"):
        tokenizer.encode(7)  # type: ignore[arg-type]
