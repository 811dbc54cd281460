"""A stream continues on the weights that it began with, and on no others."""

import pytest

from baton.errors import UnavailableError
from tests.support.router.scripted import (
    DRAINING,
    READY,
    RELEASED,
    Cue,
    Worker,
    at,
    decode,
    finished,
    first,
    fleet_of,
    letter_ids,
    lifecycle_of,
    messages_of,
    prefill,
    prefill_behind,
    run,
    run_on,
    seen_of,
    tokens,
)

LOST = UnavailableError("the worker has stopped")


def of_weights(content: bytes, worker: Worker) -> Worker:
    worker.content = content
    return worker


async def test_lifecycle_resumes_on_the_weights_it_began_with():
    failing = of_weights(b"old", decode(READY, tokens(0, 0, 1, 2), LOST))
    new = of_weights(b"new", decode(READY, finished(), name="d1"))
    old = of_weights(b"old", decode(READY, tokens(3, 3, 4), finished(), name="d2"))
    async with fleet_of(prefill_behind(0, 3), failing, new, old) as fleet:
        seen = await run(fleet)
    assert (seen.text, seen.finished.usage.num_migrations) == ("abcde", 1)
    assert (len(new.requests), len(old.requests)) == (0, 1)


async def test_lifecycle_ends_when_other_weights_alone_are_left():
    failing = of_weights(b"old", decode(READY, tokens(0, 0, 1, 2), LOST))
    new = of_weights(b"new", decode(READY, finished(), name="d1"))
    seen = []
    async with fleet_of(prefill_behind(0, 3), failing, new) as fleet:
        with pytest.raises(UnavailableError):
            seen.append(await run(fleet))
    assert (seen, new.requests) == ([], [])
    assert len(failing.requests) > 1, "it may come back"


async def test_lifecycle_says_that_others_have_other_weights():
    shown = Cue()
    failing = of_weights(b"old", decode(READY, tokens(0, 0, 1, 2), shown, LOST))
    new = of_weights(b"new", decode(READY, finished(), name="d1"))
    async with fleet_of(prefill_behind(0, 3), failing, new) as fleet:

        async def read() -> None:
            async for message in messages_of(lifecycle_of(fleet)):
                if message.HasField("tokens") and failing in fleet.workers:
                    fleet.workers.remove(failing)
                    shown.event.set()

        with pytest.raises(UnavailableError, match="other weights than the answer began with"):
            await read()


async def test_lifecycle_starts_again_on_other_weights_before_output():
    failing = of_weights(b"old", decode(LOST))
    new = of_weights(b"new", decode(READY, tokens(1, 1, 2, 3, 4), finished(), name="d1"))
    seen = await run_on(prefill(first(), RELEASED), failing, new)
    assert (seen.token_ids, seen.text) == (letter_ids(), "abcde")


async def test_lifecycle_resumes_on_worker_of_unknown_weights():
    failing = of_weights(b"old", decode(READY, tokens(0, 0, 1, 2), LOST))
    unknown = decode(READY, tokens(3, 3, 4), finished(), name="d1")
    async with fleet_of(prefill_behind(0, 3), failing, unknown) as fleet:
        assert (await run(fleet)).text == "abcde"


async def test_draining_worker_finishes_what_others_cannot_continue():
    draining = of_weights(b"old", decode(READY, tokens(0, 0, 1), DRAINING, tokens(2, 2, 3, 4)))
    draining.script.append(finished())
    new = of_weights(b"new", decode(READY, finished(), name="d1"))
    seen = await run_on(prefill(first(), RELEASED), draining, new)
    assert (seen.text, draining.orders, new.requests) == ("abcde", [], [])


async def test_lifecycle_continues_clients_output_on_its_weights():
    new = of_weights(b"new", decode(READY, finished()))
    old = of_weights(b"old", decode(READY, tokens(3, 3, 4), finished(), name="d1"))
    received = (tuple(letter_ids()[:3]),)
    async with fleet_of(prefill(at(3), RELEASED), new, old) as fleet:
        seen = await seen_of(lifecycle_of(fleet, received=received, content=b"old"))
    assert (seen.token_ids, new.requests) == (letter_ids()[3:], [])
