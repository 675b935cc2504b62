// SPDX-License-Identifier: Apache-2.0
//! Lines by which machines that know nothing of each other share out the manager seats (LOCKS.md 12.15).

use super::lines::{media_line, within};
use super::{MediaLine, Region};

media_line! {
    /// SPLITTER\[p\]: line 2p is the name, line 2p + 1 the door. Any machine may write them; nothing goes wrong by a late or lost write.
    Splitter in Splitter {
        /// Door: 1 once any machine went through it, for ever.
        @4 closed: u32,
        /// Name: the last machine that came to the door, by a random number of this attempt.
        @8 attempt: [u8; 16],
        /// Zero.
        @24 reserved: [u64; 5],
    }
}

media_line! {
    /// CLAIMANT\[p\]: line p.
    Claimant in Claimant {
        /// Newest ballot of this place; 0 = none so far.
        @4 ballot: u32,
        /// The machine whose place it is, or that used it last; zero = of no machine so far, or lost in an attempt.
        @8 machine: [u8; 16],
        /// The kernel whose machines share the place ([`crate::platform::Platform::witness`]); 0 = it is that one machine's.
        @24 witness: u64,
        /// Zero.
        @32 reserved: [u64; 4],
    } where |line| within([line.ballot])
}

media_line! {
    /// SEATCLAIM\[p\]\[q\]: line p * K + q: place p's copy of which session has seat q. The copy with the highest tag counts.
    SeatClaim in SeatClaim {
        /// Ballot under which it was written; 0 = never.
        @4 tag: u32,
        /// Sessions that the seat was given to, this one included; 0 = none so far.
        @8 generation: u32,
        /// Zero.
        @12 reserved: u32,
        /// The machine that has the seat.
        @16 machine: [u8; 16],
        /// The session of that machine.
        @32 session: [u8; 16],
        /// A session of this seat that an operator at this place's machine declared over. Not part of the vote: it counts in every copy.
        @48 ended: [u8; 16],
    } where |line| within([line.tag, line.generation])
}
