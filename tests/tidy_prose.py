# SPDX-License-Identifier: Apache-2.0
"""Marks of sentences that hide their subject, their verb or their term, counted for each 10,000 words of documents, comments and messages.

The limits are rates of redb's and TigerBeetle's documents and comments, rounded up: what good prose of this field has by accident."""

import ast
import io
import re
import tokenize
from collections import Counter

import tidy

# Mark -> (expression, most for each 10,000 words).
MARKS = {
    "a clause for a noun": (r"\bwhat (?:is|are|was|were|has|have|had|lies|lie|comes|came|goes|stands)\b", 3),
    "behind": (r"\bbehind\b", 3),
    "beside": (r"\bbeside\b", 3),
    "anew": (r"\banew\b", 2),
    "be had": (r"\b(?:be|not|never|was|were) had\b", 2),
    "is told": (r"\b(?:is|are|was|were|be|been) told\b", 2),
    "goes on": (r"\b(?:goes|go|went|going) on\b", 2),
    "of which such": (r"\bof (?:which|whom) (?:such|there|it|they|one)\b", 2),
}
# Part -> the paths that belong to it.
PARTS = {
    "documents": lambda path: path.endswith(".md"),
    "pool": lambda path: path.startswith(("kvbm_cxl/pool/src/", "kvbm_cxl/member/src/", "kvbm_cxl/tier/src/")),
    "C interface": lambda path: path.startswith(("kvbm_cxl/capi/src/", "kvbm_cxl/capi/include/")),
    "programs": lambda path: path.startswith("kvbm_cxl/ctl/src/"),
    "plugin": lambda path: path.startswith(("nixl_plugin/src/", "nixl_plugin/include/")),
    "Python": lambda path: path.startswith("python/") and "/tests/" not in path,
    "deploy": lambda path: path.startswith(("deploy/", "scripts/")) and not tidy.is_lock(path),
    "simulator": lambda path: path.startswith("kvbm_cxl/sim/src/"),
}
_WORD = re.compile(r"[A-Za-z][A-Za-z'-]*")
_STRING = re.compile(r'"((?:[^"\\\n]|\\.|\\\n)*)"')


def _is_sentence(text):
    """Whether a string of the code is a message: some words with spaces between them."""
    return len(_WORD.findall(text)) >= 4 and text.count(" ") >= 3


def _python_prose(text):
    """Comments, docstrings and messages of a Python file."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.string.lstrip("# ")
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and _is_sentence(node.value):
            yield node.value


def _curly_prose(text):
    """The same of Rust, C and C++."""
    for line in text.splitlines():
        match = re.search(r"(?:^|\s)(?://[/!]?|/\*+|\*(?=\s))\s?(.*)", line)
        if match:
            yield match[1]
    yield from filter(_is_sentence, _STRING.findall(text))


def prose(path, text):
    """What people read in a file, as one text. Code between back-ticks and fences does not count."""
    if path.endswith(".md"):
        parts = [re.sub(r"```.*?```|^    .*$", " ", text, flags=re.DOTALL | re.MULTILINE)]
    elif path.endswith((".py", ".pyi")):
        parts = _python_prose(text)
    elif tidy.is_rust(path) or tidy.is_c(path):
        parts = _curly_prose(text)
    else:
        parts = re.findall(r"^\s*#(?!!)\s?(.*)$|##\s(.*)$", text, re.MULTILINE)
        parts = [one or other for one, other in parts]
    return re.sub(r"`[^`]*`", "`", "\n".join(parts))


def rates(files):
    """Part -> mark -> count for each 10,000 words. `files`: pairs of path and text."""
    words, marks = Counter(), Counter()
    for path, text in files:
        for part, belongs in PARTS.items():
            if belongs(path):
                read = prose(path, text)
                words[part] += len(_WORD.findall(read))
                for mark, (expression, _) in MARKS.items():
                    marks[part, mark] += len(re.findall(expression, read, re.IGNORECASE))
    return {part: {mark: 1e4 * marks[part, mark] / count for mark in MARKS} for part, count in words.items()}


def found(files, mark):
    """Where a mark stands: (path, sentence) pairs."""
    for path, text in files:
        if any(belongs(path) for belongs in PARTS.values()):
            read = prose(path, text)
            for match in re.finditer(rf"[^\n]*(?:{MARKS[mark][0]})[^\n]*", read, re.IGNORECASE):
                yield path, match[0].strip()


def main():
    """Prints the rates, and with the name of a mark where it stands."""
    import sys

    files = [(path, text) for path in tidy.tracked() if (text := tidy.read(path)) is not None and not path.endswith((".svg", ".json"))]
    if len(sys.argv) > 1:
        print("\n".join(f"{path}: {sentence}" for path, sentence in found(files, sys.argv[1])))
        return
    for part, by_mark in rates(files).items():
        print(f"{part}: " + ", ".join(f"{mark} {rate:.1f}" for mark, rate in by_mark.items()))


if __name__ == "__main__":
    main()
