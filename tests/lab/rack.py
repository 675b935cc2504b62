# SPDX-License-Identifier: Apache-2.0
"""Hosts of a lab with a pool on their memory, and programs in them that do what a test says."""

import compileall
import json
import os
import signal
import time

import lines
from cxl_lab import ROOT, LabError
from cxl_lab.host import AGENT
from cxl_lab.lab import Lab

CXLCTL = ROOT / "target" / "release" / "cxlctl"
PYTHON = ROOT / ".venv" / "bin" / "python"
LAB = ROOT / "tests" / "lab"
PATHS = [ROOT / "python", ROOT / "python" / "tests", ROOT / "tests" / "nixl", ROOT / "tests" / "peers", LAB]
IMPORTS = {"PYTHONPATH": os.pathsep.join(map(str, PATHS))}
# Where a host's fork server is asked for peers.
FORKS = "/run/tmp/forks"
# Generous: the processors are emulated, and the machine may have other work.
CALL_TIMEOUT_S = 120
BOOT_TIMEOUT_S = 300
CELLS = "64K:60%"


def compile_programs():
    """Compiles what peers import, whatever Python is told of writing: in an emulated processor that is half of a start."""
    for path in (*PATHS, ROOT / "python" / "kvbm_cxl"):
        compileall.compile_dir(path, maxlevels=0, quiet=2)


def fork_server(host, environment=None):
    """Starts in a host what makes its peers, without waiting until it can be asked: it says "ready" then."""
    # No package that is installed is needed, and looking for them takes a second in an emulated processor.
    # A module that is imported comes compiled; a program is compiled at every start.
    words = [PYTHON, "-S", "-c", "import fork_server; fork_server.main()", FORKS]
    return host.start(words, {**IMPORTS, **(environment or {})})


class Peer:
    """A program in a host that is asked through lines: `peer("publish", "tiny", 7, 16, 65536)`. `peer.py`, `nixl_peer.py` have the calls.

    Every wait raises HostGone where the host ends.
    """

    def __init__(self, host, words, environment=None):
        """Starts it: a program and its arguments."""
        self.host, self.answers = host, 0
        self.process = host.start(words, environment)

    def ready(self, timeout_s=CALL_TIMEOUT_S):
        """Waits until it can be asked; a peer has joined the pool then. Raises LabError where it cannot."""
        assert self.answer(timeout_s) == "ready"
        return self

    def send(self, name, *arguments):
        """Asks for something without waiting for the answer."""
        self.process.write(lines.call(name, *arguments))

    def answer(self, timeout_s=CALL_TIMEOUT_S):
        """The answer to the oldest call that has none yet. Raises lines.Raised where the call raised an error."""
        answer = lines.parse(self.process.read_line(timeout_s))
        self.answers += 1
        return lines.value_of(answer)

    def __call__(self, name, *arguments, timeout_s=CALL_TIMEOUT_S):
        self.send(name, *arguments)
        return self.answer(timeout_s)

    def until(self, name, reached, timeout_s=CALL_TIMEOUT_S):
        """Waits until the progress of work in the background satisfies `reached`; that progress."""
        deadline = time.monotonic() + timeout_s
        while True:
            progress = self("progress", name)
            if reached(progress):
                return progress
            if "raised" in progress or time.monotonic() > deadline:
                raise LabError(f"{self.host}: {name} came to {progress}")
            time.sleep(0.05)

    def signal(self, number):
        """Sends it a signal."""
        self.process.signal(number)

    def kill(self, timeout_s=CALL_TIMEOUT_S):
        """Ends it at once; the host goes on."""
        self.process.signal(signal.SIGKILL)
        self.process.wait(timeout_s)

    def end(self, timeout_s=CALL_TIMEOUT_S):
        """Lets it leave the pool and end."""
        self.process.end_input()
        self.process.finish(timeout_s)


