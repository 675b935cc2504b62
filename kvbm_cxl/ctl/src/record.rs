// SPDX-License-Identifier: Apache-2.0
//! `cxlctl record`: what the processes of a pool recorded, merged by time into one trace for `cxl-plan`.

use crate::cli::RecordArgs;
use crate::output::{Exit, Failure, Out};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufRead, BufReader, BufWriter, Write};
use std::path::{Path, PathBuf};

/// The version of the files that is read.
const VERSION: u64 = 1;
/// What the files of recorders end with.
const ENDING: &str = ".trace.jsonl";
/// Longest line, in bytes: a recorder's queue holds no more.
const LONGEST_LINE: usize = 16 << 20;

/// A recorder's file, read line by line.
struct Source {
    path: PathBuf,
    lines: BufReader<File>,
    number: usize,
    salt: String,
    block_tokens: u64,
    host: String,
    /// Entries that are missing, as the last line says; none where the process did not end in good order.
    missing: Option<(u64, u64)>,
    /// A line that was only begun when the process ended.
    is_torn: bool,
    last_us: u64,
}

/// A request or a publish.
struct Entry {
    at_us: u64,
    object: Map<String, Value>,
}

/// Totals of the merged recordings.
#[derive(Default)]
struct Merged {
    requests: u64,
    tokens: u64,
    found_tokens: u64,
    published: u64,
    first_us: u64,
    last_us: u64,
}

impl Source {
    fn open(path: &Path) -> Result<Source, Failure> {
        let file = File::open(path).map_err(|error| Failure::new(Exit::Failed, format!("{}: {error}", path.display())))?;
        let mut source = Source {
            path: path.into(),
            lines: BufReader::new(file),
            number: 0,
            salt: String::new(),
            block_tokens: 0,
            host: String::new(),
            missing: None,
            is_torn: false,
            last_us: 0,
        };
        let Some(head) = source.line()? else { return Err(source.wrong("it has no first line: no recorder wrote it")) };
        if head.get("recorder").and_then(Value::as_u64) != Some(VERSION) {
            return Err(source.wrong(format!("its first line is not that of a recorder of version {VERSION}")));
        }
        let text = |name: &str| head.get(name).and_then(Value::as_str).map(String::from);
        let (salt, host, block_tokens) = (text("salt"), text("host"), head.get("block_tokens").and_then(Value::as_u64));
        let (Some(salt), Some(host), Some(block_tokens)) = (salt, host, block_tokens) else {
            return Err(source.wrong("its first line lacks salt, host or block_tokens"));
        };
        (source.salt, source.host, source.block_tokens) = (salt, host, block_tokens);
        Ok(source)
    }

    fn wrong(&self, what: impl std::fmt::Display) -> Failure {
        Failure::new(Exit::Failed, format!("{}:{}: {what}", self.path.display(), self.number.max(1)))
    }

    /// The next whole line; none at the end, where a line that is only begun is passed over.
    fn line(&mut self) -> Result<Option<Map<String, Value>>, Failure> {
        self.number += 1;
        let mut bytes = Vec::new();
        let mut limited = std::io::Read::take(&mut self.lines, LONGEST_LINE as u64);
        limited.read_until(b'\n', &mut bytes).map_err(|error| self.wrong(error))?;
        if bytes.is_empty() {
            return Ok(None);
        }
        if bytes.last() != Some(&b'\n') {
            self.is_torn = true;
            return if bytes.len() < LONGEST_LINE { Ok(None) } else { Err(self.wrong("a line that is too long")) };
        }
        match serde_json::from_slice(&bytes) {
            Ok(Value::Object(object)) => Ok(Some(object)),
            Ok(_) => Err(self.wrong("not a JSON object")),
            Err(error) => Err(self.wrong(format!("not JSON ({error})"))),
        }
    }

    fn next(&mut self) -> Result<Option<Entry>, Failure> {
        while let Some(object) = self.line()? {
            let number = |name: &str| object.get(name).and_then(Value::as_u64);
            let Some(at_us) = number("at_us") else { return Err(self.wrong("no at_us")) };
            if let (Some(dropped), Some(failed)) = (number("dropped"), number("failed")) {
                self.missing = Some((dropped, failed));
                continue;
            }
            // A clock that was set back must not set the order of this file's requests aside.
            self.last_us = self.last_us.max(at_us);
            return Ok(Some(Entry { at_us: self.last_us, object }));
        }
        Ok(None)
    }
}

fn files(paths: &[PathBuf]) -> Result<Vec<PathBuf>, Failure> {
    let mut files = Vec::new();
    for path in paths {
        if !path.is_dir() {
            files.push(path.clone());
            continue;
        }
        let failed = |error: std::io::Error| Failure::new(Exit::Failed, format!("{}: {error}", path.display()));
        for entry in std::fs::read_dir(path).map_err(failed)? {
            let entry = entry.map_err(failed)?;
            if entry.file_name().to_string_lossy().ends_with(ENDING) {
                files.push(entry.path());
            }
        }
    }
    if files.is_empty() {
        return Err(Failure::usage(format!("no file of a recorder: name files, or folders with *{ENDING}")));
    }
    files.sort();
    Ok(files)
}

