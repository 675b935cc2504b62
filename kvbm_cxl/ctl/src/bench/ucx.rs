// SPDX-License-Identifier: Apache-2.0
//! A program that does the same through UCX on request, one line for each request and answer: perf/ucx_peer.py and perf/ucx_calls.c
//! explain the lines.

use cxl_pool::{Error, Result};
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

/// Longest wait for an answer.
const PATIENCE: Duration = Duration::from_secs(300);

/// The program, which ends with this value.
pub struct Peer {
    child: Child,
    input: ChildStdin,
    answers: Receiver<String>,
    description: String,
}

fn failed(what: impl Into<String>) -> Error {
    Error::Invalid(what.into())
}

impl Peer {
    /// Starts it and waits until it is ready.
    pub fn start(command: &str) -> Result<Peer> {
        let mut words = command.split_whitespace();
        let program = words.next().ok_or_else(|| failed("no program is named"))?;
        let started = Command::new(program).args(words).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn();
        let mut child = started.map_err(|source| Error::Os { what: format!("start {program}"), source })?;
        let (Some(input), Some(output)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(failed("it has no pipes"));
        };
        let mut peer = Peer { child, input, answers: lines_of(output), description: String::new() };
        let ready = peer.answer()?;
        peer.description = ready.strip_prefix("ready ").ok_or_else(|| failed(ready.clone()))?.to_owned();
        Ok(peer)
    }

    pub fn description(&self) -> &str {
        &self.description
    }

    fn answer(&mut self) -> Result<String> {
        self.answers.recv_timeout(PATIENCE).map_err(|_| failed("it did not answer, or ended; run it by hand to see why"))
    }

    /// Sends `request` and gives the times that it answers, in nanoseconds. It has compared the bytes.
    pub fn request(&mut self, request: &str) -> Result<Vec<f64>> {
        writeln!(self.input, "{request}").map_err(|source| Error::Os { what: format!("ask for {request}"), source })?;
        let answer = self.answer()?;
        let times = answer.strip_prefix("ns ").ok_or_else(|| failed(format!("{request}: {answer}")))?;
        times.split(' ').map(|time| time.parse().map_err(|_| failed(format!("{request}: {answer}")))).collect()
    }
}

fn lines_of(output: ChildStdout) -> Receiver<String> {
    let (sender, receiver) = channel();
    std::thread::spawn(move || {
        for line in BufReader::new(output).lines().map_while(std::io::Result::ok) {
            if sender.send(line).is_err() {
                return;
            }
        }
    });
    receiver
}

impl Drop for Peer {
    fn drop(&mut self) {
        // It ends by itself on this; the kill is for one that does not.
        let _ = writeln!(self.input, "quit");
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
