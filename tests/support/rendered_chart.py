"""The chart as Helm renders it, and what tests ask of its objects."""

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import helm_python as helm
import yaml

from baton.serving.network_topology import CLUSTER
from tests.support.repository import ROOT

CHART = ROOT / "helm" / "baton"
NAMESPACE = "serving"
Object = dict[str, Any]

# Whatever can be turned on, at once, beside the presets.
EVERYTHING = "everything"
_EVERYTHING = """
image: { registry: registry.example/llm, tag: "1", pullSecrets: [registry] }
model: { source: image, image: registry.example/checkpoints/qwen3, name: "", servedName: qwen }
redis: { existingSecret: redis-password, signingSecret: redis-signing-keys }
tls:
  enabled: true
  existingSecrets: { router: router-tls }
  certManager: { issuer: baton, issuerKind: ClusterIssuer, trustDomain: llm.example }
router:
  http: true
  tenantsSecret: tenants
  quotasConfigMap: quotas
  aliasesConfigMap: aliases
  chatTemplatesConfigMap: templates
  settings: { placement: least-loaded, max_prompt_bytes: 2097152, share_prefixes: true,
              chat_template: /etc/baton/chat-templates/own.jinja }
  autoscaling: { enabled: true }
  nodeSelector: { pool: cpu }
  tolerations: [{ key: pool, operator: Exists, effect: NoSchedule }]
kv: { connector: auto, socketDirectory: { hostPath: /var/lib/baton } }
prefill: { gpus: 1, autoscaling: { enabled: true }, nodeSelector: { pool: gpu } }
decode:
  settings: { max_num_seqs: 8, gpu_memory_utilization: 0.85 }
  autoscaling: { enabled: true }
encode: { autoscaling: { enabled: true, minReplicas: 0 } }
autoscaling: { prometheus: "http://prometheus.monitoring:9090" }
tracing: { endpoint: "http://collector.monitoring:4317", headersSecret: collector }
monitoring: { podMonitors: true, rules: true, dashboards: true, labels: { release: prometheus } }
ingress:
  grpc: { enabled: true, className: nginx, host: grpc.example, tlsSecret: grpc-tls,
          annotations: { nginx.ingress.kubernetes.io/backend-protocol: GRPC } }
  http: { enabled: true, host: http.example }
gateway:
  parentRefs: [{ name: public, namespace: gateways }]
  grpcHostname: grpc.example
  httpHostname: http.example
helmTest: { clientSecret: client-tls }
endpointPicker:
  enabled: true
  endpoints: ["models.serving.svc:8000", "10.1.2.3:8001"]
  endpointPorts: [8000, 8001]
  settings: { max_in_flight: 64 }
  inferencePool: { name: models, selector: { app: models } }
  nodeSelector: { pool: cpu }
  tolerations: [{ key: pool, operator: Exists, effect: NoSchedule }]
podLabels: { team: llm }
podAnnotations: { example/note: "yes" }
"""

