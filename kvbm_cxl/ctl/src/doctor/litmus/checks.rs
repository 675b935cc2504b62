// SPDX-License-Identifier: Apache-2.0
//! The litmus tests themselves. Both sides run the same function; every value is unique to session, trial, round and writer.

use super::party::{Message, Party, Role, mix};
use super::plan::{Outcome, Test, Violation};
use cxl_pool::limits::LINE_BYTES;
use cxl_pool::line::Lines;
use cxl_pool::media::{Record, Region};
use cxl_pool::{Error, Result};

/// Lines of one batch of the buffering test: one bit each in a word.
const BATCH: u64 = 64;
/// Payloads on their way.
const SLOTS: u64 = 8;
pub const MAX_PAYLOAD_BYTES: u64 = 16 << 10;

/// Numbers of the lines under test; the control lines lie below.
mod place {
    use super::{BATCH, Role, SLOTS};

    pub fn first(writer: Role) -> u64 {
        8 + 2 * writer.index()
    }

    pub fn buffered(writer: Role, index: u64) -> u64 {
        64 + writer.index() * BATCH + index
    }

    pub fn flag(writer: Role, slot: u64) -> u64 {
        192 + writer.index() * SLOTS + slot
    }
}

/// Line `number` of a series of `writer`.
fn numbered(party: &Party, writer: Role, number: u64) -> Message {
    let seed = party.seed() ^ mix(writer.index() + 1);
    let mut words = [0; 7];
    words[0] = number;
    (1..7).for_each(|word| words[word] = mix(seed ^ mix(number << 3 | word as u64)));
    Message::new(words)
}

/// Stands for the number of a line that is whole and holds what neither side published in this trial.
const WRONG: u64 = u64::MAX;

