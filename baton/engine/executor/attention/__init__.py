"""Attention over paged blocks, behind one interface.

On CPUs `in_place_attention.py`, by kernels in C (ADR 0040), and `torch_attention.py` where they
are not available; on GPUs `triton_attention.py`, or FlashInfer or FlashAttention 3
(`library_attention.py`, ADR 0041).
"""
