// SPDX-License-Identifier: Apache-2.0
//! One connection to a server in this host, over this process's standard input and output.

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::thread;

/// Returns when the server has closed its side and all of it was printed.
pub fn run(address: &str) -> io::Result<()> {
    let mut stream = TcpStream::connect(address)?;
    stream.set_nodelay(true)?;
    let mut to = stream.try_clone()?;
    thread::spawn(move || {
        let _ = pass(&mut io::stdin().lock(), &mut to);
        let _ = to.shutdown(Shutdown::Write);
    });
    pass(&mut stream, &mut io::stdout().lock())
}

/// What is read goes on at once, however little it is.
fn pass(from: &mut impl Read, to: &mut impl Write) -> io::Result<()> {
    let mut buffer = [0; 16 * 1024];
    loop {
        match from.read(&mut buffer)? {
            0 => return Ok(()),
            count => to.write_all(&buffer[..count]).and_then(|()| to.flush())?,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_of_it_goes_on_in_order() {
        let sent: Vec<u8> = (0..100_000u32).flat_map(u32::to_le_bytes).collect();
        let mut arrived = Vec::new();
        pass(&mut sent.as_slice(), &mut arrived).unwrap();
        assert_eq!(arrived, sent);
    }
}
