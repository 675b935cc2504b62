# SPDX-License-Identifier: Apache-2.0
"""perf/run.py: what it accepts, what it refuses, what it records."""

import datetime
import importlib.util
import json
import re
import sys

import pytest
import tidy

SPEC = importlib.util.spec_from_file_location("perf_run", tidy.ROOT / "perf" / "run.py")
perf = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(perf)


@pytest.fixture
def results(tmp_path, monkeypatch):
    monkeypatch.setattr(perf, "PERF", tmp_path)
    return tmp_path


@pytest.fixture
def run(results, monkeypatch):
    """Runs a program in Python as benchmark perf-x, whose entry has `more`."""

    def run(source, *flags, **more):
        monkeypatch.setattr(perf, "programs", lambda: {"perf-x": {"about": "x", "run": [sys.executable, "-c", source], **more}})
        return perf.main([*flags, "perf-x"])

    return run


def records(results):
    return sorted((results / "records").glob("*.json"))


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


def test_a_run_is_recorded_only_when_asked(run, results):
    good = 'print("for people\\n\\n  more"); print(\'RATIOS {"fetch_over_load": 12.3456, "b": 2}\')'
    assert run(good) == 0 and not list(results.iterdir())
    assert run(good, "--record") == 0 and run(good, "--record") == 0
    (only,) = records(results)
    assert only.name.endswith("Z-perf-x.json")
    record = json.loads(only.read_text())
    assert record["name"] == "perf-x" and record["ratios"] == {"fetch_over_load": 12.3456, "b": 2}
    assert record["printed"] == ["for people", "", "  more"] and record["commit"]
    assert record["machine"]["cores"] >= 1 and record["machine"]["kernel"].startswith("Linux ")
    row = (results / "SUMMARY.md").read_text().splitlines()[-1]
    assert row.startswith("- [perf-x, ") and f"(records/{only.name})" in row and "`fetch_over_load` 12.35, `b` 2" in row


def test_the_summary_has_the_latest_run_of_each_benchmark_and_machine(results, monkeypatch):
    def recorded(name, cpu, hour, value, **more):
        monkeypatch.setattr(perf, "machine", lambda: {"cpu": cpu, "cores": 2, "kernel": "Linux 6"})
        date = datetime.datetime(2026, 11, 2, hour, 30, tzinfo=datetime.timezone.utc)
        return perf.keep(name, ["x"], {"a": value, **more}, [], date)

    recorded("perf-b", "one", 9, 5)
    recorded("perf-b", "one", 7, 6)  # written later, measured earlier
    recorded("perf-b", "two", 8, 7)
    last = [recorded("perf-a", "one", hour, hour, **{f"more{n}": 1 for n in range(9)}) for hour in (9, 10, 11)][-1]
    assert [path.name[11:] for path in records(results)] == ["0830Z-perf-b.json", "0930Z-perf-b.json", "1130Z-perf-a.json"]
    items = (results / "SUMMARY.md").read_text().replace("\n  ", " ").splitlines()
    assert [item for item in items if item.startswith("- ")] == [
        f"- [perf-a, 2026-11-02](records/{last.name}), one, 2 cores: `a` 11, `more0` 1, `more1` 1, `more2` 1, `more3` 1",
        "- [perf-b, 2026-11-02](records/2026-11-02T0930Z-perf-b.json), one, 2 cores: `a` 5",
        "- [perf-b, 2026-11-02](records/2026-11-02T0830Z-perf-b.json), two, 2 cores: `a` 7",
    ]


def test_the_summary_of_the_checkout_follows_from_its_records():
    kept = {path for path, _ in perf.latest_records().values()}
    assert kept == set((tidy.ROOT / "perf" / "records").glob("*.json")), "an earlier record of a benchmark and machine is in the history"
    assert perf.summary() == (tidy.ROOT / "perf" / "SUMMARY.md").read_text(), "run `perf/run.py --summary`"
    named = {json.loads(path.read_text())["name"] for path in (tidy.ROOT / "perf" / "records").glob("*.json")}
    assert named >= set(perf.MAIN_RATIOS), "a benchmark of MAIN_RATIOS has no record"


