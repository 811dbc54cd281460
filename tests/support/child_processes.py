"""Child processes by their command lines."""

import contextlib

import psutil


def children_running(name: str, parent: psutil.Process) -> list[psutil.Process]:
    """Returns the descendants whose command line has this name. One that has ended, and that its
    parent has not waited for, has none."""
    found = []
    for child in parent.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if name in " ".join(child.cmdline()):
                found.append(child)
    return found
