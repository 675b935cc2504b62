// SPDX-License-Identifier: Apache-2.0
//! A host process, as its parent sees it.

use super::host::{Order, Reply};
use crate::cli::DemoArgs;
use crate::output::{Exit, Failure};
use cxl_pool::platform::MachineId;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

/// Longest wait for an answer.
const ANSWER: Duration = Duration::from_secs(120);
/// How long a host may take to end once its orders have ended.
const END: Duration = Duration::from_secs(10);

/// A running host. Dropping it ends the process.
pub struct Child {
    process: std::process::Child,
    orders: Option<ChildStdin>,
    replies: Receiver<String>,
}

impl Child {
    /// Starts a host on a machine of its own.
    pub fn start(spec: &str, args: &DemoArgs, machine: MachineId, state: &Path) -> Result<Child, Failure> {
        let failed = |error: std::io::Error| Failure::new(Exit::Failed, format!("starting a host process: {error}"));
        let mut process = Command::new(std::env::current_exe().map_err(failed)?)
            .args(["--pool", spec, "demo-host", "--blocks", &args.blocks.to_string(), "--block", &args.block.to_string()])
            .env("CXL_MACHINE_ID", machine.to_string())
            .env("CXL_STATE_DIR", state)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            // A Ctrl-C is for the parent, which lets the round end.
            .process_group(0)
            .spawn()
            .map_err(failed)?;
        let (sender, replies) = channel();
        if let Some(stdout) = process.stdout.take() {
            std::thread::spawn(move || BufReader::new(stdout).lines().map_while(Result::ok).try_for_each(|line| sender.send(line)));
        }
        let orders = process.stdin.take();
        Ok(Child { process, orders, replies })
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.process.id()
    }

    /// Sends an order and waits for the answer.
    pub fn ask(&mut self, order: Order) -> Result<Reply, Failure> {
        self.send(order)?;
        self.receive()
    }

    /// Sends an order.
    pub fn send(&mut self, order: Order) -> Result<(), Failure> {
        let gone = |error: &dyn std::fmt::Display| Failure::new(Exit::Failed, format!("host process {}: {error}", self.process.id()));
        let text = serde_json::to_string(&order).map_err(|error| gone(&error))?;
        let Some(orders) = &mut self.orders else { return Err(gone(&"takes no orders any more")) };
        writeln!(orders, "{text}")
            .and_then(|()| orders.flush())
            .map_err(|error| Failure::new(Exit::Failed, format!("host process {} is gone: {error}", self.process.id())))
    }

    /// Waits for an answer.
    pub fn receive(&mut self) -> Result<Reply, Failure> {
        let pid = self.process.id();
        let failed = |what: String| Failure::new(Exit::Failed, format!("host process {pid} {what}"));
        let text = match self.replies.recv_timeout(ANSWER) {
            Ok(text) => text,
            Err(RecvTimeoutError::Timeout) => return Err(failed(format!("did not answer within {} s", ANSWER.as_secs()))),
            Err(RecvTimeoutError::Disconnected) => {
                let end = self.wait().map_or("closed its output".into(), |status| format!("ended with {status}"));
                return Err(failed(format!("{end} before it answered")));
            }
        };
        match serde_json::from_str(&text) {
            Ok(Reply::Failed { message }) => Err(failed(format!("failed: {message}"))),
            Ok(reply) => Ok(reply),
            Err(error) => Err(failed(format!("said {text:?}: {error}"))),
        }
    }

    /// It answered something else than it was asked.
    pub fn confused(&self) -> Failure {
        Failure::new(Exit::Failed, format!("host process {} answered something else than it was asked", self.process.id()))
    }

    /// Waits for the process to end by itself.
    pub fn finish(mut self) -> Result<(), Failure> {
        let pid = self.pid();
        self.orders = None;
        match self.wait() {
            Some(status) if status.success() => Ok(()),
            Some(status) => Err(Failure::new(Exit::Failed, format!("host process {pid} ended with {status}"))),
            None => Err(Failure::new(Exit::Failed, format!("host process {pid} does not end"))),
        }
    }

    fn wait(&mut self) -> Option<std::process::ExitStatus> {
        let deadline = Instant::now() + END;
        loop {
            match self.process.try_wait() {
                Ok(Some(status)) => return Some(status),
                Ok(None) if Instant::now() < deadline => std::thread::sleep(Duration::from_millis(5)),
                _ => return None,
            }
        }
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        // The end of its orders tells it to leave; one that does not hear is killed.
        self.orders = None;
        if self.wait().is_none() {
            let _ = self.process.kill();
            let _ = self.process.wait();
        }
    }
}
