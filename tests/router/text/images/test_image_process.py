"""Processes that decode images: hostile files, crashes, hangs and memory."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest
import pytest_asyncio
from PIL import Image, ImageDraw

from baton.errors import OverloadedError, UnsupportedModelError
from baton_router.text.images.decoder import Decoder
from baton_router.text.images.image_limits import ImageLimits
from baton_router.text.images.image_pool import ImagePool, RefusedImageError
from baton_router.text.images.image_source import sampled
from tests.support.engine.images import image, save_vision_language
from tests.support.router.hostile_images import (
    apng_claiming,
    chunk,
    damaged,
    gif,
    gif_frames,
    jpeg_of_scans,
    png,
    png_bomb,
    text_bomb,
)
from tests.support.router.images import animated, encoded
from tests.support.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")
NUM_FUZZED = 300
NUM_FUZZED_NIGHTLY = 10_000
GOOD = encoded(image(1))
# What a process of LLaVA needs without an image, and the largest image beside it.
MEMORY_BYTES = 1 << 30


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("llava")
    save_vision_language("llava_clip", folder)
    return str(folder)


@asynccontextmanager
async def pool_of(
    checkpoint: str, num_processes: int = 1, **limits: float
) -> AsyncIterator[ImagePool]:
    patient = {"timeout_s": 30.0, **limits}  # on machines that tests keep busy
    pool = ImagePool(checkpoint, ImageLimits(**patient), num_processes)  # type: ignore[arg-type]
    try:
        await pool.start()
        yield pool
    finally:
        await pool.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool(checkpoint) -> AsyncIterator[ImagePool]:
    async with pool_of(checkpoint, process_memory_bytes=MEMORY_BYTES) as made:
        yield made


def idle_of(pool: ImagePool) -> Decoder:
    (process,) = pool._idle
    return process


def pid_of(pool: ImagePool) -> int:
    return idle_of(pool).pid


async def refusal(pool: ImagePool, file: bytes, max_frames: int = 1) -> str:
    with pytest.raises(RefusedImageError) as caught:
        await pool.process(file, max_frames)
    return str(caught.value)


_FORKED_CHILDREN_ABORT = """
import asyncio, ctypes, sys
from baton_router.event_loop import EventLoop
from baton_router.text.images.image_limits import ImageLimits
from baton_router.text.images.image_pool import ImagePool

libc = ctypes.CDLL(None)
libc.__register_atfork(None, None, libc.abort, None)

async def main():
    pool = ImagePool(sys.argv[1], ImageLimits(), 1)
    await pool.start()
    await pool.close()

asyncio.Runner(loop_factory=EventLoop).run(main())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="registers a handler with glibc")
async def test_process_starts_where_handlers_of_forks_crash(checkpoint):
    # Those of gRPC do, in about one of a hundred forks beside its calls (docs/known-issues.md).
    command = [sys.executable, "-c", _FORKED_CHILDREN_ABORT, checkpoint]
    ended = await asyncio.to_thread(subprocess.run, command, capture_output=True, timeout=120)
    assert ended.returncode == 0, ended.stderr.decode()


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "GIF"])
async def test_pool_decodes_format(pool, form):
    (done,) = await pool.process(encoded(image(2), form))
    assert done.tensors["pixel_values"].shape == (1, 3, 24, 24)


@pytest.mark.parametrize("form", ["TIFF", "BMP", "ICO", "PPM", "TGA", "PDF", "JPEG2000"])
async def test_pool_refuses_other_formats(pool, form):
    assert "expected PNG, JPEG, WebP or GIF" in await refusal(pool, encoded(image(2), form))


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "I;16", "CMYK"])
async def test_pool_decodes_mode(pool, mode):
    picture = image(3).convert(mode if mode != "I;16" else "L")
    if mode == "I;16":
        picture = picture.convert("I").convert("I;16")
    (done,) = await pool.process(encoded(picture, "JPEG" if mode == "CMYK" else "PNG"))
    assert done.tensors["pixel_values"].shape == (1, 3, 24, 24)


CIRCLES = ((4, 20), (24, 40), (44, 60))


