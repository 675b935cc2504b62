// SPDX-License-Identifier: Apache-2.0
//! Requests as chains of block hashes.
//!
//! **A, B, C** have the means and deviations of TraCT table 1: input 4449 (2424) tokens, of which unique 1073 (1549), 1215 (1693), 1631
//! (2027). What the table does not say is assumed here:
//! - both lengths are lognormal, the unique and the shared part independent of each other, so that the shared part has a mean of input
//!   minus unique and a variance of the difference of the variances;
//! - the shared part is one of [`CONTEXTS`] contexts, asked for by Zipf's law with exponent [`CONTEXT_SKEW`], each request without regard
//!   to those before; its first quarter is the start of one of [`SYSTEMS`] system prompts, which the contexts share evenly;
//! - the unique part comes after the shared one and is never asked for again.
//!
//! **Turns**: conversations. Of [`CONVERSATIONS`] that run at a time one is drawn evenly for each request, which repeats all before it and
//! adds a question; the answer has the output length of table 1, 215 (263) tokens. System prompts by Zipf's law. **Scans**: the same, but
//! each tenth request is instead a long document that is read once.
//!
//! Only full blocks are cached. Answers are cached when the next turn brings them in as input.

use ctl_common::random::{LogNormal, Random, Zipf, mix};
use std::collections::HashMap;

/// Tokens of a block, as in TraCT section 4.2.
pub const BLOCK_TOKENS: u64 = 64;
/// System prompts of A, B and C.
pub const SYSTEMS: usize = 16;
/// Contexts of A, B and C.
pub const CONTEXTS: usize = 2000;
/// How uneven contexts are asked for.
pub const CONTEXT_SKEW: f64 = 0.9;
/// Conversations that run at a time.
pub const CONVERSATIONS: usize = 300;
const TURNS: f64 = 6.0;
const TURN_SYSTEMS: usize = 100;
const TURN_SYSTEM_SKEW: f64 = 1.1;
/// No request is longer, in tokens.
const MOST_TOKENS: f64 = 65_536.0;

const INPUT: (f64, f64) = (4449.0, 2424.0);
const OUTPUT: (f64, f64) = (215.0, 263.0);

/// A block: its name and the one before it in its chain.
#[derive(Clone, Copy)]
pub struct Block {
    pub key: [u8; 16],
    pub parent: Option<[u8; 16]>,
}

/// Requests in order.
pub struct Trace {
    pub name: &'static str,
    pub title: &'static str,
    pub blocks: Vec<Block>,
    /// The blocks of all requests, as indexes into `blocks`.
    accesses: Vec<u32>,
    ends: Vec<usize>,
    numbers: HashMap<[u8; 16], u32>,
    last_piece: u64,
    /// Tokens and unique tokens of each request, as drawn.
    pub tokens: Vec<(u64, u64)>,
}

/// A stretch of tokens that comes as a whole: which text it is and how long.
#[derive(Clone, Copy)]
pub struct Piece {
    pub text: u64,
    pub tokens: u64,
}

fn whole(tokens: f64) -> u64 {
    tokens.clamp(1.0, MOST_TOKENS).round() as u64
}

/// Hash of a block: of the one before it and of what it says.
fn chained(before: [u8; 16], says: u64) -> [u8; 16] {
    let [low, high]: [u64; 2] = bytemuck::cast(before);
    let first = mix(low.rotate_left(17) ^ mix(high ^ says));
    bytemuck::cast([first, mix(first ^ high.wrapping_mul(0x9fb2_1c65_1e98_df25) ^ says.rotate_left(32))])
}

impl Trace {
    /// Without requests yet.
    pub fn new(name: &'static str, title: &'static str) -> Self {
        let (blocks, accesses, ends, tokens) = Default::default();
        Trace { name, title, blocks, accesses, ends, numbers: HashMap::new(), last_piece: 0, tokens }
    }

    /// A text that was not asked for yet.
    pub fn fresh(&mut self, tokens: u64) -> Piece {
        self.last_piece += 1;
        Piece { text: self.last_piece, tokens }
    }

    /// Adds a request. Its block at token t says what the pieces say there, so two requests share as many blocks as their pieces agree on.
    pub fn ask(&mut self, pieces: &[Piece], unique_tokens: u64) {
        let total: u64 = pieces.iter().map(|piece| piece.tokens).sum();
        let mut before = None;
        for number in 0..total / BLOCK_TOKENS {
            let (start, end) = (number * BLOCK_TOKENS, (number + 1) * BLOCK_TOKENS);
            let (mut says, mut at) = (0, 0);
            for piece in pieces {
                let (from, to) = (start.max(at), end.min(at + piece.tokens));
                if from < to {
                    says = mix(says ^ mix(piece.text ^ mix(from - at)) ^ (to - from));
                }
                at += piece.tokens;
            }
            let key = chained(before.unwrap_or_default(), says);
            let next = self.blocks.len() as u32;
            let block = *self.numbers.entry(key).or_insert(next);
            if block == next {
                self.blocks.push(Block { key, parent: before });
            }
            self.accesses.push(block);
            before = Some(key);
        }
        self.ends.push(self.accesses.len());
        self.tokens.push((total, unique_tokens));
    }

    /// The chains in order.
    pub fn requests(&self) -> impl Iterator<Item = &[u32]> {
        let starts = std::iter::once(&0).chain(&self.ends);
        starts.zip(&self.ends).map(|(&start, &end)| self.accesses.get(start..end).unwrap_or_default())
    }

