# SPDX-License-Identifier: Apache-2.0
"""A Docker daemon of the tests' own, where the machine runs none: nothing of it is outside target/deploy, and it ends with the tests.

DOCKER_HOST names one that runs. What `make setup-deploy` has unpacked serves where the machine has no dockerd. Run as a program it keeps
the daemon for a command: `python daemon.py COMMAND...`, which is how `make images` builds without a daemon of the machine.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ROOT / ".venv" / "deploy" / "tools" / "root"
STATE = ROOT / "target" / "deploy"
READY_TIMEOUT_S = 180


class NoDaemon(Exception):
    """No daemon runs, and none can be started: the reason."""


def program(name):
    """A program of the machine, else the unpacked one; None where there is neither."""
    found = shutil.which(name)
    unpacked = [TOOLS / "usr" / folder / name for folder in ("bin", "sbin")]
    return found or next((str(path) for path in unpacked if path.is_file()), None)


def environment(host):
    """For clients of the daemon."""
    path = os.pathsep.join([os.environ["PATH"], str(TOOLS / "usr/bin"), str(TOOLS / "usr/sbin")])
    return {**os.environ, "DOCKER_HOST": host, "PATH": path}


def answers(env):
    """Whether a daemon answers there."""
    return subprocess.run([program("docker"), "version"], env=env, capture_output=True, timeout=60).returncode == 0


def _end(process):
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(60)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _remove_containers(env):
    """Of the daemon of our own: what an interrupted test has left would be started again with the next daemon."""
    with contextlib.suppress(subprocess.SubprocessError):
        listing = [program("docker"), "ps", "--all", "--quiet"]
        found = subprocess.run(listing, env=env, capture_output=True, text=True, timeout=60, check=False).stdout.split()
        if found:
            subprocess.run([program("docker"), "rm", "--force", *found], env=env, capture_output=True, timeout=120)


@contextlib.contextmanager
def running():
    """The environment of a client, while a daemon runs. Raises NoDaemon with the reason."""
    if not program("docker"):
        raise NoDaemon("no docker here: run make setup-deploy")
    named = os.environ.get("DOCKER_HOST", "")
    env = environment(named or "unix:///var/run/docker.sock")
    if answers(env):
        yield env
        return
    if named:
        raise NoDaemon(f"no daemon answers at DOCKER_HOST={named}")
    if os.geteuid() != 0:
        raise NoDaemon("a Docker daemon needs root; name one that runs with DOCKER_HOST=")
    if not program("dockerd"):
        raise NoDaemon("no dockerd here: run make setup-deploy")
    STATE.mkdir(parents=True, exist_ok=True)
    # A socket's path may not be long.
    short = Path(tempfile.mkdtemp(prefix="kvbm-cxl-docker-"))
    host = f"unix://{short}/sock"
    env = environment(host)
    command = [program("dockerd"), "-H", host, "--data-root", str(STATE / "docker"), "--exec-root", str(short / "exec")]
    command += ["-p", str(short / "pid"), "--iptables=false", "--ip6tables=false", "--bridge=none", "--storage-driver", "overlay2"]
    with (STATE / "dockerd.log").open("wb") as log:
        process = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
    try:
        deadline = time.monotonic() + READY_TIMEOUT_S
        while not answers(env):
            if process.poll() is not None or time.monotonic() > deadline:
                said = (STATE / "dockerd.log").read_text(errors="replace").strip().splitlines()[-1:]
                raise NoDaemon(f"dockerd does not start here: {' '.join(said)[-300:]}")
            time.sleep(0.5)
        yield env
    finally:
        _remove_containers(env)
        _end(process)
        for mount in sorted((line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()), reverse=True):
            if mount.startswith((str(short), str(STATE / "docker"))):
                subprocess.run(["umount", "-l", mount], check=False, capture_output=True)
        shutil.rmtree(short, ignore_errors=True)


def compose():
    """The command docker-compose: its plugin, its own program, or the unpacked one with what it imports."""
    if program("docker") and subprocess.run([program("docker"), "compose", "version"], capture_output=True).returncode == 0:
        return [program("docker"), "compose"], {}
    if found := shutil.which("docker-compose"):
        return [found], {}
    if (TOOLS / "usr/bin/docker-compose").is_file():
        return ["/usr/bin/python3", str(TOOLS / "usr/bin/docker-compose")], {"PYTHONPATH": str(TOOLS / "usr/lib/python3/dist-packages")}
    return None, {}


def main():
    """Runs a command with a daemon beside it."""
    try:
        with running() as env:
            return subprocess.run(sys.argv[1:], env=env, check=False).returncode
    except NoDaemon as reason:
        print(f"SKIPPED, {reason}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
