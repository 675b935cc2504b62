// SPDX-License-Identifier: Apache-2.0
//! Processes that do what a line asks, and answer each with a line of numbers.

use crate::Result;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

/// A process of this program in a role. It ends when this is dropped.
pub struct Peer {
    role: &'static str,
    child: Child,
    asks: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl Peer {
    /// Starts one with variables of its own, and waits until it is ready.
    pub fn start(role: &'static str, directory: &Path, variables: &[(&str, String)]) -> Result<Peer> {
        let mut child = Command::new(std::env::current_exe()?)
            .arg(role)
            .arg(directory)
            .envs(variables.iter().map(|(name, value)| (*name, value.as_str())))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let pipes = child.stdin.take().zip(child.stdout.take());
        let (asks, answers) = pipes.ok_or("the process has no pipes")?;
        let mut peer = Peer { role, child, asks, answers: BufReader::new(answers) };
        peer.answer("start")?;
        Ok(peer)
    }

    fn answer(&mut self, ask: &str) -> Result<Vec<String>> {
        let mut line = String::new();
        self.answers.read_line(&mut line)?;
        let mut words = line.split_whitespace().map(str::to_owned);
        match words.next().as_deref() {
            Some("ok") => Ok(words.collect()),
            _ => Err(format!("{}: {ask}: {}", self.role, if line.is_empty() { "the process ended" } else { line.trim() }).into()),
        }
    }

    /// What it answers, word by word.
    pub fn ask(&mut self, ask: &str) -> Result<Vec<String>> {
        writeln!(self.asks, "{ask}")?;
        // Metadata are long.
        self.answer(ask.get(..60).unwrap_or(ask))
    }

    /// Seconds that it answers.
    pub fn times<const N: usize>(&mut self, ask: &str) -> Result<[f64; N]> {
        let words: Vec<f64> = self.ask(ask)?.iter().map(|word| word.parse()).collect::<std::result::Result<_, _>>()?;
        <[f64; N]>::try_from(words).map_err(|words| format!("{}: {ask}: {} numbers, {N} are wanted", self.role, words.len()).into())
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        // It has nothing to tell at its end, and may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The other end: does what each line asks until there are no more.
pub fn serve(mut does: impl FnMut(&[&str]) -> Result<String>) -> Result<()> {
    println!("ok");
    for line in std::io::stdin().lines() {
        let line = line?;
        let words: Vec<&str> = line.split_whitespace().collect();
        match does(&words) {
            Ok(answer) => println!("ok {answer}"),
            Err(error) => println!("error: {error}"),
        }
    }
    Ok(())
}

/// The word at a place of an ask, as a number.
pub fn number(words: &[&str], at: usize) -> Result<u64> {
    Ok(words.get(at).ok_or_else(|| format!("word {at} of {words:?} is missing"))?.parse()?)
}

/// As [`number`], of blocks or bytes.
pub fn size(words: &[&str], at: usize) -> Result<usize> {
    Ok(usize::try_from(number(words, at)?)?)
}
