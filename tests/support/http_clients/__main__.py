"""Install every client."""

from tests.support.http_clients import CLIENTS, program_of

for client in CLIENTS:
    print(client, *program_of(client), flush=True)
