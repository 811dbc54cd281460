import subprocess
import sys

SCRIPT = """
import sys
sys.modules["PIL"] = None
import baton_router.process
from baton.models import locate
from baton_router.text.model_card import read_model_card

read_model_card(locate("tiny")).render([{"role": "user", "content": "hi"}])
absent = ("torch", "triton", "baton.engine", "baton_router.text.images.image_reader")
print(sorted(name for name in absent if name in sys.modules))
"""


def test_router_imports_neither_torch_nor_images():
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60
    )
    assert (done.stdout.strip(), done.returncode) == ("[]", 0), done.stderr
