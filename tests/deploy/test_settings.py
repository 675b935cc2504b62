# SPDX-License-Identifier: Apache-2.0
"""Chart, Compose, files of deploy/host, scripts for nodes and launcher say the same to the same process."""

import configparser
import json
import os
import re
import shutil
import subprocess
import sys
import types
from pathlib import Path

import charts
import pytest
import yaml

# The launcher's commands are wanted, not its model, whose libraries are large.
sys.modules.setdefault("tiny_model", types.SimpleNamespace(sentences=None, tiny_model=None))

from graph import workers as launcher  # noqa: E402
from graph.environment import common  # noqa: E402
from graph.model import Model  # noqa: E402
from graph.options import Options  # noqa: E402
from graph.ports import Ports  # noqa: E402

DEPLOY = charts.ROOT / "deploy"
CONNECTORS = charts.MATRIX["connector"]
PLANES = {"DYN_REQUEST_PLANE": "tcp", "DYN_EVENT_PLANE": "zmq"}


def options(command):
    """The options of a command line: name -> value, or True where none follows."""
    found = {}
    for at, word in enumerate(command):
        if word.startswith("--"):
            follows = command[at + 1] if at + 1 < len(command) else "--"
            found[word] = True if follows.startswith("--") else follows
    return found


def transfer(command):
    """What --kv-transfer-config says, without what only a machine without a GPU needs."""
    said = json.loads(options(command)["--kv-transfer-config"])
    said.pop("kv_buffer_device", None)
    return said


def of_chart(connector, router="round-robin"):
    """(environment of the graph, frontend's and workers' containers) of the chart."""
    graph = charts.of_kind(charts.render(connector=connector, router=router), "DynamoGraphDeployment")
    main = {each["type"]: each["podTemplate"]["spec"]["containers"][0] for each in graph["spec"]["components"]}
    return {each["name"]: each["value"] for each in graph["spec"]["env"]}, main


def of_launcher(connector, role, router="round-robin", tmp="/tmp"):
    """A worker's command of `make serve`."""
    model = Model("model", "model", False, None, {})
    worker = launcher.Worker.make(role, 0, Ports())
    return launcher.worker_command(Options(connector=connector, router=router), model, worker, Path(tmp))


def of_script(tmp_path, script, *arguments, **environment):
    """What a script of deploy/dynamo/nodes calls: (arguments, environment) of its python3."""
    programs = tmp_path / "programs"
    programs.mkdir(exist_ok=True)
    (programs / "python3").write_text(f"#!{sys.executable}\nimport json, os, sys\nprint(json.dumps([sys.argv[1:], dict(os.environ)]))\n")
    (programs / "kvbm-cxl").write_text("#!/bin/sh\necho /plugins\n")
    for program in programs.iterdir():
        program.chmod(0o755)
    env = {"PATH": f"{programs}{os.pathsep}{os.environ['PATH']}", **environment}
    done = subprocess.run([DEPLOY / "dynamo/nodes" / script, *arguments], env=env, capture_output=True, text=True, check=True, timeout=30)
    command, told = json.loads(done.stdout)
    return ["python3", *command], told


def of_compose(file="compose.yaml", **environment):
    """Services of a file of Compose with the defaults of .env, and others."""
    told = dict(line.split("=", 1) for line in (DEPLOY / "compose/.env").read_text().splitlines() if line and not line.startswith("#"))
    told.update(environment)
    text = (DEPLOY / "compose" / file).read_text()
    text = re.sub(r"\$\{(\w+)(?::-([^}]*))?\}", lambda found: told.get(found[1], found[2] or ""), text)
    return yaml.safe_load(text)["services"]


SUFFIX = {"cxl": "", "nixl-cxl": "-nixl-cxl", "nixl-ucx": "-nixl-ucx"}


