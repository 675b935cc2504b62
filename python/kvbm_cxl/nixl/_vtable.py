# SPDX-License-Identifier: Apache-2.0
"""Compares how the installed NIXL calls its plugins with what our plugin was built for.

NIXL checks one number, which stays the same when a virtual function is added to nixlBackendEngine: from then on it calls the wrong ones.
Its own plugins show which functions it has: each holds the table of the base class and those of its engines. Nothing is loaded for this.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from elftools.common.exceptions import ELFError
from elftools.elf.elffile import ELFFile

from ._abi import BASE, SLOTS
from ._errors import AbiMismatch
from ._installation import Installation, find

_WORD = 8
# Before the first function: the offset to the whole object, and the type information.
_BEFORE = 2
_DESTRUCTORS = 2
# Relocations of a word that is an address of a symbol, or of a place in the file, by machine.
_SYMBOLIC = {"EM_X86_64": 1, "EM_AARCH64": 257}
_RELATIVE = {"EM_X86_64": 8, "EM_AARCH64": 1027}
# Larger tables are none.
_MOST_SLOTS = 1024

Slot = tuple[bool, str, str]


@dataclass
class _Image:
    """The relevant parts of a shared library: addresses of its symbols, and the words that the loader writes."""

    places: dict[str, tuple[int, int]] = field(default_factory=dict)
    words: dict[int, str] = field(default_factory=dict)


def _read(path: Path) -> _Image:
    image = _Image()
    with path.open("rb") as file:
        elf = ELFFile(file)
        machine = elf["e_machine"]
        symbols, relocations = elf.get_section_by_name(".dynsym"), elf.get_section_by_name(".rela.dyn")
        if machine not in _SYMBOLIC or symbols is None or relocations is None:
            return image
        named, functions = [], {}
        for symbol in symbols.iter_symbols():
            named.append(symbol.name)
            if symbol["st_value"]:
                image.places[symbol.name] = (symbol["st_value"], symbol["st_size"])
                if symbol["st_info"]["type"] == "STT_FUNC":
                    functions.setdefault(symbol["st_value"], symbol.name)
        for entry in relocations.iter_relocations():
            kind, index = entry["r_info_type"], entry["r_info_sym"]
            if kind == _SYMBOLIC[machine] and index < len(named):
                image.words[entry["r_offset"]] = named[index]
            elif kind == _RELATIVE[machine] and entry["r_addend"] in functions:
                image.words[entry["r_offset"]] = functions[entry["r_addend"]]
    return image


def _table(image: _Image, name: str) -> list[str | None]:
    """The functions of a class's table, destructors included; None where it is not known which."""
    place, size = image.places.get(f"_ZTV{name}", (0, 0))
    count = min(size // _WORD, _MOST_SLOTS) - _BEFORE
    return [image.words.get(place + (_BEFORE + index) * _WORD) for index in range(max(0, count))]


def _is_engine(image: _Image, name: str) -> bool:
    """Whether a class derives from nixlBackendEngine, by its type information."""
    seen: set[str] = set()
    while name not in seen:
        seen.add(name)
        place, size = image.places.get(f"_ZTI{name}", (0, 0))
        if size < 3 * _WORD:
            return False
        name = (image.words.get(place + 2 * _WORD) or "").removeprefix("_ZTI")
        if name == BASE:
            return True
    return False


def _slot(symbol: str | None) -> Slot | None:
    """What a function in a table is, whichever class it is of; None where the symbol does not tell."""
    match = re.fullmatch(r"_ZN(K?)(\d+)(\w+)", symbol or "")
    if not match:
        return None
    rest = match[3][int(match[2]) :]
    inner = re.match(r"(\d+)(?=[A-Za-z_])", rest)
    if not inner:
        return None
    name = rest[inner.end() :][: int(inner[1])]
    return bool(match[1]), name, rest[inner.end() + len(name) :]


def _describe(slot: Slot) -> str:
    return f"{slot[1]} ({slot[2]}{', const' if slot[0] else ''})"


def _confirm(path: Path) -> set[int]:
    """Which slots one plugin confirms. Raises AbiMismatch at one that is different."""
    image = _read(path)
    base = _table(image, BASE)
    if not base:
        return set()
    if len(base) != _DESTRUCTORS + len(SLOTS):
        raise AbiMismatch(f"{path}: nixlBackendEngine has {len(base) - _DESTRUCTORS} virtual functions, not {len(SLOTS)}")
    engines = [name.removeprefix("_ZTV") for name in image.places if name.startswith("_ZTV")]
    tables = [base, *(_table(image, name) for name in engines if _is_engine(image, name))]
    confirmed = set()
    for table in tables:
        for index, symbol in enumerate(table[_DESTRUCTORS : _DESTRUCTORS + len(SLOTS)]):
            slot = _slot(symbol)
            if slot is None:
                continue
            if slot != SLOTS[index]:
                wanted = _describe(SLOTS[index])
                raise AbiMismatch(f"{path}: virtual function {index} of nixlBackendEngine is {_describe(slot)}, not {wanted}")
            confirmed.add(index)
    return confirmed


def _smallest_first(installation: Installation) -> Iterator[Path]:
    yield from sorted(installation.plugins.glob("libplugin_*.so"), key=lambda path: (path.stat().st_size, path))


def check(installation: Installation | None = None) -> list[str]:
    """Names of the plugins of the installed NIXL that show that our plugin fits it; raises AbiMismatch where it does not, or none shows it.

    Our own plugin, where it was copied to NIXL's, shows nothing and is left out.
    """
    installation = installation or find()
    missing, shown = set(range(len(SLOTS))), []
    advice = f"NIXL {installation.version} needs another version of kvbm-cxl, and the CXL backend stays out of it"
    for path in _smallest_first(installation):
        if path.name == "libplugin_CXL.so" or not missing:
            continue
        try:
            confirmed = _confirm(path)
        except AbiMismatch as error:
            raise AbiMismatch(f"{error}: {advice}") from None
        except (ELFError, OSError, ValueError, KeyError, UnicodeDecodeError):
            continue  # Not a library that can be read, so it shows nothing; the others may.
        if confirmed & missing:
            missing -= confirmed
            shown.append(path.stem.removeprefix("libplugin_"))
    if missing:
        names = ", ".join(dict.fromkeys(SLOTS[index][1] for index in sorted(missing)))
        raise AbiMismatch(f"no plugin in {installation.plugins} shows how NIXL calls {names}: {advice}")
    return shown