/// All are of one salt and one size of blocks, or their ids say nothing of one another.
fn check(sources: &[Source]) -> Result<(), Failure> {
    let Some(first) = sources.first() else { return Ok(()) };
    for source in sources {
        if source.salt != first.salt {
            let what = format!("was recorded with another salt than {}: their ids cannot be compared", first.path.display());
            return Err(Failure::new(Exit::Failed, format!("{} {what}", source.path.display())));
        }
        if source.block_tokens != first.block_tokens {
            let (one, other) = (source.block_tokens, first.block_tokens);
            let what = format!("has blocks of {one} tokens, {} of {other}: merge those of one model", first.path.display());
            return Err(Failure::new(Exit::Failed, format!("{} {what}", source.path.display())));
        }
    }
    Ok(())
}

/// Writes the requests of all files in the order of time.
fn merge(sources: &mut [Source], out: &mut impl Write) -> Result<Merged, Failure> {
    let mut merged = Merged::default();
    // By time, and by file where times are equal.
    let mut next: BTreeMap<(u64, usize), Entry> = BTreeMap::new();
    let fetch = |sources: &mut [Source], index: usize, next: &mut BTreeMap<(u64, usize), Entry>| -> Result<(), Failure> {
        if let Some(source) = sources.get_mut(index)
            && let Some(entry) = source.next()?
        {
            next.insert((entry.at_us, index), entry);
        }
        Ok(())
    };
    for index in 0..sources.len() {
        fetch(sources, index, &mut next)?;
    }
    let mut is_first = true;
    while let Some(((at_us, index), entry)) = next.pop_first() {
        if is_first {
            (merged.first_us, is_first) = (at_us, false);
        }
        merged.last_us = at_us;
        if let Some(source) = sources.get(index) {
            add(source, &entry, &mut merged, out)?;
        }
        fetch(sources, index, &mut next)?;
    }
    Ok(merged)
}

fn add(source: &Source, entry: &Entry, merged: &mut Merged, out: &mut impl Write) -> Result<(), Failure> {
    if let Some(Value::Array(published)) = entry.object.get("published") {
        merged.published += published.len() as u64;
        return Ok(());
    }
    let number = |name: &str| entry.object.get(name).and_then(Value::as_u64);
    let (Some(tokens), Some(found), Some(ids)) = (number("input_length"), number("found"), entry.object.get("hash_ids")) else {
        return Err(source.wrong("neither a request nor a publish"));
    };
    if tokens == 0 {
        return Ok(());
    }
    merged.requests += 1;
    merged.tokens += tokens;
    merged.found_tokens += found.min(tokens);
    let timestamp = (entry.at_us - merged.first_us) as f64 / 1000.0;
    let request = json!({"timestamp": timestamp, "input_length": tokens, "hash_ids": ids, "found": found, "host": source.host});
    writeln!(out, "{request}")?;
    Ok(())
}

pub fn run(args: &RecordArgs, out: &mut Out) -> Result<Exit, Failure> {
    let mut sources = files(&args.files)?.iter().map(|path| Source::open(path)).collect::<Result<Vec<Source>, Failure>>()?;
    check(&sources)?;
    let failed = |error: std::io::Error| Failure::new(Exit::Failed, format!("{}: {error}", args.write.display()));
    let mut file = BufWriter::new(File::create(&args.write).map_err(failed)?);
    let merged = merge(&mut sources, &mut file)?;
    file.flush().map_err(failed)?;
    let block_tokens = sources.first().map_or(0, |source| source.block_tokens);
    let found = merged.found_tokens as f64 / merged.tokens.max(1) as f64;
    let span_s = (merged.last_us - merged.first_us) as f64 / 1e6;
    let missing = sources.iter().filter_map(|source| source.missing).fold((0, 0), |all, of| (all.0 + of.0, all.1 + of.1));
    let cut = sources.iter().filter(|source| source.missing.is_none()).count();
    let torn = sources.iter().filter(|source| source.is_torn).count();
    let json = || {
        json!({"files": sources.len(), "requests": merged.requests, "tokens": merged.tokens, "found": found, "published": merged.published,
            "span_s": span_s, "block_tokens": block_tokens, "dropped": missing.0, "failed": missing.1, "without_end": cut, "torn": torn})
    };
    let text = || {
        let mut text = format!(
            "{} requests of {} files in {span_s:.1} s: {} tokens, {:.2} % of them found; {} blocks published\n",
            merged.requests,
            sources.len(),
            merged.tokens,
            found * 100.0,
            merged.published
        );
        if missing != (0, 0) {
            text.push_str(&format!("missing: {} entries dropped, {} not written\n", missing.0, missing.1));
        }
        if cut > 0 {
            text.push_str(&format!("{cut} files have no last line: their processes still run, or were killed\n"));
        }
        text.push_str(&format!("cxl-plan run {} --block-tokens {block_tokens}\n", args.write.display()));
        text
    };
    out.answer(json, text)?;
    Ok(Exit::Done)
}
