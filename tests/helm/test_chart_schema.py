"""Schema of the chart's values against Kubernetes' rules and OpenAPI schemas, by random values."""

import json
import re

import helm_python as helm
import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema.validators import Draft7Validator, extend

from tests.helm.test_chart_objects import VERSIONS, validate
from tests.support import kube_rules
from tests.support.rendered_chart import CHART, IMAGES, component, of_kind, render


def fits_pattern(validator, pattern, instance, schema):
    """Go's expressions, by which Helm reads the schema, know no newline before the end."""
    del schema
    is_text = validator.is_type(instance, "string")
    if is_text and re.search(pattern.replace("$", r"\Z"), instance) is None:
        yield jsonschema.ValidationError(f"{instance!r} does not match {pattern!r}")


SCHEMA = json.loads((CHART / "values.schema.json").read_text())
VALIDATOR = extend(Draft7Validator, {"pattern": fits_pattern})(SCHEMA)


def values_with(path, value):
    """Returns values of the chart that set one, by its path: `router/nodeSelector`."""
    for key in reversed(path.split("/")):
        value = {key: value}
    return value


def is_accepted(path, value):
    return VALIDATOR.is_valid(values_with(path, value))


# Characters that some rule tells from others.
text = st.text("aZ09-._/:*@ =,é\n", max_size=9)
word = st.text("ab0-", min_size=1, max_size=8)
name = st.text("aZ09-._", min_size=1, max_size=8)
long = st.integers(55, 260).map(lambda length: "a" * length)
subdomain = st.lists(word, min_size=1, max_size=3).map(".".join) | long
label_key = st.tuples(subdomain | st.just(""), name | long).map(lambda parts: "/".join(parts))
label_keys = label_key | name | long | text
label_values = name | long | text
hosts = subdomain | subdomain.map(lambda rest: f"*.{rest}") | text | st.just("10.1.2.3")
group = st.sampled_from(["", "0", "ff", "1a2B", "12345", "g"])
addresses = st.one_of(
    st.lists(st.integers(0, 300).map(str) | st.just("01"), min_size=3, max_size=5).map(".".join),
    st.lists(group, min_size=2, max_size=9).map(":".join),
    st.ip_addresses().map(str),
)
lengths = st.integers(0, 140).map(str) | st.sampled_from(["", "08", "255.0.0.0", "+1"])
cidrs = st.tuples(addresses, lengths).map("/".join) | addresses | text
path_part = st.text("az0._-", min_size=1, max_size=6)
registries = st.tuples(
    subdomain | st.sampled_from(["Reg.Example:5000", "localhost", "https://a", "a:b", "a_b"]),
    st.lists(path_part, max_size=3),
).map(lambda parts: "/".join((parts[0], *parts[1])))
tags = name | st.text("aZ0._-+ ", max_size=4) | st.integers(120, 140).map(lambda n: "a" * n)
images = st.one_of(
    registries,
    st.tuples(registries, tags).map(":".join),
    st.tuples(registries, st.sampled_from(["sha256:" + "0a" * 32, "sha256:0", "md5:" + "0" * 32]))
    .map("@".join),
    text,
)  # fmt: skip
numbers = st.sampled_from(["0", "1", "1.5", "007", ".5", "1.", "-1", "", "1e3", "a"])
suffixes = st.sampled_from(["", "m", "k", "K", "M", "Mi", "Gi", "gi", "B", "Ti", " Gi"])
quantities = (
    st.tuples(numbers, suffixes).map("".join) | st.integers(-2, 9) | st.floats(-1, 3) | text
)
resource_names = st.one_of(
    st.sampled_from(
        ["cpu", "memory", "ephemeral-storage", "storage", "hugepages-2Mi", "hugepages-", "gpu",
         "nvidia.com/gpu", "kubernetes.io/x", "requests.nvidia.com/gpu", "CPU"]
    ),
    label_keys,
)  # fmt: skip

