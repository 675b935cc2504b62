// SPDX-License-Identifier: Apache-2.0
//! A C program with copies of GPU memory, over the pool's fake of a driver: copies that happen late or out of order, calls that fail, a
//! driver that is not there.

mod common;
#[path = "../../pool/tests/cuda/device.rs"]
#[allow(dead_code)] // The tests of the engine use the rest; the same below.
mod device;
#[path = "../../pool/tests/cuda/fake.rs"]
#[allow(dead_code)]
mod fake;

use common::{Folder, Link, Running, finish, program, start, succeed};
use fake::{Fake, Kind};
use std::ffi::OsStr;

/// The program on a pool of its own, and what has to be there until it ends.
fn run(link: Link, coherence: &str, role: &str) -> Option<(Running, (Folder, Fake, Fake))> {
    let folder = Folder::new();
    let program = program(&folder, "gpu.c", link)?;
    let (fake, broken) = (Fake::new(Kind::Engine), Fake::new(Kind::Broken));
    let pool = folder.path("pool");
    let args = [OsStr::new(role), pool.as_os_str(), OsStr::new(fake.path()), OsStr::new(broken.path())];
    Some((start(&folder, &program, "one", coherence, &args), (folder, fake, broken)))
}

/// The program of blocks that a stream orders, on a pool of its own.
fn run_queued(link: Link, coherence: &str, role: &str) -> Option<(Running, (Folder, Fake))> {
    let folder = Folder::new();
    let program = program(&folder, "queued.c", link)?;
    let (fake, pool) = (Fake::new(Kind::Engine), folder.path("pool"));
    let args = [OsStr::new(role), pool.as_os_str(), OsStr::new(fake.path())];
    Some((start(&folder, &program, "one", coherence, &args), (folder, fake)))
}

#[test]
fn blocks_in_the_order_of_a_stream_are_told_of_when_their_copies_have_ended() {
    for (link, coherence) in
        [(Link::Shared, "native"), (Link::Static, "native"), (Link::Shared, "emulated:seed=5,noise=4"), (Link::Sanitized, "native")]
    {
        let Some((running, _files)) = run_queued(link, coherence, "all") else { return };
        succeed(vec![running]);
    }
}

/// A program that takes blocks for published before their end is told does not find them.
#[test]
fn a_program_that_does_not_wait_for_queued_blocks_is_noticed() {
    let Some((running, _files)) = run_queued(Link::Shared, "native", "no-wait") else { return };
    let (statuses, text) = finish(vec![running]);
    assert!(statuses.iter().any(|status| status.code() == Some(1)) && text.contains("is_there(0"), "{statuses:?}\n{text}");
}

#[test]
fn copies_of_gpu_memory_arrive_late_fail_and_are_held_until_their_end() {
    for (link, coherence) in
        [(Link::Shared, "native"), (Link::Static, "native"), (Link::Shared, "emulated:seed=5,noise=4"), (Link::Sanitized, "native")]
    {
        // The address sanitizer's heap does not survive a fork of a process with threads; under the emulator two processes are two hosts.
        let role = if link == Link::Sanitized || coherence != "native" { "no-fork" } else { "all" };
        let Some((running, _files)) = run(link, coherence, role) else { return };
        succeed(vec![running]);
    }
}

/// A program that takes a copy for made before its end is told sees other bytes.
#[test]
fn a_program_that_does_not_wait_is_noticed() {
    let Some((running, _files)) = run(Link::Shared, "native", "no-wait") else { return };
    let (statuses, text) = finish(vec![running]);
    assert!(statuses.iter().any(|status| status.code() == Some(1)) && text.contains("holds(block"), "{statuses:?}\n{text}");
}
