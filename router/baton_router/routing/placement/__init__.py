"""Placement: the prefill worker and the decode worker of a request, with the reason.

`policy.py` computes the cost of a candidate, and `placement.py` chooses two workers of one
pairing (version, fingerprint, layout), or a decode worker alone, which then computes the prompt
itself; it has to where an upgrade leaves no two workers of one version. For each image whose
output is missing, `encoder_sources.py` chooses the worker that has it cached, one of the encode
pool, or the worker that computes the prompt. All of these are pure.

`placer.py` keeps the decision of admission unless the cluster has changed since, remembers it for
`baton explain` (`explanation.py`), traces it (`placement_span.py`) and records it
(`record/recorder.py`) for `baton replay`, which decides by the same functions.
"""
