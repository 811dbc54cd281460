"""`python -m baton`: the `baton` command."""

from baton.cli.main import main

main()
