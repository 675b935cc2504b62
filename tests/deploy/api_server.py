# SPDX-License-Identifier: Apache-2.0
"""A Kubernetes API server of one test module, with the custom resources of the chart, and what stands in for the cluster's controllers.

The server is real (`make setup-apiserver`), its store is a real etcd. No controller, scheduler or kubelet runs: a thread completes the
jobs and pods of Helm's hooks, which is all that an installation waits for.
"""

import contextlib
import json
import ssl
import subprocess
import threading
import urllib.error
import urllib.request

import charts
import etcd_server
from waiting import until

KUBE_APISERVER = charts.ROOT / ".venv/deploy/apiserver/kube-apiserver"
TOKEN = "admin-of-the-test"
DYNAMO, PROMETHEUS = "nvidia.com", "monitoring.coreos.com"


LIMITS = ("pattern", "minLength", "maxLength", "minimum", "maximum", "minItems", "maxItems", "required")
OPEN = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}


def structural(schema):
    """A JSON schema as a CRD takes it: no references, one type for each node, no closed objects: the server refuses unknown fields."""
    if "$ref" in schema:
        return structural(charts.definitions()[schema["$ref"].rsplit("/", 1)[1]])
    found = [each.get("type") for each in schema.get("oneOf", ())] or [schema.get("type", "string" if "enum" in schema else "object")]
    types = {kind for each in found for kind in (each if isinstance(each, list) else [each])}
    nullable, types = {"nullable": True} if "null" in types else {}, types - {"null"}
    if types in ({"string", "integer"}, {"string", "number"}):
        return {"x-kubernetes-int-or-string": True, **nullable}
    (kind,) = types
    made = {"type": kind, **nullable, **{key: schema[key] for key in LIMITS if key in schema}}
    if "enum" in schema:
        made["enum"] = [each for each in schema["enum"] if each is not None]
    if kind == "array":
        made["items"] = structural(schema["items"]) if "items" in schema else OPEN
    elif kind == "object" and "properties" in schema:
        made["properties"] = {key: structural(value) for key, value in schema["properties"].items()}
    elif kind == "object":
        values = schema.get("additionalProperties")
        made |= {"additionalProperties": structural(values)} if isinstance(values, dict) else OPEN
    return made


def definition(group, version, kind, schema):
    """A CustomResourceDefinition of one version."""
    plural = kind.lower() + "s"
    root = structural(schema)
    root["properties"] = {key: value for key, value in root["properties"].items() if key == "spec"}
    root.pop("required", None)
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{group}"},
        "spec": {
            "group": group,
            "scope": "Namespaced",
            "names": {"kind": kind, "plural": plural, "singular": kind.lower()},
            "versions": [{"name": version, "served": True, "storage": True, "schema": {"openAPIV3Schema": root}}],
        },
    }


def custom_resources():
    """The CRDs of the operators that the chart writes for: Dynamo's own where DYNAMO_CHECKOUT names a checkout."""
    yield charts.upstream_crd() or definition(DYNAMO, "v1beta1", "DynamoGraphDeployment", charts.graph_schema()[0])
    for kind, spec in charts.PROMETHEUS.items():
        yield definition(PROMETHEUS, "v1", kind, {"type": "object", "properties": {"spec": spec}})


