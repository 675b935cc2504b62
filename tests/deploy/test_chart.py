# SPDX-License-Identifier: Apache-2.0
"""The chart: every combination of its values against strict schemas, what it may never render, and what it refuses."""

import copy
import itertools
import json
import re

import charts
import pytest

VARIANTS = [dict(zip(charts.MATRIX, each, strict=True)) for each in itertools.product(*charts.MATRIX.values())]
BARE = [dict(serving=serving, access=access, identity=identity) for serving in ("vllm", "none")
        for access in charts.MATRIX["access"] for identity in charts.MATRIX["identity"]]  # fmt: skip


def label(variant):
    return "-".join(str(each) for each in variant.values())


def test_lint_finds_nothing_but_the_icon():
    report = charts.helm().lint(str(charts.CHART), strict=True)
    assert not report["errors"] and [each["error"] for each in report["messages"]] == ["icon is recommended"]


@pytest.mark.parametrize("variant", [*VARIANTS, *BARE], ids=label)
def test_every_object_is_valid(variant):
    objects = charts.render(**variant, monitoring={"enabled": True})
    assert not [problem for found in objects for problem in charts.problems(found)]
    kinds = {found["kind"] for found in objects}
    has_pool = variant.get("connector") != "nixl-ucx"
    assert ("DaemonSet" in kinds, "Job" in kinds) == (has_pool, has_pool)
    assert ("ResourceClaimTemplate" in kinds) == (has_pool and variant["access"] == "dra")
    assert ("DynamoGraphDeployment" in kinds) == ("serving" not in variant)
    names = [(found["kind"], found["metadata"]["name"]) for found in objects]
    assert len(set(names)) == len(names)


def containers(objects):
    """(pod, its spec, container, whether it is an init container) of everything that runs."""
    for found in objects:
        for pod, template in charts.pods(found):
            spec = template["spec"]
            for key in ("initContainers", "containers"):
                for container in spec.get(key, []):
                    yield pod, spec, container, key == "initContainers"


@pytest.mark.parametrize("variant", [*VARIANTS, *BARE], ids=label)
def test_nothing_is_privileged_but_by_host_path_and_nothing_serves_as_root(variant):
    has_devices = variant["access"] == "host-path" and variant.get("connector") != "nixl-ucx"
    seen = set()
    for pod, spec, container, is_first in containers(charts.render(**variant)):
        context = container["securityContext"]
        opens = "CXL_POOL" in charts.environment(container)
        assert context.get("privileged", False) == (has_devices and opens), pod
        if not context.get("privileged"):
            assert context["allowPrivilegeEscalation"] is False and context["capabilities"]["drop"] == ["ALL"], pod
        assert spec["securityContext"]["runAsNonRoot"] and spec["securityContext"]["runAsUser"] > 0, pod
        if context.get("runAsUser") == 0:
            assert is_first and container["name"] == "cxl-state" and context["capabilities"]["add"] == ["CHOWN"], pod
            assert [mount["name"] for mount in container["volumeMounts"]] == ["cxl-state"], pod
            assert container["image"] == spec["containers"][0]["image"], pod
        # A pod that the cluster gives the pool is one that opens it.
        limits = container.get("resources", {}).get("limits", {})
        assert ("cxl.kvbm.io/pool" in limits) == (opens and variant["access"] == "device-plugin"), pod
        assert ("claims" in container.get("resources", {})) == (opens and variant["access"] == "dra"), pod
        seen.add(pod)
    assert len(seen) >= (3 if variant.get("connector") == "nixl-ucx" else 4) - (variant.get("serving") is not None)


