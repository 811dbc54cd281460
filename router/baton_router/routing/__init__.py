"""Routing: which request is served next, by which workers, and in which role they are.

`fleet/` is what the router knows of workers, `placement/` chooses among them, `admission/` decides
when a request is placed, and `roles/` proposes or makes changes of roles. Their decisions are pure
functions of plain data: the simulator makes them in simulated time, and `baton replay` again.
"""
