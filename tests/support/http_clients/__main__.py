"""Install every client."""

from tests.support.http_clients import CLIENTS, environment_of

for client in CLIENTS:
    print(client, environment_of(client), flush=True)
