"""Answers to requests: the client's events, made of the events of both workers.

`answer.py` has one `output.py` for each sequence. It puts tokens in order by position and drops
duplicates (`reorder_buffer.py`), makes text of them and applies stop strings
(`baton/models/detokenizer.py`).
"""
