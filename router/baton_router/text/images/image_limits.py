"""Limits of images in requests, of their sources and of the processes that decode them."""

from dataclasses import dataclass

from baton.serving.grpc.channels import MAX_ENCODER_INPUT_BYTES
from baton.settings import setting


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageLimits:
    """Limits of images. `max_tensor_bytes`: of one image or clip after preprocessing."""

    max_per_request: int = setting(
        16, "Maximum images of one request, frames of clips included.", ge=1
    )
    max_clip_frames: int = setting(
        8, "Maximum frames that are taken of one clip, evenly spaced.", ge=1
    )
    max_bytes: int = setting(
        20 * 2**20,
        "Maximum bytes of one image, as an encoded file. In HTTP requests images are base64, of "
        "4/3 the bytes: --http-max-body-bytes bounds them, too.",
        ge=1024,
    )
    max_total_bytes: int = setting(
        48 * 2**20, "Maximum bytes of all images of one request together.", ge=1024
    )
    max_pixels: int = setting(
        2**26,
        "Maximum pixels of one image: its width times its height, and times all frames of a clip.",
        ge=1,
    )
    timeout_s: float = setting(
        5.0, "Timeout in seconds to decode and preprocess one image or clip.", gt=0
    )
    processes: int = setting(
        3,
        "Maximum processes of the router that decode images, for each model that takes some. The "
        "first starts with the router, others ahead of need: one more than there are images.",
        ge=1,
    )
    cache_bytes: int = setting(
        64 * 2**20,
        "Maximum bytes of preprocessed images that the router caches, for each model that takes "
        "some, so that a conversation does not decode its images again in each turn. 0: none.",
        ge=0,
    )
    process_memory_bytes: int = setting(
        2 * 2**30,
        "Maximum bytes of address space of each of these processes. An image that needs more is "
        "refused.",
        ge=512 * 2**20,
    )
    url_hosts: str | None = setting(
        None,
        "Hosts from which the router fetches images that requests give by http or https URL, "
        "separated by commas, as in `images.example.org,*.example.com`; `*` is any. Only public "
        "addresses are connected to. Unset: none; requests may have data URLs.",
    )
    url_networks: str | None = setting(
        None,
        "Networks that are not public, of which --images-url-hosts may have addresses "
        "nevertheless, separated by commas, as in `10.1.0.0/16`. Unset: none.",
    )
    url_timeout_s: float = setting(
        10.0, "Timeout in seconds to fetch one image, redirects included.", gt=0
    )
    max_tensor_bytes: int = MAX_ENCODER_INPUT_BYTES


def comma_list(given: str | None) -> list[str]:
    """Returns the items of a list in a setting; None: there are none."""
    return [item.strip() for item in (given or "").split(",") if item.strip()]
