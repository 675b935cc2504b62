# SPDX-License-Identifier: Apache-2.0
"""`helm install`, `upgrade`, `test` and `uninstall` of the chart against a real API server (`make setup-apiserver`).

The server checks every object by its own rules. No pod runs: see api_server.py.
"""

import itertools
import urllib.parse

import api_server
import charts
import etcd_server
import pytest

pytestmark = [
    pytest.mark.skipif(not api_server.KUBE_APISERVER.exists(), reason="no API server: `make setup-apiserver` adds one"),
    pytest.mark.skipif(not etcd_server.ETCD.exists(), reason="no etcd: `make setup-etcd` adds one"),
]
VARIANTS = [
    dict(access=access, identity=identity, serving=serving)
    for access, identity, serving in itertools.product(charts.MATRIX["access"], charts.MATRIX["identity"], ("dynamo", "vllm", "none"))
]
GROVE = {f"app.kubernetes.io/{key}": f"grove-{key}" for key in ("name", "instance", "component", "part-of", "managed-by")}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    made = api_server.ApiServer(tmp_path_factory.mktemp("api-server"))
    try:
        made.start()
        yield made
    finally:
        made.close()


@pytest.fixture
def cluster(server):
    """(server, a function that connects Helm to a namespace). What a test installed is uninstalled after it, whatever happened."""
    connections = []

    def connect(namespace):
        text = f"""
apiVersion: v1
kind: Config
current-context: test
clusters: [{{name: test, cluster: {{server: "{server.url}", insecure-skip-tls-verify: true}}}}]
users: [{{name: test, user: {{token: {api_server.TOKEN}}}}}]
contexts: [{{name: test, context: {{cluster: test, user: test, namespace: {namespace}}}}}]
"""
        connections.append(charts.helm().Config(kubeconfig_content=text, namespace=namespace))
        return connections[-1]

    yield server, connect
    for each in connections:
        each.uninstall(charts.RELEASE, ignore_not_found=True, timeout=60)
        each.close()


def install(connection, namespace, **changes):
    options = {"namespace": namespace, "create_namespace": True, "timeout": 120, "wait": "hookOnly"}
    return connection.install(str(charts.CHART), charts.RELEASE, charts.values(**changes), **options)


def engines(objects):
    """{name: pod template} of the pods that a graph or a Deployment makes."""
    return {name: template for found in objects.values() for name, template in charts.pods(found)}


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda each: "-".join(each.values()))
def test_a_release_is_installed_upgraded_tested_and_leaves_nothing(cluster, variant):
    server, connect = cluster
    connection = connect("serving")
    install(connection, "serving", **variant, monitoring={"enabled": True})
    first = server.objects(charts.RELEASE)
    kinds = {resource for resource, _, _ in first}
    assert {"daemonsets", "deployments", "networkpolicies", "configmaps", "servicemonitors", "prometheusrules"} <= kinds
    assert ("dynamographdeployments" in kinds) == (variant["serving"] == "dynamo")
    assert ("deviceclasses" in kinds, "resourceclaimtemplates" in kinds) == ((variant["access"] == "dra",) * 2)
    assert not {"jobs", "pods"} & kinds, "hooks that succeeded are gone"

    # A new tools image restarts the keepers and the exporter, and no engine.
    connection.upgrade(
        str(charts.CHART), charts.RELEASE, charts.values(**variant, images={"tools": {"tag": "0.9.9"}}), namespace="serving", timeout=120,
        wait="hookOnly",
    )  # fmt: skip
    second = server.objects(charts.RELEASE)
    assert "servicemonitors" not in {resource for resource, _, _ in second}, "the upgrade turned monitoring off"
    before, after = engines(first), engines(second)
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {f"{charts.RELEASE}-host", f"{charts.RELEASE}-exporter"}

    server.completed.clear()
    connection.test(charts.RELEASE, timeout=120)
    assert server.completed == [f"{charts.RELEASE}-test"]
    connection.uninstall(charts.RELEASE, timeout=120)
    assert server.objects(charts.RELEASE) == {}


