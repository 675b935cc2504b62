# SPDX-License-Identifier: Apache-2.0
"""The guard takes the three versions of NIXL that the plugin is for, and refuses any whose virtual functions are other ones."""

import shutil
import struct
from dataclasses import replace
from pathlib import Path

import pytest
import wheels
from elftools.elf.elffile import ELFFile
from kvbm_cxl.nixl import AbiMismatch, Installation, check

POSIX = "libplugin_POSIX.so"


def installation_of(version):
    """An installed wheel, seen from outside of any process that has it."""
    site = wheels.folder(version)
    if version == wheels.DEFAULT:
        [site] = (wheels.ROOT / ".venv").glob("lib/python3*/site-packages")
    libraries = site / ".nixl_cu12.mesonpy.libs"
    return Installation("nixl_cu12", version, site, libraries, libraries / "plugins")


@pytest.fixture
def doctored(tmp_path):
    """An installation with POSIX as its only plugin, a copy that a test may change."""
    installation = installation_of(wheels.DEFAULT)
    shutil.copy(installation.plugins / POSIX, tmp_path)
    return replace(installation, plugins=tmp_path)


def symbol_entry(path, name):
    """Where in a file the entry of a dynamic symbol is, and its value."""
    with Path(path).open("rb") as file:
        table = ELFFile(file).get_section_by_name(".dynsym")
        for index, symbol in enumerate(table.iter_symbols()):
            if symbol.name == name:
                return table["sh_offset"] + index * table["sh_entsize"], symbol["st_value"], symbol["st_size"]
    raise AssertionError(f"{path} has no {name}")


def relocation_entry(path, place):
    """Where in a file the relocation of a word is."""
    with Path(path).open("rb") as file:
        table = ELFFile(file).get_section_by_name(".rela.dyn")
        for index, relocation in enumerate(table.iter_relocations()):
            if relocation["r_offset"] == place:
                return table["sh_offset"] + index * table["sh_entsize"]
    raise AssertionError(f"{path} has no relocation at {place:#x}")


def patch(path, offset, data):
    with Path(path).open("r+b") as file:
        file.seek(offset)
        file.write(data)


def swap(path, name, one, other):
    """Swaps what the loader writes to two slots of a class's table."""
    _, place, _ = symbol_entry(path, name)
    entries = [relocation_entry(path, place + (4 + slot) * 8) for slot in (one, other)]
    # What is relocated stays (8 bytes), by what it is relocated changes places (16 bytes).
    data = Path(path).read_bytes()
    infos = [data[entry + 8 : entry + 24] for entry in entries]
    patch(path, entries[0] + 8, infos[1])
    patch(path, entries[1] + 8, infos[0])


def test_the_installed_versions_fit(wheel):
    assert check(installation_of(wheel))


def test_one_plugin_is_enough(doctored):
    assert check(doctored) == ["POSIX"]


def test_swapped_functions_are_refused(doctored):
    swap(doctored.plugins / POSIX, "_ZTV15nixlPosixEngine", 9, 10)
    with pytest.raises(AbiMismatch, match="virtual function 9 of nixlBackendEngine is postXfer .*, not prepXfer .*another version"):
        check(doctored)


def test_swapped_functions_of_the_base_class_are_refused(doctored):
    swap(doctored.plugins / POSIX, "_ZTV17nixlBackendEngine", 21, 22)
    with pytest.raises(AbiMismatch, match="is genNotif .*, not getNotifs"):
        check(doctored)


def test_one_more_function_is_refused(doctored):
    """What a function inserted anywhere looks like: a longer table."""
    path = doctored.plugins / POSIX
    entry, _, size = symbol_entry(path, "_ZTV17nixlBackendEngine")
    patch(path, entry + 16, struct.pack("<Q", size + 8))
    with pytest.raises(AbiMismatch, match="26 virtual functions, not 25"):
        check(doctored)


def test_other_arguments_are_refused(doctored):
    """A function of the same name at the same place that takes something else."""
    path = doctored.plugins / POSIX
    data = path.read_bytes()
    name = b"_ZNK15nixlPosixEngine9checkXferEP15nixlBackendReqH\0"
    assert name in data
    path.write_bytes(data.replace(name, name.replace(b"EP15", b"EPK1")))
    with pytest.raises(AbiMismatch, match="checkXfer"):
        check(doctored)


@pytest.mark.parametrize("content", [b"", b"\x7fELF", b"no library", None], ids=["empty", "head", "text", "cut"])
def test_what_shows_nothing_is_refused(doctored, content):
    path = doctored.plugins / POSIX
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 3] if content is None else content)
    with pytest.raises(AbiMismatch, match="no plugin in .* shows how NIXL calls supportsRemote"):
        check(doctored)


def test_a_plugin_without_symbols_of_its_engine_is_not_enough(doctored):
    """Where the table of the engine itself cannot be read, only the functions of the base class are known."""
    path = doctored.plugins / POSIX
    data = path.read_bytes()
    path.write_bytes(data.replace(b"_ZTV15nixlPosixEngine\0", b"_ZTW15nixlPosixEngine\0"))
    with pytest.raises(AbiMismatch, match="shows how NIXL calls supportsRemote, .*releaseReqH: NIXL"):
        check(doctored)


def test_our_own_plugin_shows_nothing(doctored):
    shutil.move(doctored.plugins / POSIX, doctored.plugins / "libplugin_CXL.so")
    with pytest.raises(AbiMismatch, match="no plugin"):
        check(doctored)