@pytest.mark.parametrize("serving", ["dynamo", "vllm"])
def test_no_two_roles_of_a_node_share_an_identity_unless_they_share_everything(serving):
    for identity in charts.MATRIX["identity"]:
        found = {}
        for pod, spec, container, _ in containers(charts.render(identity=identity, serving=serving)):
            said = charts.environment(container)
            if "CXL_MACHINE_ID" not in said:
                continue
            assert said["CXL_MACHINE_ID"].startswith("$(NODE_NAME)/serving/rack/")
            assert said["NODE_NAME"]["fieldRef"]["fieldPath"] == "spec.nodeName"
            (state,) = [volume["hostPath"]["path"] for volume in spec["volumes"] if volume["name"] == "cxl-state"]
            mounts = [mount["mountPath"] for mount in container["volumeMounts"] if mount["name"] == "cxl-state"]
            assert mounts == [said["CXL_STATE_DIR"]]
            # A process id means something to others in the same namespace only.
            assert spec.get("hostPID", False) == (identity == "node"), pod
            found[pod] = (said["CXL_MACHINE_ID"], state)
        count = 3 if serving == "dynamo" else 2
        assert len(found) == count
        # As many state folders as identities: that is what refuses a second pod of a role on a node.
        machines, states = ({each[at] for each in found.values()} for at in (0, 1))
        assert len(machines) == len(states) == (1 if identity == "node" else count)


def test_pods_of_a_role_keep_apart_and_never_surge_where_each_is_a_host():
    for serving in ("dynamo", "vllm"):
        for identity in charts.MATRIX["identity"]:
            for found in charts.render(serving=serving, identity=identity):
                for pod, template in charts.pods(found):
                    if pod not in ("prefill", "decode", "rack-vllm"):
                        continue
                    affinity = template["spec"].get("affinity", {}).get("podAntiAffinity", {})
                    apart = affinity.get("requiredDuringSchedulingIgnoredDuringExecution")
                    assert bool(apart) == (identity == "role")
                    if apart:
                        chosen = apart[0]["labelSelector"]["matchLabels"]
                        assert chosen.items() <= template["metadata"]["labels"].items()
                        assert apart[0]["topologyKey"] == "kubernetes.io/hostname"
                    surge = template["metadata"].get("annotations", {}).get("nvidia.com/deployment-rolling-update-max-surge")
                    if found["kind"] == "Deployment":
                        surge = str(found["spec"]["strategy"]["rollingUpdate"]["maxSurge"])
                    assert (surge == "0") == (identity == "role")


def test_the_format_job_comes_first_and_has_no_way_to_destroy():
    objects = charts.render(format={"cells": ["512K:75%"], "args": ["--advanced", "objects=512"]})
    job = charts.of_kind(objects, "Job")
    assert job["metadata"]["annotations"]["helm.sh/hook"] == "pre-install,pre-upgrade"
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert container["command"] == ["format-if-empty"]
    assert container["args"] == ["--cells", "512K:75%", "--slots", "64", "--advanced", "seats=8", "--advanced", "objects=512"]
    text = json.dumps(objects)
    assert "--force" not in text and "--evict-hosts" not in text


def test_the_claim_is_there_before_the_format_job_needs_it():
    objects = charts.render(access="dra")
    about = {(each["kind"], each["metadata"]["name"]): each["metadata"] for each in objects}
    hooks = {key: metadata["annotations"] for key, metadata in about.items() if "annotations" in metadata}
    weights = {kind: int(hook["helm.sh/hook-weight"]) for (kind, _), hook in hooks.items() if kind != "Pod"}
    assert weights["ResourceClaimTemplate"] < weights["Job"] and weights["DeviceClass"] < weights["Job"]
    # Helm leaves what a hook made, unless the hook says otherwise.
    assert all("hook-succeeded" in hook["helm.sh/hook-delete-policy"] for hook in hooks.values())
    templates = {each["metadata"]["name"]: each for each in objects if each["kind"] == "ResourceClaimTemplate"}
    classes = {each["metadata"]["name"] for each in objects if each["kind"] == "DeviceClass"}
    used = {each["spec"]["spec"]["devices"]["requests"][0]["exactly"]["deviceClassName"] for each in templates.values()}
    assert used == classes and len(templates) == 2
    for found in objects:
        for pod, template in charts.pods(found):
            for claim in template["spec"].get("resourceClaims", ()):
                name = claim["resourceClaimTemplateName"]
                is_hook = ("ResourceClaimTemplate", name) in hooks
                assert name in templates and is_hook == (found["kind"] == "Job"), pod
    assert not [each for each in charts.render(access="dra", pool={"deviceClass": {"name": "pool.rack"}}) if each["kind"] == "DeviceClass"]


