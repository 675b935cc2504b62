// SPDX-License-Identifier: Apache-2.0
//! The fake driver, compiled once for each kind that is asked for. Each test loads a copy of its own, so that none sees another's.

use crate::device::Library;
use cxl_pool::copy::CudaConfig;
use std::collections::HashMap;
use std::ffi::{CStr, CString, OsStr, c_char, c_int, c_long, c_void};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::ptr::with_exposed_provenance_mut;
use std::sync::Mutex;
use tempfile::TempDir;

/// What the driver lacks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// What launches kernels: copies are made by the copy engine.
    Engine,
    /// A function that is needed.
    Broken,
    /// Nothing. It launches our own kernels, compiled for the CPU.
    Kernels,
}

fn source(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../pool").join(name)
}

/// The kernels, as GPUs run them.
pub fn kernels() -> PathBuf {
    source("src/copy/cuda/kernels/move.cu")
}

/// Compiles the fake to `path`. `kernels` is what it launches, where its kind does; altered ones may have what is not used.
fn compile(kind: Kind, kernels: &Path, is_altered: bool, path: &Path) {
    let run = |compiler: (&str, &str), arguments: &[&OsStr]| {
        let compiler = std::env::var(compiler.0).unwrap_or_else(|_| compiler.1.into());
        let status = Command::new(compiler).args(["-fPIC", "-O1", "-Wall", "-Wextra", "-Werror"]).args(arguments).status();
        assert!(status.expect("a C compiler, and one for C++").success(), "the fake driver does not compile");
    };
    let define = match kind {
        Kind::Engine => "-UFAKE_KERNELS",
        Kind::Broken => "-DFAKE_WITHOUT_EVENTS",
        Kind::Kernels => "-DFAKE_KERNELS",
    };
    let (driver, host) = (source("tests/cuda/fake.c"), source("tests/cuda/kernel/host.cpp"));
    let c = ["-std=gnu11", "-pthread", define].map(OsStr::new);
    let [shared, output, object] = ["-shared", "-o", "-c"].map(OsStr::new);
    if kind != Kind::Kernels {
        return run(("CC", "cc"), &[&c[..], &[shared, driver.as_os_str(), output, path.as_os_str()]].concat());
    }
    let middle = path.with_extension("o");
    run(("CC", "cc"), &[&c[..], &[object, driver.as_os_str(), output, middle.as_os_str()]].concat());
    let named = format!("-DKERNELS=\"{}\"", kernels.display());
    let cpp = ["-std=c++17", "-pthread", if is_altered { "-w" } else { "-O2" }, &named].map(OsStr::new);
    run(("CXX", "c++"), &[&cpp[..], &[shared, host.as_os_str(), middle.as_os_str(), output, path.as_os_str()]].concat());
    std::fs::remove_file(middle).unwrap();
}

fn compiled(kind: Kind) -> PathBuf {
    static COMPILED: Mutex<Option<HashMap<Kind, PathBuf>>> = Mutex::new(None);
    let compile = || {
        // One place for all runs, where each puts its own under the name once it is whole: more of them would stay.
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("fake-cuda");
        std::fs::create_dir_all(&folder).unwrap();
        let path = folder.join(format!("{kind:?}.so"));
        let new = tempfile::NamedTempFile::new_in(&folder).unwrap().into_temp_path();
        compile(kind, &kernels(), false, &new);
        new.persist(&path).unwrap();
        path
    };
    COMPILED.lock().unwrap().get_or_insert_default().entry(kind).or_insert_with(compile).clone()
}

/// The callback of every copy.
pub type Hook = extern "C" fn(u64, u64, usize, u64, u64);

/// A driver that only one test knows.
pub struct Fake {
    path: String,
    library: Library,
    _directory: TempDir,
}

impl Fake {
    pub fn new(kind: Kind) -> Fake {
        let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let path = directory.path().join("libcuda.so.1");
        std::fs::copy(compiled(kind), &path).unwrap();
        Fake::of(&path, directory)
    }

    /// One that launches altered kernels, whose source is this text.
    pub fn with_kernels(text: &str) -> Fake {
        let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let (path, source) = (directory.path().join("libcuda.so.1"), directory.path().join("move.cu"));
        std::fs::write(&source, text).unwrap();
        compile(Kind::Kernels, &source, true, &path);
        Fake::of(&path, directory)
    }

