"""`baton` command, as a script and as `python -m baton`."""

import os

from baton.cli.early_sigterm import end_at_sigterm


def main() -> None:
    """Runs the `baton` command: the entry point."""
    end_at_sigterm()  # before the imports, which take seconds
    # gRPC's notes on connections that end are no errors, and not in the form of the log.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    from baton.cli.main import main as run

    run()


if __name__ == "__main__":
    main()