def test_two_releases_share_a_cluster():
    """Nothing that is the cluster's, and no identity or folder of a node, is of two releases."""
    releases = [("rack", "team-a"), ("rack", "team-b"), ("other.rack", "team-a")]
    of_cluster, of_nodes = [], []
    for release, namespace in releases:
        objects = charts.render(release, namespace=namespace, access="dra")
        of_cluster.append({each["metadata"]["name"] for each in objects if each["kind"] == "DeviceClass"})
        folders, machines = set(), set()
        for _, spec, container, _ in containers(objects):
            folders |= {volume["hostPath"]["path"] for volume in spec.get("volumes", ()) if volume["name"] == "cxl-state"}
            machines |= {charts.environment(container)["CXL_MACHINE_ID"]} if "CXL_MACHINE_ID" in charts.environment(container) else set()
        of_nodes.append(folders | machines)
        assert len(folders) == len(machines) == 3
        assert all("." not in each["metadata"]["name"] for each in objects if each["kind"] == "Service")
    for kind in (of_cluster, of_nodes):
        assert all(not one & other for one, other in itertools.combinations(kind, 2))


def test_services_and_monitors_choose_the_pods_that_they_mean():
    for serving in ("dynamo", "vllm"):
        objects = charts.render(serving=serving, monitoring={"enabled": True})
        # As Dynamo's Grove does it: these labels are its own.
        grove = dict.fromkeys(("name", "component", "managed-by", "part-of"), "grove")
        relabelled = {f"app.kubernetes.io/{label}": value for label, value in grove.items()}
        labels = {pod: {**template["metadata"]["labels"], **relabelled} for each in objects for pod, template in charts.pods(each)}

        def chosen(selector, labels=labels):
            wanted = selector.get("matchLabels", selector if "matchExpressions" not in selector else {})
            among = selector.get("matchExpressions", [])
            return {
                pod
                for pod, has in labels.items()
                if wanted.items() <= has.items() and all(has.get(each["key"]) in each["values"] for each in among)
            }

        workers = {"prefill", "decode"} if serving == "dynamo" else {"rack-vllm"}
        assert chosen(charts.of_kind(objects, "PodMonitor")["spec"]["selector"]) == workers
        service = charts.of_kind(objects, "Service", "rack-exporter")
        assert chosen(service["spec"]["selector"]) == {"rack-exporter"}
        monitor = charts.of_kind(objects, "ServiceMonitor")["spec"]["selector"]["matchLabels"]
        assert monitor.items() <= service["metadata"]["labels"].items()
        fronts = workers | ({"Frontend"} if serving == "dynamo" else set())
        policies = {each["metadata"]["name"]: chosen(each["spec"]["podSelector"]) for each in objects if each["kind"] == "NetworkPolicy"}
        of_pool = {"rack-host", "rack-format", "rack-test"}
        assert policies == {"rack-pool": of_pool, "rack-exporter": {"rack-exporter"}, "rack-serving": fronts}


def test_dashboards_and_alerts_are_those_of_the_checkout():
    objects = charts.render(monitoring={"enabled": True})
    data = charts.of_kind(objects, "ConfigMap")["data"]
    files = {path.name: path.read_text() for path in (charts.CHART / "dashboards").glob("*.json")}
    assert {name: json.loads(text) for name, text in data.items()} == {name: json.loads(text) for name, text in files.items()} and files
    assert charts.of_kind(objects, "PrometheusRule")["spec"]["groups"]


