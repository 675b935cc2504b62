# SPDX-License-Identifier: Apache-2.0
"""Where several builds of NIXL are installed, the one that `import nixl` chooses is the one that has to fit."""

import sys

import pytest
from kvbm_cxl import cli, nixl
from kvbm_cxl.nixl import NixlNotFound, _manager, _overlay


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Both builds, made up, and the package that chooses the older one."""
    for package in ("nixl_cu12", "nixl_cu13"):
        (tmp_path / f".{package}.mesonpy.libs" / "plugins").mkdir(parents=True)
        (tmp_path / f".{package}.mesonpy.libs" / "libnixl.so").touch()
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").touch()
    (tmp_path / "nixl").mkdir()
    (tmp_path / "nixl" / "__init__.py").write_text("import nixl_cu12\n")
    # Something that loads anywhere stands in for the plugin.
    monkeypatch.setattr(_manager, "plugin_path", lambda: "libc.so.6")
    known = [name for name in sys.modules if name.partition(".")[0] in ("nixl", "nixl_cu12", "nixl_cu13")]
    for name in known:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in ("nixl", "nixl_cu12", "nixl_cu13"):
        sys.modules.pop(name, None)


@pytest.mark.usefixtures("installed")
def test_the_build_that_is_chosen_has_to_fit(monkeypatch):
    checked = []
    monkeypatch.setattr(_manager, "check", lambda installation: checked.append(installation.package))
    with pytest.raises(NixlNotFound, match="plugin manager"):
        _manager.enable()
    assert set(checked) == {"nixl_cu12"}


@pytest.mark.usefixtures("installed")
def test_commands_are_about_the_build_that_is_chosen(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(nixl, "check", lambda installation: [installation.package])
    monkeypatch.setattr(_manager, "check", lambda installation: None)
    monkeypatch.setattr(nixl, "plugin_path", lambda: "libc.so.6")
    monkeypatch.setattr(_overlay, "plugin_path", lambda: tmp_path / "libplugin_CXL.so")
    assert cli.main(["nixl-plugin-dir", "--into", str(tmp_path / "folder")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'folder' / '.nixl_cu12.mesonpy.libs' / 'plugins'}\n"
    for name in ("nixl", "nixl_cu12"):
        sys.modules.pop(name)
    assert cli.main(["nixl-check"]) == 1, "nothing of these builds can be loaded"
    assert "(nixl_cu12)" in capsys.readouterr().out


def test_nixl_itself_decides_where_both_are_imported(installed, monkeypatch):
    import nixl_cu12
    import nixl_cu13

    assert nixl_cu12 is not nixl_cu13
    monkeypatch.setitem(sys.modules, "nixl._api", type(sys)("nixl_cu12._api"))
    assert nixl.find().package == "nixl_cu12"
    monkeypatch.setitem(sys.modules, "nixl._api", type(sys)("nixl_cu13._api"))
    assert (nixl.find().package, nixl.find().site) == ("nixl_cu13", installed)


def test_nothing_is_guessed_where_nothing_chooses(installed):
    (installed / "nixl" / "__init__.py").unlink()
    (installed / "nixl").rmdir()
    # Another one may lie behind it on the path; this one is as if there were none.
    sys.modules["nixl"] = None
    with pytest.raises(NixlNotFound, match="nixl_cu13 and nixl_cu12 are installed.*import the one"):
        nixl.find()
    import nixl_cu12

    assert nixl.find().package == nixl_cu12.__name__


def test_another_build_is_not_none_at_all(installed, monkeypatch):
    """As with a build for other GPUs."""
    for package in ("nixl_cu12", "nixl_cu13"):
        (installed / package / "__init__.py").unlink()
        (installed / package).rmdir()
    monkeypatch.setattr(sys, "path", [str(installed)])
    with pytest.raises(NixlNotFound, match="nixl is installed, but none of nixl_cu13 and nixl_cu12"):
        nixl.find()


def test_a_choice_that_cannot_be_imported_says_why(installed):
    (installed / "nixl" / "__init__.py").write_text("import nixl_cu14\n")
    with pytest.raises(NixlNotFound, match="cannot be imported.*nixl_cu14"):
        nixl.find()
    (installed / "nixl" / "__init__.py").write_text("")
    with pytest.raises(NixlNotFound, match="chose none of nixl_cu13 and nixl_cu12"):
        nixl.find()