@pytest.mark.parametrize("connector", CONNECTORS)
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_workers_are_told_the_same_everywhere(connector, role, tmp_path):
    _, chart = of_chart(connector)
    by_chart = [*chart[role]["command"], *chart[role]["args"]]
    by_script, told = of_script(tmp_path, "worker.sh", role, CONNECTOR=connector)
    by_compose = of_compose()[role + SUFFIX[connector]]
    commands = {"chart": by_chart, "script": by_script, "compose": by_compose["command"], "launcher": of_launcher(connector, role)}
    expected = transfer(commands["launcher"])
    assert expected["kv_load_failure_policy"] == "recompute"
    # The launcher's graphs are counted to the token, so nothing of a hit is computed for the audit there.
    if connector == "cxl":
        assert expected.pop("kv_connector_extra_config") == {"audit": False}
    for name, command in commands.items():
        if name != "launcher":
            assert transfer(command) == expected, name
        assert command[1:3] == ["-m", "dynamo.vllm"], name
        # Time for the engine to leave the pool. The launcher's graphs are over when they end.
        assert options(command).get("--shutdown-timeout") == (None if name == "launcher" else "30"), name
        assert options(command)["--disaggregation-mode"] == role, name
        assert options(command)["--block-size"] == "128", name
    plugins = {
        "chart": charts.environment(chart[role]).get("NIXL_PLUGIN_DIR"),
        "script": told.get("NIXL_PLUGIN_DIR"),
        "compose": by_compose["environment"].get("NIXL_PLUGIN_DIR"),
    }
    assert all(bool(folder) == (connector == "nixl-cxl") for folder in plugins.values()), plugins
    # Where an image has the plugins: both ways to start it mean the same folder, and the images make it.
    if connector == "nixl-cxl":
        assert plugins["chart"] == plugins["compose"]
        for image in ("worker-cpu", "worker-gpu"):
            assert f" {plugins['chart']}" in (DEPLOY / f"images/{image}.Dockerfile").read_text()


def test_gpu_services_of_compose_are_those_of_cpus_without_what_cpus_need():
    services = of_compose()
    for role in ("prefill", "decode"):
        cpu, gpu = services[role], services[f"{role}-gpu"]
        assert transfer(gpu["command"]) == transfer(cpu["command"]) and gpu["command"][:3] == cpu["command"][:3]
        assert options(gpu["command"])["--shutdown-timeout"] == options(cpu["command"])["--shutdown-timeout"]
        only_cpu = {"HF_HUB_OFFLINE", "OMP_NUM_THREADS", "PYTHONPATH"}
        shared = {name: value for name, value in cpu["environment"].items() if name not in only_cpu and not name.startswith("VLLM_")}
        assert shared == {name: value for name, value in gpu["environment"].items() if name != "HF_TOKEN"}


@pytest.mark.parametrize("connector", CONNECTORS)
@pytest.mark.parametrize("router", ["round-robin", "kv", "least-loaded"])
def test_frontends_choose_alike(connector, router, tmp_path):
    _, chart = of_chart(connector, router)
    by_script, _ = of_script(tmp_path, "frontend.sh", ROUTER=router, CONNECTOR=connector)
    commands = {"chart": chart["frontend"]["args"], "script": by_script}
    if router != "least-loaded":
        commands["launcher"] = launcher.frontend_command(Options(connector=connector, router=router), 8000)
    ours = {"--router-mode": router, "--migration-limit": "3"}
    if router == "kv" and connector == "cxl":
        ours["--router-disk-cache-hit-weight"] = str(launcher.POOL_HIT_WEIGHT)
    for name, command in commands.items():
        said = {key: value for key, value in options(command).items() if not key.startswith("--http")}
        assert said == ours, name
    compose = options(of_compose()["frontend"]["command"])
    assert compose["--migration-limit"] == "3" and compose["--router-mode"] in charts.MATRIX["router"]


def test_events_of_workers_go_the_same_way(tmp_path):
    _, chart = of_chart("cxl", "kv")
    by_script, _ = of_script(tmp_path, "worker.sh", "decode", ROUTER="kv")
    for command in (chart["decode"]["args"], by_script, of_launcher("cxl", "decode", "kv")):
        said = json.loads(options(command)["--kv-events-config"])
        # With tcp vLLM would bind all addresses, or none that the other side reaches.
        assert said.pop("endpoint").startswith("ipc://") and said == {"enable_kv_cache_events": True, "publisher": "zmq"}


