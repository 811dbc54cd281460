"""Choice of tokens, by the same rules on CPUs and GPUs.

`torch_choice.py` chooses on CPUs, `triton_choice.py` on kernels, which keeps the history that
penalties look at on the device (`token_history.py`, ADR 0016).
"""