# Which no release does without, and no preset has.
IMAGES: Object = {"image": {"registry": "registry.example"}}
# What operators add to pods and objects, on top of everything.
EXTENDED = "extended"
_EXTENDED = """
pod:
  env:
    - { name: HTTPS_PROXY, value: "http://proxy.example:3128" }
    - { name: NODE_NAME, valueFrom: { fieldRef: { fieldPath: spec.nodeName } } }
  envFrom: [{ secretRef: { name: more, optional: true }, prefix: MORE_ }]
  volumes: [{ name: authorities, configMap: { name: authorities } }]
  volumeMounts: [{ name: authorities, mountPath: /etc/authorities, readOnly: true }]
  initContainers: [{ name: waits, image: registry.example/busybox:1, command: [sleep, "1"] }]
  sidecars: [{ name: logs, image: registry.example/fluent-bit:4 }]
  tmpSize: 1Gi
  cacheSize: 20Gi
  serviceAccountAnnotations: { eks.amazonaws.com/role-arn: "arn:aws:iam::1:role/baton" }
  priorityClassName: serving
  schedulerName: volcano
  nodeSelector: { zone: a }
  tolerations: [{ key: dedicated, operator: Equal, value: llm, effect: NoSchedule }]
  affinity:
    nodeAffinity:
      requiredDuringSchedulingIgnoredDuringExecution:
        nodeSelectorTerms: [{ matchExpressions: [{ key: gpu, operator: Exists }] }]
  topologySpreadConstraints:
    - { maxSkew: 1, topologyKey: kubernetes.io/hostname, whenUnsatisfiable: DoNotSchedule }
model:
  source: hub
  name: org/model
  revision: v2
  image: ""
  servedName: ""
  hubSecret: hub
  cache: { size: 100Gi, storageClass: fast }
  download: { enabled: true }
router:
  service:
    type: LoadBalancer
    annotations: { example.com/scheme: internal }
    loadBalancerClass: example.com/internal
    loadBalancerSourceRanges: [10.0.0.0/8]
    externalTrafficPolicy: Local
    trafficDistribution: PreferSameZone
    sessionAffinity: ClientIP
  disruptionBudget: { minAvailable: 50% }
  autoscaling:
    queuedRequests: 8
    behavior: { scaleUp: { policies: [{ type: Percent, value: 100, periodSeconds: 15 }] } }
decode:
  gpus: 1
  gpuResource: ""
  deviceClaims:
    - name: gpu
      deviceClassName: gpu.nvidia.com
      count: 1
      selectors: ["device.attributes['gpu.nvidia.com'].productName == 'NVIDIA H200'"]
    - { name: nic, templateName: rdma }
  autoscaling:
    fallback: { failureThreshold: 3, replicas: 4 }
    pollingInterval: 30
    behavior: { scaleUp: { stabilizationWindowSeconds: 60 } }
    triggers:
      - type: cron
        metadata: { timezone: UTC, start: 0 8 * * *, end: 0 18 * * *, desiredReplicas: "4" }
gateway: { authorityConfigMap: authority, timeouts: { request: 0s, backendRequest: 0s } }
autoscaling: { authentication: { modes: [basic, tls], secret: prometheus } }
redis:
  resources: { limits: { cpu: 200m } }
  exporter: { image: registry.example/redis_exporter:1 }
monitoring:
  relabelings: [{ action: replace, targetLabel: cluster, replacement: a }]
  metricRelabelings: [{ action: drop, sourceLabels: [__name__], regex: baton_image_.* }]
helmTest: { resources: { limits: { cpu: 500m } } }
image:
  registry: registry.example/llm
  pullSecrets: [registry]
  worker: { repository: "mirror.example:5000/llm/worker", digest: "DIGEST" }
extraObjects:
  - apiVersion: v1
    kind: ConfigMap
    metadata:
      name: "{{ .Release.Name }}-more"
      namespace: "{{ .Release.Namespace }}"
      labels: { app.kubernetes.io/component: more }
    data: { more: "1" }
"""

PRESETS = ("values", *sorted(path.stem for path in CHART.glob("values-*.yaml")), EVERYTHING)
TOGETHER = (*PRESETS, EXTENDED)
# What every release deploys; encode workers only where it is told to.
WORKERS = ("prefill", "decode")
PROCESSES = ("router", *WORKERS)


_SafeLoader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@cache
def chart() -> helm.Chart:
    return helm.Chart.load(CHART)


def values_of(preset: str) -> Object:
    """Returns the values that a preset sets on top of `values.yaml`, with images."""
    if preset == "values":
        return IMAGES
    if preset == EXTENDED:
        return _over(
            values_of(EVERYTHING), yaml.safe_load(_EXTENDED.replace("DIGEST", f"sha256:{7:064}"))
        )
    text = _EVERYTHING if preset == EVERYTHING else (CHART / f"{preset}.yaml").read_text()
    (values,) = documents(text)
    return _over(IMAGES, values)


