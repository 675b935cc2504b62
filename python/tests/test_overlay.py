# SPDX-License-Identifier: Apache-2.0
"""The folder for NIXL_PLUGIN_DIR, over an installation that is made up: no file but our own links is ever touched."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import wheels
from kvbm_cxl.nixl import NixlError, _overlay
from kvbm_cxl.nixl._installation import Installation

# As a program of its own: makes the folder again and again, and every time finds all in it.
MAKER = """
import sys
from pathlib import Path
from kvbm_cxl.nixl import _overlay
from kvbm_cxl.nixl._installation import Installation
site, plugin, folder = map(Path, sys.argv[1:])
_overlay.plugin_path = lambda: plugin
libraries = site / ".nixl_cu12.mesonpy.libs"
installation = Installation("nixl_cu12", "1", site, libraries, libraries / "plugins")
print("ready", flush=True)
sys.stdin.readline()
for number in range(600):
    # Twice each: links that are not there yet, and links that are.
    plugins = _overlay.make_overlay(installation, folder / str(number // 2))
    assert all((plugins / name).exists() for name in ("libplugin_UCX.so", "libplugin_CXL.so"))
"""


@pytest.fixture
def installation(tmp_path, monkeypatch):
    """NIXL as it is laid out, with files that say what they are."""
    site = tmp_path / "site"
    libraries = site / ".nixl_cu12.mesonpy.libs"
    names = [f".nixl_cu12.mesonpy.libs/{name}" for name in ("libnixl.so", "plugins/libplugin_UCX.so", "plugins/libplugin_POSIX.so")]
    for name in [*names, "nixl_cu12.libs/libucp.so", "plugin/libplugin_CXL.so"]:
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text(name)
    monkeypatch.setattr(_overlay, "plugin_path", lambda: site / "plugin" / "libplugin_CXL.so")
    return Installation("nixl_cu12", "1", site, libraries, libraries / "plugins")


def files(folder):
    """What lies below a folder: of files the text, of links the target."""
    found = (folder / name for top, folders, names in os.walk(folder) for name in [f"{top}/{name}" for name in [*folders, *names]])
    return {path: os.readlink(path) if path.is_symlink() else path.read_text() for path in found if path.is_symlink() or path.is_file()}


def test_links_lead_to_nixl_and_are_left_as_they_are(installation, tmp_path):
    plugins = _overlay.make_overlay(installation, tmp_path / "overlay")
    assert sorted(path.name for path in plugins.iterdir()) == ["libplugin_CXL.so", "libplugin_POSIX.so", "libplugin_UCX.so"]
    assert (plugins.parent / "libnixl.so").read_text().endswith("libnixl.so")
    assert (tmp_path / "overlay" / "nixl_cu12.libs" / "libucp.so").exists()
    made = {path: path.lstat().st_ino for path in files(tmp_path / "overlay")}
    stale = plugins / "libplugin_UCX.so"
    stale.unlink()
    stale.symlink_to(tmp_path / "older")
    assert _overlay.make_overlay(installation, tmp_path / "overlay") == plugins and stale.exists()
    again = {path: path.lstat().st_ino for path in files(tmp_path / "overlay")}
    assert set(again) == set(made) and all(made[path] == again[path] for path in made if path != stale)


def test_the_folder_is_told_from_the_root(installation, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plugins = _overlay.make_overlay(installation, Path("overlay"))
    assert plugins == tmp_path / "overlay" / installation.libraries.name / "plugins"
    assert (plugins / "libplugin_CXL.so").exists()


def test_a_user_without_a_home_is_told_what_to_do(installation, monkeypatch):
    def no_entry(_):
        raise KeyError("uid not found")

    monkeypatch.setattr("pwd.getpwuid", no_entry)
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(NixlError, match="no home.*--into"):
        _overlay.default_folder(installation)
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert _overlay.default_folder(installation) == Path("/somewhere/kvbm-cxl/nixl-nixl_cu12-1")


def test_two_processes_make_it_at_the_same_time(installation, tmp_path):
    arguments = [installation.site, installation.site / "plugin" / "libplugin_CXL.so", tmp_path / "overlay"]
    paths = [str(wheels.ROOT / "python"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    command, pipe = [sys.executable, "-c", MAKER, *map(str, arguments)], subprocess.PIPE
    makers = [subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, stderr=pipe, text=True) for _ in range(2)]
    for maker in makers:
        maker.stdout.readline()
    for maker in makers:
        # One that failed before this says why below.
        with contextlib.suppress(BrokenPipeError):
            maker.stdin.write("go\n")
            maker.stdin.flush()
    said = [maker.communicate(timeout=120)[1] for maker in makers]
    assert [maker.returncode for maker in makers] == [0, 0], said
    assert not [path for path in files(tmp_path / "overlay") if not path.is_symlink() or path.name.startswith(".lib")]


@pytest.mark.parametrize("way", ["itself", "through a link"])
def test_nixl_itself_is_never_changed(installation, tmp_path, way):
    folder = installation.site
    if way == "through a link":
        folder = tmp_path / "folder"
        folder.mkdir()
        (folder / installation.libraries.name).symlink_to(installation.libraries)
    before = files(installation.site)
    with pytest.raises(NixlError, match="holds NIXL itself.*--into"):
        _overlay.make_overlay(installation, folder)
    assert files(installation.site) == before


def test_the_file_of_another_program_is_never_replaced(installation, tmp_path):
    mine = tmp_path / "folder" / installation.libraries.name / "plugins" / "libplugin_UCX.so"
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    with pytest.raises(NixlError, match="no link of ours.*--into"):
        _overlay.make_overlay(installation, tmp_path / "folder")
    assert mine.read_text() == "mine"
