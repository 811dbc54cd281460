"""Role balance: the load of the pools, and role changes that would even it out.

Each router judges the pools by the load of all routers together (`pool_load.py`,
`role_balance.py`); with `--elastic` `rebalancer.py` changes roles (`Admin.SetRole`). A worker
drains, then begins a new epoch in its new role (ADR 0023).
"""
