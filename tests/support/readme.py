"""Commands and programs of README.md, with the outputs that it shows."""

import re

from tests.support.repository import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
_BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
PROGRAMS = [(language, code) for language, code in _BLOCKS if not code.startswith("$ ")]
"""Language, which is empty for a shell's, and code of each block without outputs."""
OUTPUTS = {
    command: output
    for _, code in _BLOCKS
    for command, output in re.findall(r"^\$ (.+)\n((?:(?!\$ ).*\n)*)", code, re.MULTILINE)
}
"""Output of each command of the other blocks."""


def shows(output: str, printed: str) -> bool:
    """Returns whether an output of the README is what a command has printed, but for times,
    addresses and the widths of columns. A line "..." stands for any lines."""
    parts = (re.escape(_masked(part)) for part in output.strip().split("...\n"))
    return re.fullmatch(".*".join(parts), _masked(printed.strip()), re.DOTALL) is not None


def _masked(text: str) -> str:
    for pattern, mask in (
        (r"\d+(\.\d+)? (ms|s)\b", "TIME"),
        (r"127\.0\.0\.1:\d+", "ADDRESS"),
        (r" *([│┃]) *", r"\1"),
        (r"━+|─+", "━"),
    ):
        text = re.sub(pattern, mask, text)
    return text
