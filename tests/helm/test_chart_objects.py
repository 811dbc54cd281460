"""Objects of every preset, validated against Kubernetes' schemas and those of their kinds."""

import json
import tomllib
from functools import cache

import helm_python as helm
import jsonschema
import kubernetes_validate
import pytest
import yaml
from kubernetes_validate.utils import all_versions
from packaging.version import Version

from tests.support.grids import nightly
from tests.support.rendered_chart import (
    CHART,
    EVERYTHING,
    EXTENDED,
    NAMESPACE,
    ROOT,
    TOGETHER,
    chart,
    documents,
    of_kind,
    preset,
    render_tests,
    values_of,
)

OLDEST = Version("1.34")
VERSIONS = sorted((v for v in set(all_versions()) if Version(v) >= OLDEST), key=Version)
SCHEMAS = {
    path.stem: json.loads(path.read_text())
    for path in (ROOT / "tests" / "helm" / "schemas").glob("*.json")
}


@cache
def validate(text: str, version: str) -> None:
    """Most objects of two presets are equal."""
    kubernetes_validate.validate(json.loads(text), version, strict=True)


@pytest.mark.parametrize("version", [VERSIONS[0], *nightly(VERSIONS[1:-1]), VERSIONS[-1]])
@pytest.mark.parametrize("name", TOGETHER)
def test_chart_objects_fit_kubernetes_schemas(name, version):
    for found in (*preset(name), *render_tests(values_of(name))):
        if found["kind"] not in SCHEMAS:
            validate(json.dumps(found), version)


def test_kubernetes_schema_refuses_unknown_field():
    (account, *_) = (found for found in preset("values") if found["kind"] == "ServiceAccount")
    with pytest.raises(kubernetes_validate.ValidationError):
        validate(json.dumps({**account, "automountServiceAccountTokens": False}), VERSIONS[0])


@pytest.mark.parametrize("name", TOGETHER)
def test_custom_resources_fit_their_schemas(name):
    for found in preset(name):
        if found["kind"] in SCHEMAS:
            jsonschema.validate(found, SCHEMAS[found["kind"]])


def test_presets_render_every_optional_kind():
    kinds = {found["kind"] for name in (EVERYTHING, EXTENDED) for found in preset(name)}
    assert kinds >= {*SCHEMAS, "HorizontalPodAutoscaler", "Ingress", "ConfigMap", "NetworkPolicy"}


@pytest.mark.parametrize("name", TOGETHER)
def test_helm_lint_reports_only_missing_icon(name):
    for version in VERSIONS:
        report = helm.lint(
            CHART, values_of(name), strict=True, namespace=NAMESPACE, kube_version=f"v{version}"
        )
        # An icon is all that is missing.
        assert {m["error"] for m in report["messages"]} == {"icon is recommended"}
        assert report["errors"] == []


@pytest.mark.parametrize("name", TOGETHER)
def test_chart_objects_have_unique_names_in_one_namespace(name):
    names = [(found["kind"], found["metadata"]["name"]) for found in preset(name)]
    assert len(names) == len(set(names))
    assert {found["metadata"]["namespace"] for found in preset(name)} == {NAMESPACE}


def test_chart_object_names_stay_valid_for_long_release_names():
    for release in ("a" * 53, "baton", "my-baton-2"):
        files = chart().render(values_of(EVERYTHING), name=release, namespace=NAMESPACE)
        for path, text in files.items():
            if not path.endswith(".txt"):
                for found in documents(text):
                    assert len(found["metadata"]["name"] if found else "") <= 63, found


def test_chart_app_version_is_package_version():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert chart().metadata["appVersion"] == project["version"]


def test_chart_ships_rules_and_dashboards_of_files():
    (rule,) = of_kind(preset(EVERYTHING), "PrometheusRule")
    files = [yaml.safe_load(path.read_text()) for path in sorted(CHART.glob("rules/*.yaml"))]
    assert rule["spec"]["groups"] == [group for file in files for group in file["groups"]]
    maps = of_kind(preset(EVERYTHING), "ConfigMap")
    assert all(found["metadata"]["labels"]["grafana_dashboard"] == "1" for found in maps)
    shown = {name: text for found in maps for name, text in found["data"].items()}
    assert shown == {path.name: path.read_text() for path in CHART.glob("dashboards/*.json")}
