"""Bodies of requests: read under bounds, with the names that clients know their fields by."""
