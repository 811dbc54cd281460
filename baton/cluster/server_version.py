"""Name and version of a Redis server, and whether Baton supports it. Knows nothing of connections.

Every Valkey reports `redis_version` 7.2.4, the Redis that it is compatible with; its own version is
`valkey_version`.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

_OLDEST = {"Redis": (6, 2), "Valkey": (7, 2)}


@dataclass(frozen=True, slots=True)
class ServerVersion:
    """A server, such as Valkey 9.1.2.

    Attributes:
        name: "Redis" or "Valkey".
        version: as the server reports it; empty where it reports none.
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
        """Whether Baton runs with it; true where the version is unknown."""
        numbers = tuple(map(int, re.findall(r"\d+", self.version)[:2]))
        return not numbers or numbers >= _OLDEST[self.name]

    def __str__(self) -> str:
        return f"{self.name} {self.version}".rstrip()
