# SPDX-License-Identifier: Apache-2.0
"""Hosts of one pool in real containers: each with process ids, network, mounts, /dev/shm and identity of its own; they share the pool.

The hosts are `cxlctl host` in the tools image and rack_host.py in an image with the Python package: what they do to the pool is what
engines do, without vLLM. Skipped, with the reason, where no Docker daemon runs or starts.
"""

import json
import os
import re
import shutil
import subprocess
import time
import uuid
import zipfile
from pathlib import Path

import charts
import daemon
import pytest

SUSPECT_MS = 5000
# How long anything may take on a machine that is busy.
WAIT_S = 180
PROGRAMS = charts.ROOT / "tests" / "deploy"
PYTHON_IMAGE = "kvbm-cxl/test-python"
# As in the tools image, a new state folder belongs to the user of the pool.
DOCKERFILE = """
FROM kvbm-cxl/base:bookworm
COPY kvbm_cxl /opt/python/kvbm_cxl
RUN install -d -o 1000 -g 1000 -m 0700 /run/kvbm-cxl
ENV PYTHONPATH=/opt/python
"""


@pytest.fixture(scope="module")
def docker_env(tmp_path_factory):
    """The environment of a Docker client, with the images built."""
    try:
        with daemon.running() as env:
            built = subprocess.run([charts.ROOT / "scripts/images", "base", "tools"], env=env, capture_output=True, text=True, timeout=1800)
            if built.returncode:
                pytest.skip(f"the tools image cannot be built here: {built.stderr.strip().splitlines()[-1]}")
            make_python_image(env, tmp_path_factory.mktemp("context"))
            yield env
    except daemon.NoDaemon as reason:
        pytest.skip(str(reason))


def make_python_image(env, context):
    """Of the wheel that the tools image is made of."""
    wheel = sorted((charts.ROOT / "target/wheels").glob("kvbm_cxl-*.whl"))[0]
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(context)
    (context / "Dockerfile").write_text(DOCKERFILE)
    command = [daemon.program("docker"), "build", "--quiet", "--network", "host", "--tag", PYTHON_IMAGE, context]
    subprocess.run(command, env={**env, "DOCKER_BUILDKIT": "0"}, check=True, capture_output=True, timeout=600)


