"""Who goes first: the `Policy` protocol, and priority before arrival.

A policy gives each request a key once, at arrival; smaller keys are admitted first and preempted last. The scheduler breaks ties by
arrival, so that the order is total and depends on nothing but priorities and arrivals. A key must never change: the argument that
every request finishes rests on it.

Starvation: among requests of one priority there is none. A request waits for all that have a smaller priority value, later ones
too, so as long as those keep coming and fill the engine it may wait for ever; once they stop, it runs. A newcomer of a smaller
value does not end what runs: it is the next to be admitted, and the last to give its blocks back. Requests that ask for no
priority have 0, and are served first come, first served.
"""

from __future__ import annotations

from typing import Protocol

from kvist.request import Request


class Policy(Protocol):
    def key(self, request: Request) -> float:
        """The request's place; smaller is served earlier."""


class PriorityThenArrival:
    """The request's own priority, smaller first."""

    def key(self, request: Request) -> float:
        return request.priority
