# SPDX-License-Identifier: Apache-2.0
"""Every house rule, shown to fail on a planted violation and to pass on what merely looks like one."""

import pytest
import tidy
from rust_text import masked, without_tests

POOL = "kvbm_cxl/pool/src/x.rs"
SPDX = "// SPDX-License-Identifier: Apache-2.0\n"
MARK = "TO" "DO"
INDEX = "https://" "mirror.example/simple/"
HOME = "/ho" "me/user/pool"

# (check, path, text, lines at which it must complain)
CASES = [
    (tidy.functions_are_verbs, "python/kvbm_cxl/x.py", "class A:\n    def _asked(self): ...\n\n\nasync def told(): ...\n", [2, 5]),
    (tidy.functions_are_verbs, "deploy/x/held.py", "def run(): ...\n", [1]),
    (tidy.functions_are_verbs, "python/kvbm_cxl/x.py", "class A:\n    @property\n    def pinned(self): ...\n    def feed(self): ...\n", []),
    (tidy.functions_are_verbs, "python/kvbm_cxl/x.py", "def is_held(): ...\ndef read(): ...\nasked = told = None\n", []),
    (tidy.functions_are_verbs, "tests/x.py", "def asked(): ...\n", []),
    (tidy.no_links, "deploy/helm/files", "../../files", [1]),
    (tidy.no_links, "deploy/helm/files.md", "../../files\nare elsewhere\n", []),
    (tidy.no_links, "deploy/helm/files.md", "../files are elsewhere", []),
    (tidy.spdx, POOL, "fn main() {}\n", [1]),
    (tidy.spdx, "scripts/run", "#!/bin/sh\necho\n", [1]),
    (tidy.spdx, "Makefile", "all:\n", [1]),
    (tidy.spdx, "a.cpp", "\n\n" + SPDX, [1]),
    (tidy.spdx, "scripts/run", "#!/bin/sh\n# SPDX-License-Identifier: Apache-2.0\n", []),
    (tidy.spdx, "README.md", "text\n", []),
    (tidy.line_length, POOL, "x" * 140 + "\n" + "y" * 141 + "\n", [2]),
    (tidy.line_length, "include/x.h", "y" * 141, [1]),
    (tidy.line_length, "tests/x.py", "y" * 141, [1]),
    (tidy.line_length, POOL, "/// " + "y" * 140, [1]),
    (tidy.line_length, POOL, "//! | " + "y" * 140 + " |\n", []),
    (tidy.line_length, "README.md", "y" * 500, []),
    (tidy.line_length, "docs/internals/protocols/models/x.cpp", "y" * 500, []),
    (tidy.no_panics, POOL, "fn f() {\n    a.unwrap();\n    b\n        .expect(why);\n    panic!();\n    todo!();\n}\n", [2, 4, 5, 6]),
    (tidy.no_panics, POOL, "fn f() { dbg!(a); unimplemented!() }", [1, 1]),
    (tidy.no_panics, "kvbm_cxl/ctl/src/main.rs", "fn f() { a.unwrap() }", [1]),
    (tidy.no_panics, POOL, "#[cfg(test)]\nmod tests;\nfn f() { a.unwrap() }", [3]),
    (tidy.no_panics, POOL, "#[cfg(test)]\nmod tests { fn g() { a.unwrap() } }\nfn f() { b.unwrap() }", [3]),
    (tidy.no_panics, POOL, 'fn f<\'a>(s: &\'a str) { let q = \'"\'; s.unwrap(); let r = \'"\'; }', [1]),
    (tidy.no_panics, POOL, "fn f() { let q = '\\''; s.unwrap() }", [1]),
    (tidy.no_panics, POOL, 'fn f() { r#"a"b.unwrap()"#; s.unwrap() }', [1]),
    (tidy.no_panics, POOL, "/* /* */ a.unwrap() */ // b.unwrap()\n/// c.unwrap()\nfn f() {}", []),
    (tidy.no_panics, POOL, 'fn f() { g("a.unwrap()"); h.unwrap_or(1); assert!(x); i.expected(2) }', []),
    (tidy.no_panics, "kvbm_cxl/pool/src/alloc/tests.rs", "fn f() { a.unwrap() }", []),
    (tidy.no_panics, "kvbm_cxl/pool/tests/x.rs", "fn f() { a.unwrap() }", []),
    (tidy.no_panics, "kvbm_cxl/sim/src/lib.rs", "fn f() { a.unwrap() }", []),
    (tidy.instructions_in_one_place, POOL, "fn f() { _mm_clflush(p);\n_mm_sfence();\n_mm512_stream_si512(p, v) }", [1, 2, 3]),
    (tidy.instructions_in_one_place, POOL, 'fn f() { asm!("dc civac, {}", in(reg) p) }', [1]),
    (tidy.instructions_in_one_place, POOL, 'global_asm!("dsb sy");', [1]),
    (tidy.instructions_in_one_place, POOL, "use x86_64::{_mm_clwb, _mm_clflushopt, _movdir64b, _mm_mfence, _mm_lfence};", [1] * 5),
    (tidy.instructions_in_one_place, "nixl/x.cpp", '__asm__ volatile("clflush %0" : "+m"(*p));\n__builtin_ia32_sfence();', [1, 2]),
    (tidy.instructions_in_one_place, "kvbm_cxl/pool/src/coherence/x86_64.rs", "fn f() { _mm_clflush(p) }", []),
    (tidy.instructions_in_one_place, POOL, "// _mm_clflush\nfn f() { self.movdir64b(); fence(SeqCst); _mm_pause() }", []),
    (tidy.unsafe_says_why, POOL, "fn f() {\n    unsafe { g() }\n}\n", [2]),
    (tidy.unsafe_says_why, POOL, "unsafe impl Send for X {}\n", [1]),
    (tidy.unsafe_says_why, POOL, 'unsafe extern "C" {\n}\n', [1]),
    (tidy.unsafe_says_why, POOL, "// SAFETY: far\n" + "\n" * 9 + "fn f() { unsafe { g() } }\n", [11]),
    (tidy.unsafe_says_why, POOL, 'fn f() { g("SAFETY:"); unsafe { h() } }\n', [1]),
    (tidy.unsafe_says_why, POOL, "// SAFETY: p is mapped.\nlet x = unsafe { g() };\n// an unsafe { } in prose\n", []),
    (tidy.unsafe_says_why, POOL, "unsafe fn f() {}\n", []),
    (tidy.names_are_verbs, POOL, "fn told() {}\npub fn stamped<T>(&self) {}\nfn unwritten () {}\n", [1, 2, 3]),
    (tidy.names_are_verbs, "kvbm_cxl/ctl/src/x.rs", "fn told() {}\n", []),
    (tidy.names_are_verbs, "kvbm_cxl/pool/src/x/tests.rs", "fn told() {}\n", []),
    (tidy.names_are_verbs, POOL, "fn is_told() {}\nfn told_of() {}\n// fn told()\nfn sorted() {}\n", []),
    (tidy.file_length, POOL, "\n" * 701, [701]),
    (tidy.file_length, POOL, "\n" * 700, []),
    (tidy.file_length, "docs/internals/design.md", "\n" * 701, []),
    (tidy.finished, POOL, f"\n// {MARK}: later\n", [2]),
    (tidy.finished, "README.md", f"{MARK}", [1]),
    (tidy.finished, POOL, "// METHODOLOGY, mktemp x.XXXXXX\n", []),
    (tidy.no_machine_paths, "README.md", f"see {HOME}\n", [1]),
    (tidy.no_machine_paths, POOL, f'open("{HOME}")', [1]),
    (tidy.no_machine_paths, "README.md", "network/work/load, ~/home, /dev/shm, https://example.org/home/x\n", []),
    (tidy.no_package_indexes, "Makefile", f"pip install -i {INDEX}\n", [1]),
    (tidy.no_package_indexes, "Makefile", "pip install --index" "-url x\npip --find" "-links y\n", [1, 2]),
    (tidy.no_package_indexes, "x.sh", "curl files.python" "hosted.org\n", [1]),
    (tidy.no_package_indexes, "README.md", "https://example.org/paper\n", []),
    (tidy.locks_without_urls, "scripts/requirements/base.lock", f"pytest==1 --hash=sha256:0\n# {INDEX}\n", [2]),
    (tidy.locks_without_urls, "scripts/requirements/serve-overrides.txt", "torch @ https://example.org/torch.whl\n", [1]),
    (tidy.locks_without_urls, "docs/x.txt", "https://example.org\n", []),
    (tidy.locks_without_urls, "Cargo.lock", 'source = "registry+https://example.org/index"\n', [1]),
    (tidy.locks_without_urls, "Cargo.lock", 'source = "registry+https://github.com/rust-lang/crates.io-index"\n', []),
    (tidy.names_the_actor, POOL, "// Nobody waits.\nfn f() {}\n// whoever comes, somebody's, x_anyone()\n", [1, 3, 3, 3]),
    (tidy.names_the_actor, "docs/limits.md", "everybody\n\neveryone\n", [1, 3]),
    (tidy.names_the_actor, "Makefile", "# anybody\n", [1]),
    (tidy.names_the_actor, "perf/records/x.json", "somebody\n", []),
    (tidy.names_the_actor, "README.md", "no body, some bodies, whoeveral, everyonesized, any one\n", []),
    (tidy.media_lines, "kvbm_cxl/pool/src/media/lines.rs", "pub struct Seat {\n    pub crc: u32,\n}\n", [1]),
    (tidy.media_lines, POOL, "struct X { crc: u32 }\nimpl crate::media::MediaLine for X {}\n", [2]),
    (
        tidy.media_lines,
        "kvbm_cxl/pool/src/media/lines.rs",
        "impl MediaLine for $name {}\nstruct $name { pub crc: u32 }\nmedia_line! { Seat in Seat { @4 n: u32, } }\nstruct G { n: u32 }\n",
        [],
    ),
]


