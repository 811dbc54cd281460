"""Quantised weights, read as the dense tensors that they stand for.

Transformers is given a mapping of names to objects whose `[...]` reads one weight, so that a load
holds the result and the weights that are being read, and never all of both.
"""
