"""The form an output must have, compiled: from `StructuredOutputsParams` to matchers over the model's own tokens, by llguidance.

A `GrammarCompiler` belongs to one tokenizer. What it compiles is kept (least recently used goes first), and each choice gets a copy
of its own. Any thread may compile; a matcher belongs to whoever asked for it. This module knows no engine, no arrays and no HTTP;
llguidance is imported, and its table of the vocabulary built, at the first use.

Invariants: a text that spells a special token is never matched by that token, only by others; whatever is wrong with a grammar is
the client's mistake and an InvalidRequestError with the grammar's own message.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from kvist.errors import InvalidRequestError
from kvist.request import StructuredOutputsParams
from kvist.text.forcing import bound_forcing
from kvist.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

T = TypeVar("T")

MAX_KEPT = 128
MAX_CHARACTERS = 512 * 1024
"""Of one grammar; what is kept stays bounded by it."""
MAX_OPTIONAL = 500
"""Properties that may be left out, of all objects of a schema. A row of the parser has four items for each, and one mask a few
rows: more would pass MAX_ITEMS wherever the model happens to begin a name."""
MAX_ITEMS = 10_000
"""Of the parser, while it makes one mask: some 15 ms. Everybody waits for it, and an ambiguous grammar would take a second."""
STACK_BYTES = 256 * 1024 * 1024
"""llguidance calls itself for each rule that names a rule, and where the stack ends, the process does. The longest chain that fits
MAX_CHARACTERS takes half of this; a thread's stack takes memory as it grows, and gives it back with the thread."""
WHITESPACE = r"[ \n\r\t]{1,20}"
"""Between JSON tokens, unless asked otherwise: room for indentation, and an end to it, which small models do not find."""

_LARK_START = re.compile(r"^[^\S\n]*+start\s*+:(?!:)", re.MULTILINE)
_GBNF_RULE = re.compile(r"^[^\S\n]*+[\w-]++\s*+::=", re.MULTILINE)


@dataclass(frozen=True)
class Grammar:
    """A compiled form. `new_matcher` gives a matcher at its start."""

    _matcher: LLMatcher

    def new_matcher(self) -> LLMatcher:
        return self._matcher.deep_copy()


class GrammarCompiler:
    """Compiles for one tokenizer; `vocab_size` is the model's, `eos_token_ids` are the ids that may follow a complete output."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = max(vocab_size, tokenizer.vocab_size)
        self._eos = sorted(token_id for token_id in eos_token_ids if token_id < self._vocab_size)
        self._building = threading.Lock()
        self._table: LLTokenizer | None = None
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, Grammar] = OrderedDict()

    @property
    def mask_words(self) -> int:
        """32-bit words of a matcher's mask; those of the model's vocabulary are the first of them."""
        return -(-self._vocab_size // 32)

    @property
    def num_kept(self) -> int:
        return len(self._kept)

    def prepare(self) -> None:
        """Build the table of the vocabulary now (some tenths of a second, in which Python does nothing else)."""
        with self._building:
            if self._table is None:
                self._table = _table(self._tokenizer, self._vocab_size, self._eos)

    def compile(self, form: StructuredOutputsParams) -> Grammar:
        """Raises InvalidRequestError with the grammar's own message."""
        source = grammar_source(form)
        with self._lock:
            if source in self._kept:
                self._kept.move_to_end(source)
                return self._kept[source]
        self.prepare()
        matcher = self._with_deep_stack(lambda: self._match(bound_forcing(source)))
        if matcher.is_error():
            raise _mistake(form, message_of(matcher))
        grammar = Grammar(matcher)
        with self._lock:
            self._kept[source] = grammar
            if len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)
        return grammar

    def _match(self, source: str) -> LLMatcher:
        assert self._table is not None
        from llguidance import LLMatcher

        matcher = LLMatcher(self._table, source, log_level=0, limits=_limits())
        if not matcher.is_error():
            matcher.compute_bitmask()  # finds what only shows at the first token, and what it learns is copied with the matcher
        return matcher

    def _with_deep_stack(self, work: Callable[[], T]) -> T:
        done: Future[T] = Future()

        def run() -> None:
            try:
                done.set_result(work())
            except BaseException as error:
                done.set_exception(error)

        with self._building:
            before = threading.stack_size(STACK_BYTES)
            try:
                threading.Thread(target=run, name="kvist-grammar", daemon=True).start()
            finally:
                threading.stack_size(before)
        return done.result()


