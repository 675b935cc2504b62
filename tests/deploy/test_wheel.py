# SPDX-License-Identifier: Apache-2.0
"""The wheels as they ship: which systems they run on, and that they do.

`make python-package` makes one for this machine, `make wheels` those for manylinux_2_28. What needs a wheel or a tool that was not made is
skipped with the reason."""

import email
import os
import re
import shutil
import subprocess
import sys
import zipfile

import charts
import pytest
import yaml
from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerNeedSection

CROSS = charts.ROOT / ".venv" / "cross"
# Dynamo's and vLLM's images have a later C library than either: that of the wheel for this machine, and that of `make wheels`.
HERE, MANYLINUX = (2, 34), (2, 28)
MACHINES = {"x86_64": "EM_X86_64", "aarch64": "EM_AARCH64"}
FILES = {"_native.abi3.so", "lib/libplugin_CXL.so", "lib/libcxl_malloc.so", "lib/libcxl_shm.so", "bin/cxlctl", "bin/cxl-plan"}
# Those of the C library and of GCC that every system has.
LIBRARIES = re.compile(r"lib(c|m|dl|rt|pthread)\.so\.\d|libgcc_s\.so\.1|ld-linux-(x86-64|aarch64)\.so\.\d")
EXPORTS = {
    "lib/libplugin_CXL.so": {"nixl_plugin_init", "nixl_plugin_fini"},
    "lib/libcxl_malloc.so": {"free", "memset", "posix_memalign"},
    "_native.abi3.so": {"PyInit__native"},
}


