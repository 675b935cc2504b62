# SPDX-License-Identifier: Apache-2.0
"""The modules of the pool use those below them: over the checkout, and shown to fail on sources made up for it."""

import re
import subprocess
import sys

import layers
import pytest
import tidy

LAYERS = layers.stated(tidy.read(layers.ROOT_FILE))
MADE_UP = [("low", "base"), ("middle", "beside"), ("high",)]


def made_up(**texts):
    """Sources of a crate: `a__b="text"` is the file of the module a::b."""
    return [(f"{layers.SOURCES}{name.replace('__', '/')}.rs", text) for name, text in texts.items()]


def complaints(**texts):
    known = dict.fromkeys(("low", "base", "middle", "beside", "high"), "") | texts
    return [(module, line) for module, line, _ in layers.upward(made_up(**known), MADE_UP)]


def test_no_module_uses_a_higher_layer(sources):
    found = [f"{module}:{line}: {reason}" for module, line, reason in layers.upward(sources, LAYERS)]
    assert not found, "\n".join(found)


def test_no_circle_is_large(sources):
    large = list(layers.large_circles(sources))
    assert not large, f"modules that use each other, in circles of more than {layers.MAX_CIRCLE_FILES} files: {large}"


def test_a_large_circle_is_found_in_the_pool_and_in_the_c_interface():
    def large(count, root):
        return list(layers.large_circles([(f"{root}{name}.rs", text) for name, text in ring_of(count).items()]))

    for root in (layers.SOURCES, layers.C_SOURCES):
        assert large(3, root) == [["m0", "m1", "m2"]] and large(2, root) == []


def test_every_module_is_in_one_layer_and_the_page_says_the_same():
    modules = re.findall(r"^(?:pub )?mod (\w+);", tidy.read(layers.ROOT_FILE), re.MULTILINE)
    assert sorted(name for layer in LAYERS for name in layer) == sorted(modules)
    assert layers.stated(tidy.read(layers.PAGE)) == LAYERS


def test_the_picture_shows_the_layers():
    command = [sys.executable, tidy.ROOT / "scripts/layers", "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_the_sources_are_read(sources):
    found = layers.arrows(sources)
    assert len(found) > 300
    assert (("pool",), ("cache",)) in found and (("cache", "pull", "pins"), ("cache", "cells", "local")) in found


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("use crate::high::Thing;", 1),
        ("fn f() {}\npub(crate) use crate::{low::x, high};", 2),
        ("use crate::{\n    base,\n    high::{self, Thing},\n};", 1),
        ("use crate::{base as b, high as h};", 1),
        ("use crate::high::*;", 1),
        ("use super::high;", 1),
        ("\nfn f() { g(crate::high::h::<u8>()) }", 2),
        ("fn f(thing: &crate :: high :: Thing) {}", 1),
        ("use crate::Thing;", 1),
        ("use crate::{Thing, base::x};", 1),
    ],
)
def test_a_use_of_a_higher_layer_is_found(text, line):
    assert complaints(low=text) == [("low", line)]
    assert complaints(low="mod inner;", low__inner=text.replace("super::", "super::super::")) == [("low::inner", line)]


@pytest.mark.parametrize(
    "text",
    [
        "use crate::{base::{self, x as y}, low};\nuse super::beside::*;",
        "/// [`crate::high::Thing`]\n// use crate::high;\nconst TEXT: &str = \"crate::high\";",
        "#[cfg(test)]\nmod tests {\n    use crate::high::Thing;\n}\n#[cfg(test)]\nuse crate::high;",
        "pub(in crate::middle) fn f() { other::crate_high() }",
        "use self::inner::x;\nfn f() -> $crate::high::Thing {}",
    ],
)
def test_other_text_is_no_use_of_a_higher_layer(text):
    assert complaints(middle=text, high="use crate::{low, middle, beside};") == []


def test_test_files_may_use_all():
    assert complaints(low="#[cfg(test)]\nmod tests;", low__tests="use crate::high;", low__tests__planted="use crate::high;") == []


def test_a_module_without_a_layer_is_found():
    assert complaints(low="\nuse crate::new;", new="") == [("new", 2)]


def ring_of(count):
    return {f"m{i}": f"use crate::m{(i + 1) % count}::x;" for i in range(count)}


def test_circles_are_found_with_all_their_files():
    nine = layers.circles(made_up(**ring_of(9), outside="use crate::m3;", below="", m9="use crate::m0;"))
    assert nine == [[(f"m{i}",) for i in range(9)]]
    assert layers.circles(made_up(a="use crate::b;", b="use crate::a;", c="use crate::d;", d="")) == [[("a",), ("b",)]]
    assert layers.circles(made_up(a="use crate::b; use crate::c;", b="use crate::c;", c="")) == []


def test_a_module_and_its_parts_are_no_circle():
    assert layers.circles(made_up(a="use self::b::x;\nuse crate::a::c;", a__b="use super::y;", a__c="use crate::a::y;")) == []
    assert layers.circles(made_up(a="", a__b="use super::c::x;", a__c="use super::b::x;")) == [[("a", "b"), ("a", "c")]]


def test_a_table_is_read_from_a_comment_and_from_a_page():
    rows = "| layer | what it does |\n|---|---|\n| [`high`] | t | u |\n| `middle`, [`beside`](mod@beside) | `x` |\n| [`low`], `base` | |\n"
    assert layers.stated(f"text\n\n{rows}\n| `later` | x |\n") == MADE_UP
    assert layers.stated("".join(f"//! {line}\n" for line in rows.splitlines()) + "//!\n//! | `later` | x |\n") == MADE_UP
    assert layers.stated("no table") == []
