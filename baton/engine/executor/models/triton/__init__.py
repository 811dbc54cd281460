"""Networks and layers on Triton kernels."""
