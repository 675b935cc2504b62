# SPDX-License-Identifier: Apache-2.0
"""Renders the chart without a cluster, and holds objects against strict schemas.

Kubernetes' own objects: kubernetes-validate. Dynamo's DynamoGraphDeployment: the CRD of a checkout of Dynamo that DYNAMO_CHECKOUT names;
without one a schema that is put together here from what Dynamo documents of v1beta1 and Kubernetes' PodTemplateSpec. Those of the
Prometheus operator: the fields that the chart uses.
"""

import contextlib
import functools
import json
import os
import re
import shutil
import tempfile
from pathlib import Path

import jsonschema
import kubernetes_validate
import yaml

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "deploy" / "helm" / "kvbm-cxl"
KUBERNETES = "1.37.0"
SCHEMAS = Path(kubernetes_validate.__file__).parent / "kubernetes-json-schema" / f"v{KUBERNETES}-local-strict"
CRD = "deploy/helm/charts/platform/components/operator/crds/nvidia.com_dynamographdeployments.yaml"
RELEASE = "rack"
MATRIX = {
    "access": ("device-plugin", "dra", "host-path"),
    "identity": ("node", "role"),
    "connector": ("cxl", "nixl-cxl", "nixl-ucx"),
    "router": ("least-loaded", "kv", "round-robin"),
}


def version():
    """That of the checkout."""
    return re.search(r'^version = "(.*)"', (ROOT / "Cargo.toml").read_text(), re.MULTILINE)[1]


def helm():
    """Helm's engine, imported late: it is a library of Go that starts threads."""
    import helm_python

    return helm_python


def values(**changes):
    """Values of a user: the dimensions of MATRIX by their name, whatever else as it is."""
    access = changes.pop("access", None)
    said = dict(changes)
    if access is not None:
        said["pool"] = {**said.get("pool", {}), "access": access}
    return said


def render(release=RELEASE, namespace="serving", version=None, **changes):
    """Every object of the chart with these values, or of a chart of another version. Raises helm's error where they are refused."""
    with contextlib.ExitStack() as ends:
        folder = CHART
        if version:
            folder = Path(ends.enter_context(tempfile.TemporaryDirectory())) / CHART.name
            shutil.copytree(CHART, folder)
            about = folder / "Chart.yaml"
            about.write_text(re.sub(r"^(appVersion|version): .*$", rf'\1: "{version}"', about.read_text(), flags=re.MULTILINE))
        chart = ends.enter_context(helm().Chart.load(str(folder)))
        files = chart.render(values(**changes), name=release, namespace=namespace)
    return [found for name, text in sorted(files.items()) if name.endswith(".yaml") for found in yaml.safe_load_all(text) if found]


def notes(**changes):
    """What the user reads after an installation."""
    with helm().Chart.load(str(CHART)) as chart:
        return next(text for name, text in chart.render(values(**changes), name=RELEASE).items() if name.endswith("NOTES.txt"))


def of_kind(objects, kind, name=None):
    """The one object of a kind, or with this name."""
    (found,) = [each for each in objects if each["kind"] == kind and name in (None, each["metadata"]["name"])]
    return found


def pods(found):
    """(name, pod template) of every pod that an object makes."""
    if found["kind"] in ("Deployment", "DaemonSet", "Job"):
        yield found["metadata"]["name"], found["spec"]["template"]
    if found["kind"] == "Pod":
        yield found["metadata"]["name"], found
    if found["kind"] == "DynamoGraphDeployment":
        for component in found["spec"]["components"]:
            yield component["name"], component["podTemplate"]


def environment(container):
    """A container's variables; those of the downward API as their field."""
    return {each["name"]: each.get("value", each.get("valueFrom")) for each in container.get("env", [])}


@functools.cache
def definitions():
    text = (SCHEMAS / "_definitions.json").read_text()
    # As the files of the package name it, and as one document.
    return json.loads(text.replace("/api/_definitions.json#/$defs/", "#/$defs/").replace("_definitions.json#/$defs/", "#/$defs/"))["$defs"]


def _object(properties, required=()):
    return {"type": "object", "additionalProperties": False, "required": list(required), "properties": properties}