def test_planes_of_dynamo_are_the_same(tmp_path):
    _, told = of_script(tmp_path, "worker.sh", "decode")
    compose = of_compose()
    places = [of_chart("cxl")[0], told, common(Options(), tmp_path)]
    places += [compose[name]["environment"] for name in ("frontend", "prefill", "decode-gpu")]
    for place in places:
        assert {name: place[name] for name in PLANES} == PLANES
    assert "PYTHONHASHSEED" not in told and "PYTHONHASHSEED" not in json.dumps([compose, charts.render()])


def keepers():
    """Every `cxlctl host` that deploy/ starts: name -> (command, environment, seconds that it has to leave)."""
    chart = charts.of_kind(charts.render(release="kvbm-cxl"), "DaemonSet")["spec"]["template"]["spec"]
    compose = of_compose()["host"]
    (container,) = chart["containers"]
    return {
        "chart": (container["command"], charts.environment(container), chart["terminationGracePeriodSeconds"]),
        "compose": (compose["command"], compose["environment"], int(compose["stop_grace_period"].removesuffix("s"))),
    }


def test_keepers_are_the_same_program_with_the_same_identity_and_time_to_leave():
    for name, (command, said, grace_s) in keepers().items():
        assert command == ["cxlctl", "host", "--ready-file", "/tmp/ready"], name
        assert grace_s == 120 and said["CXL_STATE_DIR"] == "/run/kvbm-cxl" and said["CXL_MACHINE_ID"].endswith("/host"), name
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str
    unit.read(DEPLOY / "host/kvbm-cxl-host.service")
    assert unit["Service"]["TimeoutStopSec"] == "120" and unit["Service"]["ExecStart"].endswith("cxlctl host")
    assert unit["Service"]["Environment"] == "CXL_STATE_DIR=/run/kvbm-cxl"


def test_every_host_of_compose_is_one_of_its_own_and_has_time_to_leave():
    hosts = {name: service for name, service in of_compose().items() if "CXL_MACHINE_ID" in service.get("environment", {})}
    assert {"host", "prefill", "decode", "prefill-gpu", "decode-nixl-cxl", "initiator", "target"} <= set(hosts)
    for name, service in hosts.items():
        role = name.split("-")[0]
        assert service["environment"]["CXL_MACHINE_ID"].endswith(f"/{role}"), name
        assert f"state-{role}:{service['environment']['CXL_STATE_DIR']}" in service["volumes"], name
        assert service["stop_grace_period"] == "120s", name
        assert service["environment"]["CXL_CPUS"] == "any", name
        assert service["environment"]["CXL_COPY"] == "engine=auto", name
    services = of_compose()
    assert not any("CXL_POOL" in services[name]["environment"] for name in ("prefill-nixl-ucx", "decode-nixl-ucx", "frontend"))


def test_no_service_of_compose_has_what_it_does_not_need_and_every_server_comes_back():
    services = of_compose()
    jobs = {"format", "model", "initiator", "target"}
    for name, service in services.items():
        assert service["cap_drop"] == ["ALL"] and set(service.get("cap_add", ())) <= {"CHOWN", "DAC_OVERRIDE"}, name
        assert service["security_opt"] == ["no-new-privileges:true"] and service["pids_limit"], name
        assert service["read_only"] is not name.endswith("-gpu") and "mem_limit" in service, name
        assert service["logging"]["options"].keys() == {"max-size", "max-file"}, name
        assert service.get("restart") == (None if name in jobs else "unless-stopped"), name
        assert service.get("user", "1000:1000") == "1000:1000" or name == "format", name


def test_prometheus_finds_every_worker_of_compose_by_one_name():
    jobs = yaml.safe_load((DEPLOY / "compose/prometheus.yaml").read_text())["scrape_configs"]
    names = {name for job in jobs for found in job.get("dns_sd_configs", ()) for name in found["names"]}
    workers = {name: service for name, service in of_compose().items() if name.startswith(("prefill", "decode"))}
    assert len(workers) == 8 and all(service["networks"]["rack"]["aliases"] == sorted(names) for service in workers.values())


