# SPDX-License-Identifier: Apache-2.0
"""Where several builds of NIXL are installed, the one that `import nixl` chooses is the one that has to fit."""

import sys

import pytest
from kvbm_cxl.nixl import NixlNotFound, _manager


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
    yield
    for name in ("nixl", "nixl_cu12", "nixl_cu13"):
        sys.modules.pop(name, None)


@pytest.mark.usefixtures("installed")
def test_the_build_that_is_chosen_has_to_fit(monkeypatch):
    checked = []
    monkeypatch.setattr(_manager, "check", lambda installation: checked.append(installation.package))
    with pytest.raises(NixlNotFound, match="plugin manager"):
        _manager.enable()
    assert set(checked) == {"nixl_cu12"}