# By a value of the chart: random ones, and Kubernetes' rule.
RULES = {
    "podLabels": (
        st.dictionaries(label_keys, label_values, max_size=2),
        lambda labels: kube_rules.fits_selector({"matchLabels": labels}),
    ),
    "router/nodeSelector": (
        st.dictionaries(label_keys, label_values, max_size=2),
        lambda labels: kube_rules.fits_selector({"matchLabels": labels}),
    ),
    "podAnnotations": (
        st.dictionaries(label_keys, text, max_size=2),
        lambda found: all(map(kube_rules.is_annotation_key, found)),
    ),
    "tls/existingSecrets/router": (subdomain | text, kube_rules.is_subdomain),
    "image/registry": (registries | text, kube_rules.is_registry),
    "image/tag": (tags | text, kube_rules.is_tag),
    "redis/image": (images, kube_rules.is_image_reference),
    "model/image": (images, kube_rules.is_image_reference),
    "ingress/http/host": (hosts, kube_rules.is_host),
    "gateway/grpcHostname": (hosts, kube_rules.is_host),
    "networkPolicy/dns": (
        st.lists(st.fixed_dictionaries({"ipBlock": st.fixed_dictionaries({"cidr": cidrs})}),
                 min_size=1, max_size=1),
        lambda peers: all(map(kube_rules.fits_peer, peers)),
    ),
    "decode/extraResources": (
        st.dictionaries(resource_names, st.just(1), max_size=2),
        lambda found: all("/" in key and kube_rules.is_container_resource(key) for key in found),
    ),
    "router/resources/limits": (
        st.dictionaries(resource_names, quantities, max_size=2),
        lambda found: all(map(kube_rules.is_container_resource, found))
        and all(map(kube_rules.is_quantity, found.values())),
    ),
}  # fmt: skip
# What Kubernetes takes and the chart does not: what it cannot compute with or tell from a mistake.
NARROWER = {
    "ingress/http/host": lambda host: re.fullmatch(r"[0-9.]*", host),
    "gateway/grpcHostname": lambda host: re.fullmatch(r"[0-9.]*", host),
    "image/registry": lambda registry: len(registry) > 200 or registry.endswith("/image/"),
    "redis/image": lambda image: len(image) > 255,
    "model/image": lambda image: len(image) > 255,
    "decode/extraResources": lambda found: any(len(key) > 245 for key in found),
    "router/resources/limits": lambda found: any(
        len(key) > 245
        or ("/" in key and not re.fullmatch(r"[0-9]+", str(value)))
        or (key in ("memory", "ephemeral-storage") and not isinstance(value, str))
        or not re.fullmatch(r"[0-9]+(\.[0-9]+)?(k|M|G|Mi|Gi|Ti|m)?", str(value))
        or (key in ("memory", "ephemeral-storage") and str(value).endswith("m"))
        for key, value in found.items()
    ),
}


@pytest.mark.parametrize("path", RULES)
@given(data=st.data())
@settings(max_examples=150)
def test_schema_takes_what_kubernetes_takes_and_nothing_else(path, data):
    strategy, rule = RULES[path]
    value = data.draw(strategy)
    if value == "":
        return  # unset
    if is_accepted(path, value):
        assert rule(value)
    elif not NARROWER.get(path, lambda _: False)(value):
        assert not rule(value)