def _over(below: Object, above: Object) -> Object:
    """Values on top of others, as Helm merges files."""
    both = {key for key in below.keys() & above.keys() if isinstance(above[key], dict)}
    return {**below, **above, **{key: _over(below[key], above[key]) for key in both}}


def documents(text: str) -> list[Any]:
    """Parses YAML as `yaml.safe_load_all` does, ten times as fast where libyaml is."""
    loader = _SafeLoader(text)
    try:
        found = []
        while loader.check_data():
            found.append(loader.get_data())
        return found
    finally:
        loader.dispose()


def merged(values: Object) -> Object:
    """All values that hold."""
    return chart().merge_values(values)


def render(values: Object, release: str = "demo") -> list[Object]:
    """Every object of a release, but for those of `helm test`; of `IMAGES`, if values name none."""
    return [found for path, found in _rendered(values, release) if "/tests/" not in path]


def render_tests(values: Object, release: str = "demo") -> list[Object]:
    """The objects that `helm test` applies."""
    return [found for path, found in _rendered(values, release) if "/tests/" in path]


def notes(values: Object, release: str = "demo") -> str:
    """Returns the text that Helm prints after an installation."""
    return _files(values, release)["baton/templates/NOTES.txt"]


def _rendered(values: Object, release: str = "demo") -> Iterator[tuple[str, Object]]:
    for path, text in _files(values, release).items():
        if not path.endswith(".txt"):
            yield from ((path, found) for found in documents(text) if found is not None)


def _files(values: Object, release: str) -> dict[str, str]:
    return chart().render(_over(IMAGES, values), name=release, namespace=NAMESPACE)


@cache
def preset(name: str) -> tuple[Object, ...]:
    return tuple(render(values_of(name)))


def of_kind(objects: tuple[Object, ...] | list[Object], *kinds: str) -> list[Object]:
    return [found for found in objects if found["kind"] in kinds]


def component(found: Object) -> str:
    return str(found["metadata"]["labels"]["app.kubernetes.io/component"])


def workloads(objects: tuple[Object, ...] | list[Object]) -> dict[str, Object]:
    """Deployments and StatefulSets, by their component."""
    return {component(found): found for found in of_kind(objects, "Deployment", "StatefulSet")}


def processes(objects: tuple[Object, ...] | list[Object]) -> dict[str, Object]:
    """Deployments of the processes of the cluster, by their component."""
    return {name: found for name, found in workloads(objects).items() if name in CLUSTER}


def pod_of(workload: Object) -> Object:
    spec: Object = workload["spec"]["template"]["spec"]
    return spec


def container_of(workload: Object) -> Object:
    (container,) = pod_of(workload)["containers"]
    found: Object = container
    return found


def labels_of_pods(workload: Object) -> Mapping[str, str]:
    labels: Mapping[str, str] = workload["spec"]["template"]["metadata"]["labels"]
    return labels


def env_of(workload: Object) -> dict[str, Object]:
    """The variables of its container by name."""
    return {variable["name"]: variable for variable in container_of(workload).get("env", ())}


def selects(selector: Object, labels: Mapping[str, str]) -> bool:
    """As Kubernetes matches a label selector, of what the chart makes use of."""
    assert selector.keys() <= {"matchLabels", "matchExpressions"}, selector
    for expression in selector.get("matchExpressions", ()):
        assert expression["operator"] == "In", expression
        if labels.get(expression["key"]) not in expression["values"]:
            return False
    return all(labels.get(k) == v for k, v in selector.get("matchLabels", {}).items())


def found_in(node: Any, key: str) -> Iterator[Any]:
    """The value of every key of that name, however deep."""
    if isinstance(node, dict):
        for name, value in node.items():
            if name == key:
                yield value
            yield from found_in(value, key)
    elif isinstance(node, list):
        for value in node:
            yield from found_in(value, key)
