"""Vision checkpoints for the router, readers of their images, and encoded images."""

import base64
import io
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from PIL import Image

from baton_router.text.images.image_limits import ImageLimits
from baton_router.text.images.image_reader import ImageReader, start_reader
from baton_router.text.intake import Intake
from baton_router.text.model_card import read_model_card
from baton_router.text.prompt_images import PromptImages
from baton_router.text.request_bounds import RequestLimits
from tests.support.engine.images import save_vision_language

# As llava-hf's: content is always a list of parts, images come first.
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ' : ' }}"
    "{% for part in message['content'] | selectattr('type', 'equalto', 'image') %}"
    "{{ '<image> ' }}{% endfor %}"
    "{% for part in message['content'] | selectattr('type', 'equalto', 'text') %}"
    "{{ part['text'] + ' ' }}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant :' }}{% endif %}"
)


def save_checkpoint(name: str, folder: Path) -> str:
    """Writes a LLaVA checkpoint with a chat template; returns its folder."""
    save_vision_language(name, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return str(folder)


@asynccontextmanager
async def running_reader(
    folder: str, limits: ImageLimits | None = None
) -> AsyncIterator[ImageReader]:
    """Yields the reader of a vision model's images, with one process."""
    async with AsyncExitStack() as stack:
        reader = await start_reader(folder, limits or ImageLimits(processes=1), stack)
        assert reader is not None
        yield reader


@asynccontextmanager
async def running_intake(folder: str, limits: ImageLimits | None = None) -> AsyncIterator[Intake]:
    """Yields the intake of a vision model, with one process for its images."""
    async with running_reader(folder, limits) as reader:
        card = read_model_card(folder)
        yield Intake(card, RequestLimits(), images=PromptImages(card, reader))


def data_url(file: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{base64.b64encode(file).decode()}"


def encoded(image: Image.Image, form: str = "PNG", **options: object) -> bytes:
    """Returns an image as a file."""
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def animated(frames: Sequence[Image.Image], form: str = "GIF", **options: object) -> bytes:
    """Returns frames as an animated file."""
    return encoded(frames[0], form, save_all=True, append_images=frames[1:], **options)


def frames_url(files: Sequence[bytes]) -> str:
    """Returns a data URL of a clip that has a file for each frame, as vLLM takes them."""
    return "data:video/jpeg;base64," + ",".join(base64.b64encode(f).decode() for f in files)