def grammar_source(form: StructuredOutputsParams) -> str:
    """What llguidance compiles, as text. Raises InvalidRequestError for what cannot even be written so."""
    from llguidance import LLMatcher

    given = form.json or form.regex or form.grammar or "".join(form.choice or ())
    assert isinstance(given, str)
    if len(given) > MAX_CHARACTERS:
        raise _mistake(form, f"it has {len(given)} characters, and {MAX_CHARACTERS} are the most")
    if form.json is not None or form.json_object:
        options: Any = {"whitespace_pattern": WHITESPACE if form.whitespace_pattern is None else form.whitespace_pattern}
        if form.disable_any_whitespace:
            options = {"whitespace_flexible": False}
        schema = {"true": "{}", "false": '{"not":{}}'}.get(str(form.json), form.json) or '{"type":"object"}'
        assert isinstance(schema, str)
        parsed = json.loads(schema)
        if (optional := num_optional(parsed)) > MAX_OPTIONAL:
            raise _mistake(form, f"it has {optional} properties that are not required, and {MAX_OPTIONAL} are the most")
        if lost := _lost_number(parsed):
            raise _mistake(form, f"{lost} is beyond 2^53 and would lose digits as a listed value")
        try:
            return LLMatcher.grammar_from_json_schema(schema, defaults=options)
        except ValueError as error:
            raise _mistake(form, str(error)) from None
    if form.regex is not None:
        return LLMatcher.grammar_from_regex(form.regex)
    if form.choice is not None:
        return LLMatcher.grammar_from_lark(_choice_lark(form.choice))
    assert form.grammar is not None
    return _listed(form) if form.grammar.startswith("{") else LLMatcher.grammar_from_lark(_as_lark(form))


def _listed(form: StructuredOutputsParams) -> str:
    """llguidance's own list of grammars, checked as far as others here look into it."""
    assert form.grammar is not None
    try:
        found = json.loads(form.grammar).get("grammars")
    except (ValueError, RecursionError) as error:
        raise _mistake(form, f"it begins as JSON does, and is none ({error})") from None
    if not isinstance(found, list) or not found or not all(isinstance(one, dict) for one in found):
        raise _mistake(form, "it is JSON without a list of grammars")
    if not all(isinstance(one.get("lark_grammar"), str | None) for one in found):
        raise _mistake(form, "a lark_grammar of it is no text")
    return form.grammar


def _choice_lark(choice: Sequence[str]) -> str:
    """All of them as one terminal: a rule of thousands would be too wide for llguidance."""
    texts = [json.dumps(text, ensure_ascii=False) for text in choice if text]
    if not texts:
        return 'start: ""'
    return f"start: CHOICE{'?' if '' in choice else ''}\nCHOICE: {' | '.join(texts)}"


def _lost_number(schema: Any, *, listed: bool = False) -> int | None:
    """A whole number among the values of an `enum` or `const` that llguidance, which counts in doubles, would write as another."""
    if isinstance(schema, list):
        return next(filter(None, (_lost_number(item, listed=listed) for item in schema)), None)
    if isinstance(schema, dict):
        inner = (_lost_number(value, listed=listed or key in ("enum", "const")) for key, value in schema.items())
        return next(filter(None, inner), None)
    return schema if listed and type(schema) is int and abs(schema) > 2**53 else None