@pytest.mark.parametrize(("check", "path", "text", "lines"), CASES, ids=[f"{i}-{case[0].__name__}" for i, case in enumerate(CASES)])
def test_rule_finds_exactly_the_planted_violation(check, path, text, lines):
    assert [line for line, _ in check(path, text)] == lines


def test_every_rule_has_a_violation_that_it_finds():
    assert {check for check, _, _, lines in CASES if lines} == set(tidy.FILE_CHECKS)


def test_fault_names_are_compared_over_files():
    one = (POOL, 'fn f() { point!("a.begin"); if mutant!("H3.skip") {} }\n// point!("a.begin")\n')
    two = ("kvbm_cxl/pool/src/y.rs", '\nfn g() { mutant!("a.begin") }\n')
    odd = ("kvbm_cxl/pool/src/z.rs", 'fn g() { point!("two words") }\n')
    assert list(tidy.fault_names([one])) == []
    assert [found[:2] for found in tidy.fault_names([one, two])] == [("kvbm_cxl/pool/src/y.rs", 2)]
    shared = (POOL, 'fn f() { mutant!("no_reqno"); mutant!("no_reqno") }')
    assert list(tidy.fault_names([shared])) == []
    assert [found[:2] for found in tidy.fault_names([odd])] == [("kvbm_cxl/pool/src/z.rs", 1)]


