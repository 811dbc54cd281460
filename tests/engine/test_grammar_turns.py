"""Grammars of several tenants, which an engine compiles in turns beside its steps."""

import asyncio
import os
import signal
from typing import Any

import pytest

from baton.engine.config import EngineConfig
from baton.engine.core.assembly import LoadedModel
from baton.engine.core.engine_core import EngineCore
from baton.engine.executor.grammar.compiler import GrammarCompiler
from baton.engine.executor.grammar.judge import GrammarLimits
from baton.engine.llm import LLM
from baton.engine.request import EngineRequest
from baton.errors import InvalidArgumentError
from baton.sampling import Grammar, GrammarKind, SamplingParams
from tests.support.engine.engines import load, load_parts
from tests.support.engine.streams import running

ROOM: dict[str, Any] = {"num_blocks": 64, "block_size": 16}


class PatientCore(EngineCore):
    """Its trials may take a minute: on a busy machine a third process takes seconds to start."""

    def __init__(self, config: EngineConfig, loaded: LoadedModel) -> None:
        super().__init__(config, loaded)
        info, limits = loaded.info, GrammarLimits(time_s=60.0)
        self._grammars = GrammarCompiler(
            loaded.path, info.vocab_size, info.eos_token_ids, limits=limits
        )

    @property
    def trial_pids(self) -> list[int]:
        assert self._grammars is not None
        return self._grammars.trial_pids


def request(tenant: str, pattern: str, salt: bytes = b"") -> EngineRequest:
    params = SamplingParams(grammar=Grammar(GrammarKind.REGEX, pattern))
    return EngineRequest("r", (5, 6, 7), params, 3, tenant=tenant, salt=salt)


async def test_grammar_turns_pass_one_tenants_slow_grammars(checkpoints):
    core = PatientCore(*load_parts(checkpoints["tiny"], **ROOM))
    async with running(LLM(core)) as serving:
        for count in range(1, 11):  # two at once need two processes, if both threads get a core
            both = f"[ab]{{{count}}}", f"[cd]{{{count}}}"
            await asyncio.gather(*(serving.compile_grammar(request("b", each)) for each in both))
            if len(trials := core.trial_pids) == 2:
                break
        assert len(trials) == 2
        for pid in trials:
            os.kill(pid, signal.SIGSTOP)
        try:
            slow = [
                asyncio.create_task(serving.compile_grammar(request("a", f"[xy]{{{n}}}")))
                for n in range(1, 7)
            ]
            await asyncio.sleep(0)
            assert await serving.compile_grammar(request("b", both[0])) is not None
            assert await serving.compile_grammar(request("b", "[ef]{5}")) is not None
            with pytest.raises(InvalidArgumentError, match="unclosed group"):
                await serving.compile_grammar(request("b", "(a"))
            assert not any(task.done() for task in slow)
        finally:
            for pid in trials:
                os.kill(pid, signal.SIGCONT)
        await asyncio.gather(*slow)


async def test_grammar_of_another_salt_is_compiled_again(checkpoints):
    engine = load(checkpoints["tiny"], **ROOM)
    async with running(engine) as serving:
        await serving.compile_grammar(request("a", "[ab]{3}", b"a"))
    assert engine.core.has_grammar(request("a", "[ab]{3}", b"a"))
    assert not engine.core.has_grammar(request("b", "[ab]{3}", b"b"))
