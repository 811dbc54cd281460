"""Registry of workers in Redis: their records, and a router's view of them."""
