// SPDX-License-Identifier: Apache-2.0

use super::*;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Instant;

const ROLE: &str = "CXL_TEST_ROLE";
const BASE: &str = "CXL_TEST_BASE";
const UUID: [u8; 16] = [6; 16];
const LOCAL_BYTES: usize = 8192;
const ROUNDS: u32 = 20_000;

fn machine(base: &Path) -> Machine {
    let id = MachineId([4; 16]);
    Machine::new(id, State::open(base, &UUID, id).unwrap()).unwrap()
}

fn word(memory: &LocalMemory, index: usize) -> &AtomicU32 {
    assert!((index + 1) * 4 <= memory.len_bytes);
    // SAFETY: within the mapping, aligned, and only ever used as an atomic; the borrow keeps the mapping alive.
    unsafe { &*memory.start.as_ptr().cast::<AtomicU32>().add(index) }
}

/// What a child process does; an ordinary run of the tests passes through it at once.
#[test]
fn child() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let machine = machine(Path::new(&std::env::var(BASE).unwrap()));
    let say = |text: &str| {
        println!("\nready {text}");
        std::io::stdout().flush().unwrap();
    };
    match role.as_str() {
        "hold" => {
            let _guard = machine.try_lock(MachineLock::Manager, true).unwrap().unwrap();
            say("");
            std::io::stdin().read_to_end(&mut Vec::new()).unwrap();
        }
        "idle" => {
            say("");
            std::io::stdin().read_to_end(&mut Vec::new()).unwrap();
        }
        "count" => {
            let memory = machine.local_memory(LOCAL_BYTES).unwrap();
            (0..ROUNDS).for_each(|_| _ = word(&memory, 0).fetch_add(1, Ordering::Relaxed));
            say(&machine.process().start.to_string());
        }
        "park" => {
            let memory = machine.local_memory(LOCAL_BYTES).unwrap();
            word(&memory, 1).store(1, Ordering::SeqCst);
            say("");
            let deadline = Instant::now() + Duration::from_secs(20);
            while word(&memory, 2).load(Ordering::SeqCst) == 0 && Instant::now() < deadline {
                machine.park(word(&memory, 2), 0, 20_000_000_000);
            }
            assert_eq!(word(&memory, 2).load(Ordering::SeqCst), 7);
            say("woken");
        }
        other => panic!("unknown role {other}"),
    }
}

/// A child process that is killed and reaped when the test ends, whatever happens.
struct Role {
    child: Child,
    output: BufReader<std::process::ChildStdout>,
}

impl Role {
    fn start(role: &str, base: &Path) -> Role {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["machine::tests::child", "--exact", "--nocapture", "--test-threads=1"])
            .env(ROLE, role)
            .env(BASE, base)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        Role { child, output }
    }

    fn ready(&mut self) -> String {
        let mut line = String::new();
        while self.output.read_line(&mut line).unwrap() > 0 {
            if let Some(text) = line.trim_end().strip_prefix("ready ").or((line.trim_end() == "ready").then_some("")) {
                return text.to_owned();
            }
            line.clear();
        }
        panic!("the child ended early");
    }
}