class Rack:
    """Containers of one test, their pool, and their volumes."""

    def __init__(self, env):
        self.env, self.name = env, f"kvbm-cxl-{uuid.uuid4().hex[:8]}"
        self.folder = Path("/dev/shm") / self.name
        self.pool = "/pool/kv,size=64M"

    def docker(self, *arguments, check=True):
        """What a docker command says."""
        command = [daemon.program("docker"), *map(str, arguments)]
        done = subprocess.run(command, env=self.env, capture_output=True, text=True, timeout=WAIT_S, check=False)
        assert not check or done.returncode == 0, f"{' '.join(command)}: {done.stdout}{done.stderr}"
        return done

    def start(self, name, *command, machine=None, state=None, user="1000:1000", wait=False, more=(), image=None):
        """A container with one process; `wait` runs it to its end and removes it."""
        told = ["--env", f"CXL_POOL={self.pool}", "--env", f"CXL_SUSPECT_MS={SUSPECT_MS}"]
        if machine:
            # As in the chart: a state folder for each identity, kept when the container goes.
            volume = f"{self.name}-{state or machine.replace('/', '-')}"
            told += ["--env", f"CXL_MACHINE_ID={machine}", "--env", "CXL_STATE_DIR=/run/kvbm-cxl"]
            told += ["--volume", f"{volume}:/run/kvbm-cxl"]
        how = ["--rm"] if wait else ["--detach"]
        volumes = ["--volume", f"{self.folder}:/pool", "--volume", f"{PROGRAMS}:/app:ro"]
        limits = ["--network", "none", "--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--label", self.name, "--user", user]
        options = [*how, "--name", f"{self.name}-{name}", *limits, *volumes, *told, *more]
        return self.docker("run", *options, image or self.image(), *command, check=not wait)

    def image(self):
        """Of the tools."""
        return f"kvbm-cxl/tools:{version()}"

    def format(self, **more):
        """By root, in a container that is gone afterwards."""
        told = ["--env", "POOL_OWNER=1000:1000", "--cap-add", "CHOWN", "--cap-add", "DAC_OVERRIDE"]
        command = ["format-if-empty", "--cells", "64K:50%"]
        return self.start("format", *command, user="0:0", wait=True, more=told, **more)

    def program(self, name, what, seed, count, **more):
        """rack_host.py in a container."""
        return self.start(name, "python3", "/app/rack_host.py", what, str(seed), str(count), image=PYTHON_IMAGE, **more)

    def logs(self, name):
        done = self.docker("logs", f"{self.name}-{name}", check=False)
        return done.stdout + done.stderr

    def wait_for(self, name, text):
        """Until a container has said something. One that ends before has failed."""
        deadline = time.monotonic() + WAIT_S
        while text not in (said := self.logs(name)):
            state = self.docker("inspect", "--format", "{{.State.Running}}", f"{self.name}-{name}", check=False).stdout.strip()
            assert state == "true" and time.monotonic() < deadline, f"{name} ({state}): {said}"
            time.sleep(0.2)

    def end(self, name, how):
        """Ends a container (kill or stop) and removes it."""
        if how == "kill":
            self.docker("kill", f"{self.name}-{name}")
        else:
            self.docker("stop", "--time", "120", f"{self.name}-{name}")
        self.docker("rm", f"{self.name}-{name}")

    def cxlctl(self, *arguments):
        """A command of the operator's, in a container without an identity. It only reads."""
        done = self.start("look", "cxlctl", "--json", *arguments, wait=True)
        assert done.returncode in (0, 1), done.stdout + done.stderr
        return json.loads(done.stdout)

    def hosts(self):
        """(slots that have a host or had one, seats that have a machine, hosts that live and are not fenced)."""
        told = self.cxlctl("hosts")
        slots = [slot for slot in told["slots"] if slot["state"] != "free"]
        alive = [slot for slot in slots if (slot["state"], slot["standing"]) == ("live", "not fenced") and slot["moving"]]
        return slots, [seat for seat in told["seats"] if seat["machine"]], alive

    def wait_for_hosts(self, count):
        """Until so many hosts are alive, and no other one is waited for."""
        deadline = time.monotonic() + WAIT_S
        while True:
            slots, seats, alive = self.hosts()
            if len(alive) == count and all(slot["standing"] in ("not fenced", "left", "declared dead") for slot in slots):
                return slots, seats
            assert time.monotonic() < deadline, slots
            time.sleep(0.5)

    def clear(self):
        """Removes whatever this test made."""
        found = self.docker("ps", "--all", "--quiet", "--filter", f"label={self.name}").stdout.split()
        if found:
            self.docker("rm", "--force", *found)
        volumes = self.docker("volume", "ls", "--quiet", "--filter", f"name={self.name}").stdout.split()
        if volumes:
            self.docker("volume", "rm", *volumes)
        shutil.rmtree(self.folder, ignore_errors=True)


def version():
    """Of the images."""
    (line,) = [line for line in (charts.ROOT / "deploy/compose/.env").read_text().splitlines() if line.startswith("IMAGE_TAG=")]
    return line.removeprefix("IMAGE_TAG=")


@pytest.fixture
def rack(docker_env):
    made = Rack(docker_env)
    made.folder.mkdir()
    try:
        yield made
    finally:
        made.clear()
    # Others have files in /dev/shm, too.
    assert made.name not in " ".join(os.listdir("/dev/shm")) and made.name not in Path("/proc/mounts").read_text()