    fn of(path: &Path, directory: TempDir) -> Fake {
        let path = path.to_str().unwrap().to_owned();
        Fake { library: Library::open(&path).unwrap(), path, _directory: directory }
    }

    pub fn path(&self) -> &str {
        &self.path
    }

    /// Small granules and buffers, so that little data shows what happens at their borders.
    pub fn config(&self) -> CudaConfig {
        CudaConfig {
            library: self.path.clone(),
            timeout_ms: 5_000,
            granule_bytes: 64 << 10,
            buffer_bytes: 16 << 10,
            // As many warps as show what two do to each other.
            kernel_blocks: 2,
            // A test says when it wants that.
            register_bytes: 0,
            ..CudaConfig::default()
        }
    }

    pub fn set(&self, name: &str, value: c_int) {
        let name = CString::new(name).unwrap();
        // SAFETY: a function of the fake of this signature; the same below.
        unsafe { self.library.get::<unsafe extern "C" fn(*const c_char, c_int)>("fake_set")(name.as_ptr(), value) };
    }

    pub fn get(&self, name: &str) -> i64 {
        let name = CString::new(name).unwrap();
        // SAFETY: as above.
        unsafe { self.library.get::<unsafe extern "C" fn(*const c_char) -> c_long>("fake_get")(name.as_ptr()) }
    }

    /// Calls of that name fail with `error`: `times` of them, after so many that succeed.
    pub fn fail(&self, call: &str, after: c_int, times: c_int, error: c_int) {
        let call = CString::new(call).unwrap();
        type Fail = unsafe extern "C" fn(*const c_char, c_int, c_int, c_int);
        // SAFETY: as above.
        unsafe { self.library.get::<Fail>("fake_fail")(call.as_ptr(), after, times, error) };
    }

    /// No call fails any more.
    pub fn forgive(&self) {
        // SAFETY: as above.
        unsafe { self.library.get::<unsafe extern "C" fn()>("fake_forgive")() };
    }

    /// What no driver would have put up with.
    pub fn misuse(&self) -> String {
        // SAFETY: as above; the text stays where it is.
        unsafe { CStr::from_ptr(self.library.get::<unsafe extern "C" fn() -> *const c_char>("fake_misuse")()) }
            .to_string_lossy()
            .into_owned()
    }

    /// Is called with every copy when it is made: where to, where from, bytes, and from when to when it went, in microseconds.
    pub fn hook(&self, hook: Hook) {
        // SAFETY: as above.
        unsafe { self.library.get::<unsafe extern "C" fn(Hook)>("fake_hook")(hook) };
    }

    /// Keeps a stream from doing anything, or lets it go.
    pub fn hold(&self, stream: u64, is_held: bool) {
        let stream = with_exposed_provenance_mut::<c_void>(stream as usize);
        // SAFETY: as above.
        unsafe { self.library.get::<unsafe extern "C" fn(*mut c_void, c_int)>("fake_hold")(stream, is_held.into()) };
    }

    /// Has every stream do what it was given.
    pub fn finish(&self) {
        // SAFETY: as above.
        unsafe { self.library.get::<unsafe extern "C" fn()>("fake_finish")() };
    }

    /// Has a stream write bytes to memory of the device.
    pub fn kernel(&self, stream: u64, to: u64, bytes: &[u8]) {
        let stream = with_exposed_provenance_mut::<c_void>(stream as usize);
        let from = bytes.as_ptr().cast::<c_void>();
        type Kernel = unsafe extern "C" fn(*mut c_void, u64, *const c_void, usize);
        // SAFETY: as above; the bytes are copied before it returns.
        unsafe { self.library.get::<Kernel>("fake_kernel")(stream, to, from, bytes.len()) };
    }

    /// What was taken of the driver and not given back: streams, events, registered and pinned memory, contexts, modules.
    pub fn taken(&self) -> [i64; 6] {
        ["streams", "events", "registered", "pinned", "contexts", "modules"].map(|name| self.get(name))
    }

    /// Nothing was misused and everything was given back.
    pub fn assert_left_clean(&self) {
        assert_eq!(self.misuse(), "");
        assert_eq!(self.taken(), [0; 6], "streams, events, registered, pinned, contexts, modules");
    }
}
