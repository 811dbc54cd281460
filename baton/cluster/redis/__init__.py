"""Connections to Redis of any kind, and what is built on one of them."""
