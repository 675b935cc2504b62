# SPDX-License-Identifier: Apache-2.0
"""perf/run.py: what it accepts, what it refuses, what it records."""

import importlib.util
import sys

import pytest
import tidy

SPEC = importlib.util.spec_from_file_location("perf_run", tidy.ROOT / "perf" / "run.py")
perf = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(perf)


def program(source):
    return [sys.executable, "-c", source]


@pytest.fixture
def results(tmp_path, monkeypatch):
    monkeypatch.setattr(perf, "RESULTS", tmp_path / "RESULTS.md")
    return perf.RESULTS


def run(source, *flags):
    return perf.main([*flags, "perf-x", "--", *program(source)])


def test_the_last_line_is_taken():
    assert perf.parse_ratios('text\nRATIOS {"old": 1}\nRATIOS {"a": 1.5, "b": 2}\n\n') == {"a": 1.5, "b": 2}


@pytest.mark.parametrize(
    "output",
    ["", "text", 'RATIOS {"a": 1}\ntext', "RATIOS {", "RATIOS []", "RATIOS {}", 'RATIOS {"a": 0}', 'RATIOS {"a": -1}']
    + ['RATIOS {"a": NaN}', 'RATIOS {"a": Infinity}', 'RATIOS {"a": "1"}', 'RATIOS {"a": true}', 'RATIOS {"a": null}'],
)
def test_what_is_no_measurement_is_refused(output):
    with pytest.raises(ValueError):
        perf.parse_ratios(output)


def test_records_append_only_when_asked(results):
    good = 'print(\'RATIOS {"fetch_over_load": 12.3456}\')'
    assert run(good) == 0 and not results.exists()
    assert run(good, "--record") == 0 and run(good, "--record") == 0
    text = results.read_text()
    assert text.count("# Recorded runs") == 1
    assert text.count("## perf-x, ") == 2 and text.count("| fetch_over_load | 12.35 |") == 2
    assert "cores, Linux" in text and "- commit: " in text


def test_failures_record_nothing_and_fail(results, capfd):
    assert run("print('RATIOS {\"a\": 1}'); raise SystemExit(7)", "--record") == 7
    assert run("import os; os.kill(os.getpid(), 9)", "--record") == 1
    assert run("print('no ratios')", "--record") == 1
    assert run("import time; time.sleep(60)", "--record", "--timeout-s", "0.2") == 1
    assert perf.main(["--record", "perf-x", "--", "./no-such-program"]) == 1
    assert not results.exists()
    assert "last line" in capfd.readouterr().err