impl Drop for Role {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn eventually(what: &str, mut check: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(20);
    while !check() {
        assert!(Instant::now() < deadline, "{what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_lock_falls_with_its_holder() {
    let base = tempfile::tempdir().unwrap();
    let machine = machine(base.path());
    let mut holder = Role::start("hold", base.path());
    holder.ready();
    assert!(machine.try_lock(MachineLock::Manager, true).unwrap().is_none());
    assert!(machine.try_lock(MachineLock::Join, true).unwrap().is_some(), "locks are apart");
    holder.child.kill().unwrap();
    eventually("the lock of a killed process is still held", || machine.try_lock(MachineLock::Manager, true).unwrap().is_some());
}

#[test]
fn locks_exclude_threads_and_shared_ones_share() {
    let base = tempfile::tempdir().unwrap();
    let machine = machine(base.path());
    let (one, two) = (machine.try_lock(MachineLock::Members, false).unwrap(), machine.try_lock(MachineLock::Members, false).unwrap());
    assert!(one.is_some() && two.is_some());
    assert!(machine.try_lock(MachineLock::Members, true).unwrap().is_none());
    drop(one);
    assert!(machine.try_lock(MachineLock::Members, true).unwrap().is_none());
    drop(two);
    let alone = machine.try_lock(MachineLock::Members, true).unwrap();
    assert!(alone.is_some() && machine.try_lock(MachineLock::Members, false).unwrap().is_none());
    // Another machine, and another pool, have locks of their own.
    let other = Machine::new(MachineId([5; 16]), State::open(base.path(), &UUID, MachineId([5; 16])).unwrap()).unwrap();
    assert!(other.try_lock(MachineLock::Members, true).unwrap().is_some());
}

#[test]
fn a_forked_child_does_not_drop_its_parents_lock() {
    let base = tempfile::tempdir().unwrap();
    let machine = machine(base.path());
    let guard = machine.try_lock(MachineLock::Manager, true).unwrap().unwrap();
    // SAFETY: the child only drops the guard (a system call and a free) and leaves without running anything else.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        drop(guard);
        // SAFETY: ends the child at once.
        unsafe { libc::_exit(0) };
    }
    assert!(pid > 0);
    // SAFETY: waits for the child made above; no memory is passed.
    assert_eq!(unsafe { libc::waitpid(pid, std::ptr::null_mut(), 0) }, pid);
    assert!(machine.try_lock(MachineLock::Manager, true).unwrap().is_none());
    drop(guard);
    assert!(machine.try_lock(MachineLock::Manager, true).unwrap().is_some());
}

#[test]
fn the_dead_and_the_reborn_are_not_alive() {
    let base = tempfile::tempdir().unwrap();
    let machine = machine(base.path());
    let this = machine.process();
    assert!(machine.is_alive(this));
    assert!(!machine.is_alive(ProcessId { start: this.start.wrapping_add(1), ..this }), "same pid, another process");
    assert!(!machine.is_alive(ProcessId::default()));
    let mut role = Role::start("idle", base.path());
    role.ready();
    let pid = role.child.id();
    let process = ProcessId { pid, start: start_of(pid).unwrap() };
    assert!(machine.is_alive(process));
    role.child.kill().unwrap();
    // Not waited for: it is a zombie, and /proc still has it.
    eventually("a zombie counts as alive", || !machine.is_alive(process));
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    assert!(stat.contains(") Z "), "{stat}");
    role.child.wait().unwrap();
    assert!(!machine.is_alive(process));
}

#[test]
fn stat_lines() {
    let fields = "1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 4294967298 20 21";
    assert_eq!(start_in(format!("7 (a) b) R) S {fields}").as_bytes()), Some(2), "truncated to 32 bits");
    assert_eq!(start_in(b"7 (\xff\xfe) S 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 99"), Some(99));
    for text in ["", "7 (x", "7 (x) S", "7 (x) S 1 2 3", &format!("7 (x) Z {fields}"), &format!("7 (x) X {fields}")] {
        assert_eq!(start_in(text.as_bytes()), None, "{text}");
    }
}

#[test]
fn processes_share_one_memory() {
    let base = tempfile::tempdir().unwrap();
    let machine = machine(base.path());
    let memory = machine.local_memory(LOCAL_BYTES).unwrap();
    assert!((0..LOCAL_BYTES / 4).all(|index| word(&memory, index).load(Ordering::Relaxed) == 0));
    let mut roles: Vec<_> = (0..3).map(|_| Role::start("count", base.path())).collect();
    for role in &mut roles {
        role.ready();
    }
    assert_eq!(word(&memory, 0).load(Ordering::SeqCst), 3 * ROUNDS);
    let again = machine.local_memory(LOCAL_BYTES).unwrap();
    assert_eq!(word(&again, 0).load(Ordering::SeqCst), 3 * ROUNDS);
    assert_eq!(memory.start.as_ptr() as usize % 64, 0);
    let mode = |name: &str| {
        std::os::unix::fs::PermissionsExt::mode(&std::fs::metadata(machine.state().directory().join(name)).unwrap().permissions()) & 0o777
    };
    assert_eq!((mode("local"), mode("")), (0o600, 0o700));
}

#[test]
fn waiting_ends_by_a_wake_from_another_process() {
    let base = tempfile::tempdir().unwrap();
    let machine = machine(base.path());
    let memory = machine.local_memory(LOCAL_BYTES).unwrap();
    let mut role = Role::start("park", base.path());
    role.ready();
    assert_eq!(word(&memory, 1).load(Ordering::SeqCst), 1);
    let stat = format!("/proc/{}/task", role.child.id());
    eventually("the child never waits", || {
        std::fs::read_dir(&stat).unwrap().flatten().any(|task| {
            std::fs::read_to_string(task.path().join("wchan")).is_ok_and(|text| text.contains("futex"))
                || std::fs::read_to_string(task.path().join("syscall")).is_ok_and(|text| text.starts_with(&format!("{} ", libc::SYS_futex)))
        })
    });
    let start = Instant::now();
    word(&memory, 2).store(7, Ordering::SeqCst);
    machine.wake(word(&memory, 2));
    assert_eq!(role.ready(), "woken");
    assert!(start.elapsed() < Duration::from_secs(15), "it was the time-out that ended the wait");
    // A wait with another value, or until a time-out, comes back by itself.
    machine.park(word(&memory, 2), 8, 60_000_000_000);
    machine.park(word(&memory, 2), 7, 1_000_000);
}

#[test]
fn memory_in_use_is_neither_resized_nor_shared_with_another_namespace() {
    let base = tempfile::tempdir().unwrap();
    let machine = machine(base.path());
    let memory = machine.local_memory(LOCAL_BYTES).unwrap();
    word(&memory, 0).store(5, Ordering::SeqCst);
    let refused = |outcome: Result<LocalMemory>| match outcome {
        Err(Error::Invalid(text)) => text,
        Err(other) => panic!("{other:?}"),
        Ok(_) => panic!("it was given out"),
    };
    assert!(refused(machine.local_memory(2 * LOCAL_BYTES)).contains("another version"));
    machine.state().pretend_namespace("pid:[1]");
    assert!(refused(machine.local_memory(LOCAL_BYTES)).contains("another PID namespace"));
    assert_eq!(word(&memory, 0).load(Ordering::SeqCst), 5);
    drop(memory);
    // It is not used any more: the leftovers of the other namespace are cleared.
    let memory = machine.local_memory(LOCAL_BYTES).unwrap();
    assert_eq!(word(&memory, 0).load(Ordering::SeqCst), 0);
    word(&memory, 0).store(6, Ordering::SeqCst);
    drop(memory);
    assert_eq!(word(&machine.local_memory(LOCAL_BYTES).unwrap(), 0).load(Ordering::SeqCst), 6, "kept between processes");
    let larger = machine.local_memory(2 * LOCAL_BYTES).unwrap();
    assert_eq!((larger.len_bytes, word(&larger, 0).load(Ordering::SeqCst)), (2 * LOCAL_BYTES, 0));
}

#[test]
fn a_stuck_preparation_ends_in_a_time_out() {
    let base = tempfile::tempdir().unwrap();
    let id = MachineId([4; 16]);
    let state = State::open(base.path(), &UUID, id).unwrap().with_prepare_timeout_ms(20);
    drop(state.local_memory(LOCAL_BYTES).unwrap());
    let file = std::fs::File::open(state.directory().join("local")).unwrap();
    crate::device::flock(&file, libc::LOCK_EX).unwrap();
    assert!(matches!(state.local_memory(LOCAL_BYTES), Err(Error::Timeout { .. })));
}

#[test]
fn many_threads_that_prepare_at_once_get_the_same_memory() {
    let base = tempfile::tempdir().unwrap();
    let machine = machine(base.path());
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                let memory = machine.local_memory(LOCAL_BYTES).unwrap();
                word(&memory, 0).fetch_add(1, Ordering::SeqCst);
                eventually("some thread has memory of its own", || word(&memory, 0).load(Ordering::SeqCst) == 8);
            });
        }
    });
}

