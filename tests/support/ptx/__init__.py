"""Machine that executes kernels from their PTX on the CPU, as a driver of Triton's.

Triton compiles each kernel as it does for an H100; `machine/` (C++) executes the PTX of that
compilation, thread by thread, and checks every access. See ADR 0050.
"""
