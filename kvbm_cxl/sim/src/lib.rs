// SPDX-License-Identifier: Apache-2.0
//! Deterministic simulator: the production code of many hosts over one memory without coherence, on one OS thread, driven by a seed.
//!
//! The hosts run the code of `cxl-pool` as it is shipped; only [`Coherence`](cxl_pool::coherence::Coherence) and
//! [`Platform`](cxl_pool::platform::Platform) are simulated. Every thread of a host is a coroutine; every access to the pool, every
//! fence, wait and named point is a place where the scheduler may switch. The same scenario with the same seed runs in the same way.
//!
//! # Modelled
//! **Caches.** Each host has a private cache of whole lines over the memory. A load is answered from it for as long as the line is
//! there, however old the copy. A miss brings the line in (or, by chance, passes by). At any step a line that was used lately may be
//! prefetched into any cache, evicted from it, or written back if dirty. A load of 64 bytes may be split in two halves of different age.
//!
//! **Writes.** A line write or a piece of `copy_in` goes into its thread's queue and reaches the memory some time later, in any order
//! with the rest of the queue unless a store fence stands between; writes of one line keep their order. A store fence orders and does
//! not wait; a full fence waits until the queue is empty while others continue. A thread sees its own queue, no other thread does. On the
//! path of stores and a flush ([`WritePath`]) a line is eight stores, in order with the other stores of the thread, into the host's cache
//! and a flush: it can be written back, and seen, half done.
//!
//! **Local memory.** What a thread does in memory that its siblings of the same host share comes after the writes that it fenced: those
//! have arrived before a sibling continues. Without a fence nothing is promised.
//!
//! **Flushes** are queued as well: until a full fence, younger loads of the thread may still be answered by the old copy. A flush that no
//! load fence or full fence keeps after earlier loads may have run before them, and the line may have come back since: it can leave any
//! version that the memory held meanwhile. A host never sees a line go back to before a version that it has seen.
//!
//! **Machines.** A crash of a machine loses its threads, its local memory, its machine locks, some of what its threads had queued
//! (never against the order of a fence) and some of its dirty lines. A crash of a process loses its threads; what it had issued arrives,
//! the kernel drops its locks, local memory stays as it was at that moment. Crashed processes may start again. A whole host, or one
//! thread, may stop for any time and resume: a zombie. Each machine has its own clock, with its own offset and, by configuration,
//! its own speed; sleeps end late; parked threads wake without reason; the time may jump so that all hosts look silent. Time passes by a
//! little with each step, and to the next timer when all threads wait.
//!
//! **Schedules.** The seed chooses between random switching, from at every step to seldom, with some threads far slower than others, and
//! strict priorities that change at a few random moments; and how fast queues empty and caches are disturbed.
//!
//! # Not modelled
//! - Ordering inside a host is stronger than real: threads of one host see each other's Rust atomics in program order, and switch only at
//!   accesses to the pool, waits and points. Data races in local memory are the business of other tools.
//! - Locked instructions and system calls of a host order nothing here, except the end of a thread or process, though CPUs do order
//!   then: the production code may rely on fences alone.
//! - Speculative loads of the CPU other than a prefetch into the cache; a hardware prefetch of lines that no thread used.
//! - Device loss, poison and SIGBUS; a mapping ([`address`](cxl_pool::coherence::Coherence::address) is always `None`); DMA.
//! - A machine whose identity is shared by two machines.
//! - Real time: nothing is learned about speed.
//!
//! # What scenarios must know
//! - **No `std::sync::Mutex` may be held across an access to the pool**, a wait or a point: the coroutine that wants it next would block
//!   the OS thread. [`explore`] names the seed of a run that hangs like this.
//! - When a process crashes its coroutines are unwound, to give back what they own in this OS process. Destructors run then, and each of
//!   their calls to memory and platform does nothing and fails; what they do to the machine's local memory is undone.
//! - Code that polls without [`Platform::relax`](cxl_pool::platform::Platform::relax) still lets others run, but less often.
//!
//! # Example
//! ```
//! use cxl_pool::media::Seat;
//! use cxl_sim::{Failure, Stats, World, WorldConfig, explore};
//!
//! fn two_hosts(seed: u64) -> Result<Stats, Failure> {
//!     let mut world = World::formatted(seed, WorldConfig::default());
//!     let (writer, reader) = (world.add_host(), world.add_host());
//!     world.spawn(writer, "writer", |env| {
//!         let lines = env.lines();
//!         (1..=5).try_for_each(|epoch| lines.publish(0, Seat { epoch, ..Seat::default() }))
//!     });
//!     world.spawn(reader, "reader", |env| {
//!         let (lines, platform) = (env.lines(), env.platform());
//!         let mut last = 0;
//!         for round in 0.. {
//!             let epoch = lines.fetch::<Seat>(0)?.epoch;
//!             assert!(epoch >= last, "epoch {epoch} after {last}");
//!             last = epoch;
//!             if last == 5 {
//!                 break;
//!             }
//!             platform.relax(round);
//!         }
//!         Ok(())
//!     });
//!     world.run()
//! }
//! explore("two_hosts", 200, two_hosts);
//! ```

mod config;
mod engine;
mod explore;
mod format;
mod hardware;
mod machine;
mod memory;
pub mod names;
mod outcome;
mod platform;
mod queue;
mod random;
mod sparse;
mod trace;
mod view;
mod world;

pub use config::{Chances, Fault, Planned, SimHost, SimProcess, When, WorldConfig, WritePath};
pub use explore::{Kill, Scenario, Summary, explore, mutation_table, run_mutant, search, strike_all_points, strike_points};
pub use outcome::{Failure, Stats};
pub use random::Random;
pub use view::View;
pub use world::{Env, POOL_INCARNATION, POOL_UUID, World};

pub mod scenarios;
