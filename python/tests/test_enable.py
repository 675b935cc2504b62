# SPDX-License-Identifier: Apache-2.0
"""The plugin is found, added to NIXL's, and loaded from there; each test in a process of its own."""

import shutil
import zipfile

import pytest
import wheels

UV = [wheels.ROOT / ".venv" / "bin" / "uv", "pip", "install", "--quiet", "--no-deps", "--no-index"]

AVAILABLE = """
import kvbm_cxl.nixl
print(kvbm_cxl.nixl.enable() == kvbm_cxl.nixl.enable() == kvbm_cxl.nixl.plugin_dir())
from nixl._api import nixl_agent, nixl_agent_config
agent = nixl_agent("one", nixl_agent_config(backends=[]))
print(sorted({"CXL", "UCX", "POSIX"} & set(agent.get_plugin_list())))
print("DRAM_SEG" in str(agent.get_plugin_mem_types("CXL")) or agent.get_plugin_mem_types("CXL"))
print(sorted(agent.get_plugin_params("CXL")))
"""


def test_the_package_needs_no_nixl(python):
    """Not even the part that finds it, until it is asked to."""
    code = "import sys, kvbm_cxl, kvbm_cxl.nixl; print([name for name in sys.modules if name.startswith('nixl')])"
    assert python(wheels.DEFAULT, "-c", code) == "[]\n"


def test_cxl_is_there_beside_the_others(python, wheel):
    same, names, *_ = python(wheel, "-c", AVAILABLE).splitlines()
    assert (same, names) == ("True", "['CXL', 'POSIX', 'UCX']")


def test_the_options_have_defaults(python, wheel):
    *_, memory, options = python(wheel, "-c", AVAILABLE).splitlines()
    assert memory == "True" and "'pool'" in options


def test_check_says_what_it_found(python, wheel):
    text = python(wheel, "-m", "kvbm_cxl.cli", "nixl-check")
    assert f"NIXL {wheel} (nixl_cu12)" in text and "backend CXL can be loaded" in text


def test_a_folder_for_the_environment(python, wheel):
    """Plugins of both kinds are found in it, and UCX finds its libraries from there."""
    folder = python(wheel, "-m", "kvbm_cxl.cli", "nixl-plugin-dir").strip()
    assert folder == python(wheel, "-m", "kvbm_cxl.cli", "nixl-plugin-dir").strip(), "made twice, the same"
    code = """
from nixl._api import nixl_agent, nixl_agent_config
agent = nixl_agent("one", nixl_agent_config(backends=["UCX", "POSIX"]))
print(sorted({"CXL", "UCX", "POSIX"} & set(agent.get_plugin_list())), sorted(agent.backends), bool(agent.get_plugin_params("CXL")))
"""
    assert python(wheel, "-c", code, NIXL_PLUGIN_DIR=folder) == "['CXL', 'POSIX', 'UCX'] ['POSIX', 'UCX'] True\n"


def test_the_bare_folder_holds_our_plugin(python):
    folder = python(wheels.DEFAULT, "-m", "kvbm_cxl.cli", "nixl-plugin-dir", "--bare").strip()
    assert folder == str(wheels.ROOT / "target" / "nixl_plugin")


def test_without_nixl_the_reason_is_said(python, tmp_path):
    """-S leaves the packages of the environment out."""
    [site] = (wheels.ROOT / ".venv").glob("lib/python3*/site-packages")
    (tmp_path / "elftools").symlink_to(site / "elftools")
    code = f"import sys; sys.path.append({str(tmp_path)!r}); from kvbm_cxl.cli import main; sys.exit(main(['nixl-check']))"
    assert "NIXL is not installed" in python(wheels.DEFAULT, "-S", "-c", code, expect=1)


def test_a_plugin_that_cannot_be_loaded_is_said_to_be(python, tmp_path):
    shutil.copytree(wheels.ROOT / "python" / "kvbm_cxl", tmp_path / "kvbm_cxl")
    (tmp_path / "kvbm_cxl" / "lib").mkdir()
    (tmp_path / "kvbm_cxl" / "lib" / "libplugin_CXL.so").write_bytes(b"\x7fELF is not all of it")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from kvbm_cxl.cli import main; sys.exit(main(['nixl-check']))"
    assert "the plugin cannot be loaded on this system" in python(wheels.DEFAULT, "-c", code, expect=1)


@pytest.mark.usefixtures("plugin_wheel")
class TestWheel:
    """What `make python-package` builds."""

    @pytest.fixture(scope="class")
    @classmethod
    def plugin_wheel(cls, tmp_path_factory):
        import subprocess

        folder = tmp_path_factory.mktemp("wheel")
        subprocess.run(["scripts/python-package", str(folder)], cwd=wheels.ROOT, check=True, capture_output=True, timeout=600)
        [cls.wheel] = folder.glob("kvbm_cxl-*.whl")

    def test_it_is_for_this_platform_and_any_python_of_the_stable_abi(self):
        assert "-cp311-abi3-linux_" in self.wheel.name

    def test_it_carries_programs_libraries_and_types(self):
        with zipfile.ZipFile(self.wheel) as archive:
            names = set(archive.namelist())
            text = "".join(archive.read(name).decode() for name in names if name.endswith((".txt", "METADATA", ".json")))
        carried = ("bin/cxlctl", "bin/cxl-plan", "lib/libplugin_CXL.so", "lib/libcxl_shm.so", "_native.abi3.so", "_native.pyi", "py.typed")
        assert {f"kvbm_cxl/{name}" for name in carried} <= names
        assert "kvbm_cxl.vllm_integration:register" in text and "cxlctl=kvbm_cxl.programs:cxlctl" in text.replace(" ", "")
        assert "cxl-plan=kvbm_cxl.programs:cxl_plan" in text.replace(" ", "")
        assert str(wheels.ROOT) not in text, "nothing tells of the machine that built it"

    def test_its_programs_and_module_work(self, tmp_path):
        import subprocess
        import sys

        target = tmp_path / "site"
        subprocess.run([*UV, "--target", str(target), str(self.wheel)], check=True, capture_output=True, timeout=120)
        environment = {"PYTHONPATH": str(target), "PATH": "/usr/bin:/bin"}
        for name in ("cxlctl", "cxl-plan"):
            call = f"kvbm_cxl.programs.{name.replace('-', '_')}()"
            code = f"import sys, kvbm_cxl, kvbm_cxl.programs; kvbm_cxl.Namespace; sys.argv[1:] = ['--version']; {call}"
            run = subprocess.run([sys.executable, "-c", code], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=60)
            assert run.stdout.startswith(f"{name} ") and run.returncode == 0, run.stdout + run.stderr

    def test_it_carries_the_plugin_and_finds_it(self, python, tmp_path):
        with zipfile.ZipFile(self.wheel) as archive:
            archive.extractall(tmp_path)
        code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import kvbm_cxl.nixl; print(kvbm_cxl.nixl.enable())"
        assert python(wheels.DEFAULT, "-c", code) == f"{tmp_path / 'kvbm_cxl' / 'lib'}\n"