def test_notes_name_what_is_installed():
    """Every object that the notes send a reader to is one of the chart, in every mode."""
    off = {"enabled": False}
    modes = [{}, {"serving": "vllm"}, {"serving": "none"}, {"host": off}, {"connector": "nixl-ucx"}, {"format": off}]
    for changes in modes:
        text = charts.notes(**changes)
        objects = {(each["kind"].lower(), each["metadata"]["name"]) for each in charts.render(**changes)}
        short = {"ds": "daemonset", "deploy": "deployment", "svc": "service"}
        named = {(short.get(kind, kind), name) for kind, name in re.findall(r"\b(ds|deploy|svc|job)/([\w-]+)", text)}
        named |= {("dynamographdeployment", name) for name in re.findall(r"dynamographdeployment ([\w-]+)", text)}
        # Dynamo's operator makes the frontend's service.
        assert named and named <= objects | {("service", "rack-frontend")}, (changes, named - objects)
        assert ("cxlctl" in text) == (changes.get("connector") != "nixl-ucx")


GRAPH = """
apiVersion: nvidia.com/v1beta1
kind: DynamoGraphDeployment
metadata: {name: mine, labels: {team: a}}
spec:
  components:
    - name: Frontend
      type: frontend
      replicas: 1
    - name: VllmDecodeWorker
      type: worker
      replicas: 2
      podTemplate:
        spec:
          nodeSelector: {zone: a}
          containers:
            - name: sidecar
              image: other
            - name: main
              image: nvcr.io/nvidia/ai-dynamo/vllm-runtime:1.6.1
              command: [python3, -m, dynamo.vllm]
              args: [--model, m, --kv-transfer-config, '{"kv_connector": "NixlConnector"}', --disaggregation-mode, decode]
              resources: {limits: {nvidia.com/gpu: "1"}}
    - name: VllmPrefillWorker
      type: prefill
      podTemplate:
        spec:
          volumes: [{name: state, emptyDir: {}}]
          containers:
            - name: main
              env: [{name: NODE_NAME, value: wrong}, {name: MINE, value: "1"}]
              args: [--model, m, '--kv-transfer-config={"kv_connector": "NixlConnector"}']
              volumeMounts: [{name: state, mountPath: /mine}]
"""


