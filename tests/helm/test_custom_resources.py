"""Custom resources of the chart against the types of their operators, as npm publishes them: the
fields by TypeScript, which refuses unknown ones, and the values by the packages' own validators.

`schemas/` has what the chart uses of these kinds, for tests that need no npm. InferencePool has no
package there.
"""

import copy
import json
import shutil
import subprocess

import pytest

from tests.support.rendered_chart import PRESETS, of_kind, preset

PACKAGES = (
    "@kubernetes-models/cert-manager@6.0.0",
    "@kubernetes-models/gateway-api@2.0.0",
    "@kubernetes-models/keda@2.0.0",
    "@kubernetes-models/prometheus-operator@6.0.0",
    "typescript@5.9.3",
)
MODULES = {
    "Certificate": "cert-manager/cert-manager.io/v1",
    "GRPCRoute": "gateway-api/gateway.networking.k8s.io/v1",
    "HTTPRoute": "gateway-api/gateway.networking.k8s.io/v1",
    "PodMonitor": "prometheus-operator/monitoring.coreos.com/v1",
    "PrometheusRule": "prometheus-operator/monitoring.coreos.com/v1",
    "ScaledObject": "keda/keda.sh/v1alpha1",
}
COMPILER = ("--target", "es2022", "--module", "nodenext", "--skipLibCheck", "--strict")

pytestmark = [pytest.mark.nightly, pytest.mark.system]


@pytest.fixture(scope="module")
def check(tmp_path_factory):
    """Returns a function that says what is wrong with objects: of fields, and of values."""
    folder = tmp_path_factory.mktemp("custom-resources")
    (folder / "package.json").write_text('{"private": true, "type": "module"}')
    assert shutil.which("npm"), "npm is not installed; on Debian: apt-get install npm"
    quiet = ("--ignore-scripts", "--no-audit", "--no-fund", "--silent")
    subprocess.run(["npm", "install", *quiet, *PACKAGES], cwd=folder, check=True, timeout=240)

    def checked(objects):
        source = folder / "objects.ts"
        lines = [
            f'import {{ {kind}, type I{kind} }} from "@kubernetes-models/{module}";'
            for kind, module in MODULES.items()
        ]
        for number, found in enumerate(objects):
            kind = found["kind"]
            lines.append(f"const o{number}: I{kind} = {json.dumps(found)};")
            lines.append(f"new {kind}(o{number}).validate();")
        source.write_text("\n".join(lines))
        compiler = folder / "node_modules" / ".bin" / "tsc"
        fields = subprocess.run(
            [compiler, *COMPILER, source], capture_output=True, text=True, timeout=120, cwd=folder
        )
        values = subprocess.run(
            ["node", source.with_suffix(".js")], capture_output=True, text=True, timeout=60
        )
        return fields.stdout, values.stderr

    return checked


def test_custom_resources_fit_types_of_their_operators(check):
    objects = [found for name in PRESETS for found in of_kind(preset(name), *MODULES)]
    assert {found["kind"] for found in objects} == MODULES.keys()
    assert check(objects) == ("", "")


def test_types_of_operators_refuse_unknown_fields_and_values(check):
    for kind in MODULES:
        (found, *_) = of_kind(preset("everything"), kind)
        unknown = copy.deepcopy(found)
        unknown["spec"]["nosuch"] = 1
        fields, _ = check([unknown])
        assert '"nosuch"' in fields, kind
        wrong = {**found, "apiVersion": "example.com/v1"}
        assert "/apiVersion must be equal to" in check([wrong])[1], kind
