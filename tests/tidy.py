# SPDX-License-Identifier: Apache-2.0
"""The house rules as functions of (path, text) that yield (line, reason), and of the whole tree where a rule spans files."""

import ast
import re
import subprocess
from pathlib import Path, PurePosixPath

from rust_text import line_of, masked, without_tests

ROOT = Path(__file__).resolve().parent.parent
MAX_LINE_CHARS = 140
MAX_FILE_LINES = 700
LONG_FILE_LINES = 500

C_SUFFIXES = {".c", ".h", ".cc", ".cpp", ".hpp", ".cu"}
SCRIPT_SUFFIXES = {".py", ".sh", ".toml", ".in", ".yml", ".yaml"}
SCRIPT_NAMES = {"Makefile", ".clang-format"}

# Where each exception to a rule stands, and why. A path that no longer exists fails `stale_exceptions`.
LINE_LENGTH_EXCEPTIONS = {"docs/internals/protocols/models/": "one transition per line is how a model is read"}
PANIC_ROOTS = ("kvbm_cxl/pool/src/", "kvbm_cxl/capi/src/", "kvbm_cxl/ctl/src/", "kvbm_cxl/tier/src/", "python/src/")
INSTRUCTION_HOME = "kvbm_cxl/pool/src/coherence/"
INSTRUCTION_EXCEPTIONS = {  # path -> why
    "kvbm_cxl/pool/tests/coherence/recorder.rs": "sets the trap flag, by which it records the instructions of the coherence module",
}
# Mutants whose one rule has several places in the code, and why. All places are dropped together.
SHARED_FAULT_NAMES = {
    "check_before_grant_read": "the check moves: added before the read of the grant, left out after it",
    "check_then_write": "the check moves: added before the write of the record, left out after it",
    "failover.duel_is_unrest": "the claimant that lost and an observer both judge a duel",
    "failover.no_patience_with_the_slow": "the deposed manager and an observer both grow patient",
    "failover.seats_wait_in_turn": "how many seats come before this one, and how long each is waited for",
    "join.any_departure_is_proof": "the claimant and the manager each ask whether a slot is free",
    "join.suspicion_is_proof": "the claimant and the manager each ask whether a slot is free",
    "no_incarnation": "requester and manager both compare it",
    "no_recall": "one decision, at the first grant and at a grant already out",
    "no_reqno": "requester and manager both compare it",
    "shared_grant_line": "seats share one line, and so do not step down at a newer epoch",
    "suspicion_is_proof": "the manager and the adopter each ask for proof",
}
# Where words of PRONOUNS stand, and why.
WORD_EXCEPTIONS = {
    "perf/records/": "runs stay as their programs printed them",
    "tests/tidy.py": "has the list",
    "tests/test_tidy_rules.py": "plants violations",
}
NOT_A_MEDIA_LINE = {"Superblock"}  # has a crc, but is not one 64-byte line


def tracked():
    """Paths of the files that are, or are about to be, in git."""
    command = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split("\0")
    return sorted(name for name in set(names) if name and (ROOT / name).is_file())


def read(path):
    """The text of a tracked file, or None where it is not text."""
    data = (ROOT / path).read_bytes()
    try:
        return None if b"\0" in data else data.decode()
    except UnicodeDecodeError:
        return None


def is_rust(path):
    return path.endswith(".rs")


def is_c(path):
    return PurePosixPath(path).suffix in C_SUFFIXES


def is_script(path, text):
    pure = PurePosixPath(path)
    return pure.suffix in SCRIPT_SUFFIXES or pure.name in SCRIPT_NAMES or text.startswith("#!")


def is_source(path, text):
    return is_rust(path) or is_c(path) or is_script(path, text)


def is_lock(path):
    name = PurePosixPath(path).name
    return name.endswith(".lock") or name.endswith("-lock.json") or (path.startswith("scripts/requirements/") and name.endswith(".txt"))


def is_test_code(path):
    pure = PurePosixPath(path)
    return pure.name == "tests.rs" or bool({"tests", "benches", "examples"} & set(pure.parts[:-1]))


