"""KV pools of an engine, and the layout of their blocks.

Layers that see the same tokens form a cache group, with a pool and block tables of its own (ADR
0008). A pool is block-major: one block is one contiguous region over all layers of the group. A
block is head-major, `[kv_head][layer][K, V][token][dim]`, so that a range of heads is contiguous,
too (ADR 0037). Before a step computes, the plan's blocks are moved: out to host memory, copied,
cleared, in. K and V may be kept in fp8, with static scales (`kv_scales.py`, ADR 0015).
"""