def run(*command, timeout=300, **environment):
    """What a command says, without this process's own pool and Python path. It has to end well."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("CXL_", "PYTHON", "NIXL_"))}
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=timeout, env={**kept, **environment})
    assert done.returncode == 0, f"{command}: exit {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def audited(wheel):
    """(major, minor) of the oldest glibc that auditwheel finds the wheel to run with. It brings no library that the system or NIXL has."""
    command = [sys.executable, "-m", "auditwheel", "show", wheel]
    told = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout
    found = re.search(r'platform tag:\s*"manylinux_(\d+)_(\d+)_(?:x86_64|aarch64)"', told)
    assert found and "external shared libraries" not in told, told
    return int(found[1]), int(found[2])


def test_the_wheel_needs_no_later_c_library_than_documented():
    wheels = sorted((charts.ROOT / "target/wheels").glob("kvbm_cxl-*.whl"))
    if not wheels:
        pytest.skip("no wheel in target/wheels: run make python-package")
    assert audited(wheels[-1]) <= HERE
    assert f"glibc {HERE[0]}.{HERE[1]}" in (charts.ROOT / "python/README.md").read_text()


def test_the_wheel_says_what_it_is(tmp_path):
    wheels = sorted((charts.ROOT / "target/wheels").glob(f"kvbm_cxl-{charts.version()}-*.whl"))
    if not wheels:
        pytest.skip("no wheel of this version in target/wheels: run make python-package")
    with zipfile.ZipFile(wheels[-1]) as wheel:
        about = email.message_from_bytes(wheel.read(f"kvbm_cxl-{charts.version()}.dist-info/METADATA"))
        licence = wheel.read(f"kvbm_cxl-{charts.version()}.dist-info/licenses/{about['License-File']}")
        commit = wheel.read("kvbm_cxl/commit").decode().strip()
        wheel.extractall(tmp_path)
    assert about["License-Expression"] == "Apache-2.0" and licence == (charts.ROOT / "LICENSE").read_bytes()
    assert about["Author"] == "The kvbm-cxl authors"
    chart = yaml.safe_load((charts.CHART / "Chart.yaml").read_text())
    assert dict(url.split(", ") for url in about.get_all("Project-URL")).keys() == {"Source", "Documentation"}
    assert f"Source, {chart['home']}" in about.get_all("Project-URL")
    assert {"Operating System :: POSIX :: Linux", "Programming Language :: Rust"} < set(about.get_all("Classifier"))
    assert re.fullmatch(r"[0-9a-f]{12}(-dirty)?", commit)
    assert run(sys.executable, "-c", "import kvbm_cxl; print(kvbm_cxl.__commit__)", PYTHONPATH=str(tmp_path)).strip() == commit


def manylinux(architecture):
    """The wheel that `make wheels` made."""
    found = list((charts.ROOT / "target/manylinux/wheels").glob(f"kvbm_cxl-*_{architecture}.whl"))
    if not found:
        pytest.skip(f"no wheel for {architecture} in target/manylinux/wheels: run make wheels")
    (wheel,) = found
    return wheel


@pytest.fixture(params=MACHINES)
def architecture(request):
    return request.param


@pytest.fixture
def unpacked(architecture, tmp_path):
    """The folder kvbm_cxl of a wheel, with the programs executable."""
    return unpack(architecture, tmp_path / "wheel")


def unpack(architecture, folder):
    with zipfile.ZipFile(manylinux(architecture)) as wheel:
        wheel.extractall(folder)
    for program in (folder / "kvbm_cxl/bin").iterdir():
        program.chmod(0o755)
    return folder / "kvbm_cxl"


def test_auditwheel_finds_manylinux_2_28(architecture):
    wheel = manylinux(architecture)
    assert audited(wheel) <= MANYLINUX
    assert wheel.name.endswith(f"-cp311-abi3-manylinux_{MANYLINUX[0]}_{MANYLINUX[1]}_{architecture}.whl")
    assert f"glibc {MANYLINUX[0]}.{MANYLINUX[1]}" in (charts.ROOT / "python/README.md").read_text()


def test_every_file_is_for_the_machine_and_old_enough(architecture, unpacked):
    """Each one by itself, so that a failure names it."""
    files = [path for path in unpacked.rglob("*") if path.is_file()]
    assert {str(path.relative_to(unpacked)) for path in files if path.read_bytes()[:4] == b"\x7fELF"} == FILES
    for name in FILES:
        with (unpacked / name).open("rb") as file:
            elf = ELFFile(file)
            assert elf["e_machine"] == MACHINES[architecture], name
            needed = [tag.needed for tag in elf.get_section_by_name(".dynamic").iter_tags() if tag.entry.d_tag == "DT_NEEDED"]
            assert needed and [library for library in needed if not LIBRARIES.fullmatch(library)] == [], name
            # Versions of the symbols that it takes: of GCC's unwinder and the C library. The plugin has libstdc++ in itself.
            (needs,) = [section for section in elf.iter_sections() if isinstance(section, GNUVerNeedSection)]
            versions = {version.name for _, wanted in needs.iter_versions() for version in wanted}
            assert {version.split("_")[0] for version in versions} <= {"GLIBC", "GCC"}, (name, versions)
            glibc = [tuple(map(int, version[6:].split("."))) for version in versions if version.startswith("GLIBC_")]
            assert glibc and max(glibc) <= MANYLINUX, (name, versions)
            if name in EXPORTS:
                symbols = elf.get_section_by_name(".dynsym").iter_symbols()
                defined = [symbol for symbol in symbols if symbol["st_shndx"] != "SHN_UNDEF"]
                assert {symbol.name for symbol in defined if symbol["st_info"]["bind"] != "STB_LOCAL"} == EXPORTS[name]
            assert elf.get_section_by_name(".debug_info") is None, name


@pytest.fixture(scope="module")
def fresh(tmp_path_factory):
    """The Python of a new environment with the wheel for x86_64 alone, installed as a user does."""
    wheel, folder = manylinux("x86_64"), tmp_path_factory.mktemp("fresh")
    uv = charts.ROOT / ".venv/bin/uv"
    run(uv, "venv", "--quiet", "--offline", "--python", sys.executable, folder / "venv")
    run(uv, "pip", "install", "--quiet", "--offline", "--no-deps", "--no-index", "--python", folder / "venv/bin/python", wheel)
    return folder / "venv/bin/python"


def test_two_processes_exchange_blocks(fresh, tmp_path):
    where = run(fresh, "-c", "import kvbm_cxl; print(kvbm_cxl.__file__)")
    assert str(fresh.parents[1]) in where
    assert run(fresh, charts.ROOT / "examples/python/publish_pull.py").split() == "published 65536 bytes pulled 65536 bytes".split()
    said = run(fresh.parent / "cxlctl", "demo", "--pool", f"{tmp_path}/pool,size=64M")
    assert "every byte verified" in said


def test_the_plugin_loads_in_nixl(fresh):
    """Two agents in two processes read blocks through it. NIXL and numpy come from the environment of the checkout."""
    (site,) = (charts.ROOT / ".venv").glob("lib/python3*/site-packages")
    if not (site / "nixl/__init__.py").is_file():
        pytest.skip("NIXL is not installed: make setup-nixl")
    said = run(fresh, charts.ROOT / "examples/nixl/two_agents.py", PYTHONPATH=str(site))
    assert "read 2621440 bytes in 128 blocks" in said


def test_programs_and_libraries_on_an_older_system(tmp_path):
    """The C library of Debian 11 (2.31), the oldest one that is to be had: 2.28 itself has not run."""
    old = CROSS / "old/root"
    if not os.path.lexists(old / "lib64/ld-linux-x86-64.so.2"):
        pytest.skip("no older C library: make setup-cross")
    isolated = ["unshare", "--map-root-user", "--mount"]
    if subprocess.run([*isolated, "true"], capture_output=True, timeout=60).returncode:
        pytest.skip("no namespaces here, in which another C library could be the system's")
    package = unpack("x86_64", tmp_path / "wheel")
    root = tmp_path / "root"
    shutil.copytree(old, root, symlinks=True)
    for folder in ("proc", "tmp", "dev/shm", "sys"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    shutil.copytree(package, root / "kvbm_cxl")
    mounts = "".join(f"mount --rbind /{folder} {root}/{folder} && " for folder in ("proc", "dev", "sys"))

    def inside(*command, **environment):
        return run(*isolated, "sh", "-c", f'{mounts}exec chroot {root} "$@"', "sh", *command, CXL_STATE_DIR="/tmp/state", **environment)

    assert "GLIBC 2.31" in inside("/lib64/ld-linux-x86-64.so.2", "/lib/x86_64-linux-gnu/libc.so.6")
    # Two hosts, every byte verified.
    said = inside("/kvbm_cxl/bin/cxlctl", "demo", "--pool", "/tmp/pool,size=64M", timeout=600)
    assert "every byte verified" in said
    # Every symbol of the libraries is found at once, and what they do when they are loaded goes well.
    libraries = " ".join(f"/kvbm_cxl/lib/{name}" for name in ("libcxl_shm.so", "libplugin_CXL.so", "libcxl_malloc.so"))
    assert "cxlctl" in inside("/kvbm_cxl/bin/cxlctl", "--version", LD_BIND_NOW="1", LD_PRELOAD=libraries)
    assert "Usage" in inside("/kvbm_cxl/bin/cxl-plan", "--help")


@pytest.fixture
def arm(tmp_path):
    """Runs a program of Debian for aarch64, or of the wheel, under qemu-user."""
    qemu, root = CROSS / "gcc/root/usr/bin/qemu-aarch64-static", CROSS / "arm64/root"
    if not (qemu.exists() and (root / "usr/bin/python3.11").exists()):
        pytest.skip("no qemu-user or no Python for aarch64: make setup-cross. The wheel for aarch64 was never run")
    package = unpack("aarch64", tmp_path / "wheel")

    def call(program, *arguments, **environment):
        # Its own processor flushes lines of 32 bytes, which the pool refuses.
        named = {"PYTHONPATH": str(package.parent), "CXL_STATE_DIR": str(tmp_path / "state"), "QEMU_CPU": "neoverse-n1", **environment}
        program = package / program if (package / program).exists() else root / program
        return run(qemu, "-L", root, program, *arguments, **named)

    return call


def test_programs_for_aarch64_run(arm):
    assert arm("bin/cxlctl", "--version").split()[:2] == ["cxlctl", charts.version()]
    assert "Usage" in arm("bin/cxl-plan", "--help")


def test_the_module_for_aarch64_formats_a_pool(arm, tmp_path):
    """Blocks are not exchanged: under qemu-user the second process to open a cache waits in vain for a lock, in half of the runs."""
    pool, python = tmp_path / "pool", "usr/bin/python3.11"
    assert arm(python, "-c", "import platform; print(platform.machine())").strip() == "aarch64"
    arm(python, "-c", f"import kvbm_cxl; kvbm_cxl.format_pool('{pool},size=64M', cells='64K:75%')")
    assert pool.stat().st_size == 64 << 20
    told = arm("bin/cxlctl", "info", "--pool", pool)
    assert "64" in told
    key = "import kvbm_cxl; print(bytes(kvbm_cxl.chain_key(None, range(16))).hex())"
    assert arm(python, "-c", key) == run(sys.executable, "-c", key, PYTHONPATH=str(charts.ROOT / "python"))


def test_libraries_for_aarch64_load(arm):
    """The plugin finds every symbol, and refuses what is no NIXL as it does elsewhere: no NIXL for aarch64 was there to load it."""
    lines = ["import ctypes, os, kvbm_cxl", "lib = os.path.join(os.path.dirname(kvbm_cxl.__file__), 'lib')"]
    names = ("libcxl_shm.so", "libplugin_CXL.so", "libcxl_malloc.so")
    lines += [f"ctypes.CDLL(os.path.join(lib, '{name}'), os.RTLD_NOW)" for name in names]
    lines += ["plugin = ctypes.CDLL(os.path.join(lib, 'libplugin_CXL.so')).nixl_plugin_init"]
    lines += ["plugin.restype = ctypes.c_void_p", "print(bool(plugin()))"]
    assert arm("usr/bin/python3.11", "-c", "\n".join(lines)).strip() == "True"
