# SPDX-License-Identifier: Apache-2.0
"""What Dynamo's router makes of CxlConnector's events, without an engine: what a medium counts as, how often a block has to be removed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from graph.environment import common
from graph.options import Options
from tiny_model import tiny_model

MEDIA = {
    # (device, host, disk) blocks of four.
    "EXTERNAL": (0, 0, 4),
    "DISK": (0, 0, 4),
    "CPU": (0, 4, 0),
    "GPU": (4, 0, 0),
    # Dynamo drops what it does not know.
    "CXL": (0, 0, 0),
}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("media")
    (folder / "discovery").mkdir()
    (folder / "tmp").mkdir()
    told = common(Options(), folder)
    model = tiny_model(folder / "model")
    command = [sys.executable, str(Path(__file__).with_name("media_probe.py")), str(folder), str(model), *MEDIA]
    done = subprocess.run(command, env=told, capture_output=True, text=True, timeout=300, check=False)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[[")]
    assert len(lines) == len(MEDIA), done.stderr[-3000:]
    return {medium: [tuple(each) for each in line] for medium, line in zip(MEDIA, lines, strict=True)}


@pytest.mark.parametrize("medium", MEDIA)
def test_a_medium_counts_as_the_tier_that_the_documents_say(found, medium):
    assert found[medium][0] == MEDIA[medium]


@pytest.mark.parametrize("medium", ["EXTERNAL", "DISK"])
def test_what_is_told_twice_has_to_be_taken_back_twice(found, medium):
    once, again, gone = found[medium]
    assert once == again == (0, 0, 4) and gone == (0, 0, 3)
