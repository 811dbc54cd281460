"""Pool of processes that decode and preprocess the images of one checkpoint.

A process that crashes, or takes too long for an image, costs that image's request alone: the pool
ends it and starts another one for the next image.
"""

import asyncio
import logging
import os
import socket
import subprocess
import sys
import time
from functools import partial
from threading import Thread

import msgspec

from baton.cluster.parent_death import dying_with_parent
from baton.errors import InternalError, OverloadedError, UnsupportedModelError
from baton.serving.telemetry import buckets
from baton.serving.telemetry.distribution import Distribution
from baton_router.text.images.image_limits import ImageLimits
from baton_router.text.images.image_messages import (
    LENGTH_BYTES,
    Done,
    ImageReply,
    Job,
    PreprocessedImage,
    Ready,
    Refused,
    Start,
    frame,
    read_answer,
)

logger = logging.getLogger(__name__)

# Seconds until a process has loaded transformers and the processor.
_START_SECONDS = 120.0
# Images that may wait for each process; further ones are rejected.
_MAX_WAITING = 64
# Bytes of files that wait or are decoded. One alone may have more.
_MAX_PENDING_BYTES = 2**28
_MODULE = "baton_router.text.images.image_process"
# Variables that the process has: no secrets are among them.
_VARIABLES = (
    "HF_HOME", "HF_HUB_CACHE", "HOME", "LANG", "LD_LIBRARY_PATH", "PATH", "PYTHONPATH", "TMPDIR",
)  # fmt: skip


class RefusedImageError(Exception):
    """Image that is refused; the message gives the reason, after the field that has it."""


