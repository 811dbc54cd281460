"""Commands, programs and outputs that README.md and the pages of docs/ show.

An output is below its command, which has a `$`. Blocks without one are programs, commands and
forms, which show nothing that a run has printed.
"""

import re
from itertools import chain

from tests.support.repository import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(text: str) -> list[tuple[str, str]]:
    """Returns the language, which may be empty, and the code of each block."""
    return re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def _outputs(text: str) -> list[tuple[str, str]]:
    return [
        (command, output)
        for _, code in blocks(text)
        for command, output in re.findall(r"^\$ (.+)\n((?:(?!\$ ).*\n)*)", code, re.MULTILINE)
    ]


PROGRAMS = [code for language, code in blocks(README) if language == "python"]
"""Programs of the README."""
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *ROOT.glob("helm/**/*.md")]
OUTPUTS = {
    str(path.relative_to(ROOT)): outputs
    for path in PAGES
    if "node_modules" not in path.parts and (outputs := _outputs(path.read_text(encoding="utf-8")))
}
"""Commands of each page, in order, with what it shows of their outputs."""


def outputs_of(*commands: str) -> list[str]:
    """Returns what the pages show of the output of a command, by any of its names."""
    return [output for command, output in chain(*OUTPUTS.values()) if command in commands]


def shows(output: str, printed: str) -> bool:
    """Returns whether an output of a page is what a command has printed, but for times, fractions,
    addresses, ids and the widths of columns. A line "..." stands for any lines."""
    output, printed = (f"{text.strip()}\n" for text in (output, printed))
    parts = (re.escape(_masked(part)) for part in output.split("...\n"))
    return re.fullmatch(".*".join(parts), _masked(printed), re.DOTALL) is not None


def _masked(text: str) -> str:
    for pattern, mask in (
        (r"\d+(\.\d+)? (ms|s)\b", "TIME"),
        (r"\d+ tokens/s", "SPEED"),
        (r"127\.0\.0\.1:\d+", "ADDRESS"),
        (r"request [0-9a-f]{16}", "REQUEST"),
        (r"(?<!\d)\d+\.\d+(?![.\d])", "FRACTION"),
        (r" *([│┃]) *", r"\1"),
        (r"━+|─+", "━"),
        (r"(?<=\S) {2,}", " "),
        (r" +$", ""),
    ):
        text = re.sub(pattern, mask, text, flags=re.MULTILINE)
    return text
