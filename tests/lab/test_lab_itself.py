# SPDX-License-Identifier: Apache-2.0
"""The lab's own parts, without a virtual machine: nothing has to be set up but the agent, and it takes seconds."""

import gzip
import json
import lzma
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import threading
import time

import lines
import pytest
from conftest import HERE, lab_of_namespaces
from cxl_lab import ROOT, LabError, control, image
from cxl_lab.agent import ERROR, EXIT, HEADER, OUTPUT, PING, PONG, START, Agent, Failed, HostGone
from cxl_lab.ethernet import Hub
from cxl_lab.forward import Forward
from cxl_lab.host import AGENT, environment, spawn
from cxl_lab.lab import Lab
from cxl_lab.namespace import children
from cxl_lab.qemu import MODES, Machine
from cxl_lab.qmp import Qmp

needs_agent = pytest.mark.skipif(not AGENT.is_file(), reason="no agent: `make build-lab` builds it")


@pytest.fixture
def agent():
    """The real agent in a process of this machine."""
    ours, theirs = socket.socketpair()
    with theirs:
        process = spawn([str(AGENT), f"fd:{theirs.fileno()}"], (theirs.fileno(),), subprocess.DEVNULL)
    made = Agent("here", ours, environment("here") | {"HOME": "/"}, str(ROOT))
    assert made.ready(20)
    yield made
    made.close()
    assert process.wait(20) == 0


def machine(folder, mode="cxl", **other):
    """A machine as a lab describes one, with numbers in the place of descriptors."""
    fields = {"name": "B", "number": 2, "mode": mode, "device_bytes": 256 << 20, "memory_mb": 512, "ethernet": None, "monitor": 20}
    fields |= {"memories": tuple(range(30, 30 + MODES[mode][0])), "labels": 40 if mode == "cxl-pmem" else None}
    fields |= {"channel": 50, "log": folder / "serial.log", "agent": AGENT}
    return Machine(**fields | other)


# Command lines of QEMU.


@pytest.fixture
def prepared(tmp_path):
    """A folder that looks like a lab that is set up."""
    (tmp_path / "initrd.gz").write_bytes(b"")
    return tmp_path


def pairs(command):
    """(option, value) of a command line."""
    return list(zip(command, command[1:], strict=False))


@pytest.mark.parametrize("mode", MODES)
def test_a_virtual_host_gets_the_devices_of_its_mode(prepared, mode):
    described = machine(prepared, mode)
    command = described.command(prepared)
    devices = [value for option, value in pairs(command) if option == "-device"]
    memories = [value for option, value in pairs(command) if option == "-object" and value.startswith("memory-backend-file,id=memory")]
    assert [f"mem-path=/proc/self/fd/{number}," in memory for number, memory in zip(described.memories, memories, strict=True)]
    assert all("share=on" in memory and memory.endswith(f"size={256 << 20}") for memory in memories)
    kind = "nvdimm" if mode == "nvdimm" else "cxl-type3"
    found = [device for device in devices if device.startswith(f"{kind},")]
    assert len(found) == MODES[mode][0] and all(f"id=device{index}" in device for index, device in enumerate(found))
    if kind == "cxl-type3":
        assert all(("persistent-memdev=" in device) is (mode == "cxl-pmem") for device in found)
        assert len({device.split("sn=")[1] for device in found}) == len(found), "devices are told apart by their serial numbers"
    # Without these, atomics between hosts would work, or the kernel would not make the region.
    assert ("-accel", "tcg") in pairs(command) and ("-cpu", "max,-hypervisor") in pairs(command)
    assert ("-smp", "2" if mode == "nvdimm" else "1") in pairs(command)
    assert sum("virtserialport" in device for device in devices) == 1
    assert "-netdev" not in command and not any("virtio-net" in device for device in devices)
    words = dict(word.split("=", 1) for word in command[command.index("-append") + 1].split() if word.startswith("lab_"))
    assert (words["lab_mode"], words["lab_name"], words["lab_first"], words["lab_address"]) == (mode, "B", "0", "")
    assert (words["lab_waits"] == "1") is (mode in ("cxl-pmem", "nvdimm"))
    assert int(words["lab_bytes"]) == 256 << 20


