"""Network topology: ports are those of the settings; see also `tests/e2e/test_connections.py`."""

from baton.serving.network_topology import CONNECTIONS, PORTS, PROCESSES, WORKERS
from baton_decode_worker.settings import DecodeSettings
from baton_router.settings import RouterSettings


def test_network_topology_lists_every_port_setting():
    router = {name for name in RouterSettings.model_fields if name.endswith("port")}
    worker = {name for name in DecodeSettings.model_fields if name.endswith("port")}
    assert {setting for setting, of in PORTS.values() if "router" in of} == router
    for role in WORKERS:
        assert {setting for setting, of in PORTS.values() if role in of} == worker


def test_network_topology_edges_reach_every_port_and_no_other():
    reached = {(edge.target, edge.port) for edge in CONNECTIONS if edge.port is not None}
    assert reached == {(process, port) for port, (_, of) in PORTS.items() for process in of}
    assert len({(e.source, e.target, e.port) for e in CONNECTIONS}) == len(CONNECTIONS)
    assert {edge.source for edge in CONNECTIONS} >= set(PROCESSES)
