# SPDX-License-Identifier: Apache-2.0
"""The stubs say what there is, and without the compiled part the package says what is missing."""

import ast
import inspect
import re
import shutil
import subprocess
import sys

import kvbm_cxl
import pytest
from kvbm_cxl import _native, errors
from pools import ROOT

STUB = ast.parse((ROOT / "python" / "kvbm_cxl" / "_native.pyi").read_text())
CLASSES = {node.name: node for node in STUB.body if isinstance(node, ast.ClassDef) and node.name != "Tensor" and node.name[0] != "_"}
FUNCTIONS = {node.name: node for node in STUB.body if isinstance(node, ast.FunctionDef)}
# What every object has, or what pickle and the interpreter ask for.
EVERYWHERE = set(dir(object)) | {"__doc__", "__module__", "__reduce__", "__release_buffer__", "__buffer__", "__repr__"}


def members(node):
    return {part.name: part for part in node.body if isinstance(part, ast.FunctionDef)}


def test_the_stubs_name_what_there_is():
    public = {name for name in dir(_native) if not name.startswith("_")}
    assert public == set(CLASSES) | set(FUNCTIONS) and public <= set(kvbm_cxl.__all__)
    for name, node in CLASSES.items():
        said = set(members(node)) - {"__new__", "__hash__", "__eq__", "__str__"} - EVERYWHERE
        assert {each for each in vars(getattr(_native, name)) if each not in EVERYWHERE} == said, name


def is_property(node):
    return any(isinstance(mark, ast.Name) and mark.id == "property" for mark in node.decorator_list)


def parameters(node):
    arguments = node.args
    return [part.arg for part in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs] if part.arg not in ("self", "cls")]


@pytest.mark.parametrize("name", [*CLASSES, *FUNCTIONS])
def test_the_stubs_know_the_parameters(name):
    calls = {name: FUNCTIONS[name]} if name in FUNCTIONS else members(CLASSES[name])
    for method, node in calls.items():
        if (method.startswith("__") and method != "__new__") or is_property(node):
            continue
        found = getattr(_native, name) if method == "__new__" or name in FUNCTIONS else getattr(getattr(_native, name), method)
        if method == "__new__" or name in FUNCTIONS or callable(found):
            actual = [each for each in inspect.signature(found).parameters if each not in ("self", "cls")]
            assert actual == parameters(node), f"{name}.{method}"


def test_every_call_is_documented():
    """Except where name and type say all."""
    plain = {"usage", "release"}
    for owner, node in CLASSES.items():
        assert ast.get_docstring(node), owner
        for method, part in members(node).items():
            named = is_property(part) or method.startswith("__") or method in plain
            assert named or ast.get_docstring(part), f"{owner}.{method}"
    assert all(ast.get_docstring(node) for node in FUNCTIONS.values())


def test_errors_are_what_python_programs_expect():
    assert issubclass(errors.InvalidError, ValueError) and issubclass(errors.TimeoutError_, TimeoutError)
    assert issubclass(errors.NotFoundError, LookupError) and issubclass(errors.ForkedError, errors.ClosedError)
    assert all(issubclass(getattr(errors, name), errors.CxlError) and name in kvbm_cxl.__all__ for name in errors.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = kvbm_cxl.nothing


def test_every_error_of_the_module_is_a_class():
    text = (ROOT / "python" / "src" / "failure.rs").read_text()
    raised = {word for word in text.replace('"', " ").split() if word.endswith(("Error", "Error_")) and hasattr(errors, word)}
    assert raised == set(errors.__all__), "each class is raised somewhere, and none is raised that does not exist"


def test_the_example_of_the_readme(tmp_path, monkeypatch):
    monkeypatch.setenv("CXL_STATE_DIR", str(tmp_path / "state"))
    [example] = re.findall(r"```python\n(.*?)```", (ROOT / "python" / "README.md").read_text(), re.DOTALL)
    assert "/dev/shm/kv" in example
    exec(compile(example.replace("/dev/shm/kv", str(tmp_path / "kv")), "README.md", "exec"), {})  # noqa: S102


def test_without_the_compiled_part(tmp_path):
    ignored = shutil.ignore_patterns("*.so", "__pycache__")
    shutil.copytree(ROOT / "python" / "kvbm_cxl", tmp_path / "kvbm_cxl", ignore=ignored)
    code = """
import kvbm_cxl, kvbm_cxl.nixl, kvbm_cxl.errors
print(kvbm_cxl.__version__, kvbm_cxl.nixl.plugin_path is not None)
try:
    kvbm_cxl.Pool
except ImportError as error:
    print(error)
"""
    environment = {"PYTHONPATH": str(tmp_path), "PATH": "/usr/bin:/bin"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60, check=True)
    version, reason = done.stdout.splitlines()
    assert version.endswith("True") and "kvbm_cxl.Pool needs the compiled part" in reason and "make python-extension" in reason
