"""Engine core in a child process of its worker (ADR 0038).

Commands and reports pass through two rings in shared memory (`ring.py`) as records without
pickle, counts through a page of it. The parent maps the child's pools, by descriptor on a CPU and
by CUDA IPC handle on a GPU (`pool_memory.py`), so that transfers read and write blocks in place.
Either process ends with the other.
"""
