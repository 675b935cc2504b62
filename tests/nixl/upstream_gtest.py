#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs NIXL's own gtests, from a binary of NIXL's build, with UCX and with our plugin under the name of UCX.

    upstream_gtest.py BINARY [--wheel 1.4.1] [--filter PATTERN]

The tests ask for UCX by name. NIXL_PLUGIN_DIR names a folder with our plugin as UCX, and what is loaded before the binary
(stubs/keep_plugin_dir.c) keeps tests from setting it to their build's folder. Each test runs in a process of its own, so that one that
crashes or hangs takes no other with it, with a namespace of its own in an etcd server (`make setup-etcd`), and where the kernel lets us, in
a network in which there is nothing but this machine: one test connects to an address that is not to answer.

The binary also fails a test after which NIXL has logged a warning or an error that the test did not announce. Such a test has "warned"; our
plugin's own warnings and errors, which the binary does not see, count as such unless they tell the cause of an announced error. A test
that passes with UCX and not with ours is a failure; so is a warning or an error that ours alone brings about, and a run in which our plugin
moved nothing. What a test demands of UCX's own parameters does not count against ours, and is told.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pool_api
import wheels
from etcd_server import ETCD, Etcd
from upstream_suite import environment, plugins, transfers

# Transfers, peers that fail, metadata and telemetry: what a backend takes part in.
FILTER = "*TestTransfer*:*TestErrorHandling*:*MetadataExchange*:*elemetry*"
# What only UCX can have: an expectation or a warning that names it.
OF_UCX = ("ucx_err_handling_mode", "ucx_error_handling_mode", "num_workers", "num_threads", "split_batch_size", "engine_config")
# The source that our plugin's log lines name.
OURS = "nixl_cxl"
# How often a test that crashes with UCX is tried. With ours, once.
UCX_TRIES = 3
# Set for the run in a network of its own.
ALONE = "KVBM_CXL_GTEST_ALONE"


@dataclass
class Outcome:
    """What became of a test: its state (passed, but, failed, skipped, crashed or hung), and messages that it did not announce."""

    state: str
    messages: frozenset = frozenset()

    def __str__(self):
        return "warned" if self.state in ("passed", "but") and self.messages else self.state

    def is_worse_than(self, ucx):
        """Whether UCX did what ours did not."""
        return ucx.state == "passed" and (self.state not in ("passed", "but") or not self.messages <= ucx.messages)


def names(listing):
    """The tests that a binary lists with --gtest_list_tests."""
    found, suite = [], ""
    for line in listing.splitlines():
        text = line.split("#")[0].rstrip()
        if text and not line.startswith(" ") and text.endswith("."):
            suite = text
        elif suite and line.startswith("  ") and text and "DISABLED_" not in suite + text:
            found.append(suite + text.strip())
    return found


def is_of_ucx(said):
    """Whether all that failed are expectations of UCX's own parameters."""
    failures = said.split(": Failure\n")[1:]
    return bool(failures) and all(any(word in failure.split("\n\n")[0] for word in OF_UCX) for failure in failures)


def of_ours(said, unannounced):
    """What our plugin logged but for errors after which, in the next line of the same thread, NIXL logged one that the test announced."""
    lines = re.findall(r"^([EW])\d{4} \S+ +(\d+) (\S+)\] (.*)$", said, re.MULTILINE)
    for (level, thread, source, text), (_, next_thread, next_source, next_text) in zip(lines, [*lines, ("",) * 4][1:], strict=True):
        is_told_by_nixl = level == "E" and thread == next_thread and next_source != OURS and next_text not in unannounced
        if source == OURS and not is_told_by_nixl:
            yield text


def messages(said):
    """Warnings and errors that the test did not announce, NIXL's as the binary tells them, and ours; without what differs between runs."""
    told = re.findall(r"^ATTENTION: Message is '(.*)'$", said, re.MULTILINE)
    told += of_ours(said, told)
    return frozenset(re.sub(r"\b(0x[0-9a-f]+|\d+)\b", "N", text) for text in told if not any(word in text for word in OF_UCX))


def judged(returncode, said):
    """The outcome of a test that has ended: "but" is passed in all but what is UCX's own."""
    if returncode < 0:
        return Outcome("crashed")
    if "[  FAILED  ]" in said:
        return Outcome("but" if is_of_ucx(said) else "failed", messages(said))
    if "[  SKIPPED ]" in said:
        return Outcome("skipped")
    # Not zero is also the status after messages alone.
    return Outcome("passed" if returncode == 0 or "ATTENTION: Problem count is" in said else "failed", messages(said))


def run(binary, name, env, log, timeout_s):
    """The outcome of one test, whose output is added to the log."""
    with log.open("ab") as out:
        out.write(f"== {name}\n".encode())
        out.flush()
        start = out.tell()
        try:
            ended = subprocess.run(
                [str(binary), f"--gtest_filter={name}"],
                env={**env, "NIXL_ETCD_NAMESPACE": f"/{log.parent.name}/{name}/"},
                cwd=log.parent,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                timeout=timeout_s,
            )
        except subprocess.TimeoutExpired:
            return Outcome("hung")
    return judged(ended.returncode, log.read_bytes()[start:].decode(errors="replace"))