@pytest.mark.parametrize("reverse", [False, True])
def test_a_graph_of_the_user_gets_the_pool_whatever_its_order_and_names(reverse):
    import yaml

    wanted = yaml.safe_load(GRAPH)
    if reverse:
        wanted["spec"]["components"].reverse()
    objects = charts.render(graph=yaml.safe_dump(wanted))
    graph = charts.of_kind(objects, "DynamoGraphDeployment")
    assert not charts.problems(graph) and graph["metadata"]["name"] == "mine" and graph["metadata"]["labels"]["team"] == "a"
    pods = dict(charts.pods(graph))
    assert list(pods) == [each["name"] for each in wanted["spec"]["components"]]
    seen = set()
    for name, prefix in (("VllmDecodeWorker", "--model"), ("VllmPrefillWorker", "--model")):
        spec = pods[name]["spec"]
        (main,) = [each for each in spec["containers"] if each["name"] == "main"]
        said = charts.environment(main)
        assert main["args"][0] == prefix and main["args"].count("--kv-transfer-config") == 1
        assert json.loads(main["args"][main["args"].index("--kv-transfer-config") + 1])["kv_connector"] == "CxlConnector"
        assert not any(each.startswith("--kv-transfer-config=") for each in main["args"])
        assert main["image"] == f"kvbm-cxl/worker-gpu:{charts.version()}" and main["resources"]["limits"]["cxl.kvbm.io/pool"] == "1"
        assert said["NODE_NAME"] == {"fieldRef": {"fieldPath": "spec.nodeName"}}
        assert [each["name"] for each in main["env"]].count("NODE_NAME") == 1
        assert {mount["mountPath"] for mount in main["volumeMounts"]} >= {"/run/kvbm-cxl"}
        assert [each["name"] for each in spec["initContainers"]] == ["cxl-state"]
        assert spec["terminationGracePeriodSeconds"] == 120 and spec["securityContext"]["supplementalGroups"] == [1100]
        assert pods[name]["metadata"]["labels"]["cxl.kvbm.io/part"] == "engine"
        seen.add(said["CXL_MACHINE_ID"])
    assert len(seen) == 2
    decode, prefill = pods["VllmDecodeWorker"]["spec"], pods["VllmPrefillWorker"]["spec"]
    assert decode["nodeSelector"] == {"zone": "a", "cxl.kvbm.io/pool": "true"} and len(decode["containers"]) == 2
    assert decode["containers"][1]["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert {each["name"] for each in prefill["volumes"]} == {"state", "cxl-state"}
    assert charts.environment(prefill["containers"][0])["MINE"] == "1"
    assert pods["Frontend"]["metadata"]["labels"]["cxl.kvbm.io/part"] == "frontend"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda graph: graph.update(kind="DynamoComponentDeployment"), "no DynamoGraphDeployment"),
        (lambda graph: graph.update(apiVersion="nvidia.com/v1alpha1"), "no DynamoGraphDeployment"),
        (lambda graph: graph["spec"]["components"].__delitem__(slice(1, None)), "nothing would use the pool"),
        (
            lambda graph: graph["spec"]["components"][1]["podTemplate"]["spec"]["containers"].pop(),
            "VllmDecodeWorker has no container `main`",
        ),
        (
            lambda graph: graph["spec"]["components"][1]["podTemplate"]["spec"]["containers"][1].update(command=["sh", "-c"]),
            "VllmDecodeWorker starts its engine by a shell",
        ),
    ],
)
def test_a_graph_that_cannot_get_the_pool_is_refused(change, named):
    import yaml

    graph = yaml.safe_load(GRAPH)
    change(graph)
    with pytest.raises(charts.helm().HelmError) as refused:
        charts.render(graph=yaml.safe_dump(graph))
    assert named in str(refused.value)


def test_a_pod_gets_what_the_user_adds():
    more = {"priorityClassName": "high", "volumes": [{"name": "mine", "emptyDir": {}}], "serviceAccountName": "mine"}
    more |= {"affinity": {"nodeAffinity": {}}, "tolerations": [{"key": "a"}]}
    worker = {"pod": more, "volumeMounts": [{"name": "mine", "mountPath": "/mine"}], "args": ["--kv-transfer-config", "{}"]}
    objects = charts.render(prefill=worker, host={"pod": {"priorityClassName": "system-node-critical"}})
    assert not [problem for found in objects for problem in charts.problems(found)]
    spec = dict(charts.pods(charts.of_kind(objects, "DynamoGraphDeployment")))["prefill"]["spec"]
    assert spec["priorityClassName"] == "high" and spec["serviceAccountName"] == "mine"
    assert spec["affinity"].keys() == {"nodeAffinity", "podAntiAffinity"} and len(spec["tolerations"]) == 2
    assert {volume["name"] for volume in spec["volumes"]} == {"models", "cxl-state", "mine"}
    # What the user says comes last, which is what an engine takes.
    assert spec["containers"][0]["args"][-2:] == ["--kv-transfer-config", "{}"]
    assert {mount["mountPath"] for mount in spec["containers"][0]["volumeMounts"]} == {"/models", "/run/kvbm-cxl", "/mine"}
    keeper = charts.of_kind(objects, "DaemonSet")["spec"]["template"]["spec"]
    assert keeper["priorityClassName"] == "system-node-critical"


def test_another_tools_image_or_version_restarts_no_engine():
    def engines(objects):
        return {pod: template for found in objects for pod, template in charts.pods(found) if pod in ("prefill", "decode", "rack-vllm")}

    for serving in ("dynamo", "vllm"):
        other = charts.render(serving=serving, images={"tools": {"tag": "9.9.9"}}, version="9.9.9")
        assert engines(charts.render(serving=serving)) == engines(other)


