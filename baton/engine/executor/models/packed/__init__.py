"""Packed layers of CPU workers in files of the host, which all of its workers map.

A model's layers are packed once for a kind of CPU (`packed_layers.py`) and written to a file
(`tensor_file.py`) in the user's cache folder (`packed_folder.py`). Each worker that has the same
weights maps it, and does not read those of the checkpoint: their pages are in memory once.
"""
