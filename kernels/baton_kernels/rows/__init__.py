"""Kernels whose row of output depends on its own token alone."""
