// SPDX-License-Identifier: Apache-2.0
//! C and C++ programs on the interface, as real processes that are two hosts of one pool.

mod common;

use common::{Folder, Link, Running, finish, program, start, succeed};
use std::ffi::OsStr;
use std::path::Path;

const NATIVE: &str = "native";
/// Lines may tear.
const IN_PARTS: &str = "native:write=stores-flush,load=words";

fn two_hosts(folder: &Folder, program: &Path, coherence: &str, rounds: &str, mistake: &str) -> Vec<Running> {
    two_hosts_of(&format!("{},size=24M", folder.path("pool").display()), folder, program, coherence, [rounds, mistake])
}

fn two_hosts_of(pool: &str, folder: &Folder, program: &Path, coherence: &str, more: [&str; 2]) -> Vec<Running> {
    let args = |role| [role, pool, more[0], more[1]].map(OsStr::new);
    vec![start(folder, program, "one", coherence, &args("first")), start(folder, program, "two", coherence, &args("second"))]
}

#[test]
fn two_hosts_share_structures_locks_and_blocks() {
    for (link, coherence) in [
        (Link::Shared, NATIVE),
        (Link::Static, NATIVE),
        (Link::Shared, IN_PARTS),
        (Link::Shared, "emulated:seed=1"),
        (Link::Static, "emulated:seed=2,noise=4"),
        (Link::Shared, "emulated:seed=3,noise=0"),
    ] {
        let folder = Folder::new();
        let Some(program) = program(&folder, "two_hosts.c", link) else { return };
        succeed(two_hosts(&folder, &program, coherence, "200", ""));
    }
}

#[test]
fn a_step_left_out_is_noticed_under_the_emulator() {
    for mistake in ["no-flush", "no-invalidate", "no-lock"] {
        let folder = Folder::new();
        let Some(program) = program(&folder, "two_hosts.c", Link::Shared) else { return };
        let (statuses, text) = finish(two_hosts(&folder, &program, "emulated:seed=1", "300", mistake));
        assert!(statuses.iter().any(|status| matches!(status.code(), Some(1 | 3))), "{mistake}: {statuses:?}\n{text}");
        let noticed = if mistake == "no-flush" { "node->number == number" } else { "the count is" };
        assert!(text.contains(noticed), "{mistake} failed for another reason:\n{text}");
    }
}

/// The same two programs on pools whose metadata lies on a device of its own, which only their name says.
#[test]
fn hosts_share_a_pool_with_metadata_on_another_device() {
    for (link, coherence) in [(Link::Shared, NATIVE), (Link::Static, "emulated:seed=12,noise=4")] {
        let folder = Folder::new();
        let Some(locks) = program(&folder, "two_hosts.c", link) else { return };
        let Some(blocks) = program(&folder, "cache.c", link) else { return };
        let pool = |name: &str| {
            format!(
                "{},size=24M,metadata={},metadata_size=24M",
                folder.path(name).display(),
                folder.path(&format!("{name}-metadata")).display()
            )
        };
        succeed(two_hosts_of(&pool("structures"), &folder, &locks, coherence, ["100", ""]));
        succeed(cache_hosts_of(&pool("blocks"), &folder, &blocks, coherence, ""));
    }
}

#[test]
fn everything_wrong_is_refused_with_a_reason() {
    for (link, coherence) in [(Link::Shared, NATIVE), (Link::Static, NATIVE), (Link::Sanitized, NATIVE), (Link::Shared, "emulated:seed=4")]
    {
        let folder = Folder::new();
        let Some(program) = program(&folder, "errors.c", link) else { return };
        let pool = format!("{},size=8M", folder.path("pool").display());
        let mut args = vec![OsStr::new(&pool)];
        // Two processes of one machine cannot be one host under the emulator, and the address sanitizer's heap does not survive a fork of
        // a process with threads.
        let no_fork = coherence != NATIVE || link == Link::Sanitized;
        args.extend(no_fork.then_some(OsStr::new("no-fork")));
        succeed(vec![start(&folder, &program, "one", coherence, &args)]);
    }
}

#[test]
fn sanitizers_find_nothing_in_two_hosts() {
    let folder = Folder::new();
    let Some(program) = program(&folder, "two_hosts.c", Link::Sanitized) else { return };
    succeed(two_hosts(&folder, &program, NATIVE, "100", ""));
}

fn heir_after(dying: &str, coherence: &str) {
    let folder = Folder::new();
    let Some(program) = program(&folder, "recovery.c", Link::Shared) else { return };
    let pool = format!("{},size=16M", folder.path("pool").display());
    let run = |role: &str, machine: &str| start(&folder, &program, machine, coherence, &[OsStr::new(role), OsStr::new(&pool)]);
    let mut heir = run("heir", "one");
    let mut holder = run("dies", dying);
    heir.await_text("waiting");
    holder.kill();
    let returning = (dying != "one").then(|| run("returns", dying));
    heir.await_text("repaired");
    succeed(returning.into_iter().collect());
    heir.end_input();
    succeed(vec![heir]);
}

