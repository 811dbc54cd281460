"""Text beside images: time to first token with an encode pool and without.

Simulated (`bench.simulator.encode_simulated`): three models on H100s, by the share of requests with
images.

Served: a random LLaVA on the CPU whose encoder takes for an image as long as prefill for hundreds
of tokens. Prompts of text and prompts with an image that no other has come at random times, the
same for all, whether or not those before are answered; so many that one worker, were it else idle,
would be busy with the images for a share of the time. Contenders take turns, each with one decode
worker, which computes no prompts: an encode and a prefill worker, two prefill workers, or one. A
worker has one thread, and all share the cores of this machine.
"""

import asyncio
import io
import json
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, ExitStack
from functools import partial
from operator import truediv
from pathlib import Path

import torch
from transformers import LlavaConfig, LlavaForConditionalGeneration

from baton import AsyncClient, SamplingParams
from baton.cli.local.local_cluster import LocalCluster
from baton.client.client import Image
from baton.models import locate
from baton.models.shapes.drawings import random_drawing
from bench.engine.steps import WORKER_FLAGS
from bench.report import Row
from bench.simulator import encode_simulated

IMAGE_SHARE = 0.35  # of the time, for which one worker would encode
NUM_IMAGES, NUM_TEXTS = 5, 42  # of one measurement
TEXT_LENGTH = 64

_POOL, _ONE = "1 encode + 1 prefill", "1 prefill"
_CONTENDERS = {  # encode and prefill workers
    _POOL: (1, 1),
    "2 prefill": (0, 2),
    _ONE: (0, 1),
}
_ROUTER_FLAGS = {"conditional_disaggregation": False}
_SIDE = 144  # pixels of an image, of which the shipped model makes patches of 8: 324 tokens
_TOWER = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 10}
_TOKEN_IDS = range(8, 400)  # that are text
_PARAMS = SamplingParams(max_tokens=4, ignore_eos=True)


def run(repeats: int) -> list[Row]:
    """Both parts; a ratio above 1 is in favour of the encode pool."""
    return [*encode_simulated.rows(), *_served_rows(repeats)]


def _served_rows(repeats: int) -> Iterator[Row]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        _save_model(folder)
        addresses = {
            name: stack.enter_context(_cluster(folder, *workers)).address
            for name, workers in _CONTENDERS.items()
        }
        rounds = asyncio.run(_rounds(addresses, repeats))
    for other in [name for name in addresses if name != _POOL]:
        for case in rounds[0][_POOL]:
            values, references = ([one[name][case] for one in rounds] for name in (_POOL, other))
            # The halves of a round are seconds apart: other load on the machine meets both.
            ratio = statistics.median(map(truediv, references, values))
            value, reference = map(statistics.median, (values, references))
            aim = encode_simulated.AIM if case == "TTFT p99 of text" else None
            yield Row(f"served: {case}", value, "ms", other, reference, ratio, aim)


def _cluster(folder: Path, num_encode: int, num_prefill: int) -> LocalCluster:
    return LocalCluster(
        model=str(folder),
        num_encode=num_encode,
        num_prefill=num_prefill,
        worker_flags=WORKER_FLAGS,
        router_flags=_ROUTER_FLAGS,
    )


async def _rounds(addresses: Mapping[str, str], repeats: int) -> list[dict[str, dict[str, float]]]:
    """Returns the milliseconds of each case, by contender, of each round but the first: it
    connects, and the router learns."""
    async with AsyncExitStack() as stack:
        clients = {
            name: await stack.enter_async_context(AsyncClient(address))
            for name, address in addresses.items()
        }
        alone = min([await _image_ttft(clients[_ONE], f"alone {i}") for i in range(3)])
        window = NUM_IMAGES * alone / IMAGE_SHARE
        rounds = [
            {name: await _measured(client, window, number) for name, client in clients.items()}
            for number in range(repeats + 1)
        ]
    return rounds[1:]


async def _measured(client: AsyncClient, window: float, seed: int) -> dict[str, float]:
    """Returns the figures of one window of load, in seconds."""
    text, images = await asyncio.gather(
        _at_random(NUM_TEXTS, window, f"text {seed}", partial(_text_ttft, client)),
        _at_random(NUM_IMAGES, window, f"images {seed}", partial(_image_ttft, client)),
    )
    return {
        "TTFT p50 of text": statistics.median(text),
        "TTFT p95 of text": statistics.quantiles(text, n=20)[-1],
        "TTFT p99 of text": statistics.quantiles(text, n=100, method="inclusive")[-1],
        "TTFT p50 of images": statistics.median(images),
    }


async def _at_random(
    number: int, window: float, seed: str, ttft: Callable[[str], Awaitable[float]]
) -> list[float]:
    """Returns the milliseconds until the first token of each request that comes in a window."""
    source = random.Random(seed)
    moments = [source.uniform(0.0, window) for _ in range(number)]

    async def later(index: int) -> float:
        await asyncio.sleep(moments[index])
        return 1e3 * await ttft(f"{seed} {index}")

    return await asyncio.gather(*map(later, range(number)))


async def _text_ttft(client: AsyncClient, seed: str) -> float:
    source = random.Random(seed)
    prompt = [source.choice(_TOKEN_IDS) for _ in range(TEXT_LENGTH)]
    return await _ttft(client.generate(prompt, _PARAMS))


async def _image_ttft(client: AsyncClient, seed: str) -> float:
    file = io.BytesIO()
    random_drawing(random.Random(seed)).image().save(file, "PNG")
    prompt = f"{seed}: <image>How many circles are there?"
    return await _ttft(client.generate(prompt, _PARAMS, images=[Image(file.getvalue())]))


async def _ttft(generation: AsyncIterator[object]) -> float:
    began = time.perf_counter()
    times = [time.perf_counter() async for _ in generation]
    return times[0] - began


def _save_model(folder: Path) -> None:
    """Writes a random checkpoint like the shipped `shapes`, with a larger encoder and larger
    images."""
    shipped = Path(locate("shapes"))
    for file in shipped.glob("*.json*"):
        shutil.copy(file, folder)
    processor = json.loads((shipped / "processor_config.json").read_text())
    processor["image_processor"]["size"] = {"height": _SIDE, "width": _SIDE}
    (folder / "processor_config.json").write_text(json.dumps(processor))
    config = LlavaConfig.from_pretrained(shipped)
    config.vision_config.update({**_TOWER, "image_size": _SIDE})
    torch.manual_seed(0)
    LlavaForConditionalGeneration(config).float().save_pretrained(folder)