class Rack:
    """The hosts of a lab, used by one test after the other."""

    def __init__(self, lab: Lab):
        self.lab, self.spec, self.forks = lab, "", {}

    def __getitem__(self, name):
        return self.lab[name]

    def heal(self, names):
        """Ends what runs in these hosts, boots those that are gone or broken, and ends the others."""
        for host in self.lab.hosts:
            if host.name not in names or not self._well(host):
                host.kill()
        if down := [name for name in names if not self.lab[name].alive()]:
            self.boot(*down)
        self.spec = ",".join(self.lab[names[0]].devices)

    def _well(self, host):
        if not host.alive():
            return False
        try:
            host.resume()
            if not host.agent.ready(30):
                return False
            running = [process for process in host.agent.running() if process is not self.forks.get(host.name)]
            for process in running:
                process.signal(signal.SIGKILL)
            for process in running:
                process.wait(60)
            return all(host.run(["test", "-e", device], check=False).status == 0 for device in host.devices)
        except LabError:
            return False

    def boot(self, *names):
        """Boots hosts that are not up; where one does not come up, none of them stays."""
        try:
            self.lab.boot(*names, timeout_s=BOOT_TIMEOUT_S)
        except BaseException:
            for name in names:
                self.lab[name].kill()
            raise
        for name in names:
            self.forks[name] = fork_server(self.lab[name])

    def reboot(self, names):
        """Cuts the power of these hosts, and boots them."""
        for name in names:
            self.lab[name].kill()
        self.boot(*names)

    def cxlctl(self, name, *words, environment=None, status=0, timeout_s=CALL_TIMEOUT_S):
        """Runs cxlctl with the pool in a host; what it printed. It has to end with this exit status."""
        done = self.lab[name].run([CXLCTL, *words], {"CXL_POOL": self.spec, **(environment or {})}, timeout_s, check=False)
        what = f"cxlctl {' '.join(map(str, words))} in {name}"
        assert done.status == status, f"{what}: exit status {done.status}\n{done.output[-3000:]}{done.error[-3000:]}"
        return done

    def json(self, name, *words):
        """What cxlctl tells with --json."""
        return json.loads(self.cxlctl(name, *words, "--json").output)

    def format(self, *words, cells=CELLS, name="A"):
        """Makes the pool anew, whatever is on the devices. `cells`: sizes with their shares, separated by commas."""
        sizes = [word for size in cells.split(",") for word in ("--cells", size)]
        self.cxlctl(name, "format", "--evict-hosts", *sizes, *words)

    def start(self, name, environment=None, program="peer", **options):
        """Starts a peer in a host, without waiting until it has joined. `program`: its module; `options`: of `kvbm_cxl.Pool`."""
        # Virtual machines are slow to start, and a manager may have to be missed first.
        options = {"join_timeout_ms": 1000 * CALL_TIMEOUT_S, **options}
        server = self.forks[name]
        if not server.output:
            server.read_line(CALL_TIMEOUT_S)
        words = [AGENT, "fork", FORKS, program, self.spec, json.dumps(options)]
        return Peer(self.lab[name], words, environment)

    def start_nixl(self, name):
        """Starts a NIXL worker in a host."""
        environment = {**IMPORTS, "CXL_POOL": self.spec, "NIXL_LOG_LEVEL": "WARN"}
        return Peer(self.lab[name], [PYTHON, LAB / "nixl_peer.py"], environment)

    def peers(self, names="AB", **options):
        """Peers in these hosts that have joined."""
        started = [self.start(name, **options) for name in names]
        return [peer.ready() for peer in started]

    def fsck(self, name="A", status=0):
        """Checks the pool; what cxlctl printed."""
        return self.cxlctl(name, "fsck", status=status).output

    def exchange(self, seed, count=24, len_bytes=40_000, peers=None):
        """A and B, or these peers in them, publish and pull each other's blocks, and leave a sound pool."""
        peers = peers or self.peers()
        for number, (one, other) in enumerate((peers, peers[::-1])):
            chain = (f"model-{number}", seed + number, count, len_bytes)
            assert one("publish", *chain) == ["stored"] * count
            assert other("outcomes", *chain) == ["hit"] * count
        # Of the other's namespace and chain nothing is a hit.
        assert set(peers[0]("outcomes", "model-0", seed + 1, count, len_bytes)) == {"absent"}
        for peer in peers:
            peer.end()
        assert "0 errors" in self.fsck("B")

    def story(self):
        """What the hosts wrote on their consoles, and where a copy of their memory is."""
        memory = "".join(f"memory: {path}\n" for path in self.lab.keep_memory())
        return memory + "\n".join(f"{host}, {'up' if host.alive() else 'down'}:\n{host.story()}" for host in self.lab.hosts if host.machine)
