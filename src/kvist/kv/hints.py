"""What a request may ask for its prompt's keys and values (leaf: any room may import it).

Frozen, and valid once constructed. It knows no blocks and no clock.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvist.errors import InvalidRequestError

MAX_TTL = 1e9


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


@dataclass(frozen=True)
class KVHints:
    """How long to keep a prompt's keys and values once they are computed (the whole blocks of it). `pin`: never evicted, within the
    server's pin budget. `priority` 0 to 100, ordinary is 50: lower ones are evicted first. `ttl`: seconds after which both lapse;
    without it they hold until they are withdrawn."""

    pin: bool = False
    ttl: float | None = None
    priority: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.pin, bool):
            raise InvalidRequestError(f"kv.pin is true or false, not {self.pin!r}.", param="kv.pin")
        if self.ttl is not None and not (_is_number(self.ttl) and 0.0 < self.ttl <= MAX_TTL):
            raise InvalidRequestError(f"kv.ttl must be a number in (0, {MAX_TTL:g}], not {self.ttl!r}.", param="kv.ttl")
        if self.priority is not None and not (type(self.priority) is int and 0 <= self.priority <= 100):
            raise InvalidRequestError(
                f"kv.priority must be a whole number in [0, 100], not {self.priority!r}.", param="kv.priority"
            )
        if self.ttl is not None and not self.pin and self.priority is None:
            raise InvalidRequestError("kv.ttl says how long kv.pin or kv.priority holds; give one of them too.", param="kv.ttl")

    def __bool__(self) -> bool:
        return self.pin or self.priority is not None