def test_bare_type_names_are_compared_within_a_crate():
    one = (POOL, "pub enum State { A }\nstruct PoolState;\n// struct State;\n#[cfg(test)]\nmod tests { struct State; }\n")
    two = ("kvbm_cxl/pool/src/y.rs", "\npub(super) struct State<'a>(&'a u8);\ntype Places = u8;\nfn f() { State::new() }\n")
    third = ("kvbm_cxl/pool/src/z.rs", "type Slot = u8;\nmod inner { trait Slot {} }\n")
    elsewhere = [("kvbm_cxl/sim/src/y.rs", "struct State;"), ("kvbm_cxl/pool/tests/y.rs", "struct State;")]
    assert list(tidy.bare_type_names([one, *elsewhere])) == []
    found = [at[:2] for at in tidy.bare_type_names([one, two, third])]
    assert found == [("kvbm_cxl/pool/src/y.rs", 2), ("kvbm_cxl/pool/src/z.rs", 2)]


IN_PYTHON = (
    ("assert a == b", True),
    ("with pytest.raises(OSError):\n        a()", True),
    ("subprocess.run(a, check=True)", True),
    ("run_away(check=False)", False),
    ("metrics.observe(1)", False),
    ("checked(a)", True),
    ("here.checked_by_others(a)", True),
    ("started = Thread(target=a)", False),
    ("each_of(checked)", True),
    ("own(a)", False),
    ("print('assert')  # assert", False),
)
IN_RUST = (
    ("assert_eq!(a, b);", True),
    ("a().unwrap();", True),
    ("let _ = a(); // assert!(b)", False),
    ("a().ok();", False),
    ("let x = [1u8; 4];\n    checked(x);", True),
    ("run::<Both>(a);", True),
    ('print("panic!");', False),
    ("if a { loop { break } } else { unreachable!() }", True),
)


