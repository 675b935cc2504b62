// SPDX-License-Identifier: Apache-2.0
//! A second process of this program, for whatever takes two.

use cxl_pool::{Error, Result};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// This program once more, as another process; ended with the result if it has not ended by itself.
pub struct Peer(Child);

impl Peer {
    /// Starts it with these arguments.
    pub fn start(arguments: &[String], environment: &[(&str, String)]) -> Result<Peer> {
        let failed = |source| Error::Os { what: "starting a second process".into(), source };
        let program = std::env::current_exe().map_err(failed)?;
        let mut command = Command::new(program);
        command.args(arguments).envs(environment.iter().map(|(name, value)| (name, value)));
        command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().map(Peer).map_err(failed)
    }

    /// Waits for its end; what it printed meanwhile must fit a pipe.
    pub fn wait(mut self, timeout: Duration) -> Result<(ExitStatus, String)> {
        let failed = |source| Error::Os { what: "waiting for the second process".into(), source };
        let deadline = Instant::now() + timeout;
        while self.0.try_wait().map_err(failed)?.is_none() {
            if Instant::now() >= deadline {
                return Err(Error::Timeout { what: "the second process to end".into(), timeout_ms: timeout.as_millis() as u64 });
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        let mut text = String::new();
        if let Some(mut output) = self.0.stdout.take() {
            std::io::Read::read_to_string(&mut output, &mut text).map_err(failed)?;
        }
        Ok((self.0.wait().map_err(failed)?, text))
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        // Already gone in the ordinary case; an error here leaves nothing that could be done.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
