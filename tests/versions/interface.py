# SPDX-License-Identifier: Apache-2.0
"""The interfaces of other packages as this package uses them: read from sources, without importing anything.

`uses` reads our files: names that are imported, methods that are overridden, arguments of calls, attributes that are read. `offers` reads
one version of the other package and records what it has of them. `problems` compares the two. A record is one file of records/; a test
compares every record with the package as it is, so that a new use or a new version shows what does not fit.
"""

import ast
import json
import re
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OURS = ROOT / "python/kvbm_cxl"
RECORDS = Path(__file__).parent / "records"


@dataclass
class Uses:
    """What our files use of one package. Names are `module:name`."""

    names: set[str] = field(default_factory=set)
    overrides: dict[str, list[tuple[str, dict[str, dict]]]] = field(default_factory=dict)
    """Base class -> for each of our classes its place, and its methods' signatures."""
    calls: dict[str, list[tuple[str, int, list[str]]]] = field(default_factory=dict)
    """Callable -> for each call its place, the number of positional arguments, and the keywords. Calls with * or ** are left out."""
    attributes: dict[str, str] = field(default_factory=dict)
    """Attribute -> one place that reads it."""


def signature(function, is_method):
    """The parameters of a function: positional names, keyword-only names, how many have no default, whether it takes any others."""
    args = function.args
    positional = [each.arg for each in (*args.posonlyargs, *args.args)][is_method:]
    required = len(positional) - min(len(args.defaults), len(positional))
    more = [each.arg for each in args.kwonlyargs]
    needed = [name for name, default in zip(more, args.kw_defaults) if default is None]
    return {"args": positional, "required": required, "keywords": more, "needed": needed, "any": [bool(args.vararg), bool(args.kwarg)]}


def _is_static(function):
    return any(isinstance(each, ast.Name) and each.id == "staticmethod" for each in function.decorator_list)


def _methods(cls):
    return {each.name: each for each in cls.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)}


def _top(body):
    """Statements of a module's top level, through `if` and `try`."""
    for each in body:
        yield each
        for name in ("body", "orelse", "handlers", "finalbody"):
            if isinstance(each, ast.If | ast.Try | ast.ExceptHandler):
                yield from _top(getattr(each, name, ()))


def uses(package, folder=OURS):
    """What the files of `folder` use of a package."""
    found = Uses()
    for path in sorted(folder.rglob("*.py")):
        tree, place = ast.parse(path.read_text()), str(path.relative_to(folder))
        imported = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").split(".")[0] == package:
                imported |= {each.asname or each.name: f"{node.module}:{each.name}" for each in node.names}
        if not imported:
            continue
        # A guarded import of a name that one version lacks is no use that every version has to offer.
        guarded = {
            each.name
            for guard in ast.walk(tree) if isinstance(guard, ast.Try)
            for node in guard.body if isinstance(node, ast.ImportFrom) and any(
                isinstance(handler.type, ast.Name) and handler.type.id == "ImportError" for handler in guard.handlers)
            for each in node.names
        }  # fmt: skip
        found.names |= {name for name in imported.values() if name.partition(":")[2] not in guarded}
        for node in ast.walk(tree):
            at = f"{place}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.ClassDef):
                for base in node.bases:
                    if isinstance(base, ast.Name) and base.id in imported:
                        methods = {name: signature(each, not _is_static(each)) for name, each in _methods(node).items()}
                        found.overrides.setdefault(imported[base.id], []).append((at, methods))
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in imported:
                keywords = [each.arg for each in node.keywords]
                if None not in keywords and not any(isinstance(each, ast.Starred) for each in node.args):
                    found.calls.setdefault(imported[node.func.id], []).append((at, len(node.args), keywords))
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                found.attributes.setdefault(node.attr, at)
    return found


