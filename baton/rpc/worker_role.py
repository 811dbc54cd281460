"""Roles of a worker, as every package names them."""

from typing import Literal, get_args

Role = Literal["encode", "prefill", "decode"]
ROLES: tuple[Role, ...] = get_args(Role)
