"""The physical KV memory. It moves opaque bytes, and decides nothing."""

from kvist.store.arena import Arena

__all__ = ["Arena"]