def test_a_pool_that_is_a_part_of_its_devices_is_named_as_one():
    named = set()
    for changes in ({}, {"offset": "64G", "size": "32G"}, {"offset": "64G"}):
        for _, _, container, _ in containers(charts.render(pool={"devices": ["/dev/dax0.0", "/dev/dax1.0"], **changes})):
            named |= {value for name, value in charts.environment(container).items() if name == "CXL_POOL"}
    devices = "/dev/dax0.0,/dev/dax1.0"
    assert named == {devices, f"{devices},offset=64G,size=32G", f"{devices},offset=64G"}


def test_a_device_of_metadata_is_named_and_mounted():
    changes = {"devices": ["/dev/dax0.0"], "metadata": "/dev/dax1.0", "access": "host-path"}
    for more, name in (({}, ""), ({"metadataOffset": "64G"}, ",metadata_offset=64G")):
        objects = charts.render(pool={**changes, **more})
        named, mounts = set(), set()
        for _, _, container, _ in containers(objects):
            named |= {value for key, value in charts.environment(container).items() if key == "CXL_POOL"}
            mounts |= {mount["mountPath"] for mount in container.get("volumeMounts", []) if mount["mountPath"].startswith("/dev/dax")}
        assert named == {f"/dev/dax0.0,metadata=/dev/dax1.0{name}"} and mounts == {"/dev/dax0.0", "/dev/dax1.0"}
        assert f"The pool is {named.pop()}." in charts.notes(pool={**changes, **more})


@pytest.mark.parametrize("cpus", ["any", "device", "node:1", "0-3,8", "copy=device;upkeep=0-1;workers=node:1"])
def test_every_host_is_told_where_its_threads_run(cpus):
    """Those that join the pool: workers and the keeper of each node; as a user says it, or any."""
    for changes in ({"pool": {"cpus": cpus}}, *([{}] if cpus == "any" else [])):
        told = [charts.environment(container) for _, _, container, _ in containers(charts.render(**changes))]
        hosts = [environment for environment in told if "CXL_MACHINE_ID" in environment]
        assert len(hosts) >= 3 and {environment["CXL_CPUS"] for environment in hosts} == {cpus}
        assert not any("CXL_CPUS" in environment for environment in told if "CXL_MACHINE_ID" not in environment)


@pytest.mark.parametrize("copy", ["engine=auto", "engine=cpu,workers=3,window=2M", "read_ahead=auto,ahead_page=36K", "read_ahead=4"])
def test_every_host_is_told_how_to_copy(copy):
    for changes in ({"pool": {"copy": copy}}, *([{}] if copy == "engine=auto" else [])):
        told = [charts.environment(container) for _, _, container, _ in containers(charts.render(**changes))]
        hosts = [environment for environment in told if "CXL_MACHINE_ID" in environment]
        assert len(hosts) >= 3 and {environment["CXL_COPY"] for environment in hosts} == {copy}


