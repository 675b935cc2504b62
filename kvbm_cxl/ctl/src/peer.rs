// SPDX-License-Identifier: Apache-2.0
//! A second process of this program, for tests and measurements that need two.

use cxl_pool::{Error, Result};
use serde::de::DeserializeOwned;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// This program as another process, which is killed when this value is dropped.
pub struct Peer(Child);

impl Peer {
    /// Starts it with these arguments and additional environment variables.
    pub fn start(arguments: &[String], environment: &[(&str, String)]) -> Result<Peer> {
        let failed = |source| Error::Os { what: "starting a second process".into(), source };
        let program = std::env::current_exe().map_err(failed)?;
        let mut command = Command::new(program);
        command.args(arguments).envs(environment.iter().map(|(name, value)| (name, value)));
        command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().map(Peer).map_err(failed)
    }

    /// Waits for its end and reads the JSON that it printed, which must fit a pipe.
    ///
    /// # Errors
    /// [`Error::Timeout`] when it does not end in time; [`Error::Invalid`] when it failed: it said why on standard error.
    pub fn answer<T: DeserializeOwned>(mut self, timeout: Duration) -> Result<T> {
        let failed = |source| Error::Os { what: "waiting for the second process".into(), source };
        let deadline = Instant::now() + timeout;
        let status = loop {
            if let Some(status) = self.0.try_wait().map_err(failed)? {
                break status;
            }
            if Instant::now() >= deadline {
                return Err(Error::Timeout { what: "the second process to end".into(), timeout_ms: timeout.as_millis() as u64 });
            }
            std::thread::sleep(Duration::from_millis(2));
        };
        let mut text = String::new();
        if let Some(mut output) = self.0.stdout.take() {
            std::io::Read::read_to_string(&mut output, &mut text).map_err(failed)?;
        }
        if !status.success() {
            return Err(Error::Invalid(format!("the second process failed ({status})")));
        }
        serde_json::from_str(&text).map_err(|error| Error::Invalid(format!("the second process printed {text:?}: {error}")))
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        // It has ended in the ordinary case; nothing can be done about an error.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
