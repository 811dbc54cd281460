"""Installs all coding agents."""

from tests.support.agents import AGENTS, installed

for agent in AGENTS:
    print(agent.package, flush=True)
    installed(agent)