#[test]
fn a_state_directory_of_others_is_refused() {
    let base = tempfile::tempdir().unwrap();
    let open = |path: &Path| State::open(path, &UUID, MachineId([4; 16]));
    let shared = base.path().join("shared");
    std::fs::create_dir(&shared).unwrap();
    std::fs::set_permissions(&shared, std::os::unix::fs::PermissionsExt::from_mode(0o777)).unwrap();
    assert!(matches!(open(&shared), Err(Error::Invalid(_))));
    let link = base.path().join("link");
    std::os::unix::fs::symlink(base.path(), &link).unwrap();
    assert!(matches!(open(&link), Err(Error::Invalid(_))));
    std::fs::write(base.path().join("file"), "x").unwrap();
    assert!(open(&base.path().join("file")).is_err());
}

#[test]
fn a_removed_lock_file_is_noticed() {
    let base = tempfile::tempdir().unwrap();
    let machine = machine(base.path());
    let guard = machine.try_lock(MachineLock::Manager, true).unwrap().unwrap();
    std::fs::remove_file(machine.state().directory().join("manager.lock")).unwrap();
    // The new file excludes no holder of the old one; all that can be done is to keep working with one of them.
    let second = machine.try_lock(MachineLock::Manager, true).unwrap();
    assert!(second.is_some() && machine.try_lock(MachineLock::Manager, true).unwrap().is_none());
    drop(guard);
}

#[test]
fn time_moves_on_and_random_numbers_differ() {
    let base = tempfile::tempdir().unwrap();
    let machine = machine(base.path());
    let before = machine.now_ns();
    machine.sleep_ns(2_000_000);
    assert!(machine.now_ns() - before >= 2_000_000);
    let mut seen: Vec<_> = (0..1000).map(|_| machine.random()).collect();
    seen.sort_unstable();
    seen.dedup();
    assert_eq!(seen.len(), 1000);
    let start = Instant::now();
    (0..YIELD_ROUNDS + 20).chain([u32::MAX]).for_each(|round| machine.relax(round));
    assert!(start.elapsed() < Duration::from_secs(5));
    assert!(Machine::new(MachineId::default(), machine.state().clone()).is_err());
}