def test_two_releases_share_a_cluster(cluster):
    server, connect = cluster
    for namespace in ("one", "two"):
        install(connect(namespace), namespace, access="dra")
    found = server.objects(charts.RELEASE)
    classes = {name for resource, _, name in found if resource == "deviceclasses"}
    assert len(classes) == 2 and {namespace for _, namespace, _ in found} == {"", "one", "two"}
    connect("one").uninstall(charts.RELEASE, timeout=120)
    left = server.objects(charts.RELEASE)
    assert {namespace for _, namespace, _ in left} == {"", "two"}
    assert {key: each["metadata"]["uid"] for key, each in left.items()} == {
        key: each["metadata"]["uid"] for key, each in found.items() if key[1] == "two" or key[2].startswith("two-")
    }


def test_a_release_of_the_same_name_does_not_take_what_another_one_owns(cluster):
    server, connect = cluster
    install(connect("one"), "one", access="dra", pool={"deviceClass": {"name": "of-the-cluster"}})
    install(connect("two"), "two", access="dra", pool={"deviceClass": {"name": "of-the-cluster"}})
    assert "deviceclasses" not in {resource for resource, _, _ in server.objects(charts.RELEASE)}


def test_selectors_find_the_pods_that_grove_relabels(cluster):
    """Grove gives its own app.kubernetes.io labels to the pods of a graph. The server itself evaluates each selector."""
    server, connect = cluster
    install(connect("serving"), "serving", monitoring={"enabled": True})
    objects = server.objects(charts.RELEASE)
    (graph,) = [each for (resource, _, _), each in objects.items() if resource == "dynamographdeployments"]
    made = {}
    for name, template in charts.pods(graph):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {**template["metadata"], "name": name.lower()}, "spec": template["spec"]}
        pod["metadata"]["labels"] = {**template["metadata"]["labels"], **GROVE}
        made[name.lower()] = server.post("/api/v1/namespaces/serving/pods", pod)
    assert set(made) == {"frontend", "prefill", "decode"}

    def chosen(selector):
        terms = [f"{key}={value}" for key, value in selector.get("matchLabels", {}).items()]
        terms += [f"{each['key']} {each['operator'].lower()} ({','.join(each['values'])})" for each in selector.get("matchExpressions", ())]
        query = urllib.parse.quote(",".join(terms))
        return {each["metadata"]["name"] for each in server.get(f"/api/v1/namespaces/serving/pods?labelSelector={query}")["items"]}

    spec = {(resource, name): each["spec"] for (resource, _, name), each in objects.items() if "spec" in each}
    try:
        assert chosen(spec["networkpolicies", "rack-serving"]["podSelector"]) == {"frontend", "prefill", "decode"}
        (monitor,) = [each for (resource, _), each in spec.items() if resource == "podmonitors"]
        assert chosen(monitor["selector"]) == {"prefill", "decode"}
        for role in ("prefill", "decode"):
            (term,) = made[role]["spec"]["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
            assert chosen(term["labelSelector"]) == {role}
    finally:
        for name in made:
            server.call("DELETE", f"/api/v1/namespaces/serving/pods/{name}?gracePeriodSeconds=0")


GRAPH = """
apiVersion: nvidia.com/v1beta1
kind: DynamoGraphDeployment
metadata: {name: mine}
spec:
  components:
    - name: worker
      type: worker
      podTemplate: {spec: {containers: [{name: main, image: mine, command: [python3], args: [-m, dynamo.vllm]%s}]}}
    - {name: front, type: frontend}
"""


def test_a_graph_of_a_user_is_installed(cluster):
    server, connect = cluster
    install(connect("serving"), "serving", graph=GRAPH % "")
    assert ("dynamographdeployments", "serving", "mine") in server.objects(charts.RELEASE)


@pytest.mark.parametrize(
    "more, reason", [(", imagePullPolicie: Never", "imagePullPolicie"), (", ports: [{containerPort: many}]", "containerPort")]
)
def test_the_server_refuses_a_graph_with_an_unknown_field_or_type(cluster, more, reason):
    connection = cluster[1]("serving")
    with pytest.raises(charts.helm().HelmError, match=reason):
        install(connection, "serving", graph=GRAPH % more)
