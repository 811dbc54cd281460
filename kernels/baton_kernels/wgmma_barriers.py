"""Barriers between a wgmma and the next write of the shared memory that it reads, in PTX.

Each warpgroup waits for its own wgmma. With several of them, one may overwrite what another one's
still reads, unless all meet at a barrier first. Triton 3.6 to 3.7.1 may leave that barrier out
(triton-lang/triton #11047).
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

_WARPGROUP: Final = 128
_THREADS: Final = re.compile(r"^\.reqntid (\d+)", re.MULTILINE)
_LABEL: Final = re.compile(r"^\s*([\w$]+):")
_BRANCH: Final = re.compile(r"^\s*(?P<guard>@!?%p\d+\s+)?bra(?:\.uni)?\s+(?P<label>[\w$]+);")
_WAIT: Final = re.compile(r"^\s*wgmma\.wait_group\b")
_BARRIER: Final = re.compile(r"^\s*(?:bar\.sync\s+0;|barrier\.sync\.aligned\s+0;)")
_END: Final = re.compile(r"^\s*(?:ret|exit);")
_GUARD: Final = r"^\s*(?:@!?%p\d+\s+)?"
_STORE: Final = re.compile(_GUARD + r"(?:st\.shared|stmatrix)\b")
_COPY: Final = re.compile(_GUARD + r"cp\.async\.(?:cg|ca|bulk\.tensor)\b")


def unordered_writes(ptx: str, copies_are_read: bool = True) -> list[int]:
    """Returns the lines of a kernel that write shared memory after a wgmma was waited for, without
    a barrier of all warps between, on some path. One warpgroup needs none.

    Args:
        copies_are_read: wgmma reads what asynchronous copies bring. It does not if they bring fp8,
            which is converted on the way.
    """
    threads = _THREADS.search(ptx)
    if threads is None or int(threads[1]) <= _WARPGROUP:
        return []
    lines = ptx.split("\n")
    labels = {match[1]: i for i, line in enumerate(lines) if (match := _LABEL.match(line))}
    found, seen, left = set[int](), set[tuple[int, bool]](), [(0, False)]
    while left:
        state = left.pop()
        if state in seen or state[0] == len(lines):
            continue
        seen.add(state)
        index, has_waited = state
        line = lines[index]
        if has_waited and (_STORE.match(line) or (copies_are_read and _COPY.match(line))):
            found.add(index + 1)
        has_waited = (has_waited or bool(_WAIT.match(line))) and not _BARRIER.match(line)
        left += [(after, has_waited) for after in _successors(lines, labels, index)]
    return sorted(found)


def _successors(lines: Sequence[str], labels: Mapping[str, int], index: int) -> Iterator[int]:
    branch = _BRANCH.match(lines[index])
    if branch is not None and branch["label"] in labels:
        yield labels[branch["label"]]
    is_final = _END.match(lines[index]) or (branch is not None and branch["guard"] is None)
    if not is_final:
        yield index + 1