def test_root_formats_once_and_another_user_serves(rack):
    first = rack.format()
    assert first.returncode == 0 and "formatted /pool/kv" in first.stdout, first.stderr
    assert (rack.folder / "kv").stat().st_uid == 1000 and (rack.folder / "kv").stat().st_mode & 0o777 == 0o600
    rack.start("keeper", "cxlctl", "host", machine="node-0/host")
    rack.wait_for("keeper", "serving")
    rack.program("prefill", "publish", 1, 40, machine="node-0/prefill", wait=True)
    uuid_before = rack.cxlctl("info")["uuid"]
    again = rack.format()
    assert again.returncode == 0 and "left as it is" in again.stdout, again.stdout + again.stderr
    assert rack.cxlctl("info")["uuid"] == uuid_before
    pulled = rack.program("decode", "pull", 1, 40, machine="node-1/decode", wait=True)
    assert pulled.stdout.strip() == "verified 40 of 40", pulled.stderr


@pytest.mark.parametrize("what", ["foreign bytes", "damaged pool"])
def test_a_format_job_destroys_nothing(rack, what):
    if what == "damaged pool":
        assert rack.format().returncode == 0
        with (rack.folder / "kv").open("r+b") as file:
            file.seek(16)
            file.write(b"\xff" * 4096)
    else:
        (rack.folder / "kv").write_bytes(b"something that is not ours" + bytes(8 << 20))
    held = (rack.folder / "kv").read_bytes()
    refused = rack.format()
    assert refused.returncode not in (0, 125) and "--force" in refused.stderr, refused.stdout + refused.stderr
    assert (rack.folder / "kv").read_bytes() == held
    forced = rack.start("format", "format-if-empty", "--force", user="0:0", wait=True)
    assert forced.returncode == 2 and (rack.folder / "kv").read_bytes() == held


def test_a_killed_host_comes_back_and_finds_everything(rack):
    rack.format()
    rack.program("prefill", "serve", 1, 40, machine="node-0/prefill")
    rack.program("decode", "serve", 2, 40, machine="node-1/decode")
    for name in ("prefill", "decode"):
        rack.wait_for(name, "serving")
    slots, _, alive = rack.hosts()
    assert len(slots) == len(alive) == 2
    incarnation = {slot["machine"]: slot["incarnation"] for slot in alive}
    rack.end("decode", "kill")
    rack.program("decode", "serve", 2, 40, machine="node-1/decode")
    rack.wait_for("decode", "serving")
    slots, _ = rack.wait_for_hosts(2)
    now = {slot["machine"]: slot["incarnation"] for slot in slots}
    assert set(now) == set(incarnation) and sum(now.values()) > sum(incarnation.values())
    third = rack.program("reader", "pull", 1, 40, machine="node-2/reader", wait=True)
    assert third.stdout.strip() == "verified 40 of 40", third.stderr
    assert [finding for finding in rack.cxlctl("fsck")["findings"] if finding["severity"] == "error"] == []


ROLES = {"keeper-0": "node-0/host", "keeper-1": "node-1/host", "prefill": "node-0/prefill", "decode": "node-1/decode"}


def start_all(rack, seed):
    """Every role, as a rollout starts them."""
    for number, (name, machine) in enumerate(ROLES.items()):
        if name.startswith("keeper"):
            rack.start(name, "cxlctl", "host", machine=machine)
        else:
            rack.program(name, "serve", seed + number, 20, machine=machine)
    for name in ROLES:
        rack.wait_for(name, "serving")


