// SPDX-License-Identifier: Apache-2.0
//! `cxlctl host`, and the release of hosts that crashed: real processes under one kernel, each a container of its own to the pool.

mod common;

use common::{Bench, ran};
use cxl_pool::media::Identity;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::net::UnixDatagram;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Waits until `done` says so.
fn wait_for(what: &str, mut done: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !done() {
        assert!(Instant::now() < deadline, "{what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// A running `cxlctl host`; killed with the test if it still runs.
struct Serving {
    process: Child,
    slot: u64,
    incarnation: u64,
}

impl Serving {
    fn start(mut command: Command) -> Serving {
        let mut process = command.args(["--json", "host"]).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut text = String::new();
        let mut lines = BufReader::new(process.stdout.as_mut().unwrap());
        while !text.ends_with("}\n") {
            let mut line = String::new();
            if lines.read_line(&mut line).unwrap() == 0 {
                let mut told = String::new();
                process.stderr.take().unwrap().read_to_string(&mut told).unwrap();
                panic!("no slot: {text}{told}");
            }
            text.push_str(&line);
        }
        let told: serde_json::Value = serde_json::from_str(&text).unwrap();
        Serving { process, slot: told["slot"].as_u64().unwrap(), incarnation: told["incarnation"].as_u64().unwrap() }
    }

    fn of(bench: &Bench, machine: &str) -> Serving {
        Serving::start(bench.command(machine))
    }

    /// As a machine of its own: a process whose kernel tells of another boot.
    fn under_another_kernel(bench: &Bench, machine: &str) -> Serving {
        let boot_id = bench.directory.path().join("boot_id");
        std::fs::write(&boot_id, "6c2a0a0e-1d3c-4b7e-9c55-0d2f3a4b5c6d\n").unwrap();
        let known = bench.command(machine);
        let mut command = Command::new("unshare");
        command.args([
            "--map-root-user",
            "--mount",
            "sh",
            "-c",
            r#"mount --bind "$BOOT_ID" /proc/sys/kernel/random/boot_id && exec "$0" "$@""#,
        ]);
        command.arg(known.get_program()).args(known.get_args()).env("BOOT_ID", boot_id);
        for (name, value) in known.get_envs() {
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        }
        Serving::start(command)
    }

    fn signal(&self, signal: i32) {
        // SAFETY: no memory is involved; the process is our child and was not waited for, so the pid is still its own.
        unsafe { libc::kill(self.process.id() as libc::pid_t, signal) };
    }

    /// Kills it, like the kernel that runs out of memory.
    fn crash(mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }

    /// Asks it to end; its exit code and what it said.
    fn end(mut self) -> (Option<i32>, String) {
        self.signal(libc::SIGTERM);
        let status = self.process.wait().unwrap();
        let mut told = String::new();
        self.process.stderr.take().unwrap().read_to_string(&mut told).unwrap();
        (status.code(), told)
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn standing(bench: &Bench, slot: u64) -> String {
    let (_, hosts) = bench.json(&["hosts", "--watch-ms", "10"]);
    hosts["slots"][slot as usize]["standing"].as_str().unwrap().to_owned()
}

/// More containers crash, each with an identity and a state directory of its own, than the pool has slots; all the while one host stays.
#[test]
fn crashed_containers_give_their_slots_back() {
    let bench = Bench::formatted();
    let stays = Serving::of(&bench, "machine-a");
    for number in 0..9 {
        // Four slots: from the fourth on each gets one that another has left, which nothing but the kernel's word can free.
        Serving::of(&bench, &format!("container-{number}")).crash();
    }
    let last = Serving::of(&bench, "container-last");
    assert!(last.slot != stays.slot);
    let (code, report) = bench.json(&["fsck"]);
    assert_eq!(code, 0, "{report:#}");
    // The host that stays releases the rest by itself, and says so.
    wait_for("all crashed containers are released", || {
        (0..4).filter(|slot| ![stays.slot, last.slot].contains(slot)).all(|slot| standing(&bench, slot) == "declared dead")
    });
    let (code, told) = stays.end();
    assert_eq!(code, Some(0), "{told}");
    assert!(told.contains("all its processes have ended") && told.contains("left"), "{told}");
    assert_eq!(last.end().0, Some(0));
}

/// A node is shut down: its worker is killed once the keeper was asked to end. No other host could prove that later.
#[test]
fn a_keeper_leaves_after_the_others_of_its_node() {
    let bench = Bench::formatted();
    let (keeper, worker) = (Serving::of(&bench, "machine-keeper"), Serving::of(&bench, "machine-worker"));
    let (of_keeper, of_worker) = (keeper.slot, worker.slot);
    keeper.signal(libc::SIGTERM);
    worker.crash();
    assert_eq!(keeper.end().0, Some(0));
    assert_eq!((standing(&bench, of_keeper), standing(&bench, of_worker)), ("left".into(), "declared dead".into()));
}

/// Two machines judge a death: the one whose kernel knows nothing of the dead host fences it and waits, the other one proves its end.
#[test]
fn a_witness_without_proof_leaves_the_slot_to_the_one_that_has_it() {
    let bench = Bench::formatted();
    let stranger = Serving::under_another_kernel(&bench, "machine-elsewhere");
    let dead = Serving::of(&bench, "machine-dead");
    let slot = dead.slot;
    dead.crash();
    // The stranger asks four times within the silence after which it fences.
    wait_for("the stranger fences the silent host", || standing(&bench, slot) != "not fenced");
    assert_eq!(standing(&bench, slot), "fenced");
    let neighbour = Serving::of(&bench, "machine-neighbour");
    wait_for("its neighbour proves its end", || standing(&bench, slot) == "declared dead");
    let others = ["machine-c", "machine-d"].map(|machine| Serving::of(&bench, machine));
    assert!(others.iter().any(|other| other.slot == slot), "the slot is bound to the next machine");
    drop(others);
    assert_eq!((stranger.end().0, neighbour.end().0), (Some(0), Some(0)));
}

/// A report of an incarnation that was never bound comes from a broken process: the manager does not state it.
#[test]
fn a_reported_death_above_the_bound_incarnation_is_not_stated() {
    let bench = Bench::formatted();
    let manager = Serving::of(&bench, "machine-a");
    let silent = ["machine-b", "machine-c", "machine-d"].map(|machine| Serving::of(&bench, machine));
    let mut slots = [&silent[0], &silent[1], &silent[2]].map(|host| host.slot);
    slots.sort_unstable();
    silent.iter().for_each(|host| host.signal(libc::SIGSTOP));
    wait_for("the silent hosts are fenced", || slots.iter().all(|slot| standing(&bench, *slot) == "fenced"));
    let pool = bench.open();
    let report = |by: u64, slot: u64, incarnation: u64| {
        let line: Identity = pool.lines().fetch(by).unwrap();
        let report = Identity::report_of(slot as u32, incarnation as u32).unwrap();
        pool.lines().publish(by, Identity { report, ..line }).unwrap();
    };
    // The manager reads these lines in the order of slots.
    report(slots[0], manager.slot, manager.incarnation + 1);
    report(slots[1], slots[2], 1);
    wait_for("the second report is stated", || standing(&bench, slots[2]) == "declared dead");
    assert_eq!(standing(&bench, manager.slot), "not fenced");
}

/// A machine without a seat has no row for a statement made on it: it reports to the manager, which is another machine's.
#[test]
fn a_death_is_declared_on_a_machine_without_a_seat() {
    let bench = Bench::formatted_before_slot_seats();
    let manager = Serving::of(&bench, "machine-a");
    let seated = Serving::of(&bench, "machine-b");
    wait_for("both seats are given away", || bench.json(&["hosts", "--watch-ms", "10"]).1["seats"][1]["machine"].is_string());
    let silent = Serving::of(&bench, "machine-c");
    silent.signal(libc::SIGSTOP);
    wait_for("the silent host is fenced", || standing(&bench, silent.slot) == "fenced");
    let mut command = bench.command("machine-d");
    let slot = silent.slot.to_string();
    command.args(["hosts", "declare-dead", &slot, "--incarnation", "1", "--i-know-it-is-gone"]);
    let declared = ran(command.output().unwrap());
    assert_eq!(declared.code, 0, "{}", declared.err);
    assert_eq!(standing(&bench, silent.slot), "declared dead");
    silent.crash();
    for host in [seated, manager] {
        assert_eq!(host.end().0, Some(0));
    }
}

/// A process that lives is never released, however long it is silent.
#[test]
fn a_stopped_host_is_fenced_and_not_released() {
    let bench = Bench::formatted();
    let _stays = Serving::of(&bench, "machine-a");
    let silent = Serving::of(&bench, "container");
    silent.signal(libc::SIGSTOP);
    wait_for("the silent host is fenced", || standing(&bench, silent.slot) == "fenced");
    // Many looks at it: each lasts a quarter of the time after which a host is suspected.
    std::thread::sleep(Duration::from_secs(2));
    assert_eq!(standing(&bench, silent.slot), "fenced");
    silent.signal(libc::SIGCONT);
    wait_for("it joins again", || standing(&bench, silent.slot) == "not fenced");
    let (code, told) = silent.end();
    assert_eq!(code, Some(0), "{told}");
    assert!(told.contains("has joined again"), "{told}");
}

/// Workers of the same machine share the slot that the host holds, whatever becomes of them.
#[test]
fn workers_come_and_go_under_the_slot_that_the_host_holds() {
    let bench = Bench::formatted();
    let holds = Serving::of(&bench, "machine-a");
    for _ in 0..3 {
        let mut worker = bench.host("machine-a");
        worker.order(r#"{"Publish":{"round":1}}"#);
        let reply = worker.reply();
        assert!(reply.contains("Moved"), "{reply}");
        worker.kill();
    }
    let (_, hosts) = bench.json(&["hosts", "--watch-ms", "300"]);
    let used = hosts["slots"].as_array().unwrap().iter().filter(|slot| slot["state"] != "free").count();
    assert_eq!(used, 1, "{hosts:#}");
    let held = &hosts["slots"][holds.slot as usize];
    assert_eq!((held["incarnation"].as_u64(), &held["moving"]), (Some(holds.incarnation), &true.into()), "{hosts:#}");
    let (code, told) = holds.end();
    assert_eq!(code, Some(0), "{told}");
    assert_eq!(standing(&bench, 0), "left");
}

/// Two containers with one identity and a state directory each: the second hears that it is one, and of no machine's death.
#[test]
fn a_twin_hears_that_it_is_one() {
    let bench = Bench::formatted();
    let first = Serving::of(&bench, "machine-a");
    let twin = |bench: &Bench| {
        ran(bench.command("machine-a").env("CXL_STATE_DIR", bench.directory.path().join("twin")).arg("host").output().unwrap())
    };
    let told = twin(&bench);
    assert_eq!(told.code, 1, "{}", told.err);
    assert!(told.err.contains("CXL_MACHINE_ID") && told.err.contains("identity") && !told.err.contains("declare"), "{}", told.err);
    assert_eq!(standing(&bench, first.slot), "not fenced");
    // Once the first has ended, the second is the machine.
    first.crash();
    let mut command = bench.command("machine-a");
    command.env("CXL_STATE_DIR", bench.directory.path().join("twin"));
    let second = Serving::start(command);
    assert_eq!((second.slot, second.incarnation), (0, 2));
    assert_eq!(second.end().0, Some(0));
}

#[test]
fn the_host_tells_when_it_is_ready_and_when_it_stops() {
    let bench = Bench::formatted();
    let (file, socket) = (bench.directory.path().join("ready"), bench.directory.path().join("notify"));
    let notified = UnixDatagram::bind(&socket).unwrap();
    notified.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let mut command = bench.command("machine-a");
    command.env("NOTIFY_SOCKET", &socket).args(["host", "--ready-file"]).arg(&file);
    let mut process = command.stderr(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
    let told = || {
        let mut bytes = [0; 64];
        let len = notified.recv(&mut bytes).unwrap();
        String::from_utf8_lossy(&bytes[..len]).into_owned()
    };
    assert_eq!(told(), "READY=1");
    assert_eq!(std::fs::read_to_string(&file).unwrap().trim(), process.id().to_string());
    // SAFETY: as above.
    unsafe { libc::kill(process.id() as libc::pid_t, libc::SIGINT) };
    assert_eq!(told(), "STOPPING=1");
    assert_eq!(process.wait().unwrap().code(), Some(0));
    assert!(!file.exists());
}

/// A pool that is formatted anew under the host: it ends with a reason, and writes nothing more.
#[test]
fn a_host_ends_when_its_pool_is_replaced() {
    let bench = Bench::formatted();
    let mut host = Serving::of(&bench, "machine-a");
    let again = bench.run(&["format", "--size", "16M", "--evict-hosts"]);
    assert_eq!(again.code, 0, "{}", again.err);
    assert_eq!(host.process.wait().unwrap().code(), Some(1));
    let mut told = String::new();
    host.process.stderr.take().unwrap().read_to_string(&mut told).unwrap();
    assert!(told.contains("replaced"), "{told}");
}

#[test]
fn every_fenced_host_is_listed_and_declared_dead_at_once() {
    let bench = Bench::formatted();
    let stays = Serving::of(&bench, "machine-a");
    let silent: Vec<Serving> = ["machine-b", "machine-c"].map(|machine| Serving::of(&bench, machine)).into();
    // Stopped, not ended: the kernel certifies nothing, and only a person can know what a machine elsewhere does.
    silent.iter().for_each(|host| host.signal(libc::SIGSTOP));
    silent.iter().for_each(|host| wait_for("fenced", || standing(&bench, host.slot) == "fenced"));
    let listed = bench.run(&["hosts", "declare-dead", "--all-fenced"]);
    assert_eq!(listed.code, 4, "{}", listed.err);
    assert_eq!(listed.out.lines().count(), 3, "{}", listed.out);
    assert!(listed.err.contains("--i-know-it-is-gone"), "{}", listed.err);
    silent.iter().for_each(|host| assert_eq!(standing(&bench, host.slot), "fenced"));
    let declared = bench.run(&["hosts", "declare-dead", "--all-fenced", "--i-know-it-is-gone"]);
    assert_eq!(declared.code, 0, "{}", declared.err);
    silent.iter().for_each(|host| assert_eq!(standing(&bench, host.slot), "declared dead"));
    silent.into_iter().for_each(Serving::crash);
    assert_eq!(bench.run(&["hosts", "declare-dead", "--all-fenced"]).code, 0);
    assert_eq!(stays.end().0, Some(0));
}
