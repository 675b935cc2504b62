// SPDX-License-Identifier: Apache-2.0
//! `lab-agent CHANNEL`: runs the commands that the lab sends to one of its hosts.
//!
//! The channel is a character device (a virtio port of a virtual machine), or `fd:N`, a socket that was inherited. Commands run side by
//! side, each in a process group of its own. When the channel ends, the lab is gone: everything is killed.
//!
//! `lab-agent connect ADDRESS:PORT`: what it reads goes there, what comes from there is printed: how the lab reaches a host's servers.
//!
//! `lab-agent fork SOCKET WORD...`: stands for a process that the fork server at SOCKET makes.

mod connect;
mod fork;
mod frame;

use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::FromRawFd;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, ChildStdin, Command, ExitCode, Stdio};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;

use frame::{Frame, Kind, Order};

fn main() -> ExitCode {
    let names: Vec<String> = std::env::args().skip(1).collect();
    if let [command, address] = names.as_slice()
        && command == "connect"
    {
        return match connect::run(address) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                eprintln!("lab-agent: {address}: {error}");
                ExitCode::FAILURE
            }
        };
    }
    if let [command, socket, words @ ..] = names.as_slice()
        && command == "fork"
    {
        return match fork::run(socket, words) {
            Ok(status) => ExitCode::from(u8::try_from(status).unwrap_or(u8::MAX)),
            Err(error) => {
                eprintln!("lab-agent: fork server {socket}: {error}");
                ExitCode::FAILURE
            }
        };
    }
    let [name] = names.as_slice() else {
        eprintln!("usage: lab-agent CHANNEL");
        return ExitCode::from(2);
    };
    let channel = match open(name) {
        Ok(file) => file,
        Err(error) => {
            eprintln!("lab-agent: cannot open channel {name}: {error}");
            return ExitCode::from(2);
        }
    };
    match serve(channel) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("lab-agent: {error}");
            ExitCode::FAILURE
        }
    }
}

fn open(name: &str) -> io::Result<File> {
    match name.strip_prefix("fd:") {
        None => OpenOptions::new().read(true).write(true).open(name),
        Some(number) => {
            let number = number.parse().map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?;
            // SAFETY: the caller that starts the agent with `fd:N` gives it that descriptor, and nothing else in this process uses it.
            Ok(unsafe { File::from_raw_fd(number) })
        }
    }
}

/// One command that runs. What is written to it goes through a thread: a command that does not read must not hold up the others.
struct Running {
    group: i32,
    input: Option<Sender<Vec<u8>>>,
}

#[derive(Clone)]
struct Channel {
    file: Arc<Mutex<File>>,
    running: Arc<Mutex<HashMap<u32, Running>>>,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn serve(file: File) -> io::Result<()> {
    let mut reader = file.try_clone()?;
    let channel = Channel { file: Arc::new(Mutex::new(file)), running: Arc::default() };
    let ended = loop {
        match frame::read(&mut reader) {
            Ok(Some(frame)) => channel.obey(frame)?,
            Ok(None) => break Ok(()),
            Err(error) => break Err(error),
        }
    };
    for (_, running) in locked(&channel.running).drain() {
        signal(running.group, libc::SIGKILL);
    }
    ended
}

impl Channel {
    fn say(&self, kind: Kind, command: u32, payload: &[u8]) -> io::Result<()> {
        frame::write(&mut *locked(&self.file), kind, command, payload)
    }

    fn obey(&self, Frame { kind, command, payload }: Frame) -> io::Result<()> {
        match kind {
            Kind::Start => match start(&payload) {
                Ok(child) => self.run(command, child),
                Err(why) => return self.say(Kind::Refused, command, why.as_bytes()),
            },
            // A command that has ended takes neither: the lab learns that from its exit.
            Kind::Input => {
                if let Some(Running { input: Some(input), .. }) = locked(&self.running).get(&command) {
                    let _ = input.send(payload);
                }
            }
            Kind::InputEnd => {
                if let Some(running) = locked(&self.running).get_mut(&command) {
                    running.input = None;
                }
            }
            Kind::Signal => {
                if let (Some(running), Ok(number)) = (locked(&self.running).get(&command), payload.try_into().map(i32::from_le_bytes)) {
                    signal(running.group, number);
                }
            }
            Kind::Ping => return self.say(Kind::Pong, command, &payload),
            Kind::Output | Kind::Error | Kind::Exit | Kind::Refused | Kind::Pong => {}
        }
        Ok(())
    }

    fn run(&self, command: u32, mut child: Child) {
        let input = child.stdin.take().map(feed);
        let readers = [
            child.stdout.take().map(|from| self.forward(Kind::Output, command, from)),
            child.stderr.take().map(|from| self.forward(Kind::Error, command, from)),
        ];
        locked(&self.running).insert(command, Running { group: child.id() as i32, input });
        let channel = self.clone();
        thread::spawn(move || {
            // The exit comes last, after all that it printed.
            for reader in readers.into_iter().flatten() {
                let _ = reader.join();
            }
            let status = child.wait().map_or(i32::MIN, |status| status.code().unwrap_or_else(|| -status.signal().unwrap_or(0)));
            locked(&channel.running).remove(&command);
            let _ = channel.say(Kind::Exit, command, &status.to_le_bytes());
        });
    }

    fn forward(&self, kind: Kind, command: u32, mut from: impl Read + Send + 'static) -> thread::JoinHandle<()> {
        let channel = self.clone();
        thread::spawn(move || {
            let mut buffer = vec![0; 64 * 1024];
            while let Ok(count @ 1..) = from.read(&mut buffer) {
                if channel.say(kind, command, &buffer[..count]).is_err() {
                    return;
                }
            }
        })
    }
}

fn start(payload: &[u8]) -> Result<Child, String> {
    let order = Order::parse(payload).ok_or("an order that cannot be read")?;
    let mut command = Command::new(&order.words[0]);
    command.args(&order.words[1..]).env_clear().envs(order.environment).current_dir(&order.folder);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0);
    command.spawn().map_err(|error| format!("{} (in {}): {error}", order.words[0], order.folder))
}

fn feed(mut to: ChildStdin) -> Sender<Vec<u8>> {
    let (sender, receiver) = channel::<Vec<u8>>();
    thread::spawn(move || {
        for bytes in receiver {
            if to.write_all(&bytes).is_err() {
                return;
            }
        }
    });
    sender
}

fn signal(group: i32, number: i32) {
    // SAFETY: `kill` takes plain numbers; a group that is gone is an error that changes nothing.
    unsafe { libc::kill(-group, number) };
}
