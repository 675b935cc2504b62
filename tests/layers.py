# SPDX-License-Identifier: Apache-2.0
"""Which file of the pool uses which, read from its `use` lines and paths, and the layers in which the modules lie."""

import re
from pathlib import PurePosixPath

from rust_text import line_of, masked, without_tests
from tidy import is_test_code

SOURCES = "kvbm_cxl/pool/src/"
ROOT_FILE = SOURCES + "lib.rs"  # its table of layers is the one that counts
PAGE = "docs/architecture.md"
C_SOURCES = "kvbm_cxl/capi/src/"
MAX_CIRCLE_FILES = 2
# Larger circles that are known, by the first names of their files; a new one has no place here.
KNOWN_CIRCLES = {("host", "lock"): 5, ("copy",): 4}

_TOKEN = re.compile(r"\s*(::|[{},*;]|\bas\s+\w+|\w+)")
_PATH = re.compile(r"(?<![\w:$])(?:crate|super|self)\s*::")


def _names(text, position):
    """The paths of the use tree, or the one path, at `position`, each as a list of names; and where it ends."""
    head, found = [], []
    while match := _TOKEN.match(text, position):
        token = match[1]
        if token == "{":
            position = match.end()
            while (match := _TOKEN.match(text, position)) and match[1] != "}":
                if match[1] == ",":
                    position = match.end()
                    continue
                inner, after = _names(text, position)
                if after == position:
                    break
                found += [head + names for names in inner]
                position = after
            return found, match.end() if match else position
        if token.startswith("as "):
            position = match.end()
            break
        if token in ("}", ",", ";") or (head and not follows_path):
            break
        position = match.end()
        follows_path = token == "::"
        if token not in ("::", "*"):
            head.append(token)
            follows_path = bool(re.match(r"\s*::", text[position:]))
    return [head], position


def stated(text):
    """The layers of the table in `text`, Markdown or the comment of a module, from the bottom: tuples of module names."""
    rows = []
    for line in text.partition("| layer | what it does |")[2].splitlines()[2:]:
        cells = line.removeprefix("//! ").split(" | ")
        if not cells[0].startswith("| "):
            break
        rows.append(tuple(re.findall(r"`(\w+)`", cells[0])))
    return rows[::-1]


def module_of(path, root=SOURCES):
    """The module that a file holds, as a tuple: ("cache", "pull", "pins"); empty for the crate's root."""
    parts = PurePosixPath(path.removeprefix(root)).with_suffix("").parts
    return tuple(part for part in parts if part not in ("mod", "lib"))


def arrows(files, root=SOURCES):
    """{(module, used module): line}, over the files (path, text) of the crate that are no test code; both as tuples of names."""
    files = [(path, text) for path, text in files if path.startswith(root) and path.endswith(".rs") and not is_test_code(path)]
    modules = {module_of(path, root): path for path, _ in files}
    found = {}
    for path, text in files:
        own = module_of(path, root)
        code = without_tests(masked(text))
        for match in _PATH.finditer(code):
            for names in _names(code, match.start())[0]:
                base = ()
                if names[0] != "crate":
                    base = own
                    while names and names[0] in ("super", "self"):
                        base = base[:-1] if names[0] == "super" else base
                        names = names[1:]
                else:
                    names = names[1:]
                target = base + tuple(names)
                while target and target not in modules:
                    target = target[:-1]
                if target != own:
                    found.setdefault((own, target), line_of(code, match.start()))
    return found


def upward(files, layers):
    """(module, line, reason) for each use of a higher layer or of a name of `lib.rs`, and for each module that is in no layer."""
    height = {name: level for level, names in enumerate(layers) for name in names}
    for (own, used), line in sorted(arrows(files).items()):
        for module in (own, used):
            if module and module[0] not in height:
                yield "::".join(module), line, f"is in no layer: add it to the table in {ROOT_FILE}"
        if own and not used:
            yield "::".join(own), line, "uses what lib.rs names again: say the module, so that its layer shows"
        elif own and height.get(used[0], 0) > height.get(own[0], 0):
            yield "::".join(own), line, f"uses {'::'.join(used)} of a higher layer"


def circles(files, root=SOURCES):
    """Sets of modules that reach each other, largest first. A module and those inside it are one idea: use of an ancestor is no arrow."""
    after = {}
    for own, used in arrows(files, root):
        if used and own[: len(used)] != used:
            after.setdefault(own, set()).add(used)
    order, seen = [], set()

    def visit(start, graph, out):
        stack = [(start, iter(sorted(graph.get(start, ()))))]
        seen.add(start)
        while stack:
            node, rest = stack[-1]
            step = next((other for other in rest if other not in seen), None)
            if step is None:
                out.append(node)
                stack.pop()
            else:
                seen.add(step)
                stack.append((step, iter(sorted(graph.get(step, ())))))

    nodes = sorted(set(after) | {used for targets in after.values() for used in targets})
    for node in nodes:
        if node not in seen:
            visit(node, after, order)
    before = {}
    for own, targets in after.items():
        for used in targets:
            before.setdefault(used, set()).add(own)
    seen.clear()
    found = []
    for node in reversed(order):
        if node not in seen:
            circle = []
            visit(node, before, circle)
            if len(circle) > 1:
                found.append(sorted(circle))
    return sorted(found, key=len, reverse=True)


def large_circles(files):
    """Circles of the pool and of its C interface that have more files than they may."""
    found = [circle for root in (SOURCES, C_SOURCES) for circle in circles(files, root)]
    for circle in found:
        names = tuple(sorted({module[0] for module in circle}))
        if len(circle) > KNOWN_CIRCLES.get(names, MAX_CIRCLE_FILES):
            yield ["::".join(module) for module in circle]
