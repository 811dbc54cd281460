"""Program that preprocesses an image by each checkpoint, as the router's own process does.

    python stripped_images.py IMAGE CHECKPOINT...

Prints the number of tokens of the image, or the error, by the name of the checkpoint, as JSON. Runs
in an environment without torch, and imports nothing of the tests.
"""

import json
import sys
from pathlib import Path

from baton_router.text.images.image_limits import ImageLimits
from baton_router.text.images.image_messages import Done, Job, Start
from baton_router.text.images.image_process import ImageProcess

_LIMITS = ImageLimits()


def _outcome(checkpoint: str, file: bytes) -> int | str:
    start = Start(checkpoint, _LIMITS.max_pixels, 0, _LIMITS.max_tensor_bytes)
    try:
        process = ImageProcess(start)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    done = process(Job(file))
    if not isinstance(done, Done) or process.ready.format is None:
        return str(done)
    return len(process.ready.format.span(done.frames[0].tensors))


if __name__ == "__main__":
    image, *checkpoints = sys.argv[1:]
    content = Path(image).read_bytes()
    print(json.dumps({Path(one).name: _outcome(one, content) for one in checkpoints}))