def test_failures_record_nothing_and_fail(run, results, capfd):
    assert run("print('RATIOS {\"a\": 1}'); raise SystemExit(7)", "--record") == 7
    assert run("import os; os.kill(os.getpid(), 9)", "--record") == 1
    assert run("print('no ratios')", "--record") == 1
    assert run("import time; time.sleep(60)", "--record", timeout_s=0.2) == 1
    assert run("", "--record", run=["./no-such-program"]) == 1
    assert not list(results.iterdir())
    assert "last line" in capfd.readouterr().err


def test_arguments_follow_from_variables_and_files(run, monkeypatch, capfd):
    shows = "import os, sys; print(sys.argv[1:], os.environ['ALSO'][-5:]); print('RATIOS {\"a\": 1}')"
    more = [{"variable": "SOME_ARGS", "run": ["--words", "$SOME_ARGS"]}, {"file": "no-such-file", "run": ["--file"]}]
    more += [{"file": "README.md", "run": ["--readme"]}, {"variable": "SOME_FOLDER", "run": ["$SOME_FOLDER"]}]
    monkeypatch.setenv("SOME_ARGS", "one 'two three'")
    monkeypatch.setenv("SOME_FOLDER", "/a folder's name")
    assert run(shows, **{"with": more, "environment": {"ALSO": "tests"}}) == 0
    assert """['--words', 'one', 'two three', '--readme', "/a folder's name"] tests""" in capfd.readouterr().out
    monkeypatch.delenv("SOME_ARGS")
    monkeypatch.delenv("SOME_FOLDER")
    assert run(shows, **{"with": more, "environment": {"ALSO": "tests"}}) == 0
    assert "['--readme'] tests" in capfd.readouterr().out


def test_a_benchmark_that_cannot_run_says_why_and_is_no_failure(run, monkeypatch, capfd):
    fails = "raise SystemExit(3)"
    monkeypatch.delenv("SOME_FOLDER", raising=False)
    assert run(fails, given="SOME_FOLDER", needs=["no-such-target"]) == 0
    assert "perf-x: SKIPPED, nothing was run: SOME_FOLDER= names nothing" in capfd.readouterr().out
    monkeypatch.setenv("SOME_FOLDER", "there")
    assert run(fails, given="SOME_FOLDER") == 3
    look = [sys.executable, "-c", "print('looked'); print('there is no GPU'); raise SystemExit(1)"]
    assert run(fails, look=look) == 0 and "SKIPPED, nothing was run: there is no GPU" in capfd.readouterr().out
    assert run(fails, look=[sys.executable, "-c", ""]) == 3
    assert run("print('RATIOS {\"a\": 1}')", needs=["no-such-target"]) == 2


def test_every_program_of_the_table_is_there():
    known = perf.programs()
    makefile = (tidy.ROOT / "Makefile").read_text()
    for name, entry in known.items():
        assert set(entry) <= {"about", "needs", "run", "with", "given", "look", "environment", "timeout_s"}, name
        files = [word for word in entry["run"] if word.startswith(("perf/", "scripts/", "tests/")) and word != "perf"]
        assert all((tidy.ROOT / file).exists() for file in files), name
        needs, _ = perf.command_of(entry, {})
        assert all(re.search(rf"^{re.escape(need)}:", makefile, re.MULTILINE) or need.startswith("setup-") for need in needs), name
    assert set(perf.MAIN_RATIOS) <= set(known)


def test_a_name_that_is_not_in_the_table_is_refused(capsys):
    with pytest.raises(SystemExit):
        perf.main(["perf-nothing"])
    assert "there is no benchmark perf-nothing" in capsys.readouterr().err
    assert perf.main([]) == 0 and "perf-serve " in capsys.readouterr().out
