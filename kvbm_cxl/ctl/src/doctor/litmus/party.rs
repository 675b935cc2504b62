// SPDX-License-Identifier: Apache-2.0
//! One side of the litmus tests: its lines, and how the two sides find and wait for each other through nothing but the memory under test.
//!
//! Every line has one writer. The control lines go through an intact memory of their own, so that a step left out of the memory under
//! test shows as a failed check and not as two sides that lose each other. A test in which nothing arrives at all ends at a deadline.

use super::checks::MAX_PAYLOAD_BYTES;
use super::gpu_side::GpuSide;
use super::plan::{Outcome, Test, Trial, Violation};
use crate::scratch::{self, Scratch};
use cxl_pool::coherence::{Coherence, CoherenceOptions};
use cxl_pool::limits::MAX_NUMBER;
use cxl_pool::line::Lines;
use cxl_pool::machine::random_bytes;
use cxl_pool::media::{Layout, Record};
use cxl_pool::{Error, Result};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Lines of the scratch memory that the tests use.
pub const OBJECTS: u32 = 512;
/// Trial number that ends the session.
const END: u64 = u64::MAX;

/// Who of the two this is. The leader names the trials.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Role {
    A,
    B,
}

impl Role {
    pub fn index(self) -> u64 {
        self as u64
    }

    pub fn other(self) -> Role {
        if self == Role::A { Role::B } else { Role::A }
    }
}

/// What a line of the tests says, in the form of a record, whose meaning to a pool plays no part here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Message {
    pub words: [u64; 7],
}

impl Message {
    pub fn new(words: [u64; 7]) -> Message {
        Message { words }
    }

    /// As a line to publish. The first word is spread over the numbers of a record, each of which has 31 bits.
    pub fn record(self) -> Record {
        let [first, reserved, data @ ..] = self.words;
        let part = |shift: u32| (first >> shift) as u32 & (MAX_NUMBER - 1);
        Record { crc: 0, grant: part(62), version: part(0), incarnation: part(31), reserved, data: bytemuck::cast::<[u64; 5], _>(data) }
    }

    /// From a line that verified.
    pub fn of(record: Record) -> Message {
        let first = u64::from(record.grant) << 62 | u64::from(record.incarnation) << 31 | u64::from(record.version);
        let data: [u64; 5] = bytemuck::cast(record.data);
        let mut words = [first, record.reserved, 0, 0, 0, 0, 0];
        words[2..].copy_from_slice(&data);
        Message { words }
    }
}

