# SPDX-License-Identifier: Apache-2.0
"""The deb and the rpm of the tools: what is in them, and that the programs run from where the deb puts them."""

import gzip
import re
import shutil
import struct
import subprocess

import charts
import pytest
from charts import ROOT

NFPM = ROOT / ".venv/nfpm/nfpm"
UNIT, RULES = "usr/lib/systemd/system/kvbm-cxl-host.service", "usr/lib/udev/rules.d/70-kvbm-cxl.rules"
FILES = {
    "etc/kvbm-cxl/host.env",
    "usr/bin/cxl-bench",
    "usr/bin/cxl-plan",
    "usr/bin/cxlctl",
    "usr/lib/sysusers.d/kvbm-cxl.conf",
    "usr/share/bash-completion/completions/cxlctl",
    "usr/share/doc/kvbm-cxl-tools/CHANGELOG.md",
    "usr/share/doc/kvbm-cxl-tools/copyright",
    "usr/share/man/man1/cxl-bench.1.gz",
    "usr/share/man/man1/cxl-plan-run.1.gz",
    "usr/share/man/man1/cxl-plan.1.gz",
    "usr/share/man/man1/cxlctl.1.gz",
    "usr/share/man/man1/cxlctl-format.1.gz",
    RULES,
    UNIT,
}
# Tags of an rpm's header.
NAME, VERSION, REQUIRES, BASENAMES, DIRNUMBERS, DIRNAMES = 1000, 1001, 1049, 1117, 1116, 1118


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    if not NFPM.exists():
        pytest.skip("nfpm is not there: `make setup-deploy`")
    folder = tmp_path_factory.mktemp("packages")
    subprocess.run([ROOT / "scripts/packages", NFPM, folder], check=True, capture_output=True)
    return folder


def only(folder, pattern):
    (found,) = folder.glob(pattern)
    return found


@pytest.fixture(scope="module")
def unpacked(packages, tmp_path_factory):
    """The root of a node that has the deb, without what it depends on."""
    if not shutil.which("dpkg-deb"):
        pytest.skip("no dpkg-deb here")
    root = tmp_path_factory.mktemp("node")
    subprocess.run(["dpkg-deb", "-x", only(packages, "*.deb"), root], check=True)
    return root


def rpm_header(path):
    """The main header of an rpm: values by tag. The signature's header in front of it is padded to 8 bytes."""
    data, at = path.read_bytes(), 96
    for is_signature in (True, False):
        assert data[at : at + 3] == b"\x8e\xad\xe8", path
        count, len_bytes = struct.unpack_from(">II", data, at + 8)
        store = at + 16 + 16 * count
        found = {}
        for entry in range(count):
            tag, kind, offset, items = struct.unpack_from(">IIII", data, at + 16 + 16 * entry)
            if kind == 4:
                found[tag] = list(struct.unpack_from(f">{items}I", data, store + offset))
            elif kind in (6, 8, 9):
                found[tag] = [text.decode() for text in data[store + offset :].split(b"\0", items)[:items]]
        at = store + len_bytes
        at += -at % 8 if is_signature else 0
    return found


def test_the_deb_has_what_a_node_needs(unpacked):
    there = {str(path.relative_to(unpacked)) for path in unpacked.rglob("*") if path.is_file()}
    assert there >= FILES
    manuals = {path for path in there if path.startswith("usr/share/man/man1/cxl")}
    assert there - FILES <= manuals, "something else is in the package"
    for installed, source in ((UNIT, "host/kvbm-cxl-host.service"), (RULES, "host/70-kvbm-cxl.rules")):
        assert (unpacked / installed).read_bytes() == (ROOT / "deploy" / source).read_bytes()
    for program in ("cxlctl", "cxl-bench", "cxl-plan"):
        assert f'.TH {program} 1'.encode() in gzip.decompress((unpacked / f"usr/share/man/man1/{program}.1.gz").read_bytes())
    group = re.search(r'GROUP="(\d+)"', (unpacked / RULES).read_text())[1]
    assert f"g cxl {group}\n" in (unpacked / "usr/lib/sysusers.d/kvbm-cxl.conf").read_text()


def test_the_programs_run_from_there(unpacked, tmp_path):
    version = charts.version()
    environment = {"CXL_STATE_DIR": str(tmp_path / "state"), "CXL_MACHINE_ID": "packaged", "PATH": "/usr/bin:/bin"}
    for program in ("cxlctl", "cxl-bench", "cxl-plan"):
        said = subprocess.run([unpacked / "usr/bin" / program, "--version"], capture_output=True, text=True, check=True, env=environment)
        assert said.stdout.split()[1] == version
    pool = f"{tmp_path / 'pool'},size=16M"
    for words in (["format", "--cells", "64K:50%"], ["fsck"]):
        subprocess.run([unpacked / "usr/bin/cxlctl", "--pool", pool, *words], check=True, capture_output=True, env=environment)