def test_compose_gives_every_service_with_the_pool_the_devices_of_its_name():
    """Whatever else the name says: where on them the pool begins, and that one of them carries the metadata."""
    uses_pool = {name for name, service in of_compose().items() if "CXL_POOL" in service.get("environment", {})}
    told = {"POOL": "/dev/dax2.0,offset=64G,metadata=/dev/dax3.0", "POOL_DEVICE": "/dev/dax2.0", "POOL_METADATA_DEVICE": "/dev/dax3.0"}
    services = of_compose("compose.dax.yaml", **told)
    assert set(services) == uses_pool
    for name, service in services.items():
        assert service["devices"] == ["/dev/dax2.0:/dev/dax2.0", "/dev/dax3.0:/dev/dax3.0"], name
    # Without metadata= in the name: what every container has anyway.
    [devices] = {tuple(service["devices"]) for service in of_compose("compose.dax.yaml", POOL="/dev/dax0.0").values()}
    assert devices == ("/dev/dax0.0:/dev/dax0.0", "/dev/null:/dev/null")


def test_every_file_that_the_pool_s_name_has_is_given_to_who_serves(tmp_path):
    for name, text in {"cxlctl": '[ "$1" != info ]', "chown": f'echo "$@" >>{tmp_path}/given'}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    files = [str(tmp_path / name) for name in ("one", "two", "metadata")]
    for path in files:
        Path(path).touch()
    pool = f"{files[0]},{files[1]},size=1G,metadata={files[2]},metadata_size=64M"
    env = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "CXL_POOL": pool, "POOL_OWNER": "1000:1000"}
    subprocess.run([DEPLOY / "images/format-if-empty"], env=env, check=True, timeout=30)
    assert (tmp_path / "given").read_text().splitlines() == [f"1000:1000 {path}" for path in files]


def test_the_group_of_the_device_nodes_is_the_chart_s():
    rules = (DEPLOY / "host/70-kvbm-cxl.rules").read_text()
    group = yaml.safe_load((charts.CHART / "values.yaml").read_text())["pool"]["group"]
    assert f'GROUP="{group}", MODE="0660"' in rules and f"${{POOL_GROUP:-{group}}}" in (DEPLOY / "compose/compose.dax.yaml").read_text()


def test_versions_are_those_of_the_checkout():
    version = charts.version()
    chart = yaml.safe_load((charts.CHART / "Chart.yaml").read_text())
    said = yaml.safe_load((charts.CHART / "values.yaml").read_text())
    assert {chart["version"], chart["appVersion"], said["images"]["worker"]["tag"], said["images"]["tools"]["tag"]} == {version}
    assert f"ARG PACKAGES=kvbm-cxl/packages-cpu:{version}\n" in (DEPLOY / "images/worker-cpu.Dockerfile").read_text()
    images = re.findall(r"^(?:IMAGE_TAG=|\w+_IMAGE=kvbm-cxl/services:)(.*)$", (DEPLOY / "compose/.env").read_text(), re.MULTILINE)
    assert images == [version] * 3
    for crates in ("Cargo.toml", "kvbm_cxl/tier/Cargo.toml", "python/pyproject.toml"):
        assert re.findall(r'^version = "(.*)"', (charts.ROOT / crates).read_text(), re.MULTILINE) == [version], crates
    locked = re.compile(r'name = "(?:cxl-(?:capi|member|pool|sim|tier)|cxlctl|kvbm-cxl-python)"\nversion = "(.*)"')
    for lock in ("Cargo.lock", "kvbm_cxl/fuzz/Cargo.lock", "kvbm_cxl/tier/Cargo.lock"):
        assert set(locked.findall((charts.ROOT / lock).read_text())) == {version}, lock
    assert f'return "{version}"' in (charts.ROOT / "python/kvbm_cxl/__init__.py").read_text()
    assert re.findall(r"kvbm-cxl/\S+, tag: ([^,]*),", (charts.ROOT / "docs/start/kubernetes.md").read_text()) == [version] * 2
    dynamo = re.search(r"^ai-dynamo==(.*?) ", (charts.ROOT / "scripts/requirements/serve.lock").read_text() + " ", re.MULTILINE)[1].strip()
    assert said["runtimeVersion"] == dynamo
    assert f"ARG DYNAMO_VERSION={dynamo}\n" in (DEPLOY / "images/worker-gpu.Dockerfile").read_text()
