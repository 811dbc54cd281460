"""Generates what the chart says of values: in `values.schema.json` the settings of the processes,
in `README.md` the table of all values, from that schema; `--check` only compares.

Everything else in both files is written by hand. Run through `make chart`.
"""

import argparse
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

CHART = Path(__file__).resolve().parent / "baton"
SCHEMA, README, VALUES = "values.schema.json", "README.md", "values.yaml"

# The chart sets these by itself, or by values of its own.
_BY_CHART = {
    "admin_host", "admin_port", "advertise_host", "drain_timeout_s", "host", "http_port",
    "insecure", "log_format", "log_level", "metrics", "metrics_port", "model", "port",
    "redis_password", "redis_signing_key_file", "redis_url", "tls_ca", "tls_cert", "tls_key",
}  # fmt: skip
_BY_CHART_OF_ROUTER = _BY_CHART | {
    "quotas", "client_auth", "model_aliases", "tenants_file",
}  # fmt: skip
_BY_CHART_OF_PICKER = _BY_CHART | {"endpoints"}
_BY_CHART_OF_WORKER = _BY_CHART | {
    "block_size", "device", "dtype", "kv_cache_bytes", "kv_cache_dtype", "kv_connector", "kv_port",
    "lease_timeout_s", "num_blocks", "require_rdma", "socket_dir", "worker_id",
}  # fmt: skip

_TABLE = re.compile(r"(<!-- values -->\n).*(<!-- end of values -->)", re.DOTALL)


def generate() -> dict[str, str]:
    """The contents of both files, by name."""
    from baton_decode_worker.settings import DecodeSettings
    from baton_picker.settings import PickerSettings
    from baton_router.settings import RouterSettings

    schema = json.loads((CHART / SCHEMA).read_text())
    definitions = schema["definitions"]
    definitions["pickerSettings"] = _settings(PickerSettings, _BY_CHART_OF_PICKER)
    definitions["routerSettings"] = _settings(RouterSettings, _BY_CHART_OF_ROUTER)
    definitions["workerSettings"] = _settings(DecodeSettings, _BY_CHART_OF_WORKER)
    defaults = yaml.safe_load((CHART / VALUES).read_text())
    rows = [f"| `{key}` | {default} | {text} |" for key, default, text in _rows(schema, defaults)]
    table = "\n".join(["| value | default | meaning |", "|---|---|---|", *rows, ""])
    readme = _TABLE.sub(rf"\1{_escaped(table)}\2", (CHART / README).read_text())
    return {SCHEMA: json.dumps(schema, indent=2) + "\n", README: readme}


def _settings(settings_class: Any, left_out: set[str]) -> dict[str, Any]:
    """A schema of those settings that have no value of the chart's own."""
    fields = settings_class.model_json_schema()["properties"]
    properties = {n: _setting(field) for n, field in fields.items() if n not in left_out}
    return {"type": "object", "additionalProperties": False, "properties": properties}


def _setting(field: dict[str, Any]) -> dict[str, Any]:
    given = next((a for a in field.get("anyOf", ()) if a["type"] != "null"), field)
    dropped = ("title", "default", "anyOf", "description")
    kept = {key: value for key, value in given.items() if key not in dropped}
    return {**kept, "description": field["description"]}


def _rows(
    node: dict[str, Any], default: Any, path: str = "", root: dict[str, Any] | None = None
) -> Iterator[tuple[str, str, str]]:
    """Each value's path, default and meaning."""
    root = root or node
    for name, given in node["properties"].items():
        value, key = (default or {}).get(name), f"{path}{name}"
        found = _followed(given, root)
        is_group = found.get("properties") and name not in ("behavior", "resources", "settings")
        is_group = is_group and not key.endswith(".pod")
        if is_group and key not in ("decode", "encode"):
            yield from _rows(found, value, f"{key}.", root)
        elif name != "global":
            shown = "as `prefill`" if is_group else f"`{json.dumps(value)}`"
            yield key, shown, given["description"]


def _followed(given: dict[str, Any], root: dict[str, Any]) -> dict[str, Any]:
    """Returns the definition that a reference names; anything else unchanged."""
    reference = given.get("allOf", [{}])[0].get("$ref", "")
    return root["definitions"][reference.rpartition("/")[2]] if reference else given


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail if a file is out of date")
    is_check = parser.parse_args().check
    fresh = generate()
    stale = [name for name, text in fresh.items() if (CHART / name).read_text() != text]
    if is_check and stale:
        sys.exit(f"helm/baton differs from the settings ({', '.join(stale)}); run `make chart`")
    for name in stale:
        (CHART / name).write_text(fresh[name])


if __name__ == "__main__":
    main()
