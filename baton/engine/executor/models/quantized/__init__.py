"""Quantized weights of checkpoints, read: each format's stored tensors become plain weights, or
weights in codes (`quantized_tensor.py`) where products take them.

A `Packing` (`packing.py`) describes one arrangement: the names of the tensors that store a weight,
and its values in torch. Each family of formats has its own, by the settings of the checkpoint:
`fp8.py`, `fp4.py`, `grouped_integers.py` (GPTQ, AWQ), `compressed_tensors.py`, `bitsandbytes.py`.
`checkpoint.py` finds them among a checkpoint's tensors; which weights are quantized is decided by
the tensors that exist, not by lists of modules. transformers takes the weights one after the other
as it does those of plain files, so that the model is a plain one, and loading never holds more than
the result and one parameter of it (ADR 0059).

Values are computed in the dtype of a format's own package, so that they are bitwise the same. Knows
nothing of models or devices.

GGUF files have one tensor for each weight, and modules of their own (`gguf.py`, `gguf_codes.py`).
"""
