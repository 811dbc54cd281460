"""Events of a request as its client gets them, in the form of no API."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

from baton_router.call.ending import Ending
from baton_router.call.output_delta import OutputDelta
from baton_router.call.request import Request
from baton_router.call.usage import Account
from baton_router.lifecycle.worker_events import PromptScores
from baton_router.routing.placement.placement import Placement


@dataclass(frozen=True, slots=True)
class Accepted:
    """All workers have admitted the request.

    Attributes:
        placement: None: nothing is left to do.
        account: usage and timings so far, which the rest of the request changes.
        content: hash of the weights of the placement's workers; empty: unknown, or none.
    """

    request: Request
    placement: Placement | None
    account: Account
    content: bytes = b""


@dataclass(frozen=True, slots=True)
class Finished:
    """A sequence has ended. `account`: usage and timings of the whole request by then."""

    sequence_index: int
    ending: Ending
    account: Account


ClientEvent: TypeAlias = OutputDelta | Accepted | PromptScores | Finished
"""Event of a request as its client gets it."""


def coalesced(events: list[ClientEvent]) -> Iterator[ClientEvent]:
    """Yields fewer events: adjacent tokens of a sequence become one delta. Text or parts without
    tokens, held back to the end, stay by themselves: by them a client that resumes knows that it
    has all the text, and the finish reason came with the tokens before it."""
    held: dict[int, OutputDelta] = {}
    for event in events:
        if not isinstance(event, OutputDelta):
            yield from held.values()
            held.clear()
            yield event
            continue
        index = event.sequence_index
        if index in held and event.tokens:
            held[index].append(event)
        else:
            if index in held:
                yield held.pop(index)
            held[index] = event
    yield from held.values()
