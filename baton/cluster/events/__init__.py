"""KV events: what a worker's prefix cache has, from its publisher to a router's subscriber."""
