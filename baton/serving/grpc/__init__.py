"""gRPC on both sides: servers, channels, access, errors, and bounds on what arrives."""