def circles(mode: str, ground: object, *colours: object) -> Image.Image:
    """Returns circles of these colours on a ground, from left to right."""
    drawn = Image.new(mode, (64, 24), ground)
    for (left, right), colour in zip(CIRCLES, colours, strict=False):
        ImageDraw.Draw(drawn).ellipse((left, 4, right, 20), fill=colour)
    return drawn


# Two circles, and a third one that no viewer shows, on a transparent ground.
CLEAR = circles("RGBA", (90, 0, 0, 0), (0, 80, 200), (60, 60, 60), (0, 200, 0, 0))
ON_WHITE = circles("RGB", "white", (0, 80, 200), (60, 60, 60))
GRAY_CLEAR = circles("LA", (90, 0), (200, 255), (60, 255), (10, 0))
GRAY_ON_WHITE = circles("RGB", "white", (200, 200, 200), (60, 60, 60))


def with_palette(third: int) -> Image.Image:
    """Returns the circles by a palette; the third one is of this entry."""
    drawn = circles("P", 0, 1, 2, third)
    drawn.putpalette([90, 0, 0, 0, 80, 200, 60, 60, 60, 0, 200, 0])
    return drawn


def keyed(depth: int, color: int, key: int, other: int) -> bytes:
    """Returns a PNG file whose left half is of the transparent sample, and whose right one is of
    another one."""
    channels = 3 if color == 2 else 1
    bits = "".join(f"{sample:0{depth}b}" * channels * 16 for sample in (key, other))
    row = b"\0" + int(bits, 2).to_bytes(len(bits) // 8)
    file = png(32, 32, row * 32, depth, color)
    at = file.index(b"IDAT") - 4
    return file[:at] + chunk(b"tRNS", key.to_bytes(2) * channels) + file[at:]


def half_white(shade: int) -> Image.Image:
    made = Image.new("RGB", (32, 32), "white")
    made.paste((shade,) * 3, (16, 0, 32, 32))
    return made


TRANSPARENT = {
    "RGBA": (lambda: encoded(CLEAR), ON_WHITE),
    "RGBA of WebP": (lambda: encoded(CLEAR, "WEBP", lossless=True), ON_WHITE),
    "LA": (lambda: encoded(GRAY_CLEAR), GRAY_ON_WHITE),
    "P, alpha of each": (
        lambda: encoded(with_palette(3), transparency=b"\0\xff\xff\0"),
        ON_WHITE,
    ),
    "P of GIF": (lambda: encoded(with_palette(0), "GIF", transparency=0), ON_WHITE),
    "L": (
        lambda: encoded(circles("L", 10, 200, 60, 10), transparency=10),
        GRAY_ON_WHITE,
    ),
    "1": (
        lambda: encoded(circles("1", 0, 1, 0, 1), transparency=0),
        circles("RGB", "white"),
    ),
    "RGB": (
        lambda: encoded(
            circles("RGB", (9, 9, 9), (0, 80, 200), (60, 60, 60)), transparency=(9,) * 3
        ),
        ON_WHITE,
    ),
    "L of 1 bit": (lambda: keyed(1, 0, 1, 0), half_white(0)),
    "L of 2 bits": (lambda: keyed(2, 0, 1, 2), half_white(170)),
    "L of 4 bits": (lambda: keyed(4, 0, 9, 3), half_white(51)),
    "L of 16 bits": (lambda: keyed(16, 0, 0x1234, 0x8055), half_white(0x80)),
    "RGB of 16 bits": (lambda: keyed(16, 2, 0x1234, 0x8055), half_white(0x80)),
}


@pytest.mark.symptom(
    "hermes-agent#64548, vllm#44974",
    there="transparent pixels are shown to the model",
    here="Lays the image on white.",
)
@pytest.mark.parametrize("name", TRANSPARENT)
async def test_pool_puts_transparent_image_on_white(pool, name):
    make_file, on_white = TRANSPARENT[name]
    assert await pool.process(make_file()) == await pool.process(encoded(on_white))


async def test_pool_shows_gray_of_16_bits_in_its_shades(pool):
    shades = Image.new("I;16", (32, 32), 0x8055)
    opaque = Image.new("RGB", (32, 32), (0x80,) * 3)
    assert await pool.process(encoded(shades)) == await pool.process(encoded(opaque))


async def test_pool_blends_half_transparent_pixels(pool):
    half = encoded(Image.new("RGBA", (32, 32), (0, 100, 200, 51)))
    assert await pool.process(half) == await pool.process(
        encoded(Image.new("RGB", (32, 32), (204, 224, 244)))
    )


@pytest.mark.parametrize("form", ["GIF", "WEBP", "PNG"])
async def test_pool_puts_frames_of_clip_on_white(pool, form):
    others = [each.transpose(Image.Transpose.FLIP_LEFT_RIGHT) for each in (CLEAR, ON_WHITE)]
    kept = {"WEBP": {"lossless": True}, "GIF": {"disposal": 2}}.get(form, {"disposal": 1})
    file = animated([CLEAR, others[0]], form, **kept)
    expected = [(await pool.process(encoded(each)))[0] for each in (ON_WHITE, others[1])]
    assert await pool.process(file, 8) == expected


# Made when a test asks for it: every process of the lane imports this module.
HOSTILE = {
    "a bomb": (lambda: png_bomb(60_000), "has more pixels than the 67108864"),
    "a smaller bomb": (lambda: png_bomb(10_000), "has 10000 x 10000 pixels; at most 67108864"),
    "a header alone": (lambda: png(2**31 - 1, 2**31 - 1, b""), "has more pixels than the"),
    "few rows": (lambda: png(4000, 4000, bytes(100)), "is damaged"),
    "a text bomb": (lambda: text_bomb(50 * 2**20), "is damaged"),
    "a truncated file": (lambda: half(GOOD), "is damaged"),
    "a truncated JPEG": (lambda: encoded(image(1), "JPEG")[:300], "is damaged"),
    "a JPEG of many scans": (lambda: jpeg_of_scans(3000, 8000), "has more than 100 scans"),
    "a header of JPEG": (lambda: b"\xff\xd8\xff\xe0", "is no image that can be read"),
    "no image": (
        lambda: b"<svg xmlns='http://www.w3.org/2000/svg'/>",
        "is no image that can be read",
    ),
    "no width": (lambda: png(0, 10, b""), "is"),
    "a line": (
        lambda: png(6_000_000, 1, bytes(1 + 750_000), depth=1, color=0),
        "takes more memory",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
async def test_pool_refuses_hostile_image(pool, name):
    make_file, part = HOSTILE[name]
    pid = pid_of(pool)
    assert part in await refusal(pool, make_file())
    assert await pool.process(GOOD)
    assert pid_of(pool) == pid


async def test_pool_takes_first_frame(pool):
    first = encoded(Image.new("L", (16, 16), 0), "GIF")
    assert await pool.process(gif_frames(300)) == await pool.process(first)


TURNED = [image(1).rotate(angle) for angle in range(0, 360, 60)]


@pytest.mark.parametrize("form", ["GIF", "WEBP", "PNG"])
async def test_pool_takes_frames_of_clip(pool, form):
    kept = {"WEBP": {"lossless": True}}.get(form, {})
    pictures = [each.quantize(256) for each in TURNED] if form == "GIF" else TURNED
    expected = [(await pool.process(encoded(each)))[0] for each in pictures]
    file = animated(pictures, form, **kept)
    assert await pool.process(file, 8) == expected
    assert await pool.process(file, 3) == [expected[at] for at in (0, 2, 5)]
    assert await pool.process(file) == expected[:1]


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "GIF", "MPO"])
async def test_pool_takes_still_image_as_clip(pool, form):
    file = animated([image(2), image(1)], form) if form == "MPO" else encoded(image(2), form)
    assert await pool.process(file, 8) == await pool.process(file)


async def test_pool_samples_clip_of_many_frames(pool):
    shades = [Image.new("RGB", (16, 16), (at % 256, at // 256, 0)) for at in range(4096)]
    expected = [await pool.process(encoded(shades[at])) for at in sampled(4096, 4)]
    assert [[each] for each in await pool.process(animated(shades, "PNG"), 4)] == expected


async def test_pool_takes_clip_without_durations(pool):
    frames = await pool.process(animated(TURNED, "WEBP", lossless=True, duration=0), 8)
    assert frames == await pool.process(animated(TURNED, "WEBP", lossless=True, duration=500), 8)


def half(file: bytes) -> bytes:
    return file[: len(file) // 2]


HOSTILE_CLIPS = {
    "many frames": (
        lambda: gif(1, 1, [(1, 1)] * 10_000),
        "has 10000 frames; at most 4096 are taken",
    ),
    "a million frames": (
        lambda: gif(1, 1, [(1, 1)] * 1_000_000),
        "has 1000000 frames; at most 4096",
    ),
    "many pixels": (
        lambda: gif(200, 200, [(1, 1)] * 4000),
        "has 4000 frames of 200 x 200 pixels; at",
    ),
    "a large canvas": (
        lambda: gif(8000, 8000, [(1, 1)] * 9),
        "has 9 frames of 8000 x 8000 pixels; at",
    ),
    "a huge canvas": (
        lambda: gif(60_000, 60_000, [(1, 1)] * 9),
        "has more pixels than the 67108864",
    ),
    "frames that enlarge": (
        lambda: gif(1, 1, [(8000, 8000)] * 9),
        "has 9 frames of 8000 x 8000 pixels;",
    ),
    "a late frame that enlarges": (
        lambda: gif(1, 1, [(1, 1)] * 2000 + [(8000, 8000)] * 2000),
        "has 4000 frames of 8000 x 8000 pixels;",
    ),
    "frames that are claimed": (lambda: apng_claiming(2**31), "has 2147483648 frames; at"),
    "more frames than it has": (lambda: apng_claiming(9), "is damaged"),
    "a truncated GIF": (lambda: half(animated(TURNED, "GIF")), "is damaged"),
    "a truncated WebP": (lambda: half(animated(TURNED, "WEBP")), "is damaged"),
    "a truncated PNG": (lambda: half(animated(TURNED, "PNG")), "is damaged"),
    "a video": (lambda: b"\0\0\0\x18ftypmp42\0\0\0\0mp42isom", "Send a video as frames"),
}


@pytest.mark.parametrize("name", HOSTILE_CLIPS)
async def test_pool_refuses_hostile_clip(pool, name):
    make_file, part = HOSTILE_CLIPS[name]
    pid = pid_of(pool)
    assert part in await refusal(pool, make_file(), 8)
    assert await pool.process(GOOD)
    assert pid_of(pool) == pid
    assert peak_bytes(pid) < MEMORY_BYTES


async def test_clip_beyond_tensor_bytes_is_refused(checkpoint):
    num_bytes, clip = 3 * 24 * 24 * 4, animated(TURNED, "PNG")
    async with pool_of(checkpoint, max_tensor_bytes=4 * num_bytes) as pool:
        assert len(await pool.process(clip, 4)) == 4
        assert f"has {5 * num_bytes} bytes or more" in await refusal(pool, clip, 8)


async def test_image_beyond_memory_is_refused(checkpoint):
    file = encoded(Image.new("L", (8000, 8000)))
    async with pool_of(checkpoint, process_memory_bytes=640 << 20) as pool:
        assert "takes more memory" in await refusal(pool, file)
        assert await pool.process(GOOD)


async def test_decoder_has_five_seconds_unless_told_otherwise():
    assert ImageLimits().timeout_s == 5.0


async def test_hang_ends_after_timeout(checkpoint):
    async with pool_of(checkpoint, timeout_s=2.0) as pool:
        pid = pid_of(pool)
        os.kill(pid, signal.SIGSTOP)
        assert "was not decoded within 2 s" in await refusal(pool, GOOD)
        assert not psutil.pid_exists(pid)
        assert await pool.process(GOOD)


async def test_killed_process_costs_one_image(pool):
    pid = pid_of(pool)
    num_restarts, num_images = pool.num_restarts, sum(pool.preprocessing.counts)
    os.kill(pid, signal.SIGSTOP)
    hit = asyncio.create_task(pool.process(GOOD))
    waiting = asyncio.create_task(pool.process(GOOD))
    await until(lambda: (pool.num_busy, pool.num_waiting, pool.num_idle) == (1, 1, 0))
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(RefusedImageError, match="crashed its decoder"):
        await hit
    assert await waiting
    idle = idle_of(pool)
    os.kill(idle.pid, signal.SIGKILL)  # without an image
    await until(lambda: not idle.is_running)
    assert await pool.process(GOOD)
    assert (pool.num_busy, pool.num_waiting, pool.num_idle) == (0, 0, 1)
    assert pool.num_restarts - num_restarts == 2
    assert sum(pool.preprocessing.counts) - num_images == 3


async def test_client_that_leaves_costs_no_process(pool):
    pid = pid_of(pool)
    leaving = asyncio.create_task(pool.process(GOOD))
    await asyncio.sleep(0)
    leaving.cancel()
    assert await pool.process(GOOD)
    assert pid_of(pool) == pid


async def test_pool_rejects_images_beyond_its_queue(pool):
    pid = pid_of(pool)
    os.kill(pid, signal.SIGSTOP)
    first = asyncio.create_task(pool.process(GOOD))
    second = asyncio.create_task(pool.process(bytes(1 << 20)))
    await asyncio.sleep(0)
    with pytest.raises(OverloadedError, match="of 1048576 bytes wait"):
        await pool.process(bytes(256 << 20))  # which alone would be taken
    jobs = [asyncio.create_task(pool.process(GOOD)) for _ in range(63)]
    await asyncio.sleep(0)
    with pytest.raises(OverloadedError, match="expected at most 64"):
        await pool.process(GOOD)
    os.kill(pid, signal.SIGCONT)
    assert all(await asyncio.gather(first, *jobs))
    with pytest.raises(RefusedImageError, match="no image"):
        await second
    assert (pool.num_busy, pool.num_waiting) == (0, 0)


async def test_process_ends_with_its_parent(checkpoint):
    async with pool_of(checkpoint) as pool:
        process = psutil.Process(pid_of(pool))
        environment = process.environ()
    assert not process.is_running()
    assert not {name for name in environment if name.startswith("BATON_")}


async def test_pool_names_checkpoint_without_processor(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llava"}')
    pool = ImagePool(str(tmp_path), ImageLimits(), 1)
    with pytest.raises(UnsupportedModelError, match="cannot be loaded"):
        await pool.start()
    await pool.close()


SCRIPT = """
import io, sys
from pathlib import Path
from baton_router.text.images.image_process import ImageProcess
from baton_router.text.images.image_messages import Job, Start
process = ImageProcess(Start(sys.argv[1], 2**26, 2**31, 2**27))
print(process(Job(Path(sys.argv[2]).read_bytes())).frames[0].replacement)
print(sorted(m for m in sys.modules if m.startswith("torch") and sys.modules[m] is not None))
"""


async def test_process_imports_no_torch(checkpoint, tmp_path):
    file = tmp_path / "image.png"
    file.write_bytes(GOOD)
    command = [sys.executable, "-c", SCRIPT, checkpoint, str(file)]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True)
    assert done.stdout.splitlines() == ["<image>" * 16, "[]"], done.stderr


def peak_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) << 10
    raise AssertionError("no peak")


async def fuzz(pool: ImagePool, num: int) -> None:
    """Decodes damaged files, half of them as clips: none crashes or hangs the process, and its
    memory is bounded."""
    pid, num_refused = pid_of(pool), 0
    for at, file in enumerate(damaged(num)):
        try:
            await pool.process(file, 8 if at % 2 else 1)
        except RefusedImageError:
            num_refused += 1
        assert pid_of(pool) == pid, file.hex()  # it was not replaced after a crash or a timeout
    assert num / 4 < num_refused < num
    assert peak_bytes(pid) < MEMORY_BYTES


async def test_damaged_images_harm_nothing(pool):
    await fuzz(pool, NUM_FUZZED)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
async def test_many_damaged_images_harm_nothing(pool):
    await fuzz(pool, NUM_FUZZED_NIGHTLY)