def test_windows_say_what_is_interleaved(prepared):
    windows = {mode: " ".join(machine(prepared, mode).command(prepared)) for mode in MODES}
    assert "cxl-fmw.0.targets.1=cxl.1" in windows["cxl-interleaved"] and "interleave-granularity" in windows["cxl-interleaved"]
    assert "cxl-fmw.1.targets.0=cxl.1" in windows["cxl-two"] and "cxl-fmw.0.targets.1" not in windows["cxl-two"]
    assert "cxl-fmw" not in windows["nvdimm"] and "nvdimm=on" in windows["nvdimm"]
    assert "lsa=labels" in windows["cxl-pmem"] and "/proc/self/fd/40" in windows["cxl-pmem"]


def test_a_virtual_host_on_the_ethernet_has_a_card_and_an_address(prepared):
    described = machine(prepared, ethernet=60)
    text = " ".join(described.command(prepared))
    assert "local.str=60" in text and "mac=52:54:00:00:00:02" in text and "lab_address=10.77.0.2 " in text + " "
    assert set(described.descriptors()) == {20, 30, 50, 60}


def test_without_a_setup_one_is_told_how_to_make_it(tmp_path):
    with pytest.raises(LabError, match="`make setup-lab` sets it up"):
        machine(tmp_path).command(tmp_path)


# The agent.


@needs_agent
def test_commands_run_side_by_side_and_end_with_their_status(agent):
    slow = agent.start(["cat"])
    done = agent.start(["sh", "-c", "echo $GREETING; pwd; echo no >&2; exit 3"], {"GREETING": "hello"}, "/usr").finish(20, check=False)
    assert (done.status, done.output, done.error) == (3, "hello\n/usr\n", "no\n")
    data = os.urandom(300_000).hex().encode() + b"\n"
    slow.write(data)
    assert slow.read_line(20).encode() + b"\n" == data
    slow.end_input()
    assert slow.wait(20) == 0 and agent.running() == []
    with pytest.raises(Failed, match="exit status 3"):
        agent.start(["sh", "-c", "exit 3"]).finish(20)


@needs_agent
def test_what_cannot_be_started_is_refused_with_its_reason(agent):
    with pytest.raises(LabError, match="no-such-program"):
        agent.start(["/no-such-program"]).wait(20)
    with pytest.raises(LabError, match="no line within 0 s"):
        agent.start(["sleep", "60"]).read_line(0.2)


@needs_agent
def test_a_signal_reaches_all_that_a_command_started(agent):
    process = agent.start(["sh", "-c", "sleep 600 & echo $!; wait"])
    inner = int(process.read_line(20))
    process.signal(signal.SIGTERM)
    assert process.wait(20) == -signal.SIGTERM
    with pytest.raises(LabError, match="ended without another line"):
        process.read_line(20)
    left = agent.start(["sh", "-c", f"while kill -0 {inner} 2>/dev/null; do sleep 0.05; done"])
    assert left.wait(20) == 0


