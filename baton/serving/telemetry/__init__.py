"""Telemetry of a process: metrics, traces and their endpoints."""