def test_five_rollouts_of_everything_use_no_slot_and_no_seat_more(rack):
    rack.format()
    start_all(rack, 0)
    for rollout in range(1, 6):
        # The pods of a rollout are killed and stopped in turn, and in the last ones all are killed at once.
        for number, name in enumerate(ROLES):
            rack.end(name, "kill" if rollout > 3 or (number + rollout) % 2 else "stop")
        start_all(rack, rollout * 100)
        slots, seats = rack.wait_for_hosts(len(ROLES))
        assert len(slots) == len(ROLES), f"rollout {rollout}: {slots}"
        # Each slot has a seat; those before them serve a join for milliseconds while no slot has a host that can manage.
        of_slots = [seat["machine"] for seat in seats if seat["seat"] >= 4]
        assert len(set(of_slots)) == len(of_slots) <= len(ROLES), f"rollout {rollout}: {seats}"
        assert {seat["machine"] for seat in seats} <= {slot["machine"] for slot in slots}, f"rollout {rollout}: {seats}"
    pulled = rack.program("reader", "pull", 502, 20, machine="node-2/reader", wait=True)
    assert pulled.stdout.strip() == "verified 20 of 20", pulled.stderr
    for name in ROLES:
        rack.end(name, "stop")
    slots, _, alive = rack.hosts()
    assert not alive and {slot["state"] for slot in slots} == {"left"}


def test_machines_with_names_of_their_own_each_time_are_what_uses_slots_up(rack):
    """The mistake that the identities of the chart prevent: it is seen as slots that stay in use."""
    rack.format()
    rack.start("keeper", "cxlctl", "host", machine="node-0/host")
    rack.wait_for("keeper", "serving")
    for number in range(2):
        rack.program(f"pod-{number}", "serve", number, 10, machine=f"pod-{uuid.uuid4()}")
        rack.wait_for(f"pod-{number}", "serving")
        rack.end(f"pod-{number}", "kill")
    slots, _, _ = rack.hosts()
    assert len(slots) == 3


@pytest.mark.parametrize("state", ["shared", "own"])
def test_a_second_holder_of_an_identity_is_refused_by_name(rack, state):
    rack.format()
    rack.program("decode", "serve", 1, 20, machine="node-0/decode")
    rack.wait_for("decode", "serving")
    volume = None if state == "shared" else "another-folder"
    second = rack.program("second", "serve", 2, 20, machine="node-0/decode", state=volume, wait=True)
    assert second.returncode != 0, second.stdout
    # With the state folder of the first, its processes are seen to be of another container; without it, the file of the pool tells.
    expected = "share the PID namespace" if state == "shared" else "identity"
    assert expected in second.stderr and "CXL_MACHINE_ID" in second.stderr, second.stderr
    _, _, alive = rack.hosts()
    assert len(alive) == 1
    pulled = rack.program("reader", "pull", 1, 20, machine="node-1/reader", wait=True)
    assert pulled.stdout.strip() == "verified 20 of 20"


def test_the_tools_image_is_small_and_says_what_it_is_of(rack):
    about = json.loads(rack.docker("image", "inspect", rack.image()).stdout)[0]
    assert about["Size"] < 60 * 10**6
    describe = ["git", "-C", charts.ROOT, "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty"]
    commit = subprocess.run(describe, check=True, capture_output=True, text=True).stdout.strip()
    labels = about["Config"]["Labels"]
    assert labels["org.opencontainers.image.revision"] == commit
    assert labels["org.opencontainers.image.version"] == charts.version() and labels["org.opencontainers.image.licenses"] == "Apache-2.0"


def test_the_exporter_reads_without_an_identity(rack):
    rack.format()
    rack.program("prefill", "serve", 1, 20, machine="node-0/prefill")
    rack.wait_for("prefill", "serving")
    rack.start("exporter", "cxlctl", "exporter", "--address", "0.0.0.0")
    rack.wait_for("exporter", "listening")
    page = rack.docker("exec", f"{rack.name}-exporter", "wget", "-q", "-O", "-", "http://127.0.0.1:9477/metrics").stdout
    assert re.search(r'cxl_pool_slots{pool="[0-9a-f-]+",state="live"} 1$', page, re.MULTILINE)
    assert "cxl_pool_host_published_blocks_total" in page
    assert len(rack.hosts()[0]) == 1