def test_the_unit_is_one_that_systemd_takes(unpacked):
    if not shutil.which("systemd-analyze"):
        pytest.skip("no systemd-analyze here")
    verify = ["systemd-analyze", "verify", "--recursive-errors=no", unpacked / UNIT]
    said = subprocess.run(verify, capture_output=True, text=True)
    # The program need not be installed on the machine that checks.
    wrong = [line for line in said.stderr.splitlines() if "kvbm-cxl-host" in line and "cxlctl is not executable" not in line]
    assert not wrong, said.stderr


def test_the_unit_has_no_right_that_it_does_not_need(unpacked):
    if not shutil.which("systemd-analyze"):
        pytest.skip("no systemd-analyze here")
    judge = ["systemd-analyze", "security", "--offline=true", unpacked / UNIT]
    said = subprocess.run(judge, capture_output=True, text=True)
    exposure = re.search(r"Overall exposure level for \S+: ([\d.]+)", said.stdout)
    if not exposure:
        pytest.skip(f"this systemd-analyze judges no files: {said.stderr.strip()}")
    assert float(exposure[1]) < 3, said.stdout
    unit = (unpacked / UNIT).read_text()
    (user,) = re.findall(r"^User=(.+)$", unit, re.MULTILINE)
    users = (unpacked / "usr/lib/sysusers.d/kvbm-cxl.conf").read_text()
    assert user != "root" and f"u {user} " in users and f"m {user} cxl" in users
    # The keeper proves deaths by looking at processes.
    assert not re.search(r"^Protect(Proc|Subset)=", unit, re.MULTILINE)


def test_scripts_of_the_packages_restart_and_stop_the_keeper(packages, tmp_path):
    """What dpkg runs, with programs that write down how they were called. A machine that systemd does not run has no keeper to restart."""
    subprocess.run(["dpkg-deb", "-e", only(packages, "*.deb"), tmp_path / "control"], check=True)
    programs = tmp_path / "programs"
    programs.mkdir()
    for name in ("systemctl", "udevadm", "systemd-sysusers"):
        (programs / name).write_text(f'#!/bin/sh\necho {name} "$@" >>{tmp_path}/calls\n')
        (programs / name).chmod(0o755)
    running = tmp_path / "systemd"
    running.mkdir()

    def calls(script, *arguments):
        text = (tmp_path / "control" / script).read_text().replace("/run/systemd/system", str(running))
        (tmp_path / "calls").write_text("")
        env = {"PATH": f"{programs}:/usr/bin:/bin"}
        subprocess.run(["sh", "-c", text, script, *arguments], check=True, env=env, timeout=60)
        return (tmp_path / "calls").read_text()

    installed = calls("postinst", "configure")
    assert "systemd-sysusers kvbm-cxl.conf" in installed and "udevadm trigger" in installed
    assert installed.rstrip().endswith("systemctl try-restart kvbm-cxl-host.service")
    assert "disable --now kvbm-cxl-host" in calls("prerm", "remove")
    assert calls("prerm", "upgrade", "0.2.0") == ""
    running.rmdir()
    assert calls("postinst", "configure") == "systemd-sysusers kvbm-cxl.conf\n" and calls("prerm", "remove") == ""


def test_the_chart_is_an_archive_that_helm_takes(packages):
    archive = only(packages, "kvbm-cxl-[0-9]*.tgz")
    with charts.helm().Chart.load(str(archive)) as chart:
        assert any(name.endswith("NOTES.txt") for name in chart.render({}, name="rack", namespace="serving"))


def test_deb_and_rpm_ask_for_the_c_library_of_the_programs(packages):
    needed = subprocess.run(["objdump", "-T", ROOT / "target/release/cxlctl"], capture_output=True, text=True, check=True).stdout
    newest = max(tuple(map(int, version.split("."))) for version in re.findall(r"GLIBC_([0-9.]+)", needed))
    said = subprocess.run(["dpkg-deb", "-f", only(packages, "*.deb"), "Depends"], capture_output=True, text=True, check=True).stdout
    asked = tuple(map(int, re.search(r"libc6 \(>= ([0-9.]+)\)", said)[1].split(".")))
    assert asked >= newest and "glibc" in rpm_header(only(packages, "*.rpm"))[REQUIRES]


def test_the_rpm_has_the_files_of_the_deb(packages, unpacked):
    header = rpm_header(only(packages, "*.rpm"))
    assert header[NAME] == ["kvbm-cxl-tools"]
    folders = [header[DIRNAMES][number] for number in header[DIRNUMBERS]]
    there = {f"{folder}{name}".lstrip("/") for folder, name in zip(folders, header[BASENAMES], strict=True)}
    assert {str(path.relative_to(unpacked)) for path in unpacked.rglob("*") if path.is_file()} <= there
