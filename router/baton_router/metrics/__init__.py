"""Prometheus metrics of a router, collected on scrape from counters that exist anyway."""
