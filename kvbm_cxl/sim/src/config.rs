// SPDX-License-Identifier: Apache-2.0
//! What a world is made of, what may go wrong in it, and what its seed decides.

use crate::random::Random;
use cxl_pool::limits::{DEFAULT_STRIPE_BYTES, DEVICE_HEADER_BYTES};
use cxl_pool::media::Geometry;

/// How a host writes a metadata line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WritePath {
    /// As one unit past the cache (MOVDIR64B, one AVX-512 non-temporal store).
    OneUnit,
    /// Eight stores into the cache and a flush: can be written back, and seen, half done.
    StoresAndFlush,
    /// One of the two, by seed.
    BySeed,
}

/// A machine, numbered in the order of [`crate::World::add_host`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SimHost(pub usize);

/// One start of a process; a restarted process is another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SimProcess(pub usize);

/// Something that goes wrong with a host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The machine loses power; its processes start again after this time on the global clock, or never.
    CrashMachine {
        /// Time until the restart.
        restart_after_ns: Option<u64>,
    },
    /// One process is killed: the one that runs when the fault strikes, or else one of the host's by chance.
    CrashProcess {
        /// Time until the restart.
        restart_after_ns: Option<u64>,
    },
    /// Every thread of the host stops, then resumes.
    PauseHost {
        /// For how long; `u64::MAX` = until [`crate::World::resume`].
        for_ns: u64,
    },
    /// The device loses a line: its content no longer verifies. No host does anything.
    LoseLine {
        /// Where it lies in the pool.
        offset: u64,
    },
    /// One thread stands still: the one that runs when the fault strikes, or else one of the host's by chance.
    PauseThread {
        /// For how long; `u64::MAX` = until [`crate::World::resume`].
        for_ns: u64,
    },
}

/// When a planned fault strikes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum When {
    /// At this step of the world.
    Step(u64),
    /// At the n-th visit (from 1) of the point of this name, by the planned host if one is given.
    Point(&'static str, u64),
}

/// A fault that a scenario orders.
#[derive(Clone, Copy, Debug)]
pub struct Planned {
    /// When.
    pub when: When,
    /// On which host; `None` = the one that takes the step.
    pub host: Option<SimHost>,
    /// What.
    pub fault: Fault,
}

/// Faults by chance, counted per million steps. All zero by default.
#[derive(Clone, Copy, Debug, Default)]
pub struct Chances {
    /// Machine crashes.
    pub crash_machine: u64,
    /// Process crashes.
    pub crash_process: u64,
    /// Pauses of a whole host.
    pub pause_host: u64,
    /// Pauses of one thread.
    pub pause_thread: u64,
    /// Jumps of the time: all hosts were away for so long.
    pub jump: u64,
    /// Most crashes in one run.
    pub max_crashes: u64,
    /// Most pauses of a host in one run.
    pub max_pauses: u64,
    /// Longest pause and longest jump; the actual ones spread evenly over the orders of magnitude from 1 µs.
    pub longest_ns: u64,
    /// Restart after at most this time; `None` = never.
    pub restart_within_ns: Option<u64>,
    /// Faults strike in the first so many steps only, so that a run ends in the quiet time that progress is promised for; 0 = always.
    pub for_steps: u64,
}

/// Everything about a world that its seed does not decide.
#[derive(Clone, Debug)]
pub struct WorldConfig {
    /// The pool's geometry.
    pub geometry: Geometry,
    /// How lines are written.
    pub write_path: WritePath,
    /// Faults by chance.
    pub chances: Chances,
    /// A run that takes more steps fails.
    pub max_steps: u64,
    /// A run that takes more virtual time fails.
    pub max_time_ns: u64,
    /// Events kept for the trace of a failure.
    pub trace_events: usize,
    /// Whether the hosts' clocks run at different speeds (up to a factor of about 1.5 between two hosts).
    pub skewed_clocks: bool,
    /// Whether every thread gets its share of the processor, and a round of a service takes little of a heartbeat: what a bound on a time
    /// presumes.
    pub fair_schedule: bool,
}

impl Default for WorldConfig {
    /// A tiny pool: 3 seats, 8 slots, 16 locks, 16 objects, chunks of 64 KiB, about 16 of them.
    fn default() -> Self {
        WorldConfig {
            geometry: Geometry {
                devices: 1,
                stripe_bytes: DEFAULT_STRIPE_BYTES,
                len_bytes: DEVICE_HEADER_BYTES + (5 << 18),
                seats: 3,
                slots: 8,
                locks: 16,
                objects: 16,
                chunk_bytes: 64 << 10,
                ..Geometry::with_len(0)
            },
            write_path: WritePath::OneUnit,
            chances: Chances::default(),
            max_steps: 2_000_000,
            max_time_ns: 600_000_000_000,
            // A seed that is replayed alone is wanted in full.
            trace_events: if std::env::var_os("SEED").is_some() { 1 << 20 } else { 200 },
            skewed_clocks: true,
            fair_schedule: false,
        }
    }
}

/// How the next thread to run is chosen.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Schedule {
    /// Switch once in so many steps, to any thread, some of which are chosen far less often than others.
    Weighted { switch_one_in: u64 },
    /// Always the thread of the highest priority; it loses its priority once in so many steps.
    Priorities { demote_one_in: u64 },
}

/// What the seed decides once for the whole run. Different bugs need different moods.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Mood {
    pub(crate) schedule: Schedule,
    /// A pending write or flush takes effect once in so many steps.
    pub(crate) drain_one_in: u64,
    /// The hardware does something unasked once in so many steps.
    pub(crate) disturb_one_in: u64,
    /// A miss leaves no copy in the cache once in so many times.
    pub(crate) unkept_one_in: u64,
    /// A load of a line is split in two once in so many times.
    pub(crate) split_one_in: u64,
    /// Most entries of a thread's queue.
    pub(crate) queue_entries: usize,
    pub(crate) stores_and_flush: bool,
    /// Virtual time of a step.
    pub(crate) step_ns: u64,
}

impl Mood {
    pub(crate) fn draw(config: &WorldConfig, random: &mut Random) -> Self {
        let schedule = match random.below(3) {
            _ if config.fair_schedule => Schedule::Weighted { switch_one_in: random.pick(&[1, 1, 2, 4, 16]) },
            0 => Schedule::Priorities { demote_one_in: random.pick(&[10, 50, 200, 1000, 5000]) },
            _ => Schedule::Weighted { switch_one_in: random.pick(&[1, 1, 2, 4, 16, 64, 256]) },
        };
        Mood {
            schedule,
            drain_one_in: random.pick(&[2, 4, 16, 64, 512]),
            disturb_one_in: random.pick(&[2, 8, 32, 128]),
            unkept_one_in: random.pick(&[0, 4, 16]),
            split_one_in: random.pick(&[0, 0, 0, 8]),
            queue_entries: random.pick(&[4, 12, 64]),
            stores_and_flush: match config.write_path {
                WritePath::OneUnit => false,
                WritePath::StoresAndFlush => true,
                WritePath::BySeed => random.one_in(2),
            },
            step_ns: if config.fair_schedule { 100 } else { random.pick(&[20, 100, 1000]) },
        }
    }
}
