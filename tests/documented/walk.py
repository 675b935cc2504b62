# SPDX-License-Identifier: Apache-2.0
"""Executes the blocks of a page that this machine can execute, as they stand, in one shell.

The shell runs in a mount namespace of its own. /dev/dax0.0 and /dev/dax1.0 are files there, and /dev/shm is empty, so that a page's
commands name what they name and touch no pool of the machine.
"""

import os
import shlex
import subprocess
from dataclasses import dataclass, field

from blocks import ROOT

DEVICES = ("dax0.0", "dax1.0")
UNSHARE = ("unshare", "--user", "--map-root-user", "--mount", "--pid", "--mount-proc", "--fork", "--kill-child")
NODES = ("null", "zero", "full", "random", "urandom", "tty")


@dataclass
class Given:
    """The reader's part of a page. words: values for the words in capitals. lasting: beginnings of commands that run until Ctrl-C, each
    with the port that answers once it serves, or None. before: shell commands that make what the page takes for granted. after: shell
    commands that fail if the page did not do what it says. timeout_s: of the whole page."""

    words: dict = field(default_factory=dict)
    lasting: dict = field(default_factory=dict)
    before: str = ""
    after: str = ""
    timeout_s: int = 300


def commands(text):
    """The logical lines of a block: continued lines are one."""
    found = []
    for line in text.splitlines():
        if found and found[-1].endswith("\\"):
            found[-1] += "\n" + line
        elif line.strip() and not line.lstrip().startswith("#"):
            found.append(line)
    return found


def _lasting(command, given):
    """How a command that runs until Ctrl-C runs here: until the page ends, and it has to serve before the next command begins."""
    port = next(port for beginning, port in given.lasting.items() if command.startswith(beginning))
    ended = "{ tail -n 40 lasting.$lasting >&2; exit 1; }"
    alive = f"sleep 0.5; kill -0 $! || {ended}"
    ready = f"until curl -sf -o /dev/null http://127.0.0.1:{port}/health; do {alive}; done" if port else f"sleep 2; {alive}"
    return f": $((++lasting)); {command.partition('  #')[0]} >lasting.$lasting 2>&1 & pids+=($!); {ready}"


def script(page, found, given):
    """The shell script of a page: `found` are its blocks."""
    lines = ["set -eu -o pipefail", "pids=() lasting=0", given.before]
    for block in found:
        for command in commands(block.text):
            for word, value in given.words.items():
                command = command.replace(word, str(value))
            lines.append(f"echo {shlex.quote(f'walked: {page}:{block.line}: {command.splitlines()[0]}')} >&2")
            lines.append(_lasting(command, given) if command.startswith(tuple(given.lasting)) else command)
    # As Ctrl-C would, which a shell keeps from what it starts in the background.
    end = 'for pid in "${pids[@]}"; do kill "$pid"; done; for pid in "${pids[@]}"; do wait "$pid" || [ $? -eq 143 ]; done'
    return "\n".join([*lines, given.after, end]) + "\n"


def _namespace(folder):
    """Commands that give the shell its own /dev, before the page's script."""
    dev = folder / "dev"
    made = [f"mkdir {dev}", f"mount -t tmpfs none {dev}", f"mkdir {dev}/shm {dev}/pts", f"mount -t tmpfs -o mode=1777 none {dev}/shm"]
    made += [f"[ ! -e /dev/{node} ] || {{ touch {dev}/{node}; mount --bind /dev/{node} {dev}/{node}; }}" for node in NODES]
    links = {"fd": "", "stdin": "/0", "stdout": "/1", "stderr": "/2"}
    made += [f"ln -s /proc/self/fd{number} {dev}/{name}" for name, number in links.items()]
    made += [f"truncate -s 1G {dev}/{device}" for device in DEVICES]
    return "\n".join(["set -eu", *made, f"mount --rbind {dev} /dev", "exec bash page.sh"]) + "\n"


def can_walk():
    """Why no page can be walked here; None where it can."""
    mounts = "mount -t tmpfs none /tmp && mkdir /tmp/dev && mount --rbind /tmp/dev /dev"
    done = subprocess.run([*UNSHARE, "sh", "-c", mounts], capture_output=True, text=True, check=False)
    return None if done.returncode == 0 else f"no mount namespace can be made here: {done.stderr.strip()}"


def walk(page, found, given, folder):
    """Walks a page in `folder`: the finished process, with text."""
    (folder / "page.sh").write_text(script(page, found, given))
    (folder / "namespace.sh").write_text(_namespace(folder))
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("CXL_", "KVBM_CXL_", "VLLM_", "PYTEST"))}
    programs = os.pathsep.join(map(str, (ROOT / ".venv/serve/bin", ROOT / "target/release")))
    env = {**kept, "PATH": f"{programs}{os.pathsep}{kept['PATH']}", "HOME": str(folder), "CXL_STATE_DIR": str(folder / "state")}
    env |= {"CXL_MACHINE_ID": f"walk-{os.getpid()}", "CXL_SUSPECT_MS": "30000", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [*UNSHARE, "bash", "namespace.sh"]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=given.timeout_s, check=False)
