"""Workers as one router knows them: health, load, cached prefixes, speed.

`fleet.py` gives a snapshot of the workers with what each has cached of a prompt. Redis says which
workers exist; gRPC health says whether one serves (`health_checks.py`). Without Redis no worker
is lost. Load is counted from what this router placed and saw end, and so are the prefixes that a
worker will hold once it has computed what it was given (`pending_prefixes.py`). How long work
takes is fitted to what workers report with their results (`worker_model.py`, `regression.py`).
"""
