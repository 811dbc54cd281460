"""Process that decodes images and preprocesses them by the checkpoint's own processor.

Reads what clients send, so it trusts none of it: its memory is limited, it has none of the router's
connections and secrets, and the router ends it where it takes too long. Imports no torch.

Started by `baton_router.text.images.image_pool`, as `python -m
baton_router.text.images.image_process`.
"""

import io
import os
import resource
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from baton.errors import BatonError
from baton.models.images.encoder_input import TensorData
from baton.models.images.families import read_image_format, read_image_processor
from baton.models.images.image_format import ImageFormat
from baton.models.images.pixtral import text_tokens
from baton.models.images.rgb import rgb, scale_transparent_colour
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
    read_request,
)
from baton_router.text.images.image_source import MAX_CLIP_FRAMES, sampled
from baton_router.text.images.jpeg_scans import why_slow
from baton_router.text.images.processor_loader import load_processor

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
# Other images of a JPEG file, such as a thumbnail, are no frames.
_ANIMATED = ("PNG", "WEBP", "GIF")
_NAMED_FORMATS = "PNG, JPEG, WebP or GIF"
_SHOWN_CHARS = 120


class ImageProcess:
    """Decoder and processor of one checkpoint's images."""

    def __init__(self, start: Start) -> None:
        _leave_out_torch()
        from transformers import AutoConfig

        self._max_pixels = start.max_pixels
        self._max_tensor_bytes = start.max_tensor_bytes
        # Pillow refuses twice as many, of later frames, too, before they are counted here.
        Image.MAX_IMAGE_PIXELS = start.max_pixels
        self._processor = load_processor(start.path)
        config = AutoConfig.from_pretrained(
            start.path, trust_remote_code=False, local_files_only=True
        )
        placeholder = self._processor.image_token
        self.ready = Ready(
            self._processor.image_processor.to_json_string().encode(),
            placeholder,
            self._processor.tokenizer.convert_tokens_to_ids(placeholder),
            _format(Path(start.path), config.to_dict()),
        )

    def __call__(self, job: Job) -> Done | Refused:
        """Returns the preprocessed frames, or the reason why there are none."""
        try:
            frames = self._decode(job)
        except UnidentifiedImageError:
            return Refused(
                f"is no image that can be read; expected {_NAMED_FORMATS}. Send a video as frames"
            )
        except Image.DecompressionBombError:
            return Refused(f"has more pixels than the {self._max_pixels} that are taken")
        except _RefusedImageError as error:
            return Refused(str(error))
        except MemoryError:
            return Refused("takes more memory than an image may. Send a smaller one")
        # Decoders raise all kinds of errors for files that are damaged.
        except Exception as error:
            return Refused(f"is damaged: {str(error)[:_SHOWN_CHARS] or type(error).__name__}")
        try:
            return self._preprocess_all(frames)
        except _RefusedImageError as error:
            return Refused(str(error))
        except MemoryError:
            return Refused("takes more memory than an image may. Send a smaller one")
        except Exception as error:  # such as an image too narrow to be resized
            width, height = frames[0].size
            return Refused(
                f"of {width} x {height} pixels is refused by the model's processor: "
                f"{str(error)[:_SHOWN_CHARS] or type(error).__name__}"
            )

    def _decode(self, job: Job) -> list[Image.Image]:
        """Returns the frames that are taken, as RGB, turned as the EXIF orientation says."""
        if reason := why_slow(job.file):
            raise _RefusedImageError(reason)
        frames = []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of pixels, which are counted here, and of odd EXIF
            with Image.open(io.BytesIO(job.file), formats=FORMATS) as image:
                num_frames = 1
                if job.max_frames > 1 and image.format in _ANIMATED:
                    num_frames = getattr(image, "n_frames", 1)
                if num_frames > MAX_CLIP_FRAMES:
                    raise _RefusedImageError(
                        f"has {num_frames} frames; at most {MAX_CLIP_FRAMES} are taken"
                    )
                scale_transparent_colour(image)
                taken = sampled(num_frames, job.max_frames)
                for at in range(taken[-1] + 1):
                    image.seek(at)
                    self._check_pixels(image, num_frames)  # a frame may enlarge those after it
                    if at in taken:
                        image.load()
                        frames.append(rgb(ImageOps.exif_transpose(image)))
        return frames

    def _check_pixels(self, image: Image.Image, num_frames: int) -> None:
        width, height = image.size
        if num_frames * width * height > self._max_pixels:
            frames = f"{num_frames} frames of " if num_frames > 1 else ""
            raise _RefusedImageError(
                f"has {frames}{width} x {height} pixels; at most {self._max_pixels} are taken"
            )

    def _preprocess_all(self, frames: list[Image.Image]) -> Done:
        done, num_bytes = [], 0
        for image in frames:
            done.append(self._preprocess(image))
            num_bytes += sum(len(tensor.data) for tensor in done[-1].tensors.values())
            if num_bytes > self._max_tensor_bytes:
                raise _RefusedImageError(
                    f"has {num_bytes} bytes or more after preprocessing; expected at most "
                    f"{self._max_tensor_bytes}. Send a smaller one, or raise "
                    "--max-encoder-input-bytes of routers and workers"
                )
        return Done(done)

    def _preprocess(self, image: Image.Image) -> PreprocessedImage:
        processor = self._processor
        # The settings that a call of the processor with a text would use.
        settings = processor._merge_kwargs(
            tokenizer_init_kwargs=processor.tokenizer.init_kwargs, return_tensors="np"
        )["images_kwargs"]
        images, *_ = processor.prepare_inputs_layout(images=[image], text=[processor.image_token])
        tensors, replacements = processor._process_images(images, **settings)
        wanted = set(processor.model_input_names) - set(processor.unused_input_names)
        kept = {name: value for name, value in tensors.items() if name in wanted}
        return PreprocessedImage(replacements[0], _tensors(kept))