/// A step of SplitMix64: numbers that look random, the same on both sides.
pub fn mix(number: u64) -> u64 {
    let mut x = number.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    x = (x ^ x >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ x >> 31
}

/// Numbers of the control lines.
mod place {
    use super::Role;

    /// Who is there, and which trial it is at.
    pub fn hello(role: Role) -> u64 {
        role.index()
    }

    /// What the follower saw.
    pub const RESULT: u64 = 3;

    /// How far it is within a trial.
    pub fn progress(role: Role) -> u64 {
        4 + role.index()
    }
}

/// Stands a memory in front of another.
#[cfg(test)]
pub type Wrap = Box<dyn Fn(Arc<dyn Coherence>) -> Arc<dyn Coherence> + Send>;

/// One side.
pub struct Party {
    /// Who this is.
    pub role: Role,
    /// The lines under test.
    pub tested: Lines,
    /// The memory under test.
    pub memory: Arc<dyn Coherence>,
    /// Number of the trial; never the same twice on the same memory.
    pub trial: u64,
    /// Rounds of each test.
    pub rounds: u64,
    control: Lines,
    layout: Arc<Layout>,
    scratch: Scratch,
    options: CoherenceOptions,
    /// Stands in front of the memory under test.
    #[cfg(test)]
    pub wrap: Option<Wrap>,
    timeout: Duration,
    session: [u64; 2],
    /// The number of this side's GPU, if it has one.
    gpu: Option<u32>,
    /// That GPU, in a trial of [`Test::GpuPayload`].
    gpu_side: Option<GpuSide>,
}

impl Party {
    /// Meets the other side on `scratch`, for which both name the same bytes.
    ///
    /// # Errors
    /// [`Error::Timeout`] when it does not come.
    pub fn meet(scratch: Scratch, role: Role, options: CoherenceOptions, timeout: Duration) -> Result<Party> {
        let layout = scratch.layout(OBJECTS)?;
        let memory = scratch.memory(&options)?;
        let control = scratch::lines(&memory, &layout);
        let own = u64::from_le_bytes(random_bytes()?).max(1);
        let mut party = Party {
            role,
            tested: control.clone(),
            memory: memory.memory,
            trial: 0,
            rounds: 0,
            control,
            layout,
            scratch,
            options,
            #[cfg(test)]
            wrap: None,
            timeout,
            session: [own, 0],
            gpu: None,
            gpu_side: None,
        };
        let mut named = 0;
        party.say_hello(named, 0)?;
        let other = party.wait("the other side", || {
            let Some(found) = party.look(place::hello(role.other()))? else { return Ok(None) };
            if found.words[0] != named {
                // A line of an earlier session may lie here: only a side that names us is here now.
                named = found.words[0];
                party.say_hello(named, 0)?;
            }
            Ok((found.words[1] == own).then_some(found.words[0]))
        })?;
        party.session[1] = other;
        Ok(party)
    }

    /// Has GPU `number` copy this side's payloads in trials of [`Test::GpuPayload`].
    pub fn with_gpu(self, number: Option<u32>) -> Party {
        Party { gpu: number, ..self }
    }

    fn say_hello(&self, other: u64, trial: u64) -> Result<()> {
        self.control.publish(place::hello(self.role), Message::new([self.session[0], other, trial, 0, 0, 0, 0]).record())
    }

    /// A number that both sides share and no earlier session had.
    pub fn seed(&self) -> u64 {
        mix(self.session[0] ^ self.session[1]) ^ mix(self.trial)
    }

    /// The control line `index`, if there is one; what an earlier user of the memory left does not verify.
    fn look(&self, index: u64) -> Result<Option<Message>> {
        match self.control.fetch(index) {
            Ok(record) => Ok(Some(Message::of(record))),
            Err(Error::BadLine { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Polls until there is an answer.
    pub fn wait<T>(&self, what: &str, mut look: impl FnMut() -> Result<Option<T>>) -> Result<T> {
        let deadline = Instant::now() + self.timeout;
        for round in 0u64.. {
            if let Some(found) = look()? {
                return Ok(found);
            }
            if Instant::now() >= deadline {
                break;
            }
            match round {
                0..200 => std::hint::spin_loop(),
                200..400 => std::thread::yield_now(),
                _ => std::thread::sleep(Duration::from_micros(20)),
            }
        }
        Err(Error::Timeout { what: format!("{what} (role {:?} waits)", self.role), timeout_ms: self.timeout.as_millis() as u64 })
    }

    /// The next hello of the other side that passes.
    fn await_hello(&self, what: &str, passes: impl Fn(&[u64; 7]) -> bool) -> Result<[u64; 7]> {
        self.wait(what, || match self.look(place::hello(self.role.other()))? {
            Some(found) if found.words[0] != self.session[1] => {
                Err(Error::Invalid("the other side restarted in the middle of the tests: start both again".into()))
            }
            found => Ok(found.map(|found| found.words).filter(&passes)),
        })
    }

    /// Leader: announces a trial and waits until the other side is ready for it.
    pub fn announce(&mut self, trial: &Trial, rounds: u64) -> Result<()> {
        let word = trial.encode();
        self.begin(self.trial + 1, Some(trial), rounds)?;
        let [own, other] = self.session;
        self.control.publish(place::hello(self.role), Message::new([own, other, self.trial, word, rounds, 0, 0]).record())?;
        self.await_hello("the other side to begin a trial", |words| words[2] == self.trial).map(drop)
    }

    /// Leader: says that there is nothing more.
    pub fn finish(&self) -> Result<()> {
        let [own, other] = self.session;
        self.control.publish(place::hello(self.role), Message::new([own, other, END, 0, 0, 0, 0]).record())
    }

    /// Follower: the next trial, ready to run; `None` after the last.
    pub fn follow(&mut self) -> Result<Option<Trial>> {
        let seen = self.trial;
        let words = self.await_hello("the next trial", |words| words[2] > seen)?;
        if words[2] == END {
            return Ok(None);
        }
        let trial = Trial::decode(words[3])?;
        let trial = trial.ok_or_else(|| Error::Invalid("the other side names a test that this program does not know".into()))?;
        self.begin(words[2], Some(&trial), words[4])?;
        self.say_hello(self.session[1], self.trial)?;
        Ok(Some(trial))
    }

    /// Sets the memory under test up.
    fn begin(&mut self, number: u64, trial: Option<&Trial>, rounds: u64) -> Result<()> {
        let instructions = trial.map(|trial| trial.instructions).filter(|_| self.options.emulator.is_none());
        let mapped = self.scratch.memory(&CoherenceOptions { instructions, ..self.options })?;
        #[cfg(test)]
        let mapped = match &self.wrap {
            Some(wrap) => cxl_pool::coherence::MappedMemory { memory: wrap(mapped.memory), ..mapped },
            None => mapped,
        };
        self.tested = scratch::lines(&mapped, &self.layout);
        self.memory = mapped.memory;
        // That of an earlier trial uses the memory of it.
        let gpu = self.gpu.filter(|_| trial.is_some_and(|trial| trial.test == Test::GpuPayload));
        self.gpu_side = gpu.map(|gpu| GpuSide::open(gpu, &self.memory, MAX_PAYLOAD_BYTES as usize)).transpose()?;
        self.trial = number;
        self.rounds = rounds.clamp(1, 1 << 24);
        Ok(())
    }

    /// Says how far this side is: `value` rises within a trial; `more` goes with it, and `before` with the value before.
    pub fn report(&self, value: u64, more: u64, before: u64) -> Result<()> {
        self.control.publish(place::progress(self.role), Message::new([self.session[0], self.trial, value, more, before, 0, 0]).record())
    }

    /// How far the other side is in this trial: what it reported.
    pub fn progress(&self) -> Result<Option<[u64; 3]>> {
        let found = self.look(place::progress(self.role.other()))?.map(|found| found.words);
        let found = found.filter(|words| words[0] == self.session[1] && words[1] == self.trial);
        Ok(found.map(|words| [words[2], words[3], words[4]]))
    }

    /// Waits until the other side has reached `value`, and returns the number reported with it. By then that side can be one step ahead,
    /// but not two, if each step waits for the other side.
    pub fn await_progress(&self, value: u64) -> Result<u64> {
        let [now, more, before] = self.wait("the other side to continue", || Ok(self.progress()?.filter(|found| found[0] >= value)))?;
        Ok(if now == value { more } else { before })
    }

    /// Follower: hands over what it saw.
    pub fn hand_over(&self, outcome: &Outcome) -> Result<()> {
        let first = outcome.first.map_or(0, Violation::code);
        let counts = [outcome.checks, outcome.overlapping, outcome.violations, outcome.torn];
        let [checks, overlapping, violations, torn] = counts;
        self.control.publish(place::RESULT, Message::new([self.seed(), self.trial, checks, overlapping, violations, torn, first]).record())
    }

    /// Leader: takes over what the follower saw.
    pub fn take_over(&self) -> Result<Outcome> {
        let words = self.wait("the other side's result", || {
            let found = self.look(place::RESULT)?.map(|found| found.words);
            Ok(found.filter(|words| words[0] == self.seed() && words[1] == self.trial))
        })?;
        let [_, _, checks, overlapping, violations, torn, first] = words;
        Ok(Outcome { checks, overlapping, violations, torn, first: Violation::from_code(first) })
    }

    /// Copies a payload in, so that a line that is published next may name it.
    pub fn put(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        match &self.gpu_side {
            Some(gpu) => gpu.put(&*self.memory, offset, bytes)?,
            None => self.memory.copy_in(offset, bytes)?,
        }
        self.memory.fence_stores();
        Ok(())
    }

    /// Copies a payload out that a line named.
    pub fn get(&self, offset: u64, into: &mut [u8]) -> Result<()> {
        if let Some(gpu) = &self.gpu_side {
            return gpu.get(&*self.memory, offset, into);
        }
        self.memory.flush_range(offset, into.len() as u64)?;
        self.memory.fence_all();
        self.memory.copy_out(offset, into)
    }

    /// Pool offset and size of the payload area that `writer` writes.
    pub fn payload_area(&self, writer: Role) -> (u64, u64) {
        let start = self.layout.data_offset();
        let len_bytes = (self.memory.len_bytes() - start) / 2 / 4096 * 4096;
        (start + writer.index() * len_bytes, len_bytes)
    }
}