#[test]
fn a_holder_that_dies_leaves_its_lock_to_be_repaired_on_the_same_host() {
    heir_after("one", NATIVE);
}

#[test]
fn a_holder_that_dies_leaves_its_lock_to_be_repaired_on_another_host() {
    heir_after("two", NATIVE);
    heir_after("two", "emulated:seed=5");
}

#[test]
fn kept_blocks_outlive_their_process_and_scratch_blocks_do_not() {
    for coherence in [NATIVE, "emulated:seed=7"] {
        for end in ["leaves", "crashes"] {
            let folder = Folder::new();
            let Some(program) = program(&folder, "kept.c", Link::Shared) else { return };
            let pool = format!("{},size=8M", folder.path("pool").display());
            let run = |role: &str| start(&folder, &program, "one", coherence, &[OsStr::new(role), OsStr::new(&pool)]);
            let mut first = run(end);
            first.await_text("ready");
            if end == "crashes" {
                first.kill();
            } else {
                succeed(vec![first]);
            }
            succeed(vec![run("finds")]);
        }
    }
}

/// Counts of processes that are gone stay, what they held does not; nothing is counted twice when they come back.
#[test]
fn hosts_tell_what_their_processes_counted() {
    let folder = Folder::new();
    let Some(program) = program(&folder, "counts.c", Link::Shared) else { return };
    let run = |pool: &str, machine: &str, coherence: &str, args: &[&str]| {
        let pool = format!("{},size=8M", folder.path(pool).display());
        let args: Vec<&OsStr> = [args[0], &pool].into_iter().chain(args[1..].iter().copied()).map(OsStr::new).collect();
        start(&folder, &program, machine, coherence, &args)
    };
    succeed(vec![run("native", "one", NATIVE, &["refused"])]);
    // That one counted three times and left.
    let mut first = run("native", "one", NATIVE, &["stays", "5"]);
    succeed(vec![run("native", "two", NATIVE, &["sees", "8", "5"])]);
    let mut second = run("native", "one", NATIVE, &["stays", "7"]);
    succeed(vec![run("native", "two", NATIVE, &["sees", "15", "12"])]);
    second.kill();
    succeed(vec![run("native", "two", NATIVE, &["sees", "15", "5"])]);
    first.kill();
    succeed(vec![run("native", "one", NATIVE, &["leaves", "2"]), run("native", "two", NATIVE, &["sees", "17", "0"])]);

    // Under the emulator every process is a machine.
    let emulated = "emulated:seed=11";
    succeed(vec![run("emulated", "one", emulated, &["refused"])]);
    let mut only = run("emulated", "one", emulated, &["stays", "4"]);
    succeed(vec![run("emulated", "two", emulated, &["sees", "7", "4"])]);
    only.kill();
}

fn cache_hosts(folder: &Folder, program: &Path, coherence: &str, mistake: &str) -> Vec<Running> {
    cache_hosts_of(&format!("{},size=8M", folder.path("pool").display()), folder, program, coherence, mistake)
}

fn cache_hosts_of(pool: &str, folder: &Folder, program: &Path, coherence: &str, mistake: &str) -> Vec<Running> {
    let args = |role| [role, pool, mistake].map(OsStr::new);
    let given = if mistake.is_empty() { 2 } else { 3 };
    vec![
        start(folder, program, "one", coherence, &args("publish")[..given]),
        start(folder, program, "two", coherence, &args("pull")[..given]),
    ]
}

#[test]
fn what_one_host_publishes_another_pulls() {
    for (link, coherence) in
        [(Link::Shared, NATIVE), (Link::Static, "emulated:seed=1"), (Link::Shared, "emulated:seed=2,noise=4"), (Link::Sanitized, NATIVE)]
    {
        let folder = Folder::new();
        let Some(program) = program(&folder, "cache.c", link) else { return };
        succeed(cache_hosts(&folder, &program, coherence, ""));
    }
}

#[test]
fn a_block_that_was_not_filled_is_noticed() {
    let folder = Folder::new();
    let Some(program) = program(&folder, "cache.c", Link::Shared) else { return };
    let (statuses, text) = finish(cache_hosts(&folder, &program, NATIVE, "no-fill"));
    assert!(statuses.iter().any(|status| status.code() == Some(1)) && text.contains("word_of(block, index)"), "{statuses:?}\n{text}");
}

#[test]
fn messages_go_to_and_fro_and_a_killed_caller_is_noticed() {
    // The last caller is on a host of its own, or on the server's.
    for (link, coherence, serve, dying) in [
        (Link::Shared, NATIVE, "serve", "three"),
        (Link::Shared, NATIVE, "serve-own", "one"),
        (Link::Sanitized, NATIVE, "serve", "three"),
        (Link::Static, "emulated:seed=8,noise=4", "serve", "three"),
    ] {
        let folder = Folder::new();
        let Some(program) = program(&folder, "ring.c", link) else { return };
        let pool = format!("{},size=24M", folder.path("pool").display());
        let run = |role: &str, machine: &str| start(&folder, &program, machine, coherence, &[OsStr::new(role), OsStr::new(&pool)]);
        let mut server = run(serve, "one");
        server.await_text("listening");
        let caller = run("call", "two");
        server.await_text("closed");
        let mut dying = run("dies", dying);
        server.await_text("waiting");
        dying.kill();
        succeed(vec![server, caller]);
    }
}

