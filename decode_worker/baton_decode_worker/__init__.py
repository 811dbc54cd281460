"""Decode role: fetches the blocks of a prompt, and generates the answer.

A decode worker promises capacity (`capacity.py`), allocates blocks and opens `KvTransfer.Fetch`.
When all blocks are checked it confirms the lease's generation; only then is the sequence
committed to its engine, and its blocks to its prefix cache. Decoded tokens stream to the router,
the first one again among them in case the prefill worker has died since.

A request with `n`, `best_of` or beams is one prompt that forks here: the prefill worker's token
is not used, and the last prompt token is computed once more, so that forks, seeds and beams are
decided by one engine (ADR 0010). Samples stream side by side; ranked sequences are sent when all
have ended. A stop string ends a sequence in the router, which has this worker end it too
(`Decode.EndSequence`). A worker that takes such a request over gets the tokens of each sample so
far, computes them as a prompt, and resumes after them; ranked sequences start again (ADR 0027).

A worker that drains stops its requests and keeps their blocks for another one (`handover.py`, ADR
0018).
"""
