// SPDX-License-Identifier: Apache-2.0
//! Stands for a process that a fork server makes: it gets this one's streams, environment and process group, and its exit status is this
//! one's. `fork_server.py` is the other end.

use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;

/// Asks for a process that runs `words`, and waits for its end: its exit status, or 128 plus the signal that ended it, as in a shell.
pub fn run(socket: &str, words: &[String]) -> io::Result<i32> {
    let mut stream = UnixStream::connect(socket)?;
    stream.write_all(&request(std::process::id(), std::env::vars(), words))?;
    stream.shutdown(Shutdown::Write)?;
    let mut status = [0; 4];
    stream.read_exact(&mut status)?;
    Ok(match i32::from_le_bytes(status) {
        signal @ ..0 => 128 - signal,
        status => status,
    })
}

/// Parts that end with a NUL each: process, number of variables, `NAME=value` for each, words.
fn request(process: u32, variables: impl Iterator<Item = (String, String)>, words: &[String]) -> Vec<u8> {
    let pairs: Vec<String> = variables.map(|(name, value)| format!("{name}={value}")).collect();
    let parts = [process.to_string(), pairs.len().to_string()].into_iter().chain(pairs).chain(words.iter().cloned());
    parts.flat_map(|part| [part.into_bytes(), vec![0]].concat()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_says_for_whom_with_what_and_what() {
        let variables = [("A", "1"), ("B", "x=y")].map(|(name, value)| (name.to_owned(), value.to_owned()));
        let words = ["peer", ""].map(str::to_owned);
        assert_eq!(request(7, variables.into_iter(), &words), b"7\x002\0A=1\0B=x=y\0peer\0\0");
    }

    #[test]
    fn without_a_server_it_fails() {
        assert_eq!(run("/nowhere/socket", &[]).unwrap_err().kind(), io::ErrorKind::NotFound);
    }
}
