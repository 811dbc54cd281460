"""Coding agents as npm publishes them, set up as the page on coding agents says.

    python -m tests.support.agents

installs all of them.
"""

import asyncio
import os
import re
import signal
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tests.support.documents import blocks
from tests.support.repository import ROOT

PAGE = ROOT / "docs" / "guides" / "coding-agents.md"
ADDRESS, MODEL = "http://127.0.0.1:8000", "my-model"  # on the page
SECONDS = 240.0  # of one task

_SECTION = r"^## (.+?)\n(.*?)(?=^## |\Z)"
_FILE = r"In `(?:~/)?([^`]+)`[^`]*(?:`[^`]+`)?:\n\n```\w+\n(.*?)^```"


@dataclass(frozen=True, slots=True)
class Agent:
    """Coding agent.

    Attributes:
        title: of its section of the page.
        package: on npm, with the version that the tests take.
        program: name of its command.
        setup: script of the package that fetches what npm would run it for; empty: none.
    """

    title: str
    package: str
    program: str
    setup: str = ""

    @property
    def name(self) -> str:
        """Package on npm without its version."""
        return self.package.rpartition("@")[0]

    @property
    def section(self) -> str:
        """Text of its section."""
        sections = dict(re.findall(_SECTION, PAGE.read_text(), re.DOTALL | re.MULTILINE))
        return str(sections[self.title])


AGENTS = (
    Agent("Claude Code", "@anthropic-ai/claude-code@2.1.197", "claude", "install.cjs"),
    Agent("Codex", "@openai/codex@0.171.0", "codex"),
    Agent("opencode", "opencode-ai@1.18.33", "opencode", "postinstall.mjs"),
    Agent("Qwen Code", "@qwen-code/qwen-code@0.15.10", "qwen"),
)


def installed(agent: Agent) -> Path:
    """Returns the folder with the agent's command, installed once for each version."""
    folder = ROOT / ".pytest_cache" / "agents" / agent.package.replace("/", "-")
    commands, done = folder / "node_modules" / ".bin", folder / "done"
    if not done.exists():
        folder.mkdir(parents=True, exist_ok=True)
        quiet = ("--no-audit", "--no-fund", "--ignore-scripts", "--prefix", str(folder))
        _run("npm", "install", *quiet, agent.package)
        if agent.setup:
            _run("node", str(folder / "node_modules" / agent.name / agent.setup))
        done.touch()
    return commands


async def ask(agent: Agent, folder: Path, address: str, model: str) -> str:
    """Has the agent do the task of its section in `folder`, and returns what it prints.

    Raises `AssertionError` with that if it fails or does not end in time.
    """
    section = agent.section.replace(ADDRESS, address).replace(MODEL, model)
    home = folder / "home"
    for name, content in re.findall(_FILE, section, re.DOTALL | re.MULTILINE):
        file = (home if f"~/{name}" in section else folder) / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
    home.mkdir(exist_ok=True)
    (script,) = (code for language, code in blocks(section) if language == "bash")
    commands = await asyncio.to_thread(installed, agent)
    process = await asyncio.create_subprocess_exec(
        *("bash", "-ec", script),
        cwd=folder,
        env={**os.environ, "PATH": f"{commands}:{os.environ['PATH']}", "HOME": str(home)},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(SECONDS):
            printed, _ = await process.communicate()
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    text = printed.decode(errors="replace")
    assert process.returncode == 0, text[-4000:]
    return text


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