def excepted(path, exceptions):
    return any(path == entry or (entry.endswith("/") and path.startswith(entry)) for entry in exceptions)


def _matches(pattern, text, reason):
    for match in re.finditer(pattern, text):
        yield line_of(text, match.start()), reason.format(match[0].strip())


def spdx(path, text):
    """Every source file names its licence in its first lines (the second where a `#!` comes first)."""
    if not is_source(path, text) or path == "Cargo.lock":
        return
    if not any("SPDX-License-Identifier: Apache-2.0" in line for line in text.splitlines()[:2]):
        yield 1, "no SPDX-License-Identifier: Apache-2.0 in the first two lines"


def line_length(path, text):
    """Code lines fit a screen. A row of a table in a doc comment cannot be broken and may be longer."""
    if not (is_rust(path) or is_c(path) or path.endswith(".py")) or excepted(path, LINE_LENGTH_EXCEPTIONS):
        return
    for number, line in enumerate(text.splitlines(), 1):
        if len(line) > MAX_LINE_CHARS and not re.match(r"\s*//[!/] \|.*\|$", line):
            yield number, f"{len(line)} characters, more than {MAX_LINE_CHARS}"


def no_panics(path, text):
    """What ships returns errors: nothing in the pool, a file or a peer may bring the process down."""
    if not is_rust(path) or not path.startswith(PANIC_ROOTS) or is_test_code(path):
        return
    code = without_tests(masked(text))
    yield from _matches(r"\.\s*(?:unwrap|expect)\s*\(|\b(?:panic|todo|unimplemented|dbg)\s*!", code, "{} outside tests")


_INSTRUCTIONS = re.compile(
    r"\b_mm\d*_(?:clflush|clflushopt|clwb|[sml]fence|(?:mask)?stream\w*|maskmoveu\w*)\b"
    r"|\b__?movdir64b\b|\b_directstoreu\w*|\b__builtin_ia32_(?:clflush|clwb|[sml]fence|mov[nt]{2}\w*|movdir\w*)\w*"
    r"|\b(?:global_|naked_)?asm\s*!|\b(?:__asm__|__asm|asm)\b(?:\s+(?:volatile|__volatile__|goto|inline))*\s*[({]|\b__d[sm]b\b|\b__isb\b"
)


def instructions_in_one_place(path, text):
    """Flushes, fences, non-temporal stores and inline assembly stand in the coherence module alone, where the emulator can stand in."""
    if not (is_rust(path) or is_c(path)) or path.startswith(INSTRUCTION_HOME) or excepted(path, INSTRUCTION_EXCEPTIONS):
        return
    yield from _matches(_INSTRUCTIONS, masked(text), "{} outside " + INSTRUCTION_HOME)


_UNSAFE = re.compile(r'\bunsafe\s*\{|\bunsafe\s+impl\b|\bunsafe\s+extern\s*(?:"[^"]*")?\s*\{')


def unsafe_says_why(path, text):
    """A `SAFETY:` comment stands above every unsafe block: in the same statement, or in the comment right above it."""
    if not is_rust(path):
        return
    code, lines = masked(text), text.splitlines()
    for match in _UNSAFE.finditer(code):
        number = line_of(code, match.start())
        above = lines[max(0, number - 9) : number]
        if not any("SAFETY:" in line and "//" in line for line in above):
            yield number, "unsafe without a SAFETY: comment in the 8 lines above"


def file_length(path, text):
    """One idea per file."""
    count = len(text.splitlines())
    if is_source(path, text) and count > MAX_FILE_LINES:
        yield count, f"{count} lines, more than {MAX_FILE_LINES}: split it by idea"


# Put together here so that this file does not find itself.
_MARKS = re.compile(r"\b(?:" + "|".join(("TO" "DO", "FIX" "ME", "X" "XX", "HA" "CK")) + r")\b")


def finished(path, text):
    """No marks of unfinished work."""
    yield from _matches(_MARKS, text, "{}: finish it, or say what is missing in prose")