@pytest.mark.parametrize(("body", "fails"), IN_PYTHON)
def test_a_python_test_that_cannot_fail_is_found(body, fails):
    helpers = "def checked(a):\n    return inner(a)\ndef inner(a):\n    assert a\ndef own(a):\n    assert a\n"
    text = f"def own(a):\n    return a\ndef checked_by_others(a):\n    checked(a)\ndef test_x():\n    {body}\ndef helper():\n    {body}\n"
    found = list(tidy.tests_that_cannot_fail([("tests/helpers.py", helpers), ("tests/test_x.py", text)]))
    assert [(path, line) for path, line, _ in found] == ([] if fails else [("tests/test_x.py", 5)])


@pytest.mark.parametrize(("body", "fails"), IN_RUST)
def test_a_rust_test_that_cannot_fail_is_found(body, fails):
    helpers = "pub fn run<T>(a: u8) {\n    checked(a)\n}\nfn checked(a: [u8; 4]) { assert!(a) }\n"
    text = f"#[test]\n#[ignore]\nfn f() {{\n    {body}\n}}\n#[test]\n#[should_panic]\nfn g() {{}}\nfn h() {{}}\n"
    found = list(tidy.tests_that_cannot_fail([("kvbm_cxl/sim/src/run.rs", helpers), ("kvbm_cxl/pool/tests/x.rs", text)]))
    assert [(path, line) for path, line, _ in found] == ([] if fails else [("kvbm_cxl/pool/tests/x.rs", 3)])


def test_an_exception_whose_file_is_gone_is_found():
    assert tidy.stale_exceptions([]) == [*tidy.LINE_LENGTH_EXCEPTIONS, *tidy.INSTRUCTION_EXCEPTIONS, *tidy.WORD_EXCEPTIONS]


def test_masking_keeps_lines_and_length():
    text = 'a /* 1\n /* 2 */ */ "x\\"y\nz" b\'\\\'\' \'\\u{1F}\' r##"q"#"## // end\n&\'static str'
    code = masked(text)
    assert len(code) == len(text) and code.count("\n") == text.count("\n")
    assert not any(hidden in code for hidden in ("1", "2", "y", "z", "q", "F", "end"))
    assert "&'static str" in code and '"x' in masked(text, strings=False)


def test_test_items_end_where_they_end():
    code = without_tests("#[cfg(test)]\nuse a::{b, c};\n#[cfg(all(test, unix))]\nfn f(x: [u8; 4]) { { } }\nfn kept() {}\n")
    assert code.split() == [";", "fn", "kept()", "{}"]
