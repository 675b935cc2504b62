// SPDX-License-Identifier: Apache-2.0
//! What a command writes and how it ends.

use crate::text::safe;
use cxl_pool::Error;
use serde_json::Value;
use std::io::{BufWriter, ErrorKind, Stdout, Write};
use std::process::ExitCode;

/// How a command ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    Done = 0,
    /// Findings, or the operation failed.
    Failed = 1,
    Usage = 2,
    /// The pool cannot be opened.
    CannotOpen = 3,
    /// Refused because something would be lost or is in use.
    Refused = 4,
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> ExitCode {
        ExitCode::from(exit as u8)
    }
}

/// Why a command failed: one line.
#[derive(Debug)]
pub struct Failure {
    pub exit: Exit,
    message: String,
}

impl Failure {
    /// A failure with this exit code.
    pub fn new(exit: Exit, message: impl Into<String>) -> Self {
        Failure { exit, message: message.into() }
    }

    pub fn usage(message: impl Into<String>) -> Self {
        Failure::new(Exit::Usage, message)
    }

    pub fn message(&self) -> &str {
        &self.message
    }

    /// Prints it as `program`'s. Where standard error is closed the message is lost; the exit code is not.
    pub fn report(&self, program: &str) {
        let line = safe(&self.message.replace(['\n', '\r'], " "));
        let _ = writeln!(std::io::stderr(), "{program}: {line}");
    }
}

/// How `program` ends, after it has said why it failed if it did.
pub fn end(program: &str, outcome: Result<Exit, Failure>) -> ExitCode {
    match outcome {
        Ok(exit) => exit.into(),
        Err(failure) => {
            failure.report(program);
            failure.exit.into()
        }
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Failure::new(Exit::Failed, error.to_string())
    }
}

impl From<std::io::Error> for Failure {
    fn from(error: std::io::Error) -> Self {
        Failure::new(Exit::Failed, format!("writing the output: {error}"))
    }
}

/// JSON whose strings hold nothing that a terminal acts on: the serializer escapes control characters only.
fn safe_json(text: &str) -> String {
    let mut safe = String::with_capacity(text.len());
    for c in text.chars() {
        match c == '\n' || matches!(cxl_pool::escaped(c.encode_utf8(&mut [0; 4])), std::borrow::Cow::Borrowed(_)) {
            true => safe.push(c),
            false => c.encode_utf16(&mut [0; 2]).iter().for_each(|unit| safe.push_str(&format!("\\u{unit:04x}"))),
        }
    }
    safe
}

/// Standard output. Once its reader is gone everything written is dropped: the exit code still tells how the command ended.
pub struct Out {
    stdout: BufWriter<Stdout>,
    is_closed: bool,
    is_json: bool,
}

impl Out {
    /// Standard output, for a command that was asked for JSON or not.
    pub fn stdout(is_json: bool) -> Self {
        Out { stdout: BufWriter::new(std::io::stdout()), is_closed: false, is_json }
    }

    pub fn is_json(&self) -> bool {
        self.is_json
    }

    /// The reader is gone: long output may end here.
    pub fn is_closed(&self) -> bool {
        self.is_closed
    }

    pub fn text(&mut self, text: impl AsRef<str>) -> Result<(), Failure> {
        self.bytes(text.as_ref().as_bytes())
    }

    pub fn line(&mut self, text: impl AsRef<str>) -> Result<(), Failure> {
        self.text(text)?;
        self.text("\n")
    }

    pub fn bytes(&mut self, bytes: &[u8]) -> Result<(), Failure> {
        if self.is_closed {
            return Ok(());
        }
        let written = self.stdout.write_all(bytes);
        self.settle(written)
    }

    /// Writes JSON or text, whichever was asked for.
    pub fn answer(&mut self, json: impl FnOnce() -> Value, text: impl FnOnce() -> String) -> Result<(), Failure> {
        if self.is_json {
            let pretty = format!("{:#}", json());
            self.line(safe_json(&pretty))
        } else {
            // A name within a line must not end it, and our own lines do.
            self.text(text().split('\n').map(safe).collect::<Vec<_>>().join("\n"))
        }
    }

    /// Brings everything out.
    pub fn flush(&mut self) -> Result<(), Failure> {
        if self.is_closed {
            return Ok(());
        }
        let flushed = self.stdout.flush();
        self.settle(flushed)
    }

    fn settle(&mut self, result: std::io::Result<()>) -> Result<(), Failure> {
        match result {
            Err(error) if error.kind() == ErrorKind::BrokenPipe => {
                self.is_closed = true;
                Ok(())
            }
            other => Ok(other?),
        }
    }
}
