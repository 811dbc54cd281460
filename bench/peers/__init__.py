"""Benchmarks against other engines and servers, those that are installed."""
