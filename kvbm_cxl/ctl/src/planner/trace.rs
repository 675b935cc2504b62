// SPDX-License-Identifier: Apache-2.0
//! Recorded requests: one JSON object a line, with `timestamp` (ms), `input_length` (tokens) and `hash_ids`, one for each block of the
//! input.
//!
//! This is the format of Mooncake's published traces, and of agent sessions whose prompts were reduced to hashes: they name a `session`, of
//! which no request comes before the one before it is answered. Other members are passed over. A block is known by its hash and by the
//! blocks before it, so hashes may be chained or not.

use crate::planner::error::{Origin, PlanError, Planned};
use crate::random::mix;
use serde_json::{Map, Value};
use std::collections::HashMap;
use std::path::Path;

/// Blocks that a trace may have when their size is not given.
const BLOCK_SIZES: [u64; 8] = [16, 32, 64, 128, 256, 512, 1024, 2048];
/// Longest input, in tokens.
const MOST_TOKENS: u64 = 1 << 26;
/// Latest arrival, in milliseconds: a year.
const MOST_MS: f64 = 366.0 * 24.0 * 3600.0 * 1000.0;
/// Blocks of all requests, so that numbers of blocks fit in 32 bits.
const MOST_BLOCKS: usize = 1 << 31;

#[derive(Clone, Copy, Debug)]
pub struct Request {
    /// When it came, after the first one.
    pub arrival_s: f64,
    pub input_tokens: u64,
    /// The request before it in its session, by number.
    pub previous: Option<u32>,
    start: usize,
    end: usize,
}

/// A block as an eviction policy knows it.
#[derive(Clone, Copy, Debug)]
pub struct Block {
    pub key: [u8; 16],
    /// The name of the block before it.
    pub parent: Option<[u8; 16]>,
}

#[derive(Debug)]
pub struct Trace {
    pub file: String,
    pub requests: Vec<Request>,
    pub blocks: Vec<Block>,
    pub block_tokens: u64,
    chains: Vec<u32>,
}

impl Trace {
    /// The blocks of a request, from the first on.
    pub fn chain(&self, request: &Request) -> &[u32] {
        self.chains.get(request.start..request.end).unwrap_or_default()
    }

    pub fn asked_tokens(&self) -> u64 {
        self.requests.iter().map(|request| request.input_tokens).sum()
    }

    /// Requests follow others of their sessions.
    pub fn has_sessions(&self) -> bool {
        self.requests.iter().any(|request| request.previous.is_some())
    }

    pub fn span_s(&self) -> f64 {
        self.requests.last().map_or(0.0, |request| request.arrival_s)
    }

    /// The part of the tokens that a cache without limit would have when each request is done before the next one comes.
    pub fn ceiling(&self) -> f64 {
        let mut seen = vec![false; self.blocks.len()];
        let mut hits = 0;
        for request in &self.requests {
            let chain = self.chain(request);
            let found = chain.iter().take_while(|&&block| seen.get(block as usize) == Some(&true)).count() as u64;
            hits += (found * self.block_tokens).min(request.input_tokens.saturating_sub(1));
            chain.iter().for_each(|&block| {
                if let Some(seen) = seen.get_mut(block as usize) {
                    *seen = true;
                }
            });
        }
        hits as f64 / self.asked_tokens().max(1) as f64
    }

    /// Reads the file; at most `most` requests. `block_tokens` is found out where it is not given.
    pub fn read(path: &Path, most: usize, block_tokens: Option<u64>) -> Planned<Trace> {
        let file = path.display().to_string();
        let bytes = std::fs::read(path).map_err(|source| PlanError::Unusable { file: file.clone(), source })?;
        Trace::parse(&file, &bytes, most, block_tokens)
    }

    pub fn parse(file: &str, bytes: &[u8], most: usize, block_tokens: Option<u64>) -> Planned<Trace> {
        let mut reader = Reader::new(file);
        let last = bytes.iter().rposition(|byte| !byte.is_ascii_whitespace()).map_or(0, |at| at + 1);
        let lines = bytes.get(..last).unwrap_or_default();
        if !lines.is_empty() {
            lines.split(|&byte| byte == b'\n').take(most).try_for_each(|line| reader.line(line))?;
        }
        reader.finish(block_tokens)
    }
}

struct Reader {
    file: String,
    number: usize,
    first_ms: f64,
    last_ms: f64,
    trace: Trace,
    /// By the block before, plus one, and the hash.
    numbers: HashMap<(u32, u64), u32>,
    /// The last request of each session.
    sessions: HashMap<String, u32>,
}

impl Reader {
    fn new(file: &str) -> Self {
        let trace = Trace { file: file.into(), requests: Vec::new(), blocks: Vec::new(), block_tokens: 0, chains: Vec::new() };
        Reader { file: file.into(), number: 0, first_ms: 0.0, last_ms: 0.0, trace, numbers: HashMap::new(), sessions: HashMap::new() }
    }

    fn here(&self) -> Origin {
        Origin::Line { file: self.file.clone(), line: self.number }
    }

    fn malformed(&self, what: impl Into<String>, remedy: impl Into<String>) -> PlanError {
        PlanError::Malformed { origin: self.here(), what: what.into(), remedy: remedy.into() }
    }

    /// A number within its range.
    fn number(&self, object: &Map<String, Value>, name: &str, (least, most): (f64, f64), unit: &'static str) -> Planned<f64> {
        let value = object.get(name).ok_or_else(|| self.malformed(format!("no {name}"), format!("every request needs it, in {unit}")))?;
        let out = || PlanError::OutOfRange { origin: self.here(), name: name.into(), given: excerpt(value), least, most, unit };
        value.as_f64().filter(|number| (least..=most).contains(number)).ok_or_else(out)
    }

