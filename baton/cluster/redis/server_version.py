"""Name and version of a Redis server, and whether Baton supports it. Independent of connections.

Every Valkey reports as `redis_version` the compatible Redis, 7.2.4; its own version is
`valkey_version`.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

_OLDEST = {"Redis": (6, 2), "Valkey": (7, 2)}


@dataclass(frozen=True, slots=True)
class ServerVersion:
    """Server name and version, such as Valkey 9.1.2.

    Attributes:
        name: "Redis" or "Valkey".
        version: as the server reports it; empty if it reports none.
    """

    name: str
    version: str

    @classmethod
    def from_info(cls, info: Mapping[str, object]) -> "ServerVersion":
        """Reads the section `server` of INFO."""
        if "valkey_version" in info:
            return cls("Valkey", str(info["valkey_version"]))
        return cls("Redis", str(info.get("redis_version", "")))

    @property
    def is_supported(self) -> bool:
        """Whether Baton supports the server; true if its version is unknown."""
        numbers = tuple(map(int, re.findall(r"\d+", self.version)[:2]))
        return not numbers or numbers >= _OLDEST[self.name]

    def __str__(self) -> str:
        return f"{self.name} {self.version}".rstrip()
