"""Grammars of several tenants, which an engine compiles in turns beside its steps."""

import asyncio
import os
import signal

import psutil
import pytest

from baton.engine.request import EngineRequest
from baton.errors import InvalidArgumentError
from baton.sampling import Grammar, GrammarKind, SamplingParams
from tests.support.engine.engines import load
from tests.support.engine.streams import running

ROOM = {"num_blocks": 64, "block_size": 16}


def request(tenant: str, pattern: str, salt: bytes = b"") -> EngineRequest:
    params = SamplingParams(grammar=Grammar(GrammarKind.REGEX, pattern))
    return EngineRequest("r", (5, 6, 7), params, 3, tenant=tenant, salt=salt)


def trial_processes() -> list[psutil.Process]:
    children = psutil.Process().children(recursive=True)
    return [p for p in children if "baton.engine.executor.grammar.judge" in p.cmdline()]


async def test_grammar_turns_pass_one_tenants_slow_grammars(checkpoints):
    async with running(load(checkpoints["tiny"], **ROOM)) as serving:
        both = ("[ab]{3}", "[ab]{4}")
        await asyncio.gather(*(serving.compile_grammar(request("b", each)) for each in both))
        trials = trial_processes()
        assert len(trials) == 2
        for process in trials:
            os.kill(process.pid, signal.SIGSTOP)
        try:
            slow = [
                asyncio.create_task(serving.compile_grammar(request("a", f"[xy]{{{n}}}")))
                for n in range(1, 7)
            ]
            await asyncio.sleep(0)
            assert await serving.compile_grammar(request("b", both[0])) is not None
            assert await serving.compile_grammar(request("b", "[ab]{5}")) is not None
            with pytest.raises(InvalidArgumentError, match="unclosed group"):
                await serving.compile_grammar(request("b", "(a"))
            assert not any(task.done() for task in slow)
        finally:
            for process in trials:
                os.kill(process.pid, signal.SIGCONT)
        await asyncio.gather(*slow)


async def test_grammar_of_another_salt_is_compiled_again(checkpoints):
    engine = load(checkpoints["tiny"], **ROOM)
    async with running(engine) as serving:
        await serving.compile_grammar(request("a", "[ab]{3}", b"a"))
    assert engine.core.has_grammar(request("a", "[ab]{3}", b"a"))
    assert not engine.core.has_grammar(request("b", "[ab]{3}", b"b"))