REFUSED = {
    "copy": ({"pool": {"copy": "read_ahead=9"}}, "/pool/copy"),
    "copy-kind": ({"pool": {"copy": "ahead=auto"}}, "/pool/copy"),
    "cpus": ({"pool": {"cpus": "node1"}}, "/pool/cpus"),
    "cpus-kind": ({"pool": {"cpus": "cores=1"}}, "/pool/cpus"),
    "cpus-nothing": ({"pool": {"cpus": ""}}, "/pool/cpus"),
    "offset": ({"pool": {"offset": "64 GB"}}, "/pool/offset"),
    "metadata": ({"pool": {"metadata": "/dev/shm/kv"}}, "/pool/metadata"),
    "access": ({"access": "hostpath"}, "/pool/access"),
    "identity": ({"identity": "pod"}, "/identity"),
    "connector": ({"connector": "ucx"}, "/connector"),
    "router": ({"router": "random"}, "/router"),
    "serving": ({"serving": "sglang"}, "/serving"),
    "misspelt": ({"conector": "cxl"}, "conector"),
    "misspelt-within": ({"pool": {"device": ["/dev/dax0.0"]}}, "device"),
    "file": ({"pool": {"devices": ["/dev/shm/kv"]}}, "/pool/devices/0"),
    "no-device": ({"pool": {"devices": []}}, "/pool/devices"),
    "twice": ({"pool": {"devices": ["/dev/dax0.0", "/dev/dax0.0"]}}, "/pool/devices"),
    "cells": ({"format": {"cells": ["16 MiB"]}}, "/format/cells/0"),
    "seats": ({"format": {"seats": 9}}, "/format/seats"),
    "slots": ({"format": {"slots": 65}}, "/format/slots"),
    "force": ({"format": {"args": ["--force"]}}, "/format/args/0"),
    "evict": ({"format": {"args": ["--evict-hosts"]}}, "/format/args/0"),
    "root": ({"user": 0}, "/user"),
    "version": ({"runtimeVersion": "v1.6"}, "/runtimeVersion"),
    "replicas": ({"prefill": {"replicas": -1}}, "replicas"),
    "grace": ({"gracePeriodSeconds": 5}, "/gracePeriodSeconds"),
    "open-metrics": ({"networkPolicy": {"metricsFrom": []}}, "metricsFrom"),
    "servers-without-pairs": ({"serving": "vllm", "connector": "nixl-cxl"}, "set connector: cxl, or serving: dynamo"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_values_that_make_no_sense_are_refused_by_name(case):
    changes, named = REFUSED[case]
    with pytest.raises(charts.helm().HelmError) as refused:
        charts.render(**changes)
    assert named in str(refused.value)


def broken(objects, kind, change):
    found = copy.deepcopy(charts.of_kind(objects, kind))
    change(found)
    return charts.problems(found)


def test_the_schemas_notice_what_is_wrong():
    objects = charts.render()
    components = lambda graph: graph["spec"]["components"][1]  # noqa: E731
    main = lambda graph: components(graph)["podTemplate"]["spec"]["containers"][0]  # noqa: E731
    assert broken(objects, "DynamoGraphDeployment", lambda graph: components(graph).update(replica=1))
    assert broken(objects, "DynamoGraphDeployment", lambda graph: components(graph).update(type="prefiller"))
    assert broken(objects, "DynamoGraphDeployment", lambda graph: components(graph).update(runtimeVersionOverride="main"))
    assert broken(objects, "DynamoGraphDeployment", lambda graph: main(graph).update(volumeMount=[]))
    assert broken(objects, "DynamoGraphDeployment", lambda graph: main(graph)["env"].append({"name": "A", "value": 1}))
    assert broken(objects, "DaemonSet", lambda found: found["spec"]["template"]["spec"].update(hostPid=True))
    assert broken(objects, "Job", lambda found: found["spec"].update(retries=3))
    assert broken(objects, "Deployment", lambda found: found["spec"]["template"]["spec"]["containers"][0].update(readinesProbe={}))


def test_a_checkout_of_dynamo_gives_the_schema(tmp_path, monkeypatch):
    text = {"type": "string"}
    components = {"type": "array", "items": {"type": "object", "properties": {"name": text}}}
    spec = {"type": "object", "properties": {"components": components}}
    schema = {"type": "object", "properties": {"apiVersion": text, "kind": text, "metadata": {}, "spec": spec}}
    crd = {"spec": {"versions": [{"name": "v1beta1", "schema": {"openAPIV3Schema": schema}}]}}
    path = tmp_path / charts.CRD
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(crd))
    monkeypatch.setenv("DYNAMO_CHECKOUT", str(tmp_path))
    charts.graph_schema.cache_clear()
    try:
        found = {"apiVersion": "nvidia.com/v1beta1", "kind": "DynamoGraphDeployment", "metadata": {"name": "a"}}
        found["spec"] = {"components": [{"name": "b"}]}
        assert not charts.problems(found)
        found["spec"]["components"][0]["nam"] = "c"
        assert charts.problems(found)
    finally:
        charts.graph_schema.cache_clear()
