"""Kernels from logits to tokens: rules, penalties, grammars and the draw."""