    /// The blocks of all requests, one after the other.
    pub fn accesses(&self) -> &[u32] {
        &self.accesses
    }
}

/// All workloads.
pub const WORKLOADS: usize = 5;

/// The workload of this number, below [`WORKLOADS`].
pub fn generate(number: usize, requests: usize, seed: u64) -> Trace {
    // One stream for A, B and C, so that the same contexts are asked for most, and one for the conversations.
    let mut random = Random::new(seed.wrapping_mul(2).wrapping_add(u64::from(number > 2)));
    match number {
        0 => shared(Trace::new("A", "A: unique 1073 (1549) of 4449 tokens"), (1073.0, 1549.0), requests, &mut random),
        1 => shared(Trace::new("B", "B: unique 1215 (1693) of 4449 tokens"), (1215.0, 1693.0), requests, &mut random),
        2 => shared(Trace::new("C", "C: unique 1631 (2027) of 4449 tokens"), (1631.0, 2027.0), requests, &mut random),
        3 => turns(Trace::new("turns", "Turns: conversations"), false, requests, &mut random),
        _ => turns(Trace::new("scans", "Scans: turns and one-off documents"), true, requests, &mut random),
    }
}

fn shared(mut trace: Trace, unique: (f64, f64), requests: usize, random: &mut Random) -> Trace {
    let deviation = (INPUT.1.powi(2) - unique.1.powi(2)).sqrt();
    let (shared, unique) = (LogNormal::new(INPUT.0 - unique.0, deviation), LogNormal::new(unique.0, unique.1));
    let popularity = Zipf::new(CONTEXTS, CONTEXT_SKEW);
    // Each context gets the length at its place in the distribution that requests are to have, so that the few that are asked for most do
    // not shift the mean; which are long has nothing to do with rank.
    let mut lengths: Vec<f64> = (0..CONTEXTS * 50).map(|_| shared.draw(random)).collect();
    lengths.sort_by(f64::total_cmp);
    let mut order: Vec<usize> = (0..CONTEXTS).collect();
    (1..CONTEXTS).rev().for_each(|last| order.swap(last, random.below(last + 1)));
    let shares: Vec<f64> = popularity.shares().collect();
    let mut contexts = vec![[Piece { text: 0, tokens: 0 }; 2]; CONTEXTS];
    let systems: Vec<u64> = (0..SYSTEMS).map(|_| trace.fresh(0).text).collect();
    let mut below = 0.0;
    for (place, &rank) in order.iter().enumerate() {
        let share = shares.get(rank).copied().unwrap_or_default();
        let index = ((below + share / 2.0) * lengths.len() as f64) as usize;
        below += share;
        let length = whole(lengths.get(index.min(lengths.len() - 1)).copied().unwrap_or(INPUT.0));
        let system = Piece { text: systems.get(place % SYSTEMS).copied().unwrap_or_default(), tokens: length / 4 };
        if let Some(context) = contexts.get_mut(rank) {
            *context = [system, trace.fresh(length - length / 4)];
        }
    }
    for _ in 0..requests {
        let own = whole(unique.draw(random));
        let own = trace.fresh(own);
        if let Some(&[system, context]) = contexts.get(popularity.draw(random)) {
            trace.ask(&[system, context, own], own.tokens);
        }
    }
    trace
}

/// A conversation: what was said, and how many turns are left.
struct Conversation {
    pieces: Vec<Piece>,
    turns: usize,
}

fn turns(mut trace: Trace, with_scans: bool, requests: usize, random: &mut Random) -> Trace {
    let (question, answer) = (LogNormal::new(300.0, 400.0), LogNormal::new(OUTPUT.0, OUTPUT.1));
    let (system, document) = (LogNormal::new(1500.0, 1000.0), LogNormal::new(8000.0, 4000.0));
    let popularity = Zipf::new(TURN_SYSTEMS, TURN_SYSTEM_SKEW);
    let systems: Vec<Piece> = (0..TURN_SYSTEMS).map(|_| whole(system.draw(random))).map(|tokens| trace.fresh(tokens)).collect();
    let opening = |random: &mut Random| Vec::from_iter(systems.get(popularity.draw(random)).copied());
    let mut running: Vec<Conversation> = Vec::new();
    for number in 0..requests {
        if with_scans && number % 10 == 9 {
            let read = whole(document.draw(random));
            let mut pieces = opening(random);
            pieces.push(trace.fresh(read));
            trace.ask(&pieces, read);
            continue;
        }
        let drawn = random.below(CONVERSATIONS);
        if running.get(drawn).is_none_or(|conversation| conversation.turns == 0) {
            let begun = Conversation { pieces: opening(random), turns: random.tries(TURNS) };
            match running.get_mut(drawn) {
                Some(ended) => *ended = begun,
                None => running.push(begun),
            }
        }
        let last = running.len().saturating_sub(1);
        let Some(conversation) = running.get_mut(drawn.min(last)) else { continue };
        let asked = whole(question.draw(random));
        conversation.pieces.push(trace.fresh(asked));
        conversation.turns = conversation.turns.saturating_sub(1);
        trace.ask(&conversation.pieces, asked);
        let answered = whole(answer.draw(random));
        conversation.pieces.push(trace.fresh(answered));
    }
    trace
}
