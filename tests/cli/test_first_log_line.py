"""First log line of each process: before the imports that take seconds, and as all others."""

import json
import os
import resource
import subprocess
import sys

import pytest

from tests.support.repository import ROOT

ROLES = {"router": "router"} | {f"{role}-worker": role for role in ("encode", "prefill", "decode")}
HEAVY = ("torch", "transformers", "tokenizers", "uvloop", "redis")


def run(code: str, *arguments: str, **variables: str) -> tuple[list[str], float]:
    """Returns the lines on stderr, and the CPU seconds that the process took."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ, **variables},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(done.stdout, done.stderr)
    seconds = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    return done.stderr.splitlines(), seconds


# The first import of something heavy ends the process; looking whether it is installed does not.
STOPPED = f"""
import sys
from importlib.machinery import ModuleSpec
class Stop:
    def find_spec(self, name, path=None, target=None):
        return ModuleSpec(name, self) if name in {HEAVY} else None
    def create_module(self, spec):
        return None
    def exec_module(self, module):
        sys.exit("imports " + module.__name__)
sys.meta_path.insert(0, Stop())
from baton.cli.main import main
main()
"""


@pytest.mark.parametrize("command", ROLES)
def test_process_logs_first_line_before_heavy_imports(command):
    (line, stopped), seconds = run(STOPPED, command, BATON_LOG_FORMAT="json")
    first = json.loads(line)
    assert (first["role"], first["level"]) == (ROLES[command], "INFO")
    assert first["message"].startswith("baton ")
    assert stopped.startswith("imports ")
    # A second, on a machine that does nothing else.
    print(f"{command}: first line within {seconds:.2f} s of computing")


@pytest.mark.parametrize(
    ("arguments", "level", "is_said"),
    [
        (["--log-level", "warning"], "INFO", False),
        (["--log-level=INFO"], "ERROR", True),
        ([], "ERROR", False),
        (["--log-format"], "INFO", True),
        (["--help"], "INFO", False),
    ],
)
def test_first_line_follows_the_settings_of_logs(arguments, level, is_said):
    code = (
        "import sys; from baton.serving.first_line import log_first_line; "
        "log_first_line('router', sys.argv[1:])"
    )
    lines, _ = run(code, *arguments, BATON_LOG_LEVEL=level)
    assert [" INFO router baton.serving.first_line: baton " in line for line in lines] == (
        [True] if is_said else []
    )


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
from baton.serving.logs import configure_logging
configure_logging("INFO", "json", "router")
from baton.models import locate
from baton_router.text.model_card import read_model_card
read_model_card(locate("tiny")).warm_up()
import logging
logging.getLogger("transformers.x").warning("a warning of transformers")
"""


def test_router_without_torch_logs_json_lines_alone():
    lines, _ = run(WITHOUT_TORCH)
    assert [json.loads(line)["message"] for line in lines] == ["a warning of transformers"]
