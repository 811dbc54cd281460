"""Commands about the command line itself: completion and version."""

from typing import Annotated, Literal

import typer

from baton.cli.command import command

COMPLETION_VARIABLE = "_BATON_COMPLETE"
"""Environment variable by which a shell's completion script asks for completions."""


@command("Shell")
def completion(
    shell: Annotated[
        Literal["bash", "zsh", "fish"], typer.Argument(help="Shell that reads the script.")
    ],
) -> None:
    """Print a script that completes `baton` in a shell.

    \b
    Examples:
      source <(baton completion bash)
      baton completion zsh > ~/.zfunc/_baton
      baton completion fish > ~/.config/fish/completions/baton.fish
    """
    from typer.completion import get_completion_script  # type: ignore[attr-defined]

    print(get_completion_script(prog_name="baton", complete_var=COMPLETION_VARIABLE, shell=shell))


@command("Shell")
def version() -> None:
    """Print the version.

    \b
    Example:
      baton version
    """
    print_version()


def print_version() -> None:
    """Prints the version of the package."""
    from baton.version import version

    print(f"baton {version()}")