def runs(pid):
    """Whether a process has not ended: an orphan may wait to be reaped."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@needs_agent
def test_when_the_lab_goes_so_does_all_that_it_started():
    ours, theirs = socket.socketpair()
    with theirs:
        process = spawn([str(AGENT), f"fd:{theirs.fileno()}"], (theirs.fileno(),), subprocess.DEVNULL)
    agent = Agent("here", ours, environment("here"), "/")
    sleeper = agent.start(["sh", "-c", "echo up; exec sleep 600"])
    assert sleeper.read_line(20) == "up"
    inside = children(process.pid)
    assert inside
    agent.close()
    process.wait(20)
    deadline = time.monotonic() + 20
    while any(runs(pid) for pid in inside):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    with pytest.raises(HostGone):
        sleeper.wait(20)


def test_frames_travel_as_the_agent_has_them():
    """The other end by hand: pieces of frames, a start with its words, an end."""
    ours, theirs = socket.socketpair()
    agent = Agent("there", ours, {"A": "1"}, "/folder")

    def frame(kind, number, payload=b""):
        return HEADER.pack(kind, number, len(payload)) + payload

    def received():
        kind, number, length = HEADER.unpack(theirs.recv(HEADER.size, socket.MSG_WAITALL))
        return kind, number, theirs.recv(length, socket.MSG_WAITALL) if length else b""

    process = agent.start(["program", "an argument"], {"B": "2"})
    assert received() == (START, 1, b"/folder\x002\x00A=1\x00B=2\x00program\x00an argument")
    for byte in frame(OUTPUT, 1, "ä line\nrest".encode()) + frame(ERROR, 1, b"!") + frame(OUTPUT, 9, b"of no call"):
        theirs.send(bytes([byte]))
    assert process.read_line(5) == "ä line"
    theirs.send(frame(EXIT, 1, (-9).to_bytes(4, "little", signed=True)))
    assert process.wait(5) == -9 and process.output == "ä line\nrest" and process.error == "!"
    answered = threading.Thread(target=lambda: received()[0] == PING and theirs.send(frame(PONG, 0)))
    answered.start()
    assert agent.ready(5)
    answered.join()
    waiting = agent.start(["program"])
    theirs.close()
    with pytest.raises(HostGone, match="host is gone"):
        waiting.read_line(5)
    assert not agent.ready(5)
    agent.close()


# The monitor, the Ethernet, the image.


def test_the_monitor_answers_refuses_and_goes():
    ours, theirs = socket.socketpair()
    said = [{"QMP": {}}, {"return": {}}, {"event": "STOP"}, {"return": {"running": False}}, {"error": {"desc": "no such device"}}]
    theirs.sendall(b"".join(json.dumps(message).encode() + b"\n" for message in said))
    monitor = Qmp(ours, 5)
    assert monitor.execute("query-status") == {"running": False} and monitor.events == ["STOP"]
    with pytest.raises(LabError, match="device_del: no such device"):
        monitor.execute("device_del", id="device0")
    asked = [json.loads(line) for line in theirs.recv(65536).splitlines()]
    assert [one["execute"] for one in asked] == ["qmp_capabilities", "query-status", "device_del"]
    assert asked[2]["arguments"] == {"id": "device0"}
    theirs.close()
    with pytest.raises(LabError, match="gone"):
        monitor.execute("query-status")


def test_what_is_plugged_gets_the_next_frame():
    for _ in range(50):  # A race between the hub's list and the plug: one time would seldom show it.
        hub = Hub()
        with hub.plug("A") as first:
            first.send(b"keeps the hub busy with its list of one")
            with hub.plug("B") as second:
                second.settimeout(5)
                first.send(b"to B")
                while second.recv(100) != b"to B":
                    pass
        hub.close()


def test_what_one_host_sends_all_others_get():
    hub = Hub()
    ends = {name: hub.plug(name) for name in "ABC"}
    for end in ends.values():
        end.settimeout(5)
    ends["A"].send(b"from A")
    assert [ends[name].recv(100) for name in "BC"] == [b"from A"] * 2
    # A host that boots again gets another cable.
    ends["B"].close()
    ends["B"] = hub.plug("B")
    ends["B"].settimeout(5)
    ends["B"].send(b"from B")
    assert [ends[name].recv(100) for name in "AC"] == [b"from B"] * 2
    for end in ends.values():
        end.setblocking(False)
        with pytest.raises(BlockingIOError):
            end.recv(100)
        end.close()
    hub.close()


def module(root, name, depends, packed=False):
    """A kernel module that says what it depends on."""
    path = root / "lib/modules/6/kernel/drivers" / f"{name}.ko{'.xz' if packed else ''}"
    path.parent.mkdir(parents=True, exist_ok=True)
    content = f"\x7fELF {name}\0depends={depends}\0license=none\0".encode()
    path.write_bytes(lzma.compress(content) if packed else content)


def test_modules_are_loaded_after_what_they_need(tmp_path):
    module(tmp_path, "cxl-core", "")
    module(tmp_path, "cxl_port", "cxl-core", packed=True)
    module(tmp_path, "cxl_acpi", "cxl-core,cxl_port,compiled_in")
    order = image.load_order(("cxl_acpi", "cxl_port", "absent"), image.module_files(tmp_path))
    assert list(order) == ["cxl_core", "cxl_port", "cxl_acpi"]
    assert order["cxl_port"].startswith(b"\x7fELF")


def test_the_image_unpacks_to_what_was_put_in(tmp_path):
    module(tmp_path, "device_dax", "")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/busybox").write_bytes(b"busybox")
    data = gzip.decompress(image.image(tmp_path))
    found, at = {}, 0
    while (name := data[at + 110 : at + 110 + int(data[at + 94 : at + 102], 16) - 1].decode()) != "TRAILER!!!":
        assert data[at : at + 6] == b"070701"
        mode, length, name_length = (int(data[at + place : at + place + 8], 16) for place in (14, 54, 94))
        start = -(-(at + 110 + name_length) // 4) * 4
        found[name] = (mode, data[start : start + length])
        at = -(-(start + length) // 4) * 4
    assert found["bin/busybox"] == (stat.S_IFREG | 0o755, b"busybox")
    assert found["mod/cxl"][1] == b"device_dax\n" and stat.S_ISDIR(found["mod"][0])
    assert found["init"][1] == (HERE / "guest" / "init").read_bytes()
    assert {f"mod/{group}" for group in image.GROUPS} <= found.keys()
    assert set(image.GROUPS) == {"base", "ethernet", *MODES}


def test_the_kernel_is_unpacked_where_it_can_be(tmp_path):
    (tmp_path / "boot").mkdir()
    packed = tmp_path / "boot" / "vmlinuz-6"
    plain = b"\x7fELF" + bytes(range(256)) * 64
    packed.write_bytes(b"MZ of a loader" + lzma.compress(plain) + b"what follows")
    assert image.kernel(tmp_path) == (plain if shutil.which("xz") else packed.read_bytes())
    packed.write_bytes(b"MZ and nothing that is known")
    assert image.kernel(tmp_path) == packed.read_bytes()


# Labs, and who asks them.


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"hosts": 0}, "1 to 4"),
        ({"hosts": 5}, "1 to 4"),
        ({"mode": "numa"}, "cxl-interleaved"),
        ({"size_mb": 100}, "units of 256"),
        ({"size_mb": 0}, "units of 256"),
    ],
)
def test_labs_that_cannot_be_are_refused(options, reason):
    with pytest.raises(LabError, match=reason):
        Lab(**options)


@pytest.fixture
def hosts(tmp_path):
    """Hosts A and B of namespaces."""
    with lab_of_namespaces(2, tmp_path) as made:
        yield made["A"], made["B"]


def test_hosts_of_namespaces_share_the_pool_and_nothing_else(hosts):
    a, b = hosts
    a.run(["sh", "-c", "echo from A >/dev/shm/pool; echo mine >/dev/shm/mine; echo mine >/run/mine"])
    assert b.run(["head", "-1", "/dev/shm/pool"]).output == "from A\n"
    assert b.run(["ls", "/dev/shm/mine", "/run/mine"], check=False).status != 0
    assert [host.run(["hostname"]).output for host in hosts] == ["A\n", "B\n"]
    sleeper = a.start(["sleep", "600"])
    assert "sleep" not in b.run(["sh", "-c", "cat /proc/[0-9]*/comm"]).output
    assert [line.split(":")[0].strip() for line in b.run(["cat", "/proc/net/dev"]).output.splitlines()[2:]] == ["lo"]
    assert sleeper.status is None


def test_a_host_that_is_paused_stands_still(hosts):
    a, b = hosts
    ticks = a.start(["sh", "-c", "while :; do echo tick; sleep 0.01; done"])
    ticks.read_line(20)
    a.pause()
    # What was on its way may still arrive.
    b.run(["sleep", "0.2"])
    before = len(ticks.output)
    b.run(["sleep", "0.3"])
    assert len(ticks.output) == before
    a.resume()
    for _ in range(before // 5 + 2):
        ticks.read_line(20)
    a.kill()
    with pytest.raises(HostGone):
        ticks.wait(20)
    assert not a.alive() and b.run(["true"]).status == 0


# Says its port, and answers every client with all that was sent, backwards.
SERVER = """
import socket
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], flush=True)
while True:
    client, _ = server.accept()
    with client, client.makefile("rb") as sent:
        client.sendall(sent.read()[::-1])
