#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs NIXL's own Python tests, from a checkout of NIXL, with our plugin, and the same with UCX to compare.

    upstream_suite.py CHECKOUT [--wheel 1.4.1]

Three passes, each on a pool of its own: UCX; CXL, by the suite's option --backend; and CXL under the name of UCX, for the tests that ask
for UCX by name. The wheel is the one nearest to the version that the checkout states. A test that passes with UCX and not with ours is a
failure; so is a pass in which our plugin moved nothing, because then it was not ours that was tested. Nothing is written to the checkout.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

import pool_api
import wheels

PLUGIN = wheels.ROOT / "target" / "nixl_plugin" / "libplugin_CXL.so"
CXLCTL = wheels.ROOT / "target" / "release" / "cxlctl"
SUITE = Path("test") / "python"
# Of one test, and of a whole pass.
TEST_TIMEOUT_S, PASS_TIMEOUT_S = 120, 900


def stated_version(checkout):
    """The version in the checkout's meson.build, like "1.4.1"."""
    found = re.search(r"^project\([^)]*?version:\s*'([0-9.]+)'", (checkout / "meson.build").read_text(), re.MULTILINE | re.DOTALL)
    if not found:
        sys.exit(f"{checkout / 'meson.build'} states no version: name a wheel with --wheel")
    return found[1]


def nearest(version):
    """The wheel with the smallest distance to a version, the later one of two."""

    def distance(wheel):
        ours, theirs = (tuple(map(int, text.split("."))) + (0,) * 3 for text in (wheel, version))
        return [abs(one - other) for one, other in zip(ours[:3], theirs[:3], strict=True)], [-part for part in ours[:3]]

    return min(wheels.VERSIONS, key=distance)


def environment(wheel):
    """Without anything that would choose a backend, a pool or a NIXL; torch is a stand-in (tests/nixl/stubs)."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("CXL_", "KVBM_CXL_", "NIXL_", "PYTHON", "UCX_"))}
    paths = [path for path in wheels.python_path(wheel) if path != str(wheels.HERE)]
    stubs = str(wheels.HERE / "stubs")
    return {**kept, "PYTHONPATH": os.pathsep.join([*paths, *([] if stubs in paths else [stubs])]), "PYTHONDONTWRITEBYTECODE": "1"}


def plugins(folder, wheel, is_in_place_of_ucx):
    """A folder for NIXL_PLUGIN_DIR with the wheel's plugins and ours, under its own name or that of UCX."""
    command = [sys.executable, "-m", "kvbm_cxl.cli", "nixl-plugin-dir", "--into", str(folder)]
    told = subprocess.run(command, env=environment(wheel), check=True, capture_output=True, text=True)
    made = Path(told.stdout.strip())
    if is_in_place_of_ucx:
        (made / "libplugin_UCX.so").unlink()
        (made / "libplugin_UCX.so").symlink_to(PLUGIN)
        (made / PLUGIN.name).unlink()
    return made


def outcomes(report):
    """Name -> passed, failed or skipped, of a JUnit report."""
    found = {}
    for case in ElementTree.parse(report).iter("testcase"):
        kinds = {child.tag for child in case}
        name = f"{case.get('classname', '').rsplit('.', 1)[-1]}::{case.get('name')}"
        found[name] = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
    return found


def counted(env):
    """What the agents of the pool have counted: name -> sum of all hosts."""
    told = subprocess.run([str(CXLCTL), "nixl", "--json"], env=env, check=True, capture_output=True, text=True)
    return json.loads(told.stdout)["all"]


def transfers(env):
    """Transfers that ended well, as the agents of the pool have counted them."""
    now = counted(env)
    return now["reads"] + now["writes"]


def run_pass(checkout, wheel, folder, backend, is_ours, is_in_place_of_ucx=False):
    """One pass of the suite: its outcomes, how many transfers our plugin made, and where its output is."""
    folder.mkdir()
    env = environment(wheel)
    if is_ours:
        os.environ.update(CXL_MACHINE_ID="upstream", CXL_STATE_DIR=str(folder / "state"))
        pool_api.format_pool(f"{folder / 'pool'},size=256M")
        env.update(CXL_POOL=str(folder / "pool"), CXL_MACHINE_ID="upstream", CXL_STATE_DIR=str(folder / "state"))
    env["NIXL_PLUGIN_DIR"] = str(plugins(folder / "plugins", wheel, is_in_place_of_ucx))
    report, log = folder / "report.xml", folder / "log"
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"--timeout={TEST_TIMEOUT_S}", f"--junitxml={report}"]
    with log.open("wb") as out:
        try:
            subprocess.run(
                [*command, f"--backend={backend}", str(checkout / SUITE)],
                cwd=folder,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                timeout=PASS_TIMEOUT_S,
            )
        except subprocess.TimeoutExpired:
            print(f"   the suite did not end within {PASS_TIMEOUT_S} s")
    return (outcomes(report) if report.is_file() else {}), (transfers(env) if is_ours else 0), log


def main():
    """Runs the passes, shows what each test did in them, and tells whether ours did what UCX did."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--wheel", choices=wheels.VERSIONS)
    asked = parser.parse_args()
    checkout = asked.checkout.resolve()
    if not (checkout / SUITE / "conftest.py").is_file():
        sys.exit(f"{checkout} is no checkout of NIXL with Python tests: {checkout / SUITE / 'conftest.py'} is missing")
    version = stated_version(checkout)
    wheel = asked.wheel or nearest(version)
    if not wheels.installed(wheel):
        sys.exit(f"the wheel {wheel} is not installed: run `make setup-nixl`")
    print(f"   tests of a checkout that states version {version}, with the wheel {wheel}")
    folder = Path(tempfile.mkdtemp(prefix="kvbm-cxl-upstream-", dir="/dev/shm"))
    try:
        ucx, _, _ = run_pass(checkout, wheel, folder / "ucx", "UCX", is_ours=False)
        own, own_transfers, own_log = run_pass(checkout, wheel, folder / "cxl", "CXL", is_ours=True)
        alias, alias_transfers, alias_log = run_pass(checkout, wheel, folder / "alias", "UCX", is_ours=True, is_in_place_of_ucx=True)
        print("   UCX      CXL      as UCX")
        worse = []
        for name in sorted({*ucx, *own, *alias}):
            seen = [outcome.get(name, "missing") for outcome in (ucx, own, alias)]
            print("   " + "".join(f"{outcome:9}" for outcome in seen) + name)
            if seen[0] == "passed" and seen[1:] != ["passed", "passed"]:
                worse.append(name)
        passed = [sum(outcome == "passed" for outcome in found.values()) for found in (ucx, own, alias)]
        print(f"   passed: {passed[0]} with UCX, {passed[1]} with CXL, {passed[2]} with CXL in UCX's place")
        print(f"   transfers that our plugin made: {own_transfers}, {alias_transfers}")
        is_ours = own_transfers > 0 and alias_transfers > 0
        if worse or not passed[0] or not is_ours:
            for log in (own_log, alias_log):
                print(log.read_text(errors="replace")[-20_000:])
            if worse:
                sys.exit(f"passed with UCX alone: {', '.join(worse)}")
            if not passed[0]:
                sys.exit(f"nothing passes with UCX either: the checkout may be newer than the wheel {wheel}")
            sys.exit("our plugin moved nothing")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
