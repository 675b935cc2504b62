// SPDX-License-Identifier: Apache-2.0
//! As much of HTTP/1.1 as a reader of metrics needs, towards clients that may be slow or mean harm.
//!
//! A connection carries one request and has one deadline. The time to make the answer does not count: it does not depend on the client, and
//! reading a large pool takes long. The length of a request and the number of connections at a time are bounded; further connections get
//! status 503. Only the first line of a request is used.

use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Connections served at a time.
pub const MAX_CONNECTIONS: usize = 16;
/// Time for a connection from its acceptance to the last byte of the answer, without that in which the answer is made.
const DEADLINE: Duration = Duration::from_secs(5);
const MAX_HEAD_BYTES: usize = 8 << 10;
/// Rest after an accept that failed, as when no descriptor is left.
const AFTER_FAILURE: Duration = Duration::from_millis(100);

pub struct Answer {
    /// Status code and what it means.
    pub status: &'static str,
    /// Type of the body.
    pub content_type: &'static str,
    pub body: String,
}

impl Answer {
    /// One line of text with the reason.
    pub fn refusal(status: &'static str, why: impl std::fmt::Display) -> Answer {
        Answer { status, content_type: "text/plain; charset=utf-8", body: format!("{why}\n") }
    }
}

/// Answers requests for ever: `answer` is given the path.
pub fn serve(listener: &TcpListener, answer: impl Fn(&str) -> Answer + Send + Sync + 'static) -> ! {
    let (answer, served) = (Arc::new(answer), Arc::new(AtomicUsize::new(0)));
    loop {
        let Ok((mut stream, _)) = listener.accept() else {
            std::thread::sleep(AFTER_FAILURE);
            continue;
        };
        let deadline = Instant::now() + DEADLINE;
        let place = Place::take(&served);
        let Some(place) = place else {
            // A short text that fits into the socket's buffer: no thread waits for the client here.
            let _ = stream.set_nonblocking(true);
            let _ = stream.write(&head_and_body(&Answer::refusal("503 Service Unavailable", "too many connections"), true));
            continue;
        };
        let answer = answer.clone();
        let spawned = std::thread::Builder::new().spawn(move || {
            // A client that has gone or is too slow gets no answer.
            let _ = converse(&mut stream, deadline, &*answer);
            drop(place);
        });
        if spawned.is_err() {
            std::thread::sleep(AFTER_FAILURE);
        }
    }
}

/// One of the connections served at a time.
struct Place(Arc<AtomicUsize>);

impl Place {
    fn take(served: &Arc<AtomicUsize>) -> Option<Place> {
        // Only one thread accepts, so the number can only fall between the two steps.
        (served.load(Ordering::Acquire) < MAX_CONNECTIONS).then(|| {
            served.fetch_add(1, Ordering::AcqRel);
            Place(served.clone())
        })
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

fn remaining(deadline: Instant) -> std::io::Result<Duration> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() { Err(ErrorKind::TimedOut.into()) } else { Ok(left) }
}

fn converse(stream: &mut TcpStream, deadline: Instant, answer: &dyn Fn(&str) -> Answer) -> std::io::Result<()> {
    let head = read_head(stream, deadline)?;
    let asked = Instant::now();
    let (answer, with_body) = match head.as_deref().map(first_line) {
        None => (Answer::refusal("431 Request Header Fields Too Large", "the request is too long"), true),
        Some(None) => (Answer::refusal("400 Bad Request", "this is no HTTP request"), true),
        Some(Some((method, path))) => match method {
            "GET" | "HEAD" => (answer(path), method == "GET"),
            _ => (Answer::refusal("405 Method Not Allowed", "only GET and HEAD are answered"), true),
        },
    };
    let deadline = deadline + asked.elapsed();
    let bytes = head_and_body(&answer, with_body);
    let mut rest = bytes.as_slice();
    while !rest.is_empty() {
        stream.set_write_timeout(Some(remaining(deadline)?))?;
        match stream.write(rest) {
            Ok(0) => return Err(ErrorKind::WriteZero.into()),
            Ok(written) => rest = rest.get(written..).unwrap_or_default(),
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    drain(stream, deadline)
}

/// Says that the answer is complete and takes what the client still sends: a close with unread bytes would be a reset, which may overtake
/// the answer.
fn drain(stream: &mut TcpStream, deadline: Instant) -> std::io::Result<()> {
    stream.shutdown(std::net::Shutdown::Write)?;
    let mut rest = [0; 1 << 10];
    loop {
        stream.set_read_timeout(Some(remaining(deadline)?))?;
        if stream.read(&mut rest)? == 0 {
            return Ok(());
        }
    }
}

/// Reads up to the empty line that ends the head; `None` when it is too long.
fn read_head(stream: &mut TcpStream, deadline: Instant) -> std::io::Result<Option<Vec<u8>>> {
    let (mut head, mut piece) = (Vec::new(), [0; 1 << 10]);
    while head.len() <= MAX_HEAD_BYTES {
        stream.set_read_timeout(Some(remaining(deadline)?))?;
        match stream.read(&mut piece) {
            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
            Ok(count) => head.extend_from_slice(piece.get(..count).unwrap_or_default()),
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
        // The end may lie across two pieces.
        if head.windows(4).any(|end| end == b"\r\n\r\n") {
            return Ok(Some(head));
        }
    }
    Ok(None)
}

/// Method and path of a request, the query left out.
fn first_line(head: &[u8]) -> Option<(&str, &str)> {
    let line = head.split(|byte| *byte == b'\r').next()?;
    let mut words = std::str::from_utf8(line).ok()?.split(' ');
    let (method, target, version) = (words.next()?, words.next()?, words.next()?);
    let is_http = version.starts_with("HTTP/1.") && words.next().is_none() && !method.is_empty();
    let path = target.split(['?', '#']).next()?;
    (is_http && path.starts_with('/')).then_some((method, path))
}

fn head_and_body(answer: &Answer, with_body: bool) -> Vec<u8> {
    let Answer { status, content_type, body } = answer;
    let len_bytes = body.len();
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nContent-Length: {len_bytes}\r\n\
         Cache-Control: no-store\r\nConnection: close\r\n\r\n"
    );
    let mut bytes = head.into_bytes();
    if with_body {
        bytes.extend_from_slice(body.as_bytes());
    }
    bytes
}

#[cfg(test)]
mod tests;
