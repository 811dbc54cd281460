"""Text beside images on simulated H100s: what an encode worker changes, and where it loses.

Three models, by how long their encoder takes for an image beside the prefill of its tokens
(`baton_simulator.machines`): 0.08 times for LLaVA-1.5 7B, 0.55 for Qwen2.5-VL 7B, 4.1 for Gemma 3
4B. A share of the requests show one to four images, one in five of which was shown before; the
others are text of 100 to 1,500 tokens. They arrive at random, at 70% of what two prefill workers
could compute and encode without waiting. Two decode workers. An encode worker takes the place of a
prefill worker, or comes in addition.
"""

import json
import random
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from baton_simulator.cluster import Cluster
from baton_simulator.latency import Machine
from baton_simulator.machines import h100_gemma_4b, h100_llava_7b, h100_qwen_vl_7b
from baton_simulator.rates import rates_of
from baton_simulator.setup import Setup
from baton_simulator.study import simulate
from baton_simulator.traces import TraceImage, TraceRow
from bench.engine.parallel import in_processes
from bench.report import Row

NUM_REQUESTS = 1500
LOAD = 0.7
HEADLINE = 0.3  # of requests with images, to the first model
AIM = 2.0  # for text, of an encode worker that comes in addition

_BLOCK_SIZE = 64  # a fourth of the smallest image
_NUM_LOADED = 2  # prefill workers that the load is for
_REPEATS = 0.2

_Workers = tuple[int, int]
"""Encode and prefill workers."""

_COMPARED: tuple[tuple[_Workers, _Workers], ...] = (
    ((1, 2), (0, 2)),
    ((1, 2), (0, 3)),
    ((1, 1), (0, 2)),
)


@dataclass(frozen=True, slots=True)
class _Model:
    """A model on its machine. `shares`: of requests with images."""

    name: str
    machine: Machine
    num_image_tokens: int
    shares: tuple[float, ...]


_MODELS = (
    _Model("Gemma 3 4B", h100_gemma_4b(), 256, (0.1, 0.3, 0.6)),
    _Model("Qwen2.5-VL 7B", h100_qwen_vl_7b(), 1296, (0.1, 0.3, 0.6)),
    _Model("LLaVA-1.5 7B", h100_llava_7b(), 576, (0.3,)),
)


def rows() -> list[Row]:
    """Simulates every cluster; a ratio above 1 is in favour of the encode worker."""
    cases = [(str(i), str(s)) for i, model in enumerate(_MODELS) for s in model.shares]
    return [Row(**row) for found in in_processes(__name__, cases) for row in found]


def headline_rows() -> list[Row]:
    """Simulates the cases of the headline alone."""
    return _rows_of(_MODELS[0], HEADLINE)


def _rows_of(model: _Model, share: float) -> list[Row]:
    trace = _trace(share, model.num_image_tokens)
    rate = LOAD * _NUM_LOADED * trace[-1].arrival / _seconds(model.machine, trace)
    clusters = {
        workers: _simulated(model.machine, workers, trace, rate)
        for workers in dict.fromkeys(workers for pair in _COMPARED for workers in pair)
    }
    found = []
    for pooled, plain in _COMPARED:
        has_aim = (model, share, plain) == (_MODELS[0], HEADLINE, (0, pooled[1]))
        for kind, of_images in (("text", False), ("images", True)):
            value, reference = (_p99(clusters[w], of_images=of_images) for w in (pooled, plain))
            row = Row(
                f"{model.name}, {share:.0%} with images, {_named(pooled)}: TTFT p99 of {kind}",
                value,
                "ms",
                _named(plain),
                reference,
                reference / value,
                AIM if has_aim and not of_images else None,
            )
            found.append(row)
    return found


def _trace(share: float, num_image_tokens: int) -> list[TraceRow]:
    """Returns requests that are a second apart in the mean. Images are in the middle of text."""
    source, now, num_contents, found = random.Random(0), 0.0, 0, []
    for _ in range(NUM_REQUESTS):
        now += source.expovariate(1.0)
        has_images = source.random() < share
        num_text = source.randint(50, 300) if has_images else source.randint(100, 1500)
        images = []
        for i in range(source.randint(1, 4) if has_images else 0):
            is_repeat = num_contents > 0 and source.random() < _REPEATS
            content = source.randrange(num_contents) if is_repeat else num_contents
            num_contents += not is_repeat
            start = num_text // 2 + i * num_image_tokens
            images.append(TraceImage(start, num_image_tokens, content))
        num_tokens = num_text + len(images) * num_image_tokens
        found.append(TraceRow(now, num_tokens, source.randint(10, 120), images=tuple(images)))
    return found


def _seconds(machine: Machine, trace: Sequence[TraceRow]) -> float:
    """Returns the seconds in which one worker computes and encodes everything, repeats included."""
    rates = rates_of(machine)
    num_encoder_tokens = sum(image.num_tokens for row in trace for image in row.images)
    return (
        sum(row.num_prompt_tokens for row in trace) * rates.prefill_seconds_per_token
        + num_encoder_tokens * rates.encoder_seconds_per_token
    )


def _simulated(
    machine: Machine, workers: _Workers, trace: Sequence[TraceRow], rate: float
) -> Cluster:
    num_encode, num_prefill = workers
    setup = Setup(
        machine=machine,
        num_encode=num_encode,
        num_prefill=num_prefill,
        num_decode=2,
        block_size=_BLOCK_SIZE,
    )
    return simulate(setup, trace, rate)


def _p99(cluster: Cluster, *, of_images: bool) -> float:
    """Returns milliseconds."""
    ttfts = sorted(j.ttft or 0.0 for j in cluster.jobs if bool(j.encoder_inputs) == of_images)
    return 1e3 * ttfts[int(0.99 * len(ttfts))]


def _named(workers: _Workers) -> str:
    num_encode, num_prefill = workers
    return (
        f"{num_encode} encode + {num_prefill} prefill" if num_encode else f"{num_prefill} prefill"
    )


if __name__ == "__main__":
    found = _rows_of(_MODELS[int(sys.argv[1])], float(sys.argv[2]))
    print(json.dumps([asdict(row) for row in found]))