def _format(folder: Path, config: Mapping[str, Any]) -> ImageFormat | None:
    described = {**config, **text_tokens(folder, config)}
    return read_image_format(described, read_image_processor(folder))


class _RefusedImageError(Exception):
    """Image that is beyond a limit."""


def _tensors(given: Mapping[str, Any]) -> dict[str, TensorData]:
    found = {name: np.ascontiguousarray(np.asarray(value)) for name, value in given.items()}
    return {
        name: TensorData(array.dtype.name, array.shape, array.tobytes())
        for name, array in found.items()
    }


def _leave_out_torch() -> None:
    """Lets transformers preprocess by Pillow and numpy, whether torch is installed or not."""
    for name in ("torch", "torchvision"):
        sys.modules[name] = None  # type: ignore[assignment]


def _limit(memory_bytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _read(source: BinaryIO) -> Start | Job | None:
    """Returns the next message; None: the router has closed its end."""
    head = source.read(LENGTH_BYTES)
    if len(head) < LENGTH_BYTES:
        return None
    size = int.from_bytes(head, "little")
    content = source.read(size)
    return read_request(content) if len(content) == size else None


def _write(target: BinaryIO, answer: ImageReply) -> None:
    target.write(frame(answer))
    target.flush()


def main() -> int:
    """Answers the router until it closes its end. Returns the exit code."""
    # What a library prints must not be taken for an answer.
    with os.fdopen(os.dup(1), "wb") as answers:
        os.dup2(2, 1)
        requests = sys.stdin.buffer
        start = _read(requests)
        if not isinstance(start, Start):
            return 0
        _limit(start.memory_bytes)
        try:
            process = ImageProcess(start)
        except BatonError as error:
            _write(answers, Refused(str(error)))
            return 1
        except Exception as error:
            _write(answers, Refused(f"{type(error).__name__}: {error}"))
            return 1
        _write(answers, process.ready)
        while (job := _read(requests)) is not None:
            assert isinstance(job, Job), "a second start"
            _write(answers, process(job))
    return 0


if __name__ == "__main__":
    sys.exit(main())
