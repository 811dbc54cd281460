"""Limits of images in requests, of their sources and of the processes that decode them."""

from dataclasses import dataclass

from baton.serving.channels import MAX_ENCODER_INPUT_BYTES

DEFAULT_MAX_IMAGES = 16
DEFAULT_MAX_CLIP_FRAMES = 8
DEFAULT_MAX_IMAGE_BYTES = 20 * 2**20
DEFAULT_MAX_TOTAL_BYTES = 48 * 2**20
DEFAULT_MAX_PIXELS = 2**26
DEFAULT_CACHE_BYTES = 64 * 2**20
DEFAULT_MEMORY_BYTES = 2 * 2**30
DEFAULT_TIMEOUT_SECONDS = 30.0
DEFAULT_FETCH_SECONDS = 10.0
DEFAULT_NUM_PROCESSES = 2


@dataclass(frozen=True, slots=True)
class ImageLimits:
    """Limits of images.

    Attributes:
        max_images: images of one request, frames of clips included.
        max_bytes: bytes of the encoded file of one image.
        max_total_bytes: bytes of the files of all images of one request.
        max_pixels: width times height of one image, times all frames of a clip.
        memory_bytes: address space of a process that decodes.
        timeout: seconds for one image or clip to be decoded and preprocessed.
        fetch_timeout: seconds for one image to be fetched, redirects included.
        max_clip_frames: frames that are taken of one clip.
        max_tensor_bytes: bytes of one image or clip after preprocessing.
        cache_bytes: bytes of preprocessed images that are cached.
    """

    max_images: int = DEFAULT_MAX_IMAGES
    max_bytes: int = DEFAULT_MAX_IMAGE_BYTES
    max_total_bytes: int = DEFAULT_MAX_TOTAL_BYTES
    max_pixels: int = DEFAULT_MAX_PIXELS
    memory_bytes: int = DEFAULT_MEMORY_BYTES
    timeout: float = DEFAULT_TIMEOUT_SECONDS
    fetch_timeout: float = DEFAULT_FETCH_SECONDS
    max_clip_frames: int = DEFAULT_MAX_CLIP_FRAMES
    max_tensor_bytes: int = MAX_ENCODER_INPUT_BYTES
    cache_bytes: int = DEFAULT_CACHE_BYTES
