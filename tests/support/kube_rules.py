"""Rules of Kubernetes for names, labels, quantities and the like, which its OpenAPI schemas lack.

Written from its documentation ("Object Names and IDs", "Labels and Selectors", "Quantity", "Taints
and Tolerations", "Network Policies"), and that of image references; an oracle for the schema of the
chart's values, with which it shares no expression.
"""

from ipaddress import ip_network
from itertools import groupby
from string import ascii_letters, ascii_lowercase, digits
from typing import Any

_LOWER = set(ascii_lowercase + digits)
_ALPHANUMERIC = set(ascii_letters + digits)
_HEX = set("0123456789abcdef")
_SUFFIXES = {"", "n", "u", "m", *"kMGTPE", *(f"{prefix}i" for prefix in "KMGTPE")}


def _is_between(text: str, ends: set[str], inner: str) -> bool:
    """Returns whether `text` is not empty, begins and ends with `ends`, and has these and `inner`
    alone."""
    return text != "" and {text[0], text[-1]} <= ends and set(text) <= ends | set(inner)


def is_subdomain(text: str) -> bool:
    """Returns whether `text` is the name of most objects, a DNS subdomain."""
    return len(text) <= 253 and all(_is_between(part, _LOWER, "-") for part in text.split("."))


def is_label_key(text: str) -> bool:
    prefix, slash, name = text.rpartition("/")
    is_name = len(name) <= 63 and _is_between(name, _ALPHANUMERIC, "-_.")
    return is_name and (is_subdomain(prefix) if slash else True)


def is_annotation_key(text: str) -> bool:
    return text.isascii() and is_label_key(text.lower())


def is_label_value(text: str) -> bool:
    return text == "" or (len(text) <= 63 and _is_between(text, _ALPHANUMERIC, "-_."))


def is_host(text: str) -> bool:
    """Returns whether an Ingress takes `text` as its host: a DNS name, no address."""
    return len(text) <= 253 and is_subdomain(text.removeprefix("*.")) and not is_cidr(f"{text}/32")


def is_cidr(text: str) -> bool:
    """Returns whether `text` is a network in the usual spelling."""
    address, slash, length = text.partition("/")
    if not slash or not set(length) <= set(digits) or length != str(int(length or 0)):
        return False
    if ":" in address and "." in address:
        return False  # an address of version 4 in one of version 6, which the chart does not take
    try:
        ip_network(text, strict=False)
    except ValueError:
        return False
    return "%" not in text


def is_image_reference(text: str) -> bool:
    """Returns whether a container runtime would pull `text`, with a sha256 if it has a digest."""
    text, at, digest = text.partition("@")
    algorithm, _, value = digest.partition(":")
    if at and not (algorithm == "sha256" and len(value) == 64 and set(value) <= _HEX):
        return False
    head, slash, last = text.rpartition("/")
    last, colon, tag = last.partition(":")
    if colon and not is_tag(tag):
        return False
    parts = f"{head}{slash}{last}".split("/")
    if len(parts) > 1 and not _is_path_part(parts[0]):
        if not _is_registry_host(parts[0]):
            return False
        parts = parts[1:]
    return all(map(_is_path_part, parts)) and len("/".join(parts)) <= 255


def is_tag(text: str) -> bool:
    word = _ALPHANUMERIC | {"_"}
    return 1 <= len(text) <= 128 and text[0] in word and set(text) <= word | {".", "-"}


def is_registry(text: str) -> bool:
    """Returns whether images of this registry, which may have a path, can be named."""
    return is_image_reference(f"{text.removesuffix('/')}/image")


def _is_registry_host(text: str) -> bool:
    host, colon, port = text.partition(":")
    is_port = port != "" and set(port) <= set(digits) if colon else True
    return is_port and all(_is_between(part, _ALPHANUMERIC, "-") for part in host.split("."))


def _is_path_part(text: str) -> bool:
    runs = ["".join(run) for _, run in groupby(text, key=lambda c: c if c in "._-" else "")]
    words, separators = runs[::2], runs[1::2]
    return (
        len(words) == len(separators) + 1
        and all(set(word) <= _LOWER for word in words)
        and all(run in (".", "_", "__") or set(run) == {"-"} for run in separators)
    )


def is_quantity(value: Any) -> bool:
    """Returns whether `value` is an amount of a resource, which may not be below 0."""
    if isinstance(value, bool):
        return False
    if isinstance(value, int | float):
        return value >= 0
    number = value.rstrip(ascii_letters)
    whole, dot, fraction = number.partition(".")
    is_number = set(whole + fraction) <= set(digits) and (whole + fraction) != ""
    return is_number and (dot in ("", ".")) and value[len(number) :] in _SUFFIXES


def is_container_resource(name: str) -> bool:
    """Returns whether containers may ask for a resource of this name."""
    prefix, slash, _ = name.rpartition("/")
    if not slash:
        size = name.removeprefix("hugepages-")
        is_page = size != name and is_quantity(size)
        return name in ("cpu", "memory", "ephemeral-storage") or is_page
    is_extended = "kubernetes.io/" not in name and not name.startswith("requests.")
    return is_extended and is_label_key(name) and len(prefix) + len("requests.") <= 253


def fits_toleration(toleration: dict[str, Any]) -> bool:
    operator = toleration.get("operator", "Equal")
    effect, key = toleration.get("effect", ""), toleration.get("key", "")
    return (
        operator in ("Exists", "Equal")
        and effect in ("", "NoSchedule", "PreferNoSchedule", "NoExecute")
        and (is_label_key(key) if key else operator == "Exists")
        and (not toleration.get("value") if operator == "Exists" else True)
        and is_label_value(toleration.get("value", ""))
        and ("tolerationSeconds" not in toleration or effect == "NoExecute")
    )


def fits_selector(selector: dict[str, Any]) -> bool:
    labels = selector.get("matchLabels", {})
    return all(is_label_key(k) and is_label_value(v) for k, v in labels.items()) and all(
        is_label_key(expression["key"])
        and all(map(is_label_value, expression.get("values", ())))
        and bool(expression.get("values")) == (expression["operator"] in ("In", "NotIn"))
        for expression in selector.get("matchExpressions", ())
    )


def is_within(inner: str, outer: str) -> bool:
    """Returns whether a network is a part of another one, and smaller."""
    part, whole = ip_network(inner, strict=False), ip_network(outer, strict=False)
    is_part = part.version == whole.version and whole.supernet_of(part)  # type: ignore[arg-type]
    return is_part and part.prefixlen > whole.prefixlen


def fits_peer(peer: dict[str, Any]) -> bool:
    block = peer.get("ipBlock")
    if block is not None:
        networks = (block["cidr"], *block.get("except", ()))
        return len(peer) == 1 and all(map(is_cidr, networks))
    return bool(peer) and all(map(fits_selector, peer.values()))
