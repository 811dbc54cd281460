"""Clusters on this machine: processes, their start, and the commands that run one."""