_MACHINE_PATH = re.compile(r"(?<![\w.~*/-])/(?:" + "|".join(("work", "home", "root")) + r")/[\w.]")


def no_machine_paths(path, text):
    """Nothing depends on, or tells of, the machine it was written on."""
    yield from _matches(_MACHINE_PATH, text, "{}...: a path of one machine")


_INDEX = re.compile(
    r"https?://[A-Za-z0-9.:-]+/(?:simple|packages|debian|debian-security)(?:[/\s\"']|$)"
    r"|\b(?:pypi\.org|pythonhosted\.org|deb\.debian\.org)\b"
    r"|--(?:extra-)?index-url\b|--find-link[s]\b"
)


def no_package_indexes(path, text):
    """Where packages come from is the machine's setting, not ours."""
    yield from _matches(_INDEX, text, "{}: the address of a package index")


def locks_without_urls(path, text):
    """Lock files pin by version and hash; the one address allowed is the name cargo gives crates.io."""
    if not is_lock(path):
        return
    for number, line in enumerate(text.splitlines(), 1):
        crates_io = path.endswith("Cargo.lock") and line == 'source = "registry+https://github.com/rust-lang/crates.io-index"'
        if re.search(r"https?://", line) and not crates_io:
            yield number, "a URL in a lock file"


PRONOUNS = ("nobody", "somebody", "whoever", "anybody", "everybody", "anyone", "someone", "everyone")
_PRONOUN = re.compile(r"(?<![A-Za-z0-9])(?:" + "|".join(PRONOUNS) + r")(?![A-Za-z0-9])", re.IGNORECASE)


def names_the_actor(path, text):
    """Sentences name who acts: the owner, a reader, another host, the operator, the caller. They hold no pronoun for an unnamed person."""
    if not excepted(path, WORD_EXCEPTIONS) and not is_lock(path):
        yield from _matches(_PRONOUN, text, "{}: say which host, process, thread, caller or operator it is")


def media_lines(path, text):
    """Every structure with a CRC in the on-media format is declared with `media_line!`, which asserts its size and offsets."""
    if not path.startswith("kvbm_cxl/") or not is_rust(path) or is_test_code(path):
        return
    code = without_tests(masked(text))
    # `impl MediaLine for $name` in the macro itself has no identifier here.
    yield from _matches(r"\bimpl\s+(?:\w+::)*MediaLine\s+for\s+\w+", code, "{}: use media_line!, which asserts size and offsets")
    if "/media/" in path:
        for match in re.finditer(r"\bstruct\s+(\w+)\s*\{\s*(?:pub(?:\([^)]*\))?\s+)?crc\s*:", code):
            if match[1] not in NOT_A_MEDIA_LINE:
                yield line_of(code, match.start()), f"{match[1]} has a crc: declare it with media_line!"


_FAULT = re.compile(r'\b(mutant|point)!\s*\(\s*"([^"]*)"\s*,?\s*\)')


def fault_names(files):
    """Yields (path, line, reason) for every mutant or point name that stands at two places without being listed, or is no plain name."""
    seen = {}
    for path, text in files:
        if not is_rust(path) or is_test_code(path) or not path.startswith(PANIC_ROOTS):
            continue
        code = masked(text, strings=False)
        for match in _FAULT.finditer(code):
            where, name = (path, line_of(code, match.start())), match[2]
            if not re.fullmatch(r"[A-Za-z0-9_.-]+", name):
                yield *where, f'"{name}" is not a plain name'
            elif name in seen and name not in SHARED_FAULT_NAMES:
                yield *where, f'"{name}" stands at {seen[name][0]}:{seen[name][1]} too: one name, one meaning'
            seen.setdefault(name, where)


# Names that say nothing alone. One type of a crate may have each: which place, whose state.
BARE_NAMES = ("Entry", "Found", "Place", "Slot", "Standing", "State", "Taken", "Watch")
_BARE_TYPE = re.compile(r"\b(?:struct|enum|union|trait|type)\s+(" + "|".join(BARE_NAMES) + r")\b")