"""


def test_a_port_of_a_host_is_reached_from_here(hosts):
    server = hosts[0].start([sys.executable, "-Sc", SERVER])
    port = int(server.read_line(20))
    forward = Forward(hosts[0], port)
    try:
        data = os.urandom(200_000)
        for _ in range(2):
            with socket.create_connection(("127.0.0.1", port), 20) as client:
                client.sendall(data)
                client.shutdown(socket.SHUT_WR)
                with client.makefile("rb") as answer:
                    assert answer.read() == data[::-1]
        hosts[0].kill()
        with socket.create_connection(("127.0.0.1", port), 20) as client:
            assert client.recv(1) == b""
    finally:
        forward.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), 20)


@needs_agent
def test_who_waits_for_no_host_is_told(tmp_path):
    lab = Lab(folder=tmp_path)
    try:
        with pytest.raises(LabError, match="no host C: there are A, B"):
            lab["C"]
        with pytest.raises(LabError, match="host A is not up"):
            lab["A"].run(["true"])
        assert not lab["A"].alive()
    finally:
        lab.close()


def test_memory_is_kept_as_it_is(tmp_path):
    lab = Lab(folder=tmp_path)
    try:
        places = {0: b"first", lab.device_bytes // 2 + 77: b"middle", lab.device_bytes - 4: b"last"}
        for offset, written in places.items():
            os.pwrite(lab.memories[0], written, offset)
        (kept,) = lab.keep_memory()
        with open(kept, "rb") as copy:
            for offset in range(0, lab.device_bytes, 1 << 20):
                assert copy.read(1 << 20) == os.pread(lab.memories[0], 1 << 20, offset)
            assert copy.read() == b""
    finally:
        lab.close()


def test_lines_bring_bytes_through():
    message = ["add", b"\0\xff", [1, {"a": None}]]
    assert lines.line(message).endswith(b"\n") and lines.line(message).count(b"\n") == 1
    assert lines.parse(lines.line(message)) == message


@pytest.fixture
def served():
    """A lab of namespaces that `scripts/lab up` keeps."""
    if control.SOCKET.exists():
        pytest.skip("a lab is up in this checkout")
    command = [ROOT / "scripts/lab", "up", "--mode", "namespaces", "--ethernet"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    said = []
    for text in process.stderr:
        said.append(text)
        if text.startswith("up;"):
            break
    if process.poll() is not None:
        process.stderr.close()
        pytest.skip("".join(said))
    yield process
    process.terminate()
    process.wait(30)
    process.stderr.close()


def lab(*words, status=0):
    """Runs scripts/lab; what it printed, and on standard error."""
    done = subprocess.run([ROOT / "scripts/lab", *words], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout, done.stderr


@needs_agent
def test_a_lab_is_used_from_the_command_line(served):
    assert lab("status")[0].splitlines() == ["A  up  /dev/shm/pool", "B  up  /dev/shm/pool"]
    assert lab("run", "A", "sh", "-c", "echo $(hostname) >/dev/shm/pool; echo no >&2; exit 7", status=7)[1] == "no\n"
    assert lab("run", "--env", "X=y z", "B", "sh", "-c", "head -1 /dev/shm/pool; echo $X")[0] == "A\ny z\n"
    assert "no command" in lab("run", "A", status=2)[1]
    assert "host A cannot unplug" in lab("unplug", "A", status=2)[1]
    assert "up already" in lab("up", "--mode", "namespaces", status=2)[1]
    lab("kill", "B")
    assert "B  down" in lab("status")[0]
    assert "not up" in lab("run", "B", "true", status=2)[1]
    lab("boot", "B")
    assert lab("run", "B", "hostname")[0] == "B\n"
    lab("down")
    assert served.wait(30) == 0
    assert "no lab is up" in lab("status", status=2)[1]
