// SPDX-License-Identifier: Apache-2.0
//! Building C and C++ programs against the libraries of this build, and running them as hosts.
#![allow(dead_code)] // Every test file uses its part.

use std::ffi::OsStr;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// After this long a program counts as hung.
pub const DEADLINE: Duration = Duration::from_secs(150);

/// The directory of this crate.
pub fn here() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Where cargo put the libraries that this test was built with.
pub fn built() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    test.parent().unwrap().to_path_buf()
}

/// The libraries, the header and the pkg-config file, installed as users install them.
pub fn installed() -> &'static Path {
    static PREFIX: OnceLock<PathBuf> = OnceLock::new();
    PREFIX.get_or_init(|| {
        // One place for all runs: an archive of a debug build is large, and would stay.
        let prefix = Path::new(env!("CARGO_TARGET_TMPDIR")).join("capi");
        let script = here().join("../../scripts/install-capi");
        let status = Command::new(&script).arg(&prefix).arg(built()).status().unwrap();
        assert!(status.success(), "{} failed", script.display());
        prefix
    })
}

/// A folder in shared memory that goes away with the test.
pub struct Folder(pub TempDir);

impl Folder {
    /// An empty one.
    pub fn new() -> Folder {
        Folder(tempfile::tempdir_in("/dev/shm").unwrap())
    }

    /// A path in it.
    pub fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }
}

/// How a program is linked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Link {
    /// With the archive.
    Static,
    /// With the shared library.
    Shared,
    /// With the shared library, under the address and undefined behaviour sanitizers.
    Sanitized,
}

/// The compiler for C or C++, or why there is none.
fn compiler(source: &str) -> Result<String, String> {
    let (variable, default) = if source.ends_with(".cpp") { ("CXX", "c++") } else { ("CC", "cc") };
    let name = std::env::var(variable).unwrap_or_else(|_| default.to_owned());
    match Command::new(&name).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status() {
        Ok(status) if status.success() => Ok(name),
        _ => Err(format!("no compiler: {name} does not run (set {variable})")),
    }
}

/// Compiles a file without linking it; the compiler's messages on failure, `None` where there is no compiler.
pub fn compiles(folder: &Folder, source: &Path) -> Option<Result<(), String>> {
    let name = source.to_string_lossy();
    let compiler = match compiler(&name) {
        Ok(compiler) => compiler,
        Err(reason) => {
            println!("skipped: {reason}");
            return None;
        }
    };
    let standard = if name.ends_with(".cpp") { "-std=c++20" } else { "-std=c11" };
    let output = Command::new(compiler)
        .args([standard, "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-c", "-I"])
        .arg(here().join("include"))
        .arg(source)
        .arg("-o")
        .arg(folder.path("object.o"))
        .output()
        .unwrap();
    Some(if output.status.success() { Ok(()) } else { Err(String::from_utf8_lossy(&output.stderr).into_owned()) })
}

/// Builds a test program; `None`, with the reason printed, where there is no compiler.
pub fn program(folder: &Folder, source: &str, link: Link) -> Option<PathBuf> {
    program_of(folder, &here().join("tests/c").join(source), link)
}

/// As [`program`], of a source anywhere.
pub fn program_of(folder: &Folder, path: &Path, link: Link) -> Option<PathBuf> {
    let source = &*path.file_name()?.to_string_lossy();
    let compiler = match compiler(source) {
        Ok(compiler) => compiler,
        Err(reason) => {
            println!("skipped: {reason}");
            return None;
        }
    };
    let prefix = installed();
    let program = folder.path(&format!("{}-{link:?}", source.replace('.', "-")));
    let standard = if source.ends_with(".cpp") { "-std=c++20" } else { "-std=c11" };
    let mut command = Command::new(compiler);
    command
        .args([standard, "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-D_DEFAULT_SOURCE", "-O1", "-g", "-pthread"])
        .arg("-I")
        .arg(prefix.join("include"))
        .arg(path)
        .arg("-o")
        .arg(&program);
    let library = prefix.join("lib");
    match link {
        Link::Static => {
            command.arg(library.join("libcxl_shm.a")).args(["-ldl", "-lm"]);
        }
        Link::Shared | Link::Sanitized => {
            command.arg("-L").arg(&library).arg("-lcxl_shm").arg(format!("-Wl,-rpath,{}", library.display()));
        }
    }
    if link == Link::Sanitized {
        command.args(["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]);
    }
    let output = command.output().unwrap();
    assert!(output.status.success(), "{source}, {link:?}:\n{}", String::from_utf8_lossy(&output.stderr));
    Some(program)
}

/// A process that plays a machine, and where its output goes.
pub struct Running {
    name: String,
    child: Child,
    output: PathBuf,
}

/// Starts a program as machine `machine`; `coherence` is the value of CXL_COHERENCE.
pub fn start(folder: &Folder, program: &Path, machine: &str, coherence: &str, args: &[&OsStr]) -> Running {
    let name = format!("{} as {machine}", args.first().map_or_else(String::new, |arg| arg.to_string_lossy().into_owned()));
    let output = folder.path(&format!("{}.out", name.replace([' ', '/'], "-")));
    let file = File::create(&output).unwrap();
    let child = Command::new(program)
        .args(args)
        .env("CXL_MACHINE_ID", machine)
        .env("CXL_STATE_DIR", folder.path("state"))
        .env("CXL_COHERENCE", coherence)
        .env_remove("CXL_POOL")
        .stdin(Stdio::piped())
        .stdout(file.try_clone().unwrap())
        .stderr(file)
        .spawn()
        .unwrap();
    Running { name, child, output }
}

impl Running {
    /// What it has printed so far.
    pub fn text(&self) -> String {
        std::fs::read_to_string(&self.output).unwrap()
    }

    /// Waits until it has printed `wanted`.
    pub fn await_text(&mut self, wanted: &str) {
        let since = Instant::now();
        while !self.text().contains(wanted) {
            let ended = self.child.try_wait().unwrap();
            assert!(ended.is_none() && since.elapsed() < DEADLINE, "{} ({ended:?}) never said {wanted:?}:\n{}", self.name, self.text());
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Ends its input, for which a program waits that is to stay until then.
    pub fn end_input(&mut self) {
        self.child.stdin.take();
    }

    /// Kills it, as a crash would.
    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // Whatever went wrong elsewhere, no process is left behind.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Waits for all of them; kills the rest as soon as one fails. Returns the statuses of those that ended by themselves, and all output.
pub fn finish(mut running: Vec<Running>) -> (Vec<ExitStatus>, String) {
    let since = Instant::now();
    let mut statuses: Vec<Option<ExitStatus>> = vec![None; running.len()];
    while statuses.iter().any(Option::is_none) && statuses.iter().flatten().all(ExitStatus::success) && since.elapsed() < DEADLINE {
        for (process, status) in running.iter_mut().zip(&mut statuses) {
            if status.is_none() {
                *status = process.child.try_wait().unwrap();
            }
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    let text = running.iter().map(|process| format!("-- {}\n{}", process.name, process.text())).collect();
    (statuses.into_iter().flatten().collect(), text)
}

/// [`finish`], with success of all demanded.
pub fn succeed(running: Vec<Running>) {
    let count = running.len();
    let (statuses, text) = finish(running);
    assert!(statuses.len() == count && statuses.iter().all(ExitStatus::success), "{statuses:?}\n{text}");
}
