"""Memory that a process may still take."""

from pathlib import Path

from baton.engine.executor.memory.machine_memory import (
    allowed_memory,
    available_memory,
    machine_memory,
)

MIB = 2**20


def write(folder: Path, **files: str) -> None:
    for name, text in files.items():
        (folder / name.replace("_", ".", 1)).write_text(text)


def test_available_memory_of_this_machine_is_within_it():
    assert 0 < available_memory() <= allowed_memory() <= machine_memory()


def test_available_memory_is_what_the_cgroup_leaves(tmp_path):
    """Cached files that are not in use give way."""
    machine = tmp_path / "meminfo"
    machine.write_text(f"MemTotal:  9000000 kB\nMemAvailable:  {900 * 1024} kB\n")
    limit = tmp_path / "memory.max"
    write(tmp_path, memory_max=f"{500 * MIB}\n", memory_current=f"{300 * MIB}\n")
    assert available_memory(machine, [limit]) == 200 * MIB
    write(tmp_path, memory_stat=f"anon 5\ninactive_file {100 * MIB}\n")
    assert available_memory(machine, [limit]) == 300 * MIB
    write(tmp_path, memory_current=f"{700 * MIB}\n", memory_stat="anon 5\n")
    assert available_memory(machine, [limit]) == 0


def test_available_memory_without_limit_is_the_machines(tmp_path):
    machine = tmp_path / "meminfo"
    machine.write_text(f"MemAvailable:  {900 * 1024} kB\n")
    write(tmp_path, memory_max="max\n", memory_current="1\n")
    for limits in ([tmp_path / "memory.max"], [tmp_path / "none"]):
        assert available_memory(machine, limits) == 900 * MIB
    write(tmp_path, memory_max=f"{2000 * MIB}\n")
    assert available_memory(machine, [tmp_path / "memory.max"]) == 900 * MIB
