"""Who goes first: the `Policy` protocol and first come, first served.

A policy gives each request a key once, at arrival; smaller keys are admitted first and preempted last. The scheduler breaks ties by
arrival, so that the order is total. A key must never change: the argument that every request finishes rests on it.
"""

from __future__ import annotations

from typing import Protocol

from kvist.request import Request


class Policy(Protocol):
    def key(self, request: Request) -> float:
        """The request's place; smaller is served earlier."""


class FirstComeFirstServed:
    """All alike: arrival alone decides."""

    def key(self, request: Request) -> float:
        return 0.0
