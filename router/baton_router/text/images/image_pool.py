"""Pool of processes that decode and preprocess the images of one checkpoint.

A process that crashes, or takes too long for an image, costs that image's request alone: the pool
ends it and starts another one for the next image. Tenants take turns, and none has all processes
that have started. While there are images, one more is started ahead.
"""

import asyncio
import logging
import time

from baton.errors import InternalError, OverloadedError
from baton.fairness.fair_slots import FairSlots
from baton.serving.telemetry import buckets
from baton.serving.telemetry.distribution import Distribution
from baton.serving.tenant import DEFAULT_TENANT
from baton_router.text.images.decoder import Decoder, LostDecoderError
from baton_router.text.images.image_limits import ImageLimits
from baton_router.text.images.image_messages import (
    Done,
    ImageReply,
    Job,
    PreprocessedImage,
    Ready,
    Refused,
    Start,
)

logger = logging.getLogger(__name__)

# Images that may wait for each process.
_MAX_WAITING = 64
# Bytes of files that wait. One alone may have more.
_MAX_WAITING_BYTES = 2**28


class RefusedImageError(Exception):
    """Image that is refused; the message gives the reason, after the field that has it."""


class ImagePool:
    """Pool of processes for one checkpoint.

    Args:
        path: folder of the checkpoint.
        num_processes: at most.

    Attributes:
        num_busy: processes that have an image.
        num_restarts: processes that were ended over an image, or ended by themselves.
        preprocessing: seconds per image, without the wait for a process.
    """

    def __init__(
        self,
        path: str,
        limits: ImageLimits,
        num_processes: int,
    ) -> None:
        self.num_busy = 0
        self.num_restarts = 0
        self.preprocessing = Distribution(buckets.STAGE)
        self._start = Start(
            path, limits.max_pixels, limits.process_memory_bytes, limits.max_tensor_bytes
        )
        self._timeout = limits.timeout_s
        self._max_waiting = num_processes * _MAX_WAITING
        self._slots = FairSlots(  # one for each process that has started
            0,
            self._overload,
            max_waiting=self._max_waiting,
            max_bytes=_MAX_WAITING_BYTES,
        )
        self._max_processes = num_processes
        self._num_processes = 0
        self._idle: list[Decoder] = []
        self._starting: asyncio.Task[None] | None = None
        self._jobs: set[asyncio.Task[None]] = set()

    @property
    def num_idle(self) -> int:
        """Processes without an image."""
        return len(self._idle)

    @property
    def num_waiting(self) -> int:
        """Images that wait for a process."""
        return self._slots.num_waiting

    async def start(self) -> Ready:
        """Starts the first process, and returns the facts of the checkpoint's processor. Raises
        `UnsupportedModelError` if it cannot be loaded."""
        return (await self._add()).ready

    async def process(
        self, file: bytes, max_frames: int = 1, holder: str = DEFAULT_TENANT
    ) -> list[PreprocessedImage]:
        """Returns the frames that are taken of a file (`Job.max_frames`), preprocessed. Raises
        `RefusedImageError` with the reason if it is refused, and `OverloadedError` if too many
        wait, most of them of `holder`, the tenant that it is of."""
        asyncio.get_running_loop().call_soon(self._start_ahead)  # once this image is counted
        await self._slots.acquire(holder, len(file))
        answer: asyncio.Future[ImageReply] = asyncio.get_running_loop().create_future()
        # A client that leaves does not cost the process, which is in the middle of its image.
        job = asyncio.create_task(self._run(Job(file, max_frames), holder, answer))
        self._jobs.add(job)
        job.add_done_callback(self._jobs.discard)
        match await asyncio.shield(answer):
            case Done(frames=frames):
                return frames
            case Refused(problem=problem):
                raise RefusedImageError(problem)
        raise InternalError("a process of images answered with something else")

    async def close(self) -> None:
        """Ends all processes."""
        self._slots.close()
        tasks = [*self._jobs, *([self._starting] if self._starting else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(decoder.kill() for decoder in self._idle))
        self._idle.clear()

    def _overload(self) -> OverloadedError:
        return OverloadedError(
            f"{self.num_waiting} images of {self._slots.num_bytes} bytes wait to be decoded; "
            f"expected at most {self._max_waiting} of {_MAX_WAITING_BYTES}. Retry later, or raise "
            "--images-processes.",
            reason="images",
        )

    async def _run(self, job: Job, holder: str, answer: "asyncio.Future[ImageReply]") -> None:
        """Answers a job in a turn of the holder, which lasts until a process is idle again: other
        holders' processes are not taken for those that its images have ended."""
        try:
            decoder = await self._take()
            if not await self._answered(decoder, job, answer):
                decoder = await Decoder.start(self._start)
            self._idle.append(decoder)
        except Exception as error:
            if answer.done():
                logger.warning("no process for images was started: %s", error)
            else:
                answer.set_exception(error)
                answer.exception()  # of a client that has left
        finally:
            answer.cancel()  # at the end of the pool; one that is done stays
            self._slots.release(holder)

    async def _answered(
        self, decoder: Decoder, job: Job, answer: "asyncio.Future[ImageReply]"
    ) -> bool:
        """Sets the answer to a job. Returns False if the process had to be ended over it."""
        try:
            answer.set_result(await self._ask(decoder, job))
        except TimeoutError:
            await self._end(decoder)
            answer.set_result(
                Refused(f"was not decoded within {self._timeout:g} s. Send a smaller one")
            )
        except (LostDecoderError, OSError):
            await self._end(decoder)
            answer.set_result(Refused("crashed its decoder; expected a valid image"))
        except BaseException:
            await decoder.kill()
            raise
        return decoder.is_running

    async def _ask(self, decoder: Decoder, job: Job) -> ImageReply:
        began = time.monotonic()
        self.num_busy += 1
        try:
            async with asyncio.timeout(self._timeout):
                return await decoder.ask(job)
        finally:
            self.num_busy -= 1
            self.preprocessing.observe(time.monotonic() - began)

    async def _take(self) -> Decoder:
        while self._idle:
            decoder = self._idle.pop()
            if decoder.is_running:
                return decoder
            await self._end(decoder)  # it ended while it had no image
        return await Decoder.start(self._start)

    def _start_ahead(self) -> None:
        """Starts a process unless there is one more than images."""
        num_wanted = 1 + self._slots.num_running + self._slots.num_waiting
        if self._num_processes < min(num_wanted, self._max_processes) and self._starting is None:
            self._starting = asyncio.create_task(self._add_ahead())

    async def _add_ahead(self) -> None:
        try:
            await self._add()
        except Exception as error:
            logger.warning("no process for images was started: %s", error)
            return
        finally:
            self._starting = None
        self._start_ahead()

    async def _add(self) -> Decoder:
        decoder = await Decoder.start(self._start)
        self._idle.append(decoder)
        self._num_processes += 1
        self._slots.add()
        return decoder

    async def _end(self, decoder: Decoder) -> None:
        self.num_restarts += 1
        await decoder.kill()
        logger.warning("a process that decodes images was ended, exit code %s", decoder.exit_code)
