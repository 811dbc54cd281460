"""Process that decodes and preprocesses images (`image_process.py`), as the router has it."""

import asyncio
import os
import socket
import subprocess
import sys
from threading import Thread

import msgspec

from baton.cluster.parent_death import dying_with_parent
from baton.errors import UnsupportedModelError
from baton_router.text.images.image_messages import (
    LENGTH_BYTES,
    ImageReply,
    Job,
    Ready,
    Refused,
    Start,
    frame,
    read_answer,
)

# Seconds until a process has loaded transformers and the processor.
_START_SECONDS = 120.0
_MODULE = "baton_router.text.images.image_process"
# Variables that the process has: no secrets are among them.
_VARIABLES = (
    "HF_HOME", "HF_HUB_CACHE", "HOME", "LANG", "LD_LIBRARY_PATH", "PATH", "PYTHONPATH", "TMPDIR",
)  # fmt: skip


class LostDecoderError(Exception):
    """Process that ended without an answer."""


class Decoder:
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
    async def start(cls, start: Start) -> "Decoder":
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
        except (LostDecoderError, OSError, TimeoutError) as error:
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
        # Its socket ends before a thread knows of its end.
        return self._child.returncode is None and not self._answers.at_eof()

    @property
    def exit_code(self) -> int | None:
        return self._child.returncode

    @property
    def pid(self) -> int:
        return self._child.pid

    async def ask(self, job: Job) -> ImageReply:
        """Returns the answer to a job. Raises `LostDecoderError` or `OSError` if it ends."""
        return await self._exchange(frame(job))

    async def kill(self) -> None:
        """Ends the process, and waits until it has."""
        self._child.kill()
        await asyncio.to_thread(self._child.wait)
        self._requests.close()

    async def _exchange(self, request: bytes) -> ImageReply:
        if self._requests.is_closing():
            raise LostDecoderError
        self._requests.write(request)
        await self._requests.drain()
        try:
            head = await self._answers.readexactly(LENGTH_BYTES)
            size = int.from_bytes(head, "little")
            return read_answer(await self._answers.readexactly(size))
        except (asyncio.IncompleteReadError, msgspec.DecodeError):
            raise LostDecoderError from None


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