    fn line(&mut self, line: &[u8]) -> Planned<()> {
        self.number += 1;
        if line.trim_ascii().is_empty() {
            return Err(self.malformed("an empty line between requests", "delete it"));
        }
        let value: Value = serde_json::from_slice(line)
            .map_err(|error| self.malformed(format!("not JSON ({error})"), "give one JSON object a line, whole and on one line"))?;
        let Value::Object(object) = value else {
            return Err(self.malformed("not a JSON object", "give {\"timestamp\": ms, \"input_length\": tokens, \"hash_ids\": [...]}"));
        };
        let timestamp_ms = self.number(&object, "timestamp", (0.0, MOST_MS), "milliseconds")?;
        let input_tokens = self.number(&object, "input_length", (1.0, MOST_TOKENS as f64), "tokens")?;
        if input_tokens.fract() != 0.0 {
            return Err(self.malformed(format!("input_length is {input_tokens}"), "give a whole number of tokens"));
        }
        if object.contains_key("output_length") {
            self.number(&object, "output_length", (0.0, MOST_TOKENS as f64), "tokens")?;
        }
        if self.trace.requests.is_empty() {
            self.first_ms = timestamp_ms;
        } else if timestamp_ms < self.last_ms {
            let what = format!("timestamp {timestamp_ms} is before {} of the line above", self.last_ms);
            return Err(self.malformed(what, "sort the trace by timestamp"));
        }
        self.last_ms = timestamp_ms;
        let start = self.trace.chains.len();
        self.chain(&object)?;
        let end = self.trace.chains.len();
        let arrival_s = (timestamp_ms - self.first_ms) / 1000.0;
        let number = self.trace.requests.len() as u32;
        let previous = object.get("session").and_then(|session| self.sessions.insert(session.to_string(), number));
        self.trace.requests.push(Request { arrival_s, input_tokens: input_tokens as u64, previous, start, end });
        Ok(())
    }

    fn chain(&mut self, object: &Map<String, Value>) -> Planned<()> {
        let Some(Value::Array(ids)) = object.get("hash_ids") else {
            return Err(self.malformed("no list hash_ids", "every request needs it, a whole number for each block of its input"));
        };
        if self.trace.chains.len() + ids.len() > MOST_BLOCKS {
            return Err(self.malformed("more blocks than a plan can hold", format!("give --requests {}", self.number.saturating_sub(1))));
        }
        let mut before: Option<u32> = None;
        for (index, id) in ids.iter().enumerate() {
            let Some(id) = id.as_u64() else {
                let what = format!("hash_ids[{index}] is {}", excerpt(id));
                return Err(self.malformed(what, "give whole numbers from 0 to 18446744073709551615, without holes"));
            };
            let next = self.trace.blocks.len() as u32;
            let block = *self.numbers.entry((before.map_or(0, |block| block + 1), id)).or_insert(next);
            if block == next {
                let parent = before.and_then(|block| self.trace.blocks.get(block as usize)).map(|block| block.key);
                self.trace.blocks.push(Block { key: key(block), parent });
            }
            self.trace.chains.push(block);
            before = Some(block);
        }
        Ok(())
    }

    fn finish(mut self, block_tokens: Option<u64>) -> Planned<Trace> {
        if self.trace.requests.is_empty() {
            return Err(PlanError::Empty { file: self.file });
        }
        // The whole blocks, and one for the rest; or one more, which lengths that were rounded down have at the end of a block.
        let exact = |tokens: u64, request: &Request| {
            let blocks = (request.end - request.start) as u64;
            blocks == request.input_tokens / tokens || blocks == request.input_tokens.div_ceil(tokens)
        };
        let fits = |tokens: u64, request: &Request| {
            exact(tokens, request) || (request.end - request.start) as u64 == request.input_tokens / tokens + 1
        };
        let requests = &self.trace.requests;
        let sizes = |fits: &dyn Fn(u64, &Request) -> bool| -> Vec<u64> {
            BLOCK_SIZES.into_iter().filter(|&tokens| requests.iter().all(|request| fits(tokens, request))).collect()
        };
        let candidates = match block_tokens {
            Some(tokens) => vec![tokens],
            None => Some(sizes(&exact)).filter(|sizes| !sizes.is_empty()).unwrap_or_else(|| sizes(&fits)),
        };
        let remedy = "give --block-tokens, the tokens of a block in this trace (512 in Mooncake's)";
        let whole = |what: &str| PlanError::Malformed { origin: Origin::File(self.file.clone()), what: what.into(), remedy: remedy.into() };
        let tokens = match candidates.as_slice() {
            [tokens] => *tokens,
            [] => return Err(whole("no size of a block fits the number of hashes of all requests")),
            _ => return Err(whole("several sizes of a block fit the numbers of hashes")),
        };
        if let Some(line) = requests.iter().position(|request| !fits(tokens, request)) {
            let request = requests.get(line).copied();
            let (blocks, length) = request.map_or((0, 0), |request| (request.end - request.start, request.input_tokens));
            self.number = line + 1;
            let what = format!("{blocks} hashes for {length} tokens do not fit blocks of {tokens} tokens");
            return Err(self.malformed(what, "give another --block-tokens, or repair the trace"));
        }
        self.trace.block_tokens = tokens;
        Ok(self.trace)
    }
}

/// The beginning of a value, for a message.
fn excerpt(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(40) {
        Some((end, _)) => format!("{}...", text.get(..end).unwrap_or_default()),
        None => text,
    }
}

/// The name of the block of this number.
pub fn key(number: u32) -> [u8; 16] {
    bytemuck::cast([mix(u64::from(number) + 1), u64::from(number)])
}
