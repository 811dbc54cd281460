"""Encoder outputs on their way from the workers that encode them, or have them cached, to those
that need them, by the encode jobs of their schedulers. Knows nothing of requests.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

from baton.engine.scheduler.kv.encoder_cache import HeldOutput
from baton.engine.scheduler.scheduler import Scheduler
from baton.engine.scheduler.scheduling.encode_jobs import EncodeJob
from baton.models.images.encoder_input import EncoderInput
from baton_simulator.clock import Clock
from baton_simulator.engine import SimulatedEngine
from baton_simulator.latency import Network


@dataclass(slots=True, eq=False)
class _Transfer:
    """One output. It moves once `source` has it and `claimant` has blocks for it."""

    source: SimulatedEngine
    claimant: SimulatedEngine
    encoder_input: EncoderInput
    on_encoded: Callable[[], None]
    is_encoded: bool = False
    has_blocks: bool = False


class EncoderTransfers:
    """All transfers of a cluster."""

    def __init__(self, clock: Clock, network: Network) -> None:
        self._clock = clock
        self._network = network
        self._numbers = count()
        self._transfers: dict[int, _Transfer] = {}

    def begin(
        self,
        source: SimulatedEngine,
        claimant: SimulatedEngine,
        encoder_input: EncoderInput,
        on_encoded: Callable[[], None],
        *,
        only_cached: bool,
    ) -> None:
        """Asks the source for an output, and the claimant to wait for it: until it is there, or the
        source has refused, the claimant does not compute it.

        Args:
            on_encoded: told once the source has nothing left to compute for it.
            only_cached: the source refuses if it would have to compute the output.
        """
        number = next(self._numbers)
        self._transfers[number] = _Transfer(source, claimant, encoder_input, on_encoded)
        job = EncodeJob(encoder_input)
        claimant.submit(lambda s: s.encode_jobs.expect(number, job))

        def ask(scheduler: Scheduler) -> None:
            jobs = scheduler.encode_jobs
            if only_cached and encoder_input.content_hash not in jobs.cache:
                self._clock.at(self._clock.now, lambda: self._end(number))
            else:
                jobs.encode(number, job)

        source.submit(ask)

    def on_held(self, engine: SimulatedEngine, held: HeldOutput) -> None:
        """An engine's step has ended, after which a job of it holds an output or blocks for it."""
        transfer = self._transfers.get(held.number)
        if transfer is None:
            engine.submit(lambda s: s.encode_jobs.release(held.number))
        elif engine is transfer.source:
            transfer.is_encoded = True
            transfer.on_encoded()
            self._move(held.number, transfer)
        elif held.was_cached:
            self._end(held.number)
        else:
            transfer.has_blocks = True
            self._move(held.number, transfer)

    def _move(self, number: int, transfer: _Transfer) -> None:
        if transfer.is_encoded and transfer.has_blocks:
            seconds = transfer.encoder_input.length * self._network.per_encoder_token
            end = self._clock.now + seconds + self._network.per_transfer
            self._clock.at(end, lambda: self._commit(number, transfer))

    def _commit(self, number: int, transfer: _Transfer) -> None:
        transfer.claimant.submit(lambda s: s.encode_jobs.commit(number))
        self._end(number)

    def _end(self, number: int) -> None:
        """Releases what both hold; the claimant computes an output that has not come."""
        transfer = self._transfers.pop(number, None)
        if transfer is None:
            return
        if not transfer.is_encoded:
            transfer.on_encoded()
        for engine in (transfer.source, transfer.claimant):
            engine.submit(lambda s: s.encode_jobs.release(number))