def bare_type_names(files):
    """Yields (path, line, reason) for every type with a bare name that another type of the same crate has too."""
    seen = {}
    for path, text in files:
        crate = path.partition("/src/")[0]
        if not is_rust(path) or is_test_code(path) or crate == path:
            continue
        code = without_tests(masked(text))
        for match in _BARE_TYPE.finditer(code):
            where, key = (path, line_of(code, match.start())), (crate, match[1])
            if key in seen:
                yield *where, f"{match[1]} is a type at {seen[key][0]}:{seen[key][1]} too: say in the name which"
            seen.setdefault(key, where)


# Functions do something or return something: their names are verbs or nouns, and no bare participles.
PARTICIPLES = (
    "asked begun bound built done drawn felt found given gone heard held kept known lent lost made met said seen sent shown spoilt taken "
    "told understood written"
)
_PARTICIPLE = re.compile(r"\bfn\s+((?:un)?(?:[a-z]+ed|" + "|".join(PARTICIPLES.split()) + r"))\s*[(<]")
VERB_ROOTS = ("kvbm_cxl/pool/src/", "kvbm_cxl/capi/src/", "python/src/")
KNOWN_PARTICIPLES = set(
    """
    added asked awaited bound bounded checked closed damaged decided done enabled ended escaped failed flushed forked granted
    healed held hinted joined kept locked opened owned pinned published pulled queued refused removed repaired reported shown
    sorted striped unbound unfinished unflushed written
    """.split()
)


def names_are_verbs(path, text):
    """A function of the pool, its C interface or its Python module is called by a verb or noun of the field."""
    if path.startswith(VERB_ROOTS) and is_rust(path) and not is_test_code(path):
        for line, reason in _matches(_PARTICIPLE, without_tests(masked(text)), "{}"):
            name = re.split(r"[\s(<]+", reason)[1]
            if name not in KNOWN_PARTICIPLES:
                yield line, f"fn {name} is a participle: say what it does or returns"


# Code that tests consist of, whose functions assert for them.
SIMULATOR = "kvbm_cxl/sim/"
# What fails a test when it is called: calls of pytest, subprocess and numpy.
_FAILING_CALLS = {"raises", "fail", "warns", "check_call", "check_output", "check_returncode"}
_RUST_FAILING = re.compile(r"\b(?:debug_|prop_)?assert\w*\s*!|\b(?:panic|unreachable)\s*!|\.\s*(?:unwrap|expect)(?:_err)?\s*\(|\?\s*;")
_RUST_FN = re.compile(
    r"((?:#\[[^\]]*\]\s*)*)(?:pub(?:\([^)]*\))?\s+)?(?:const\s+|async\s+|unsafe\s+|extern\s+)*\bfn\s+(\w+)(?:\[[^\]]*\]|[^{;])*\{"
)
_RUST_CALL = re.compile(r"\b(\w+)\s*(?:::<[^;{}()]*>)?\(|\b(\w+)\s*!\s*[({\[]")


def _python_functions(text):
    """Functions of a Python file: (name, line, whether it fails by itself, names that it calls, whether it is a test)."""
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        parts = list(ast.walk(node))
        calls = [part for part in parts if isinstance(part, ast.Call)]
        named = [*(call.func for call in calls), *(argument for call in calls for argument in call.args)]
        used = {each.attr if isinstance(each, ast.Attribute) else each.id for each in named if isinstance(each, (ast.Attribute, ast.Name))}
        checks = any(word.arg == "check" and getattr(word.value, "value", None) is True for call in calls for word in call.keywords)
        fails = checks or bool(used & _FAILING_CALLS) or any(isinstance(part, (ast.Assert, ast.Raise)) for part in parts)
        yield node.name, node.lineno, fails, used - {node.name}, node.name.startswith("test_")


