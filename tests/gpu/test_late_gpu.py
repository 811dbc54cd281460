"""Order of events on a GPU that is late: the host announces and reuses only what an event has
passed, and waits for nothing else."""

import time
from typing import Any

import pytest
import torch

from baton.engine.config import EngineConfig
from baton.engine.executor.cache.kv_pool import KvPool
from baton.engine.llm import LLM
from baton.engine.request import EngineRequest, KvSource, Purpose
from baton.sampling import SamplingParams
from tests.support.kernels.delayed_engine import DelayedModel, cycles, delayed_engine
from tests.support.kernels.engine_families import GREEDY, PROMPTS
from tests.support.kernels.far_pool import NUM_BLOCKS, filled, layouts

pytestmark = pytest.mark.smoke

BLOCK_SIZE = 16
PROMPT = tuple(range(2, 66))  # four chunks of one block
DELAY = 0.15


@pytest.fixture
def load_delayed(folder: Any, settings: dict[str, Any]) -> Any:
    """Loads an engine and its model; on a CPU without the interpreter, which is slow."""
    kernels = "torch" if settings["device"] == "cpu" else "triton"

    def of(**changes: Any) -> tuple[LLM, DelayedModel]:
        config = EngineConfig(**{**settings, "kernels": kernels, **changes})
        return delayed_engine(folder("llama"), config)

    return of


class Onlooker:
    """Reader of a pool that waits for none of the engine's work, as another process would."""

    def __init__(self, pool: KvPool) -> None:
        self._pool = pool
        self._stream = torch.cuda.Stream() if pool.content.is_cuda else None

    def read(self, block_ids: tuple[int, ...]) -> torch.Tensor:
        """Returns the bytes of blocks as they are now, in host memory."""
        with torch.cuda.stream(self._stream):
            return self._pool.content[list(block_ids)].cpu()


def announced_content(engine: LLM, onlooker: Onlooker) -> list[torch.Tensor]:
    """Prefills the prompt and returns, for each step, the content of the whole blocks that it
    announced, read at once."""
    engine.core.add(EngineRequest("it", PROMPT, GREEDY, len(PROMPT), Purpose.PREFILL))
    contents = []
    while engine.core.has_work:
        for update in engine.core.step().updates:
            num_whole = update.num_computed_tokens // BLOCK_SIZE
            contents.append(onlooker.read(update.block_ids[0][:num_whole]))
    engine.core.scheduler.release("it")
    return contents


@pytest.mark.parametrize("asynchronous", [False, True])
def test_engine_announces_blocks_after_the_gpu_wrote_them(load_delayed, asynchronous):
    """Covers chunks that sample nothing, too. The first run compiles, and says what is written."""
    engine, model = load_delayed(
        max_num_batched_tokens=BLOCK_SIZE, prefix_caching=False, async_scheduling=asynchronous
    )
    pool = engine.core.cache.pools[0]
    onlooker = Onlooker(pool)
    expected = announced_content(engine, onlooker)
    assert [len(content) for content in expected] == [1, 2, 3, 4]
    assert expected[-1].any(dim=1).all()
    pool.content.zero_()
    if pool.content.is_cuda:
        torch.cuda.synchronize()
    model.num_cycles = cycles(DELAY, engine.core.device)
    for found, content in zip(announced_content(engine, onlooker), expected, strict=True):
        assert torch.equal(found, content), "a block was announced before it was written"