class ApiServer:
    """etcd, kube-apiserver and their client."""

    def __init__(self, folder):
        self.folder = folder
        self.etcd = etcd_server.Etcd(folder)
        self.port = etcd_server.free_port()
        self.url = f"https://127.0.0.1:{self.port}"
        self.tls = ssl._create_unverified_context()  # The server signs its own certificate.
        self.process, self.ended = None, threading.Event()
        self.completed = []  # Names of jobs and pods of hooks.

    def start(self):
        key, tokens = self.folder / "accounts.key", self.folder / "tokens.csv"
        subprocess.run(["openssl", "genrsa", "-out", key, "2048"], check=True, capture_output=True)
        tokens.write_text(f"{TOKEN},admin,admin,system:masters\n")
        options = {
            "etcd-servers": self.etcd.url,
            "cert-dir": self.folder / "certificates",
            "secure-port": self.port,
            "bind-address": "127.0.0.1",
            "service-account-issuer": "https://kubernetes.default.svc",
            "service-account-key-file": key,
            "service-account-signing-key-file": key,
            "token-auth-file": tokens,
            "authorization-mode": "RBAC",
            "service-cluster-ip-range": "10.0.0.0/24",
            "disable-admission-plugins": "ServiceAccount",
            "allow-privileged": "true",  # As clusters have it: access host-path needs it.
        }
        log = open(self.folder / "apiserver.log", "wb")
        command = [KUBE_APISERVER, *(f"--{name}={value}" for name, value in options.items())]
        self.process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        until(lambda: self.process.poll() is not None or self._answers("/readyz"), f"no API server: see {log.name}")
        assert self.process.poll() is None, (self.folder / "apiserver.log").read_text()[-2000:]
        for crd in custom_resources():
            self.post("/apis/apiextensions.k8s.io/v1/customresourcedefinitions", crd)
        until(lambda: all(self._answers(f"/apis/{path}") for path in (f"{DYNAMO}/v1beta1", f"{PROMETHEUS}/v1")), "the CRDs are not served")
        self.controllers = threading.Thread(target=self._complete_hooks, daemon=True)
        self.controllers.start()

    def close(self):
        self.ended.set()
        with contextlib.suppress(AttributeError):
            self.controllers.join()
        if self.process:
            self.process.terminate()
            self.process.wait()
        self.etcd.stop()

    def _answers(self, path):
        try:
            self.get(path)
        except (OSError, ValueError):
            return False
        return True

    def call(self, method, path, body=None, kind="application/json"):
        """The server's answer as text. Raises urllib.error.HTTPError with the server's reason."""
        request = urllib.request.Request(self.url + path, json.dumps(body).encode() if body is not None else None, method=method)
        request.add_header("Authorization", f"Bearer {TOKEN}")
        request.add_header("Content-Type", kind)
        try:
            with urllib.request.urlopen(request, context=self.tls, timeout=60) as answer:
                return answer.read().decode()
        except urllib.error.HTTPError as error:
            error.msg = f"{error.msg}: {error.read().decode()[:2000]}"
            raise

    def get(self, path):
        text = self.call("GET", path)
        return text if path == "/readyz" else json.loads(text)

    def post(self, path, body):
        return json.loads(self.call("POST", path, body))

    def kinds(self):
        """(API folder, resource) of all that can be listed and written."""
        groups = ["/api/v1"] + [f"/apis/{group['preferredVersion']['groupVersion']}" for group in self.get("/apis")["groups"]]
        for folder in groups:
            for each in self.get(folder)["resources"]:
                if {"list", "create"} <= set(each["verbs"]) and "/" not in each["name"]:
                    yield folder, each["name"]

    def objects(self, release):
        """{(kind of resource, namespace, name): object} of all that carries the release's name in our own label or Helm's annotation."""
        found = {}
        for folder, resource in self.kinds():
            listed = self.get(f"{folder}/{resource}")
            for each in listed["items"]:
                each["kind"] = listed["kind"].removesuffix("List")
                about = each["metadata"]
                labels, notes = about.get("labels", {}), about.get("annotations", {})
                if release in (labels.get("cxl.kvbm.io/release"), notes.get("meta.helm.sh/release-name")):
                    found[resource, about.get("namespace", ""), about["name"]] = each
        return found

    def _complete_hooks(self):
        """What the job controller and a kubelet would write of jobs and pods that succeed."""
        now = "2026-01-01T00:00:00Z"
        job = {
            "startTime": now, "completionTime": now, "succeeded": 1,
            "conditions": [{"type": each, "status": "True", "lastTransitionTime": now} for each in ("SuccessCriteriaMet", "Complete")],
        }  # fmt: skip
        wanted = [("/apis/batch/v1/jobs", "/apis/batch/v1", job), ("/api/v1/pods", "/api/v1", {"phase": "Succeeded"})]
        while not self.ended.wait(0.1):
            for listing, folder, status in wanted:
                for each in self.get(listing)["items"]:
                    about = each["metadata"]
                    if each.get("status", {}).get("completionTime") or each.get("status", {}).get("phase") == "Succeeded":
                        continue
                    path = f"{folder}/namespaces/{about['namespace']}/{listing.rsplit('/', 1)[1]}/{about['name']}/status"
                    with contextlib.suppress(urllib.error.HTTPError):  # Helm may have deleted it.
                        self.call("PATCH", path, {"status": status}, "application/merge-patch+json")
                        self.completed.append(about["name"])