def alone():
    """Begins anew in a network with nothing but this machine, if the kernel lets us; goes on if not, or if this is it."""
    enter = ["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
    if ALONE in os.environ:
        return
    if shutil.which("unshare") and subprocess.run([*enter, "true"], capture_output=True).returncode == 0:
        os.execvpe(enter[0], [*enter, sys.executable, *sys.argv], {**os.environ, ALONE: "1"})
    print("   in the machine's network: none of its own was to be had (unshare --net)")


def etcd(folder):
    """A server for the tests of metadata that is kept in etcd; none where `make setup-etcd` has not run."""
    if not ETCD.exists():
        print("   tests of metadata in etcd are skipped, others may complain that there is none: `make setup-etcd` has not run")
        return None
    folder.mkdir()
    return Etcd(folder)


def kept(folder):
    """The library that keeps NIXL_PLUGIN_DIR as it is."""
    library = folder / "keep_plugin_dir.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(wheels.HERE / "stubs" / "keep_plugin_dir.c"), "-ldl"], check=True)
    return library


def run_pass(asked, binary, found, folder, server, is_ours):
    """One pass over all tests: the outcome of each, how many transfers our plugin made, and where the output is."""
    folder.mkdir()
    wheel = asked.wheel
    env = {**environment(wheel), "LD_LIBRARY_PATH": wheels.library_path(wheel), "LD_PRELOAD": str(kept(folder))}
    if server:
        env["NIXL_ETCD_ENDPOINTS"] = server.url
    if is_ours:
        os.environ.update(CXL_MACHINE_ID="upstream", CXL_STATE_DIR=str(folder / "state"))
        pool_api.format_pool(f"{folder / 'pool'},size=256M")
        env.update(CXL_POOL=str(folder / "pool"), CXL_MACHINE_ID="upstream", CXL_STATE_DIR=str(folder / "state"))
    env["NIXL_PLUGIN_DIR"] = str(plugins(folder / "plugins", wheel, is_ours))
    log = folder / "log"
    outcomes = {}
    for name in found:
        outcomes[name] = run(binary, name, env, log, asked.timeout_s)
        # UCX crashes at times when a peer ends; what it does else is what ours has to do.
        tries = 1
        while not is_ours and outcomes[name].state == "crashed" and tries < UCX_TRIES:
            print(f"   crashed with UCX, tried again: {name}")
            outcomes[name] = run(binary, name, env, log, asked.timeout_s)
            tries += 1
    del env["LD_PRELOAD"]
    return outcomes, transfers(env) if is_ours else 0, log


def told_apart(found, ucx, ours):
    """Shows what each test did in both passes, and names those that ours did worse in."""
    print("   UCX      as UCX")
    for name in found:
        print(f"   {ucx[name]!s:9}{ours[name]!s:9}{name}")
    told = [[str(outcome) for outcome in outcomes.values()] for outcomes in (ucx, ours)]
    for state in ("passed", "but", "warned", "skipped", "failed", "crashed", "hung"):
        if state in told[0] + told[1]:
            print(f"   {state}: {told[0].count(state)} with UCX, {told[1].count(state)} with CXL in its place")
    print("   but: passed but for what is demanded of UCX's own parameters")
    print("   warned: passed but for messages that the test does not announce")
    for message in sorted({message for outcome in ucx.values() for message in outcome.messages}):
        print(f"   message with UCX: {message}")
    for name in found:
        for message in sorted(ours[name].messages - ucx[name].messages):
            print(f"   message with CXL alone: {name}: {message}")
    return [name for name in found if ours[name].is_worse_than(ucx[name])]


def said_in(log, wanted):
    """What the named tests printed, the end of each."""
    parts = re.split(r"^== ", log.read_text(errors="replace"), flags=re.MULTILINE)
    return "\n".join(part[-5_000:] for part in parts if part.partition("\n")[0] in wanted)[-50_000:]


def main():
    """Runs both passes, shows what each test did in them, and tells whether ours did what UCX did."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("binary", type=Path)
    parser.add_argument("--wheel", choices=wheels.VERSIONS, default=wheels.DEFAULT)
    parser.add_argument("--filter", default=FILTER)
    parser.add_argument("--timeout-s", type=float, default=120, help="of one test")
    asked = parser.parse_args()
    binary = asked.binary.resolve()
    if not os.access(binary, os.X_OK):
        sys.exit(f"{binary} is no program: name the gtest binary of NIXL's build")
    if not wheels.installed(asked.wheel):
        sys.exit(f"the wheel {asked.wheel} is not installed: run `make setup-nixl`")
    alone()
    folder, server = Path(tempfile.mkdtemp(prefix="kvbm-cxl-gtest-", dir="/dev/shm")), None
    try:
        env = {**environment(asked.wheel), "LD_LIBRARY_PATH": wheels.library_path(asked.wheel)}
        listing = [str(binary), "--gtest_list_tests", f"--gtest_filter={asked.filter}"]
        told = subprocess.run(listing, env=env, capture_output=True, text=True, timeout=asked.timeout_s)
        found = names(told.stdout)
        if told.returncode or not found:
            sys.exit(f"{binary} lists no test that {asked.filter} means (exit {told.returncode}): {told.stderr.strip()[-2000:]}")
        server = etcd(folder / "etcd")
        ucx, _, _ = run_pass(asked, binary, found, folder / "ucx", server, is_ours=False)
        ours, moved, log = run_pass(asked, binary, found, folder / "cxl", server, is_ours=True)
        worse = told_apart(found, ucx, ours)
        print(f"   transfers that our plugin made: {moved}")
        has_passed = any(outcome.state == "passed" for outcome in ucx.values())
        if worse or not has_passed or not moved:
            print(said_in(log, worse or found))
        if worse:
            sys.exit(f"passed with UCX alone: {', '.join(worse)}")
        if not has_passed:
            sys.exit(f"nothing passes with UCX either: the binary may be of another version than the wheel {asked.wheel}")
        if not moved:
            sys.exit("our plugin moved nothing")
    finally:
        if server:
            server.stop()
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