class ImagePool:
    """Pool of processes for one checkpoint.

    Args:
        path: folder of the checkpoint.

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
        self._slots = asyncio.Semaphore(num_processes)
        self._max_pending = num_processes * (1 + _MAX_WAITING)
        self._idle: list[_Process] = []
        self._jobs: set[asyncio.Task[Done]] = set()
        self._pending_bytes = 0

    @property
    def num_idle(self) -> int:
        """Processes without an image."""
        return len(self._idle)

    @property
    def num_waiting(self) -> int:
        """Images that wait for a process."""
        return len(self._jobs) - self.num_busy

    async def start(self) -> Ready:
        """Starts the first process, and returns the facts of the checkpoint's processor. Raises
        `UnsupportedModelError` if it cannot be loaded."""
        process = await _Process.start(self._start)
        self._idle.append(process)
        return process.ready

    async def process(self, file: bytes, max_frames: int = 1) -> list[PreprocessedImage]:
        """Returns the frames that are taken of a file (`Job.max_frames`), preprocessed. Raises
        `RefusedImageError` with the reason if it is refused, and `OverloadedError` if too many
        wait."""
        pending_bytes = self._pending_bytes + len(file)
        has_room = len(self._jobs) < self._max_pending and pending_bytes <= _MAX_PENDING_BYTES
        if self._jobs and not has_room:
            raise OverloadedError(
                f"{len(self._jobs)} images of {self._pending_bytes} bytes wait to be decoded; "
                f"expected at most {self._max_pending} of {_MAX_PENDING_BYTES}. Retry later, or "
                "raise --images-processes.",
                reason="images",
            )
        self._pending_bytes = pending_bytes
        # A client that leaves does not cost the process, which is in the middle of its image.
        job = asyncio.create_task(self._run(Job(file, max_frames)))
        self._jobs.add(job)
        job.add_done_callback(partial(self._end, len(file)))
        return (await asyncio.shield(job)).frames

    async def close(self) -> None:
        """Ends all processes."""
        jobs = list(self._jobs)
        for job in jobs:
            job.cancel()
        await asyncio.gather(*jobs, return_exceptions=True)
        await asyncio.gather(*(process.kill() for process in self._idle))
        self._idle.clear()

    def _end(self, num_bytes: int, job: "asyncio.Task[Done]") -> None:
        self._pending_bytes -= num_bytes
        self._jobs.discard(job)
        if not job.cancelled():
            job.exception()  # of a client that has left

    async def _run(self, job: Job) -> Done:
        async with self._slots:
            process = await self._take()
            try:
                answer = await self._ask(process, job)
            except TimeoutError:
                await self._replace(process)
                raise RefusedImageError(
                    f"was not decoded within {self._timeout:g} s. Send a smaller one"
                ) from None
            except (_LostError, OSError):
                await self._replace(process)
                raise RefusedImageError("crashed its decoder; expected a valid image") from None
            except BaseException:
                await process.kill()
                raise
            self._idle.append(process)
        if isinstance(answer, Refused):
            raise RefusedImageError(answer.problem)
        if not isinstance(answer, Done):
            raise InternalError("a process of images answered with something else")
        return answer

    async def _ask(self, process: "_Process", job: Job) -> ImageReply:
        began = time.monotonic()
        self.num_busy += 1
        try:
            async with asyncio.timeout(self._timeout):
                return await process.ask(job)
        finally:
            self.num_busy -= 1
            self.preprocessing.observe(time.monotonic() - began)

    async def _take(self) -> "_Process":
        while self._idle:
            process = self._idle.pop()
            if process.is_running:
                return process
            await self._replace(process)  # it ended while it had no image
        return await _Process.start(self._start)

    async def _replace(self, process: "_Process") -> None:
        self.num_restarts += 1
        await process.kill()
        logger.warning("a process that decodes images was ended, exit code %s", process.exit_code)


class _LostError(Exception):
    """Process that ended without an answer."""


class _Process:
    """One process, with the socket to it."""

    def __init__(
        self,
        child: subprocess.Popen[bytes],
        answers: asyncio.StreamReader,
        requests: asyncio.StreamWriter,
    ) -> None:
        self._child = child
        self._answers = answers
        self._requests = requests
        self.ready = Ready(b"", "", 0, None)

    @classmethod
    async def start(cls, start: Start) -> "_Process":
        """Starts a process that has loaded the checkpoint's processor. Raises
        `UnsupportedModelError`."""
        # Not by the event loop: uvloop forks, and the handlers that gRPC has for it crash the child
        # where calls are in progress. This creates a process without them.
        ours, theirs = socket.socketpair()
        with theirs:
            child = subprocess.Popen(  # noqa: S603, ASYNC220 - of our own; takes a millisecond
                dying_with_parent([sys.executable, "-m", _MODULE]),
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                env=_environment(),
            )
        # Notices its end, whenever that is, as the event loop would.
        Thread(target=child.wait, daemon=True).start()
        process = cls(child, *await asyncio.open_unix_connection(sock=ours))
        try:
            async with asyncio.timeout(_START_SECONDS):
                answer = await process._exchange(frame(start))
        except (_LostError, OSError, TimeoutError) as error:
            await process.kill()
            raise UnsupportedModelError(
                f"the process for images of {start.path!r} did not start (exit code "
                f"{process.exit_code}, {type(error).__name__}). See its log"
            ) from None
        except BaseException:
            await process.kill()
            raise
        if not isinstance(answer, Ready):
            await process.kill()
            problem = answer.problem if isinstance(answer, Refused) else "no facts"
            raise UnsupportedModelError(
                f"the processor of {start.path!r} cannot be loaded: {problem}"
            )
        process.ready = answer
        return process

    @property
    def is_running(self) -> bool:
        return self._child.returncode is None

    @property
    def exit_code(self) -> int | None:
        return self._child.returncode

    @property
    def pid(self) -> int:
        return self._child.pid

    async def ask(self, job: Job) -> ImageReply:
        """Returns the answer to a job. Raises `_LostError` or `OSError` if the process ends."""
        return await self._exchange(frame(job))

    async def kill(self) -> None:
        """Ends the process, and waits until it has."""
        self._child.kill()
        await asyncio.to_thread(self._child.wait)
        self._requests.close()

    async def _exchange(self, request: bytes) -> ImageReply:
        if self._requests.is_closing():
            raise _LostError
        self._requests.write(request)
        await self._requests.drain()
        try:
            head = await self._answers.readexactly(LENGTH_BYTES)
            size = int.from_bytes(head, "little")
            return read_answer(await self._answers.readexactly(size))
        except (asyncio.IncompleteReadError, msgspec.DecodeError):
            raise _LostError from None


def _environment() -> dict[str, str]:
    kept = {name: os.environ[name] for name in _VARIABLES if name in os.environ}
    # One thread: more would each reserve address space, which is limited.
    return {
        **kept,
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
    }