/// Fetches a line of a series once: its number, or [`WRONG`], or `None` for one that is half written.
fn look(party: &Party, lines: &Lines, writer: Role, index: u64, outcome: &mut Outcome) -> Result<Option<u64>> {
    let raw = lines.fetch_raw(lines.layout().line_offset(Region::Record, index)?)?;
    match lines.open::<Record>(index, &raw) {
        Ok(record) => {
            let found = Message::of(record);
            let expected = numbered(party, writer, found.words[0]);
            if found.words == expected.words {
                return Ok(Some(found.words[0]));
            }
            outcome.violated(Violation::WrongLine);
            Ok(Some(WRONG))
        }
        Err(Error::BadLine { .. }) => {
            outcome.torn += 1;
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

pub fn run(party: &Party, test: Test) -> Result<Outcome> {
    match test {
        Test::Buffering => buffering(party, false),
        Test::BufferingReadBack => buffering(party, true),
        Test::Order => both_ways(party, write_in_order, read_in_order),
        Test::Payload | Test::GpuPayload => both_ways(party, write_payloads, read_payloads),
    }
}

type Side = fn(&Party, &mut Outcome) -> Result<()>;

/// A writes and B reads, then the reverse. `report` values above the rounds keep the two halves apart.
fn both_ways(party: &Party, write: Side, read: Side) -> Result<Outcome> {
    let mut outcome = Outcome::default();
    for writer in [Role::A, Role::B] {
        (if party.role == writer { write } else { read })(party, &mut outcome)?;
    }
    Ok(outcome)
}

/// Progress value at which a half of a trial begins.
fn base(party: &Party, writer: Role) -> u64 {
    1 + writer.index() * (party.rounds + 2)
}

/// Rounds of the writer of the order test in one go, and looks of its reader before it says so.
const BURST: u64 = 32;

fn write_in_order(party: &Party, _outcome: &mut Outcome) -> Result<()> {
    let (writer, first, start) = (party.role, place::first(party.role), base(party, party.role));
    let publish = |number: u64| {
        party.tested.publish(first, numbered(party, writer, number).record())?;
        party.tested.publish(first + 1, numbered(party, writer, number).record())
    };
    publish(0)?;
    party.report(start, 0, 0)?;
    party.await_progress(start)?;
    let mut looks = 0;
    for number in 1..=party.rounds {
        publish(number)?;
        if number.is_multiple_of(BURST) {
            // Waits for a reader that the scheduler has stopped; if it runs, the writer continues at once.
            let found = party.wait("the reader of the publish order test", || Ok(party.progress()?.filter(|found| found[1] > looks)))?;
            looks = found[1];
        }
    }
    party.report(start + party.rounds, 0, 0)?;
    party.await_progress(start + party.rounds).map(drop)
}

fn read_in_order(party: &Party, outcome: &mut Outcome) -> Result<()> {
    let (writer, first) = (party.role.other(), place::first(party.role.other()));
    let (start, end) = (base(party, writer), base(party, writer) + party.rounds);
    // The first line comes into the cache before the start, as a line that was used before would.
    party.await_progress(start)?;
    look(party, &party.tested, writer, first, outcome)?;
    party.report(start, 0, 0)?;
    let (mut last_first, mut last_second) = (0, 0);
    let mut looks = 0u64;
    party.wait("the writer of the publish order test", || {
        // Asked before the lines are fetched, so that they must be there if it says so.
        let is_over = looks.is_multiple_of(BURST) && party.progress()?.is_some_and(|found| found[0] >= end);
        let second = look(party, &party.tested, writer, first + 1, outcome)?;
        let one = look(party, &party.tested, writer, first, outcome)?;
        looks += 1;
        if looks.is_multiple_of(BURST) {
            party.report(start, looks, 0)?;
        }
        if let (Some(second), Some(one)) = (second, one)
            && second != WRONG
            && one != WRONG
        {
            outcome.checks += 1;
            outcome.overlapping += u64::from(second > last_second && second < party.rounds);
            if one < second || one < last_first || second < last_second {
                outcome.violated(Violation::OutOfOrder);
            }
            (last_first, last_second) = (last_first.max(one), last_second.max(second));
        }
        if is_over && (second, one) != (Some(party.rounds), Some(party.rounds)) {
            outcome.violated(Violation::Stale);
        }
        Ok(is_over.then_some(()))
    })?;
    party.report(end, looks, 0)
}

/// Where payload `number` lies: its slot, with a start that moves within a line, and its length.
fn payload_place(party: &Party, writer: Role, number: u64) -> (u64, u64) {
    let (start, len_bytes) = party.payload_area(writer);
    let room = len_bytes / SLOTS / 4096 * 4096;
    let random = mix(party.seed() ^ number << 1);
    let most = MAX_PAYLOAD_BYTES.min(room - LINE_BYTES as u64);
    (start + number % SLOTS * room + random % LINE_BYTES as u64, 1 + (random >> 16) % most)
}

fn payload(party: &Party, writer: Role, number: u64, into: &mut Vec<u8>, len_bytes: u64) {
    let seed = party.seed() ^ mix(number << 1 | writer.index());
    into.clear();
    into.extend((0..len_bytes.div_ceil(8)).flat_map(|word| mix(seed ^ word).to_le_bytes()));
    into.truncate(len_bytes as usize);
}

/// Payload rounds are as many as lines would be, divided by this.
const PAYLOAD_SHARE: u64 = 4;

fn write_payloads(party: &Party, _outcome: &mut Outcome) -> Result<()> {
    let (writer, start) = (party.role, base(party, party.role));
    let mut bytes = Vec::new();
    for slot in 0..SLOTS {
        party.tested.publish(place::flag(writer, slot), numbered(party, writer, 0).record())?;
    }
    party.report(start, 0, 0)?;
    for number in 1..=(party.rounds / PAYLOAD_SHARE).max(1) {
        // The reader has begun, and has read the former payload of the slot.
        party.await_progress(start + number.saturating_sub(SLOTS))?;
        let (offset, len_bytes) = payload_place(party, writer, number);
        payload(party, writer, number, &mut bytes, len_bytes);
        party.put(offset, &bytes)?;
        party.tested.publish(place::flag(writer, number % SLOTS), numbered(party, writer, number).record())?;
        party.report(start + number, 0, 0)?;
    }
    party.await_progress(start + (party.rounds / PAYLOAD_SHARE).max(1)).map(drop)
}

fn read_payloads(party: &Party, outcome: &mut Outcome) -> Result<()> {
    let (writer, start) = (party.role.other(), base(party, party.role.other()));
    let (mut bytes, mut found) = (Vec::new(), Vec::new());
    party.await_progress(start)?;
    party.report(start, 0, 0)?;
    for number in 1..=(party.rounds / PAYLOAD_SHARE).max(1) {
        let (offset, len_bytes) = payload_place(party, writer, number);
        // A prefetcher may have had the payload's lines in this cache while they were still those of the payload before.
        let first_line = offset / LINE_BYTES as u64 * LINE_BYTES as u64;
        for line in (first_line..offset + len_bytes).step_by(LINE_BYTES) {
            party.memory.load_line(line)?;
        }
        let mut looks = 0u64;
        party.wait("the flag of a payload", || {
            // Asked before the flag is fetched, so that the flag must be there if it says so.
            let is_published = party.progress()?.is_some_and(|found| found[0] >= start + number);
            let seen = look(party, &party.tested, writer, place::flag(writer, number % SLOTS), outcome)?;
            looks += 1;
            Ok(match seen {
                Some(seen) if seen >= number => Some(()),
                _ if is_published => {
                    outcome.violated(Violation::Stale);
                    Some(())
                }
                _ => None,
            })
        })?;
        found.clear();
        found.resize(len_bytes as usize, 0);
        party.get(offset, &mut found)?;
        payload(party, writer, number, &mut bytes, len_bytes);
        outcome.checks += 1;
        outcome.overlapping += u64::from(looks > 1);
        if found != bytes {
            outcome.violated(Violation::WrongPayload);
        }
        party.report(start + number, 0, 0)?;
    }
    Ok(())
}

fn buffering(party: &Party, read_back: bool) -> Result<Outcome> {
    let mut outcome = Outcome::default();
    let (own, other) = (party.role, party.role.other());
    for index in 0..BATCH {
        party.tested.publish(place::buffered(own, index), numbered(party, own, index).record())?;
    }
    let batches = party.rounds.div_ceil(BATCH);
    let (mut saw_last, mut saw_before) = (0, 0);
    for batch in 0..=batches {
        // What both saw of the batch before; the first meeting has none.
        party.report(1 + batch, saw_last, saw_before)?;
        let seen_by_other = party.await_progress(1 + batch)?;
        if batch > 0 && own == Role::A {
            outcome.checks += BATCH;
            outcome.overlapping += u64::from((saw_last & seen_by_other).count_ones());
            (0..(!(saw_last | seen_by_other)).count_ones()).for_each(|_| outcome.violated(Violation::NeitherSaw));
        }
        if batch == batches {
            break;
        }
        (saw_before, saw_last) = (saw_last, 0);
        for index in 0..BATCH {
            let (before, now) = (batch * BATCH + index, (batch + 1) * BATCH + index);
            // The sides drift against each other by less than a step's time, so that every overlap occurs.
            (0..mix(party.seed() ^ now << 1 ^ own.index()) % 16).for_each(|_| std::hint::spin_loop());
            party.tested.publish(place::buffered(own, index), numbered(party, own, now).record())?;
            if read_back && look(party, &party.tested, own, place::buffered(own, index), &mut outcome)? != Some(now) {
                outcome.violated(Violation::WrongLine);
            }
            let seen = loop {
                // Half written is neither old nor new, so it is fetched again, which its writer soon ends; a bound all the same.
                match look(party, &party.tested, other, place::buffered(other, index), &mut outcome)? {
                    None if outcome.torn < party.rounds * BATCH => {}
                    seen => break seen,
                }
            };
            match seen {
                Some(seen) if seen == now => saw_last |= 1 << index,
                Some(seen) if seen == before => {}
                // Counted where it was seen.
                Some(WRONG) => {}
                _ => outcome.violated(Violation::Stale),
            }
        }
    }
    Ok(outcome)
}