def num_optional(schema: Any) -> int:
    """How many properties all objects of a JSON schema may leave out."""
    if isinstance(schema, list):
        return sum(map(num_optional, schema))
    if not isinstance(schema, dict):
        return 0
    named, required = schema.get("properties"), schema.get("required")
    needed = {name for name in required if isinstance(name, str)} if isinstance(required, list) else set()
    own = len(named.keys() - needed) if isinstance(named, dict) else 0
    return own + sum(map(num_optional, schema.values()))


def _as_lark(form: StructuredOutputsParams) -> str:
    assert form.grammar is not None
    if _LARK_START.search(form.grammar) or not _GBNF_RULE.search(form.grammar):
        return form.grammar
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return str(gbnf_to_lark(form.grammar))
    except Exception as error:  # the converter raises whatever its parsing runs into
        raise _mistake(form, f"it is no GBNF ({error})") from None


def message_of(matcher: LLMatcher) -> str:
    """What is wrong, in one line."""
    words = " ".join(matcher.get_error().replace("<non-verbose/>", "").split()).removesuffix(".")
    return "no text has this form" if words.startswith("NoExtension") else words


def _mistake(form: StructuredOutputsParams, message: str) -> InvalidRequestError:
    kinds = ("json", "regex", "choice", "grammar")
    kind = next((name for name in kinds if getattr(form, name) is not None), "json_object")
    what = {"json": "JSON schema", "choice": "list of choices"}.get(kind, kind)
    words = " ".join(message.split())
    words = words if len(words) <= 500 else f"{words[:500]} ..."
    return InvalidRequestError(f"The {what} cannot be used: {words.removesuffix('.')}.", param=f"structured_outputs.{kind}")


def _limits() -> LLParserLimits:
    """A mask is made between two tokens of everybody: what would take long is given up on, after some milliseconds."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        initial_lexer_fuel=400_000,
        step_lexer_fuel=100_000,
        step_max_items=MAX_ITEMS,
        max_items_in_row=MAX_ITEMS,
        verbose_errors=False,
    )


def _table(tokenizer: Tokenizer, vocab_size: int, eos_token_ids: list[int]) -> LLTokenizer:
    """llguidance's view of the vocabulary, checked to stand for the same bytes as ours. It marks special tokens by a byte ff, which
    UTF-8 does not have, so that a token of that byte alone is never allowed."""
    from llguidance import LLTokenizer

    if not eos_token_ids:
        raise _unsupported("it has no token that ends a text")
    hidden = tokenizer.special_token_ids
    try:
        table = LLTokenizer(_without_special_names(tokenizer.to_json()), n_vocab=vocab_size, eos_token=eos_token_ids)
        wrong = sum(
            table.decode_bytes([token_id]) != ours
            for token_id in range(tokenizer.vocab_size)
            if token_id not in hidden and (ours := tokenizer.token_bytes(token_id))[:1] not in (b"", b"\xff")
        )
    except ValueError as error:
        raise _unsupported(f"llguidance cannot read it: {error}") from None
    if wrong:
        raise _unsupported(f"{wrong} of its tokens mean other bytes to llguidance")
    return table


def _unsupported(why: str) -> InvalidRequestError:
    return InvalidRequestError(f"This model's tokenizer cannot be used for structured outputs ({why}).", param="structured_outputs")


def _without_special_names(tokenizer_json: str) -> str:
    """The tokenizer with special tokens that no text can spell: llguidance tokenizes what a grammar forces, and would otherwise
    take the name of a special token in it for the token."""
    content = json.loads(tokenizer_json)
    content["post_processor"] = None
    model, renamed = content["model"], {}
    for token in content["added_tokens"]:
        if token["special"]:
            renamed[token["content"]] = f"\ufdd0{token['id']}\ufdd1"
            token["content"] = renamed[token["content"]]
    if isinstance(model["vocab"], dict):
        model["vocab"] = {renamed.get(piece, piece): token_id for piece, token_id in model["vocab"].items()}
    else:
        model["vocab"] = [[renamed.get(piece, piece), score] for piece, score in model["vocab"]]
    if model.get("unk_token") in renamed:
        model["unk_token"] = renamed[model["unk_token"]]
    return json.dumps(content, ensure_ascii=False)
