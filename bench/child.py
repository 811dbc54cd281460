"""A process of a benchmark that is told lines and answers each with one."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Mapping


class Child:
    """`python -m module arguments`, until `close`, which ends its standard input."""

    def __init__(
        self,
        module: str,
        *arguments: str,
        python: str = sys.executable,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Adds `environment` to that of this process."""
        self._process = subprocess.Popen(
            [python, "-m", module, *arguments],
            env={**os.environ, **(environment or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    async def read(self) -> str:
        """Its next line."""
        assert self._process.stdout is not None
        line = await asyncio.to_thread(self._process.stdout.readline)
        assert line, "the other process has ended; its reason is above"
        return line.strip()

    async def ask(self, line: str) -> str:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return await self.read()

    async def close(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        await asyncio.to_thread(self._process.wait)