class Sources:
    """The files of one version of a package."""

    def __init__(self, root):
        self.root, self._trees = Path(root), {}

    def tree(self, module):
        """(parsed file, whether it is a package), or None."""
        if module not in self._trees:
            base = self.root.joinpath(*module.split("."))
            path = next((each for each in (base.with_suffix(".py"), base / "__init__.py") if each.is_file()), None)
            self._trees[module] = (ast.parse(path.read_text()), path.name == "__init__.py") if path else None
        return self._trees[module]

    def is_native(self, module):
        parent, _, name = module.rpartition(".")
        return any(self.root.joinpath(*parent.split(".")).glob(f"{name}.*.so"))

    def find(self, module, name, depth=8):
        """(module, node) that defines a name, through imports; None as the node of a native module or of a module by itself."""
        loaded = self.tree(module)
        if self.tree(f"{module}.{name}"):
            return f"{module}.{name}", None
        if loaded is None or not depth:
            return (module, None) if self.is_native(module) else None
        tree, is_package = loaded
        for node in _top(tree.body):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
                return module, node
            targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
            if any(isinstance(each, ast.Name) and each.id == name for each in targets):
                return module, node
            if isinstance(node, ast.ImportFrom):
                for each in node.names:
                    if name in (each.asname, each.name) and (each.asname or each.name) == name:
                        parts = module.split(".") if is_package else module.split(".")[:-1]
                        parts = parts[: len(parts) - node.level + 1] if node.level else []
                        origin = ".".join([*parts, *([node.module] if node.module else [])])
                        # Another package defines it: its own record covers it.
                        return self.find(origin, each.name, depth - 1) or (None if self.tree(origin) else (origin, None))
        return None

    def class_of(self, module, node, depth=8):
        """What a class offers: methods with signatures, abstract ones, fields in order, through its bases."""
        methods, abstract, fields = {}, set(), {}
        for base in node.bases:
            found = self.find(module, base.id) if isinstance(base, ast.Name) and depth else None
            if found and isinstance(found[1], ast.ClassDef):
                inherited = self.class_of(*found, depth - 1)
                methods |= inherited["methods"]
                abstract |= set(inherited["abstract"])
                fields |= inherited["fields"]
        for name, each in _methods(node).items():
            methods[name] = signature(each, not _is_static(each))
            is_abstract = any("abstract" in ast.dump(decorator) for decorator in each.decorator_list)
            (abstract.add if is_abstract else abstract.discard)(name)
        for each in node.body:
            if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
                fields[each.target.id] = each.value is not None
        return {"methods": methods, "abstract": sorted(abstract), "fields": fields}

    def attributes(self, package):
        """Every name that a class, an instance or a module of the package defines."""
        found = set()
        for path in self.root.joinpath(package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                    found.add(node.name)
                elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                    found.add(node.attr)
                elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                    found.add(node.id)
        return found

    def settings(self):
        """Fields of vLLM's configuration classes, and under "" the environment variables."""
        found = {}
        for path in sorted(self.root.glob("vllm/config/*.py")):
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, ast.ClassDef):
                    typed = [each for each in node.body if isinstance(each, ast.AnnAssign)]
                    fields = [each.target.id for each in typed if not re.search("ClassVar|InitVar", ast.dump(each.annotation))]
                    found |= {node.name: " ".join(fields)} if fields else {}
        tree, _ = self.tree("vllm.envs")
        (table,) = [
            node.value for node in tree.body if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Dict)
            and "environment_variables" in ast.dump(node.target if isinstance(node, ast.AnnAssign) else node.targets[0])
        ]  # fmt: skip
        return {"": " ".join(key.value for key in table.keys), **found}


