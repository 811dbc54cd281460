"""`baton token`: a new bearer token for a tenant."""

import json

from baton.serving.tokens import new_token


def show(tenant: str, *, as_json: bool) -> None:
    """Prints a new token and the line that gives it to the tenant."""
    token, line = new_token(tenant)
    if as_json:
        print(json.dumps({"tenant": tenant, "token": token, "line": line}))
        return
    print(f"token of {tenant}, printed only this once:\n\n  {token}\n")
    print(f"line for the router's --tenants-file:\n\n  {line}")
