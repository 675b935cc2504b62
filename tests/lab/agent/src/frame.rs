// SPDX-License-Identifier: Apache-2.0
//! Frames: what travels between the lab and an agent.
//!
//! A frame is a header of 12 bytes, little-endian, and its payload: kind (u32), number of the command that it is about (u32), length of the
//! payload in bytes (u32). `cxl_lab/agent.py` is the other end.

use std::io::{self, Read, Write};

/// No frame is longer; a header that says otherwise is a stream that went wrong.
pub const MAX_PAYLOAD_BYTES: usize = 1 << 20;

/// What a frame says. To the agent: the first five; from it: the rest.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u32)]
pub enum Kind {
    /// Start a command: see [`Order::parse`].
    Start = 1,
    /// Bytes for its standard input.
    Input = 2,
    /// Its standard input ends here.
    InputEnd = 3,
    /// Send its process group a signal (i32).
    Signal = 4,
    /// Asks for a [`Kind::Pong`].
    Ping = 5,
    /// Bytes of its standard output.
    Output = 6,
    /// Bytes of its standard error.
    Error = 7,
    /// It ended: exit status (i32), or minus the signal that ended it. Nothing follows.
    Exit = 8,
    /// It could not be started, and why (text). Nothing follows.
    Refused = 9,
    /// The agent is there.
    Pong = 10,
}

impl Kind {
    const ALL: [Kind; 10] = [
        Kind::Start,
        Kind::Input,
        Kind::InputEnd,
        Kind::Signal,
        Kind::Ping,
        Kind::Output,
        Kind::Error,
        Kind::Exit,
        Kind::Refused,
        Kind::Pong,
    ];

    fn of(number: u32) -> Option<Kind> {
        Kind::ALL.into_iter().find(|&kind| kind as u32 == number)
    }
}

/// One frame.
#[derive(Debug)]
pub struct Frame {
    /// What it says.
    pub kind: Kind,
    /// The command that it is about.
    pub command: u32,
    /// What belongs to it.
    pub payload: Vec<u8>,
}

/// The next frame; `None` where the stream ends between two. Fails on a header that cannot be.
pub fn read(from: &mut impl Read) -> io::Result<Option<Frame>> {
    let mut header = [0; 12];
    let mut filled = 0;
    while filled < header.len() {
        match from.read(&mut header[filled..])? {
            0 if filled == 0 => return Ok(None),
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            count => filled += count,
        }
    }
    let [kind, command, len] = [0, 4, 8].map(|at| u32::from_le_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]]));
    let invalid = |what: String| io::Error::new(io::ErrorKind::InvalidData, what);
    let kind = Kind::of(kind).ok_or_else(|| invalid(format!("a frame of unknown kind {kind}")))?;
    let len_bytes = len as usize;
    if len_bytes > MAX_PAYLOAD_BYTES {
        return Err(invalid(format!("a frame of {len_bytes} bytes, more than {MAX_PAYLOAD_BYTES}")));
    }
    let mut payload = vec![0; len_bytes];
    from.read_exact(&mut payload)?;
    Ok(Some(Frame { kind, command, payload }))
}

/// Writes one frame in one call, so that frames of several threads do not mix. `payload`: at most [`MAX_PAYLOAD_BYTES`].
pub fn write(to: &mut impl Write, kind: Kind, command: u32, payload: &[u8]) -> io::Result<()> {
    let mut bytes = Vec::with_capacity(12 + payload.len());
    for number in [kind as u32, command, payload.len() as u32] {
        bytes.extend(number.to_le_bytes());
    }
    bytes.extend(payload);
    to.write_all(&bytes)?;
    to.flush()
}

/// What to run.
#[derive(Debug, PartialEq)]
pub struct Order {
    /// Where.
    pub folder: String,
    /// Its whole environment.
    pub environment: Vec<(String, String)>,
    /// Program and arguments.
    pub words: Vec<String>,
}

impl Order {
    /// The payload of [`Kind::Start`]: folder, number of variables, `NAME=value` for each, program, arguments; a NUL between two.
    pub fn parse(payload: &[u8]) -> Option<Order> {
        let text = std::str::from_utf8(payload).ok()?;
        let mut parts = text.split('\0').map(str::to_owned);
        let folder = parts.next()?;
        let count: usize = parts.next()?.parse().ok()?;
        let environment: Vec<_> = parts
            .by_ref()
            .take(count)
            .map(|pair| pair.split_once('=').map(|(name, value)| (name.into(), value.into())))
            .collect::<Option<_>>()?;
        let words: Vec<String> = parts.collect();
        (environment.len() == count && !words.is_empty()).then_some(Order { folder, environment, words })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_frame_comes_out_as_it_went_in_and_the_stream_ends_between_two() {
        let mut stream = Vec::new();
        write(&mut stream, Kind::Output, 7, b"bytes").unwrap();
        write(&mut stream, Kind::InputEnd, 8, b"").unwrap();
        let mut from = stream.as_slice();
        let first = read(&mut from).unwrap().unwrap();
        assert_eq!((first.kind, first.command, first.payload.as_slice()), (Kind::Output, 7, b"bytes".as_slice()));
        let second = read(&mut from).unwrap().unwrap();
        assert_eq!((second.kind, second.command, second.payload.len()), (Kind::InputEnd, 8, 0));
        assert!(read(&mut from).unwrap().is_none());
    }

    #[test]
    fn a_stream_that_went_wrong_is_noticed() {
        let frame = |kind: u32, len: u32| [kind, 1, len].map(u32::to_le_bytes).concat();
        assert!(read(&mut frame(11, 0).as_slice()).is_err());
        assert!(read(&mut frame(0, 0).as_slice()).is_err());
        assert!(read(&mut frame(1, MAX_PAYLOAD_BYTES as u32 + 1).as_slice()).is_err());
        assert!(read(&mut frame(1, 4).as_slice()).is_err(), "the payload is missing");
        assert!(read(&mut &frame(1, 0)[..5]).is_err(), "half a header");
    }

    #[test]
    fn an_order_says_where_with_what_and_what() {
        let order = Order::parse(b"/tmp\x002\0A=1\0B=x=y\0prog\0one two\0").unwrap();
        assert_eq!(order.folder, "/tmp");
        assert_eq!(order.environment, [("A".into(), "1".into()), ("B".into(), "x=y".into())]);
        assert_eq!(order.words, ["prog", "one two", ""]);
        for wrong in [b"".as_slice(), b"/", b"/\x001\0A=1", b"/\0x\0prog", b"/\x001\0A\0prog", b"/\x002\0A=1\0prog", b"\xff\x000\0prog"] {
            assert_eq!(Order::parse(wrong), None, "{}", String::from_utf8_lossy(wrong));
        }
    }
}
