// SPDX-License-Identifier: Apache-2.0
//! Lines by which machines that know nothing of each other share out the manager seats (LOCKS.md 12.15).

use super::lines::{media_line, within};
use super::{MediaLine, Region};
use bytemuck::{Pod, Zeroable};

/// SPLITTER\[p\]: line 2p is the name, line 2p + 1 the door. Any machine may write them; nothing goes wrong by a late or lost write.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct Splitter {
    /// CRC32C of the line.
    pub crc: u32,
    /// Door: 1 once any machine went through it, for ever.
    pub closed: u32,
    /// Name: the last machine that came to the door, by a random number of this attempt.
    pub attempt: [u8; 16],
    /// Zero.
    pub reserved: [u64; 5],
}
media_line!(Splitter, Splitter { crc @ 0, closed @ 4, attempt @ 8, reserved @ 24 });

/// CLAIMANT\[p\]: line p.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct Claimant {
    /// CRC32C of the line.
    pub crc: u32,
    /// Newest ballot of this place; 0 = none so far.
    pub ballot: u32,
    /// The machine whose place it is, or that used it last; zero = of no machine so far, or lost in an attempt.
    pub machine: [u8; 16],
    /// The kernel whose machines share the place ([`crate::platform::Platform::witness`]); 0 = it is that one machine's.
    pub witness: u64,
    /// Zero.
    pub reserved: [u64; 4],
}
media_line!(Claimant, Claimant { crc @ 0, ballot @ 4, machine @ 8, witness @ 24, reserved @ 32 }, |line| within([line.ballot]));

/// SEATCLAIM\[p\]\[q\]: line p * K + q: place p's copy of which session has seat q. The copy with the highest tag counts.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct SeatClaim {
    /// CRC32C of the line.
    pub crc: u32,
    /// Ballot under which it was written; 0 = never.
    pub tag: u32,
    /// Sessions that the seat was given to, this one included; 0 = none so far.
    pub generation: u32,
    /// Zero.
    pub reserved: u32,
    /// The machine that has the seat.
    pub machine: [u8; 16],
    /// The session of that machine.
    pub session: [u8; 16],
    /// A session of this seat that an operator of this place's machine stated to be over. Not part of the vote: it counts in every copy.
    pub ended: [u8; 16],
}
media_line!(
    SeatClaim,
    SeatClaim { crc @ 0, tag @ 4, generation @ 8, reserved @ 12, machine @ 16, session @ 32, ended @ 48 },
    |line| within([line.tag, line.generation])
);