/// The end of a listener's process is proof on its own host. Elsewhere its host is only taken for dead, which is none.
#[test]
fn the_presence_of_a_listener_is_told_without_waiting() {
    for (coherence, machine, looks) in
        [(NATIVE, "one", "looks-here"), (NATIVE, "two", "looks-elsewhere"), ("emulated:seed=10", "two", "looks-elsewhere")]
    {
        let folder = Folder::new();
        let Some(program) = program(&folder, "ring.c", Link::Shared) else { return };
        let pool = format!("{},size=24M", folder.path("pool").display());
        let run = |role: &str, machine: &str| start(&folder, &program, machine, coherence, &[OsStr::new(role), OsStr::new(&pool)]);
        let mut listener = run("listens", "one");
        listener.await_text("listening");
        let mut looker = run(looks, machine);
        looker.await_text("seen");
        listener.kill();
        succeed(vec![looker]);
    }
}

#[test]
fn closing_and_leaving_beside_calls_that_wait() {
    for link in [Link::Shared, Link::Sanitized] {
        let folder = Folder::new();
        let Some(program) = program(&folder, "closing.c", link) else { return };
        let pool = format!("{},size=24M", folder.path("pool").display());
        succeed(vec![start(&folder, &program, "one", NATIVE, &[OsStr::new(&pool)])]);
    }
}

#[test]
fn bytes_of_devices_cross_hosts_and_pools_are_left_alone() {
    for (link, coherence) in
        [(Link::Shared, NATIVE), (Link::Static, "emulated:seed=9"), (Link::Shared, "emulated:seed=3,noise=4"), (Link::Sanitized, NATIVE)]
    {
        let folder = Folder::new();
        let Some(program) = program(&folder, "device.c", link) else { return };
        let run =
            |role: &str, machine: &str| start(&folder, &program, machine, coherence, &[OsStr::new(role), folder.0.path().as_os_str()]);
        let mut writer = run("write", "one");
        writer.await_text("written");
        let mut reader = run("read", "two");
        reader.await_text("read");
        succeed(vec![writer, reader]);
    }
}

#[test]
fn owners_in_cpp_clean_up() {
    for (link, coherence) in [(Link::Static, NATIVE), (Link::Shared, "emulated:seed=6"), (Link::Sanitized, NATIVE)] {
        let folder = Folder::new();
        let Some(program) = program(&folder, "raii.cpp", link) else { return };
        let pool = format!("{},size=32M", folder.path("pool").display());
        let run = |role: &str, machine: &str| start(&folder, &program, machine, coherence, &[OsStr::new(role), OsStr::new(&pool)]);
        succeed(vec![run("publish", "one"), run("consume", "two")]);
    }
}

#[test]
fn a_program_with_the_short_names_of_its_own_links_the_archive() {
    let folder = Folder::new();
    let Some(program) = program(&folder, "own_names.c", Link::Static) else { return };
    let pool = format!("{},size=32M", folder.path("pool").display());
    succeed(vec![start(&folder, &program, "one", NATIVE, &[OsStr::new(&pool)])]);
}

#[test]
fn the_program_of_the_examples_runs() {
    let folder = Folder::new();
    let source = common::here().join("../../examples/c/greeting.c");
    let Some(program) = common::program_of(&folder, &source, Link::Shared) else { return };
    // `kept.c` formats the pool, and leaves it.
    let Some(formats) = common::program(&folder, "kept.c", Link::Shared) else { return };
    let pool = format!("{},size=8M", folder.path("pool").display());
    succeed(vec![start(&folder, &formats, "one", NATIVE, &[OsStr::new("leaves"), OsStr::new(&pool)])]);
    let output = std::process::Command::new(program)
        .env("CXL_POOL", &pool)
        .env("CXL_MACHINE_ID", "one")
        .env("CXL_STATE_DIR", folder.path("state"))
        .env_remove("CXL_COHERENCE")
        .output()
        .unwrap();
    assert!(output.status.success() && output.stdout == b"hello\n", "{output:?}");
}

#[test]
fn lists_of_copies_cross_hosts_whole() {
    for (link, coherence) in
        [(Link::Shared, NATIVE), (Link::Static, "emulated:seed=5"), (Link::Shared, "emulated:seed=6,noise=4"), (Link::Sanitized, NATIVE)]
    {
        let folder = Folder::new();
        let Some(program) = program(&folder, "copies.c", link) else { return };
        let pool = format!("{},size=24M", folder.path("pool").display());
        let run = |role: &str, machine: &str| start(&folder, &program, machine, coherence, &[OsStr::new(role), OsStr::new(&pool)]);
        succeed(vec![run("first", "one"), run("second", "two")]);
    }
}
