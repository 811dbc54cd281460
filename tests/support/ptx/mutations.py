"""Mutations of PTX: one wait, barrier or fence less."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

_GUARD = r"(?:@!?%p\d+\s+)?"
_KINDS = {
    "barrier": re.compile(rf"^\s*{_GUARD}bar\.sync\b"),
    "copy wait": re.compile(rf"^\s*{_GUARD}cp\.async\.wait_group\s+(?P<allowed>\d+)"),
    "wgmma wait": re.compile(rf"^\s*{_GUARD}wgmma\.wait_group\.sync\.aligned\s+(?P<allowed>\d+)"),
    # The branch back to `mbarrier.try_wait`.
    "mbarrier wait": re.compile(r"^\s*@!complete\s+bra"),
}
_NEVER = "999"  # operations may be unfinished at such a wait


@dataclass(frozen=True, slots=True)
class Site:
    """Synchronization of a kernel: its kind, and the index of its line."""

    kind: str
    index: int


def sites(ptx: str) -> Iterator[Site]:
    """Yields the waits and barriers of a kernel."""
    for index, line in enumerate(ptx.split("\n")):
        for kind, pattern in _KINDS.items():
            if pattern.match(line):
                yield Site(kind, index)


def without(ptx: str, *removed: Site) -> str:
    """Returns the PTX whose `removed` sites neither wait nor synchronize."""
    lines = ptx.split("\n")
    for site in removed:
        match = _KINDS[site.kind].match(lines[site.index])
        assert match is not None
        allowed = match.groupdict().get("allowed")
        lines[site.index] = "" if allowed is None else _allowing_all(lines[site.index], match)
    return "\n".join(lines)


def trapped(ptx: str, site: Site) -> str:
    """Returns the PTX that stops where the site is."""
    lines = ptx.split("\n")
    lines[site.index] = "trap;" + lines[site.index]
    return "\n".join(lines)


def _allowing_all(line: str, match: re.Match[str]) -> str:
    begin, end = match.span("allowed")
    return line[:begin] + _NEVER + line[end:]
