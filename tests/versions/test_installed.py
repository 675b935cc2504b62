# SPDX-License-Identifier: Apache-2.0
"""The records are what the installed versions offer. RECORD=1 writes those of all versions that are installed and in the window."""

import os
import re

import interface
import pytest
from kvbm_cxl import versions

FOLDERS = ("serve/lib/python3*/site-packages", "lmcache", "sglang", "versions/*")


def installed():
    """(package, version) -> the folder that has it."""
    found = {}
    for path in [path for pattern in FOLDERS for path in (interface.ROOT / ".venv").glob(f"{pattern}/*.dist-info")]:
        name, version = re.fullmatch(r"(.*)-([^-]*)\.dist-info", path.name).groups()
        package = name.split("_")[0].split("-")[0]
        if package in versions.WINDOWS and (path.parent / package).is_dir():
            found.setdefault((package, version.split("+")[0]), path.parent)
    return found


HERE = installed()
RECORDED = {(package, each["version"]): each for package in versions.WINDOWS for each in interface.records(package)}
WRITES = os.environ.get("RECORD") == "1"


@pytest.mark.parametrize("package, version", sorted(HERE if WRITES else RECORDED), ids="-".join)
def test_the_record_is_the_installed_version_s(package, version):
    if (package, version) not in HERE:
        pytest.skip(f"{package} {version} is not installed: `make test-versions` adds it")
    record = interface.offers(HERE[package, version], package, version, interface.uses(package))
    if WRITES:
        versions.check(package, version)
        interface.write(record)
    else:
        assert record == RECORDED[package, version], "record it: make test-versions RECORD=1"
