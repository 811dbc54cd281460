"""Attention over the paged cache: the plan of a step's work, and the kernels that follow it."""
