"""Checkpoints of all families that take images, and images that another environment preprocesses
by them."""

import json
import subprocess
from pathlib import Path

from baton.models import locate
from tests.support.engine.images import VISION_LANGUAGE, image, save_vision_language
from tests.support.repository import ROOT

# Those of another activation have the same processors.
NAMES = [name for name in VISION_LANGUAGE if not name.endswith("_gelu")]
PROGRAM = ROOT / "tests" / "support" / "stripped_images.py"
IMAGE = "image.png"


def save_families(folder: Path) -> None:
    """Writes a checkpoint of each of `NAMES`, in a folder of this name, and an image, `IMAGE`."""
    for name in NAMES:
        save_vision_language(name, folder / name)
    image(1).save(folder / IMAGE)


def outcomes_in(root: Path, folder: Path) -> dict[str, int | str]:
    """Returns the number of tokens of the image, or the error, of each checkpoint of a folder and
    of the shipped one, in a virtual environment that has Baton."""
    checkpoints = [*(folder / name for name in NAMES), Path(locate("shapes"))]
    done = subprocess.run(
        [root / "bin" / "python", "-P", PROGRAM, folder / IMAGE, *checkpoints],
        env={"PATH": "/usr/bin:/bin", "HOME": str(folder), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    outcomes: dict[str, int | str] = json.loads(done.stdout)
    return outcomes