def _assembled():
    """DynamoGraphDeployment of v1beta1, as far as it is documented."""
    any_object = {"type": "object"}
    component = _object(
        {
            "name": {"type": "string", "pattern": "^[A-Za-z0-9]([-A-Za-z0-9]*[A-Za-z0-9])?$", "maxLength": 63},
            "type": {"enum": ["frontend", "worker", "prefill", "decode", "planner", "epp"]},
            "runtimeVersionOverride": {"type": "string", "pattern": r"^(0|[1-9][0-9]{0,3})(\.(0|[1-9][0-9]{0,3})){2}$"},
            "podTemplate": {"$ref": "#/$defs/io.k8s.api.core.v1.PodTemplateSpec"},
            "replicas": {"type": "integer", "minimum": 0},
            "minAvailable": {"type": "integer", "minimum": 1},
            "sharedMemorySize": {"type": ["string", "integer"]},
            "globalDynamoNamespace": {"type": "boolean"},
            "roles": {"type": "array"},
            "frontendSidecar": {"type": "string"},
            "dynamoSidecar": {"type": "string"},
            **dict.fromkeys("multinode modelRef scalingAdapter eppConfig compilationCache".split(), any_object),
            **dict.fromkeys("topologyConstraint experimental providerOverride".split(), any_object),
        },
        ["name"],
    )
    spec = _object(
        {
            "backendFramework": {"enum": ["sglang", "vllm", "trtllm"]},
            "annotations": any_object,
            "labels": any_object,
            "priorityClassName": {"type": "string"},
            "env": {"type": "array", "items": {"$ref": "#/$defs/io.k8s.api.core.v1.EnvVar"}},
            "components": {"type": "array", "maxItems": 25, "items": component},
            **dict.fromkeys("restart topologyConstraint experimental providerOverride".split(), any_object),
        }
    )
    return {**_custom("nvidia.com/v1beta1", "DynamoGraphDeployment", spec), "$defs": definitions()}


def _custom(version, kind, spec):
    metadata = {"type": "object", "required": ["name"]}
    properties = {"apiVersion": {"const": version}, "kind": {"const": kind}, "metadata": metadata, "spec": spec}
    return _object(properties, properties)


def _strict(schema):
    """A CRD's schema as an API server applies it with --validate=strict: no fields that it does not name."""
    if isinstance(schema, list):
        return [_strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: _strict(value) for key, value in schema.items()}
    if made.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    is_open = made.get("x-kubernetes-preserve-unknown-fields") or made.get("x-kubernetes-embedded-resource")
    if isinstance(made.get("properties"), dict) and made.get("type") == "object" and "additionalProperties" not in made and not is_open:
        made["additionalProperties"] = False
    return made


def upstream_crd():
    """Dynamo's own CRD of the checkout that DYNAMO_CHECKOUT names, or None."""
    checkout = os.environ.get("DYNAMO_CHECKOUT", "")
    return yaml.safe_load((Path(checkout) / CRD).read_text()) if checkout else None


@functools.cache
def graph_schema():
    """The schema of DynamoGraphDeployment, and where it comes from."""
    crd = upstream_crd()
    if not crd:
        return _assembled(), "assembled"
    (version,) = [each for each in crd["spec"]["versions"] if each["name"] == "v1beta1"]
    schema = _strict(version["schema"]["openAPIV3Schema"])
    schema["properties"]["metadata"] = {"type": "object"}
    return schema, os.environ["DYNAMO_CHECKOUT"]


_LABELS = {"type": "object", "additionalProperties": {"type": "string"}}
_SELECTOR = _object({"matchLabels": _LABELS, "matchExpressions": {"type": "array"}})
_ENDPOINTS = {
    "type": "array",
    "items": _object({"port": {"type": "string"}, "path": {"type": "string"}, "interval": {"type": "string"}}, ["port", "interval"]),
}
_TEXT = {"type": "string"}
_RULE = _object({"alert": _TEXT, "expr": _TEXT, "for": _TEXT, "labels": _LABELS, "annotations": _LABELS}, ["expr"])
_GROUP = _object({"name": {"type": "string"}, "rules": {"type": "array", "items": _RULE}}, ["name", "rules"])
PROMETHEUS = {
    "ServiceMonitor": _object({"selector": _SELECTOR, "endpoints": _ENDPOINTS}, ["selector", "endpoints"]),
    "PodMonitor": _object({"selector": _SELECTOR, "podMetricsEndpoints": _ENDPOINTS}, ["selector", "podMetricsEndpoints"]),
    "PrometheusRule": _object({"groups": {"type": "array", "items": _GROUP}}, ["groups"]),
}


def problems(found):
    """What the schemas say against an object: one text for each."""
    kind = found["kind"]
    if kind == "DynamoGraphDeployment" or kind in PROMETHEUS:
        schema = graph_schema()[0] if kind not in PROMETHEUS else _custom("monitoring.coreos.com/v1", kind, PROMETHEUS[kind])
        errors = jsonschema.Draft202012Validator(schema).iter_errors(found)
        return [f"{kind} {'.'.join(map(str, error.absolute_path))}: {error.message}" for error in errors]
    try:
        kubernetes_validate.validate(found, KUBERNETES, strict=True)
    except Exception as error:  # Each kind of failure has a class of its own.
        return [f"{kind} {found['metadata']['name']}: {error}"]
    return []