@pytest.mark.parametrize("asynchronous", [False, True])
def test_engine_announces_external_blocks_after_gpu_used_them(load_delayed, asynchronous):
    """Those of sequences that left while a step that writes to their blocks was launched. They are
    filled on a stream of their own, as by a transfer, which waits for no step."""
    engine, model = load_delayed(
        num_blocks=6,
        max_model_len=6 * BLOCK_SIZE,
        prefix_caching=False,
        free_block_margin=0.0,
        async_scheduling=asynchronous,
    )
    pool, params = engine.core.cache.pools[0], SamplingParams(max_tokens=40, ignore_eos=True)
    stream = torch.cuda.Stream() if pool.content.is_cuda else None
    engine.generate([PROMPT[:40]], params)  # compiles
    for name in ("a", "b"):
        engine.core.add(EngineRequest(name, PROMPT[:40], params, 40))
    for _ in range(3):
        engine.core.step()
    model.num_cycles = cycles(DELAY, engine.core.device)
    engine.core.step()
    engine.core.scheduler.abort("a", "b")
    longest, one = (*PROMPT, *PROMPT)[: 6 * BLOCK_SIZE - 1], SamplingParams(max_tokens=1)
    engine.core.add(EngineRequest("it", longest, one, len(longest), kv_source=KvSource.EXTERNAL))
    (allocation,) = next(filter(None, (engine.core.step().external for _ in range(4))))
    targets = list(allocation.block_ids[0])
    assert len(targets) == 6
    with torch.cuda.stream(stream):
        pool.content[targets] = 77
    if stream is not None:
        torch.cuda.synchronize()
    assert pool.content[targets].eq(77).all(), "a block was announced before a step wrote to it"
    engine.core.scheduler.abort("it")


@pytest.mark.gpu  # a CPU computes while the host waits
def test_engine_returns_tokens_while_the_next_step_runs(load_delayed):
    engine, model = load_delayed(async_scheduling=True)
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    expected = engine.generate([PROMPT], params)[0].token_ids
    engine.core.add(EngineRequest("it", PROMPT, params, len(PROMPT)))
    found = [u.token_id for _ in range(3) for u in engine.core.step().updates]
    model.num_cycles = cycles(DELAY, engine.core.device)
    left = []
    for _ in range(4):
        found += [u.token_id for u in engine.core.step().updates]
        start = time.perf_counter()
        torch.cuda.synchronize()
        left.append(time.perf_counter() - start)
    while engine.core.has_work:
        found += [u.token_id for u in engine.core.step().updates]
    assert tuple(token for token in found if token is not None) == expected
    assert min(left[1:]) > DELAY / 2, "the tokens of a step were waited for with the next step"


@pytest.mark.gpu  # only there host memory is pinned
def test_block_copy_keeps_its_indices_until_it_ran(device):
    """Pinned memory of the same size is taken and written while the copy waits for the GPU."""
    source, layout = filled(device)[0], layouts()[0]
    sources = list(range(1, NUM_BLOCKS + 1))
    reverse = torch.tensor([sources[::-1], sources[::-1]]).t().contiguous()
    target = KvPool(layout, NUM_BLOCKS, torch.device(device))
    target.copy_blocks(sources, sources, source)  # compiles
    target.content.zero_()
    torch.cuda.synchronize()
    torch.cuda._sleep(cycles(DELAY, target.device))
    target.copy_blocks(sources[:-1], sources[1:], source)
    others = [torch.empty_like(reverse[1:], pin_memory=True).copy_(reverse[1:]) for _ in range(64)]
    torch.cuda.synchronize()
    assert len(others) == 64
    assert torch.equal(target.content[2:], source.content[1:-1])
    assert not target.content[:2].any()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_engine_swaps_blocks_that_the_gpu_has_written(load_delayed, asynchronous):
    prompts = [[i, *PROMPTS[1][1:]] for i in range(3)]  # a block each, and soon another
    changes = {"preemption": "swap", "swap_bytes": 2**22, "max_model_len": 64}
    engine, model = load_delayed(num_blocks=4, async_scheduling=asynchronous, **changes)
    roomy, _ = load_delayed(**changes)
    expected = roomy.generate(prompts, GREEDY)
    assert engine.generate(prompts, GREEDY) == expected
    engine.core.scheduler.flush_cache()
    num_swaps = engine.core.scheduler.stats().num_swaps
    model.num_cycles = cycles(DELAY / 10, engine.core.device)
    assert engine.generate(prompts, GREEDY) == expected
    assert engine.core.scheduler.stats().num_swaps > num_swaps > 0