# Of objects: each field as it should be, or of what another one may be.
keys = st.sampled_from(["a", "example.com/a", "a b", "", "-"])
labels = st.sampled_from(["a", "", "a b", "a_b"])
tolerations = st.fixed_dictionaries(
    {},
    optional={
        "key": keys,
        "operator": st.sampled_from(["Exists", "Equal", "In"]),
        "value": labels,
        "effect": st.sampled_from(["NoSchedule", "NoExecute", "PreferNoSchedule", "No"]),
        "tolerationSeconds": st.integers(0, 9),
    },
)
expressions = st.fixed_dictionaries(
    {"key": keys, "operator": st.sampled_from(["In", "NotIn", "Exists", "DoesNotExist"])},
    optional={"values": st.lists(labels, max_size=2)},
)
selectors = st.fixed_dictionaries(
    {},
    optional={
        "matchLabels": st.dictionaries(keys, labels, max_size=1),
        "matchExpressions": st.lists(expressions, max_size=1),
    },
)
networks = st.sampled_from(["10.0.0.0/8", "10.1.0.0/16", "10.0.0.0", "fd00::/8"])
blocks = st.fixed_dictionaries(
    {"cidr": networks}, optional={"except": st.lists(networks, max_size=1)}
)
peers = st.fixed_dictionaries(
    {}, optional={"podSelector": selectors, "namespaceSelector": selectors, "ipBlock": blocks}
)


@given(toleration=tolerations)
def test_schema_takes_tolerations_that_kubernetes_takes(toleration):
    fits = kube_rules.fits_toleration(toleration) and toleration.get("key") != ""
    assert is_accepted("decode/tolerations", [toleration]) == fits


@given(peer=peers)
def test_schema_takes_peers_that_kubernetes_takes(peer):
    assert is_accepted("networkPolicy/clients", [peer]) == kube_rules.fits_peer(peer)
    rule = {"to": [peer], "ports": [{"port": 443}]}
    assert is_accepted("networkPolicy/egress", [rule]) == kube_rules.fits_peer(peer)


ipv4 = st.tuples(st.sampled_from([0, 1, 10, 127, 128, 255]), st.sampled_from([0, 1, 128, 255]))
ipv4_networks = st.tuples(ipv4, st.integers(0, 32)).map(lambda n: f"{n[0][0]}.{n[0][1]}.0.9/{n[1]}")


@given(inner=ipv4_networks | st.just("fd00::/9"), outer=ipv4_networks | st.just("fd00::/8"))
@settings(max_examples=25)
def test_chart_takes_exceptions_within_their_network(inner, outer):
    egress = [{"to": [{"ipBlock": {"cidr": outer, "except": [inner]}}]}]
    if kube_rules.is_within(inner, outer):
        render({"networkPolicy": {"egress": egress}})
    else:
        with pytest.raises(helm.HelmError, match=f"except has {inner}; expected a part of {outer}"):
            render({"networkPolicy": {"egress": egress}})


def is_whole(peer):
    """Returns whether no exception of a peer is outside its network."""
    block = peer.get("ipBlock", {})
    return all(kube_rules.is_within(inner, block["cidr"]) for inner in block.get("except", ()))


@given(
    toleration=tolerations,
    peer=peers.filter(lambda peer: not kube_rules.fits_peer(peer) or is_whole(peer)),
    key=keys,
    label=labels,
    port=st.sampled_from([{"port": 443}, {"port": "https", "protocol": "UDP"}, {"port": 0}, {}]),
    limits=st.dictionaries(
        st.sampled_from(["cpu", "memory", "ephemeral-storage", "example.com/a"]),
        st.sampled_from(["4", "4Gi", 4, "4.5"]),
    ),
)
@settings(max_examples=25)
def test_accepted_values_render_objects_of_every_kubernetes(
    toleration, peer, key, label, port, limits
):
    values = {
        "router": {
            "tolerations": [toleration],
            "nodeSelector": {key: label},
            "resources": {"requests": {"cpu": 1, "memory": "1"}, "limits": limits},
        },
        "networkPolicy": {"clients": [peer], "egress": [{"to": [peer], "ports": [port]}]},
        "podLabels": {key: label},
        "podAnnotations": {key: label},
    }
    # Those of them that the schema accepts, each apart.
    accepted = {
        section: {name: value for name, value in found.items()
                  if is_accepted(f"{section}/{name}", value)}
        for section, found in values.items()
    }  # fmt: skip
    made = of_kind(render({**IMAGES, **accepted}), "Deployment", "NetworkPolicy")
    for found in (found for found in made if component(found) == "router"):
        for version in VERSIONS:
            validate(json.dumps(found), version)