def _rust_functions(text):
    """The same of a Rust file."""
    code = masked(text)
    for match in _RUST_FN.finditer(code):
        depth, stop = 0, len(code)
        for brace in re.finditer(r"[{}]", code[match.end() - 1 :]):
            depth += 1 if brace[0] == "{" else -1
            if depth == 0:
                stop = match.end() + brace.start()
                break
        body = code[match.end() - 1 : stop]
        fails = bool(_RUST_FAILING.search(body)) or "should_panic" in match[1]
        used = {one or other for one, other in _RUST_CALL.findall(body)}
        yield match[2], line_of(code, match.start(2)), fails, used - {match[2]}, bool(re.search(r"#\[(?:\w+::)?test\b", match[1]))


def tests_that_cannot_fail(files):
    """Yields (path, line, reason) for every test without an assertion, of its own or of a function of the tests that it calls. Functions
    are known by their names: those of its own file first, else those of any file."""
    known, tests = {}, []
    for path, text in files:
        language = "rust" if is_rust(path) else "python" if path.endswith(".py") else None
        if not language or not (is_test_code(path) or path.startswith(SIMULATOR) or "#[cfg(test)]" in text):
            continue
        for name, line, fails, used, is_test in _rust_functions(text) if language == "rust" else _python_functions(text):
            for where in (path, language):
                known.setdefault((where, name), []).append((fails, [(path, language, each) for each in used]))
            if is_test:
                tests.append((path, line, name))

    def resolved(path, language, name):
        return (path, name) if (path, name) in known else (language, name)

    failing = {key for key, functions in known.items() if any(fails for fails, _ in functions)}
    while more := {
        key
        for key, functions in known.items()
        if key not in failing and any(resolved(*each) in failing for _, used in functions for each in used)
    }:
        failing |= more
    yield from ((path, line, f"{name} asserts nothing: say what has to be so") for path, line, name in tests if (path, name) not in failing)


def no_links(path, text):
    """No file is a link to another: a link gets lost where a tree is packed or copied, and what it leads to is missing then."""
    lost = text.strip()
    if (ROOT / path).is_symlink() or (lost.startswith("../") and len(lost.split()) == 1):
        yield 1, "a link, or a link that was lost: keep the file itself here, or a copy that a script writes and compares"


def stale_exceptions(paths):
    """Listed exceptions whose file is gone."""
    listed = [*LINE_LENGTH_EXCEPTIONS, *INSTRUCTION_EXCEPTIONS, *WORD_EXCEPTIONS]
    return [entry for entry in listed if not any(path == entry or (entry.endswith("/") and path.startswith(entry)) for path in paths)]


PARTICIPLE_ROOTS = ("python/kvbm_cxl/", "deploy/")
_BASE_FORMS = ("embed", "feed", "need", "seed", "speed")
_IRREGULAR = frozenset(
    ("begun", "bound", "built", "chosen", "done", "drawn", "found", "given", "gone", "held", "kept", "known", "left", "lent", "lost")
    + ("made", "met", "said", "seen", "sent", "shown", "sought", "spent", "taken", "told", "written")
)


def _is_participle(name):
    name = name.strip("_")
    return name in _IRREGULAR or ("_" not in name and name.endswith("ed") and not name.endswith(_BASE_FORMS))


def functions_are_verbs(path, text):
    """Functions and files are named by verbs and nouns of the field (`record_request`), not by a bare participle (`asked`). A property may
    be one."""
    if not path.endswith(".py") or not path.startswith(PARTICIPLE_ROOTS) or is_test_code(path):
        return
    if _is_participle(Path(path).stem):
        yield 1, f"{Path(path).name}: a bare participle"
    for node in sorted(_python_defs(text), key=lambda node: node.lineno):
        is_property = any("property" in ast.unparse(mark) for mark in node.decorator_list)
        if _is_participle(node.name) and not is_property:
            yield node.lineno, f"{node.name}: a bare participle, say what it does"


def _python_defs(text):
    return [node for node in ast.walk(ast.parse(text)) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]


FILE_CHECKS = [
    functions_are_verbs,
    spdx,
    line_length,
    no_panics,
    instructions_in_one_place,
    unsafe_says_why,
    file_length,
    finished,
    no_machine_paths,
    no_package_indexes,
    locks_without_urls,
    names_the_actor,
    media_lines,
    names_are_verbs,
    no_links,
]
