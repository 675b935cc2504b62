# SPDX-License-Identifier: Apache-2.0
"""Rust and C sources with comments, literals or test code blanked out, line numbers kept, so that the checks can use plain patterns."""

import re

_TOKEN = re.compile(
    r"""
    (?P<line>//[^\n]*)
  | (?P<block>/\*)
  | (?P<raw>\b(?:b|c)?r(?P<hashes>\#*)")
  | (?P<string>(?:\b[bc])?"(?:\\.|[^"\\])*")
  | (?P<char>'(?:\\.[^'\n]*|[^\\'\n])')
    """,
    re.VERBOSE | re.DOTALL,
)


def _spaces(text):
    return "".join("\n" if c == "\n" else " " for c in text)


def _block_comment_end(text, start):
    depth, position = 1, start + 2
    while depth and position < len(text):
        if text.startswith("/*", position):
            depth, position = depth + 1, position + 2
        elif text.startswith("*/", position):
            depth, position = depth - 1, position + 2
        else:
            position += 1
    return position


def masked(text, strings=True):
    """Blanks comments and, if `strings`, what stands between the quotes of string and character literals."""
    out, position = [], 0
    while match := _TOKEN.search(text, position):
        out.append(text[position : match.start()])
        end = match.end()
        if match["block"]:
            end = _block_comment_end(text, match.start())
        elif match["raw"]:
            closing = text.find('"' + match["hashes"], end)
            end = len(text) if closing < 0 else closing + 1 + len(match["hashes"])
        token = text[match.start() : end]
        if match["line"] or match["block"]:
            out.append(_spaces(token))
        elif strings:
            opening = match.end() - match.start() if match["raw"] else token.index(token[-1]) + 1
            closing = 1 + len(match["hashes"]) if match["raw"] else 1
            out.append(token[:opening] + _spaces(token[opening : len(token) - closing]) + token[len(token) - closing :])
        else:
            out.append(token)
        position = end
    out.append(text[position:])
    return "".join(out)


def without_tests(code):
    """Blanks every item under `#[cfg(test)]` (or `cfg(all(test, ...))`) of masked code."""
    while match := re.search(r"#\s*\[\s*cfg\s*\(\s*(?:all\s*\(\s*)?test\b[^\]]*\]", code):
        position, depth = match.end(), 0
        while position < len(code):
            c = code[position]
            if c in "([{":
                depth += 1
            elif c in ")]}":
                depth -= 1
                if depth == 0 and c == "}":
                    break
            elif c == ";" and depth == 0:
                break
            position += 1
        code = code[: match.start()] + _spaces(code[match.start() : position + 1]) + code[position + 1 :]
    return code


def line_of(text, offset):
    """Line number, from 1, of a character offset."""
    return text.count("\n", 0, offset) + 1