def offers(root, package, version, used):
    """The record of one version: the used names, attributes and settings that it defines."""
    sources, names = Sources(root), {}
    for name in sorted(used.names):
        found = sources.find(*name.split(":"))
        if found is None:
            continue
        module, node = found
        names[name] = {}
        if isinstance(node, ast.ClassDef):
            about = sources.class_of(module, node)
            wanted = {method for _, methods in used.overrides.get(name, ()) for method in methods}
            names[name]["abstract"] = about["abstract"]
            names[name]["methods"] = {each: about["methods"][each] for each in sorted(wanted & set(about["methods"]) - {"__init__"})}
            if name in used.calls:
                names[name]["call"] = about["methods"].get("__init__") or {
                    "args": list(about["fields"]), "required": sum(not has for has in about["fields"].values()),
                    "keywords": [], "needed": [], "any": [not about["fields"]] * 2,
                }  # fmt: skip
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and name in used.calls:
            names[name]["call"] = signature(node, False)
    attributes = sorted(sources.attributes(package) & set(used.attributes))
    record = {"package": package, "version": version, "names": names, "attributes": attributes}
    return record | ({"settings": sources.settings()} if package == "vllm" else {})


def _call_problem(count, keywords, offered):
    if count > len(offered["args"]) and not offered["any"][0]:
        return f"takes {len(offered['args'])} arguments"
    known = set(offered["args"][count:]) | set(offered["keywords"])
    if unknown := [each for each in keywords if each not in known and not offered["any"][1]]:
        return f"has no argument {', '.join(unknown)}"
    missing = [each for each in (*offered["args"][count : offered["required"]], *offered["needed"]) if each not in keywords]
    return f"needs {', '.join(missing)}" if missing else None


def _override_problem(ours, theirs):
    if len(theirs["args"]) > len(ours["args"]) and not ours["any"][0]:
        return f"is called with {', '.join(theirs['args'])}"
    if ours["required"] > len(theirs["args"]):
        return f"gets {', '.join(theirs['args']) or 'nothing'} alone"
    lacking = [each for each in theirs["keywords"] if each not in ours["keywords"] + ours["args"] and not ours["any"][1]]
    return f"is called with {', '.join(lacking)}=" if lacking else None


def problems(used, record, oldest):
    """What of the uses does not fit a recorded version; attributes are those that the oldest version has."""
    found, names = [], record["names"]
    found += [f"{name} is gone" for name in sorted(used.names - set(names))]
    for name, classes in used.overrides.items():
        offered = names.get(name, {})
        for place, methods in classes:
            others = [more for base, found_in in used.overrides.items() if base != name for at, more in found_in if at == place]
            ours = set(methods).union(*others)
            found += [f"{place} lacks {each}, which is abstract in {name}" for each in offered.get("abstract", ()) if each not in ours]
            for method, theirs in offered.get("methods", {}).items():
                if method in methods and (problem := _override_problem(methods[method], theirs)):
                    found.append(f"{place} {method} {problem} by {name}")
    for name, calls in used.calls.items():
        offered = names.get(name, {}).get("call")
        for place, count, keywords in calls:
            if offered and (problem := _call_problem(count, keywords, offered)):
                found.append(f"{place}: {name} {problem}")
    gone = set(oldest["attributes"]) & set(used.attributes) - set(record["attributes"])
    return found + [f"{used.attributes[each]} reads .{each}, which nothing of {record['version']} defines" for each in sorted(gone)]


def records(package):
    """The recorded versions of a package, oldest first."""
    found = [json.loads(path.read_text()) for path in RECORDS.glob(f"{package}-*.json")]
    found = [{**each, "attributes": each["attributes"].split()} for each in found]
    return sorted(found, key=lambda each: [int(part) for part in each["version"].split("rc")[0].split(".")])


def _lines(table):
    return ",\n".join(f"  {json.dumps(name)}: {json.dumps(about)}" for name, about in table.items())


def write(record):
    """One line for each name, as a difference can be read."""
    head = f'{{"package": {json.dumps(record["package"])}, "version": {json.dumps(record["version"])},\n'
    settings = f' "settings": {{\n{_lines(record["settings"])}\n }},\n' if "settings" in record else ""
    names = f' "names": {{\n{_lines(record["names"])}\n }},\n'
    RECORDS.mkdir(exist_ok=True)
    text = f'{head}{settings}{names} "attributes": {json.dumps(" ".join(record["attributes"]))}}}\n'
    (RECORDS / f"{record['package']}-{record['version']}.json").write_text(text)
