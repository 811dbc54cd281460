"""Options that several commands share."""

from typing import Annotated, TypeAlias

import typer

from baton.sampling import MAX_TEMPERATURE

DEFAULT_ADDRESS = "127.0.0.1:50051"

Address: TypeAlias = Annotated[
    str, typer.Option(envvar="BATON_ADDRESS", metavar="HOST:PORT", help="Where the router listens.")
]
MaxTokens: TypeAlias = Annotated[int, typer.Option(min=1, help="Tokens to generate at most.")]
Temperature: TypeAlias = Annotated[
    float, typer.Option(min=0.0, max=MAX_TEMPERATURE, help="0 takes the likeliest token always.")
]
TopK: TypeAlias = Annotated[
    int, typer.Option(min=0, help="Consider the k likeliest tokens alone; 0: all.")
]
TopP: TypeAlias = Annotated[
    float, typer.Option(help="Consider the likeliest tokens up to this probability, in (0, 1].")
]
Seed: TypeAlias = Annotated[
    int, typer.Option(min=0, help="The same seed draws the same tokens again.")
]
Timeout: TypeAlias = Annotated[
    float, typer.Option(min=0.0, help="Seconds that an answer may take as a whole.")
]
Json: TypeAlias = Annotated[bool, typer.Option("--json", help="Print JSON instead, for programs.")]
