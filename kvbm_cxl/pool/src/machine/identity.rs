// SPDX-License-Identifier: Apache-2.0
//! Which machine this is.

use super::state::base_from_env;
use crate::error::{Error, Result};
use crate::platform::MachineId;
use std::io::{Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// Environment variable with this machine's identity: 32 hexadecimal digits, or any other text, which is then hashed.
pub const ENV_MACHINE_ID: &str = "CXL_MACHINE_ID";
/// Longest text taken as an identity, in bytes.
const MAX_TEXT_BYTES: u64 = 4096;

/// This machine's identity: `CXL_MACHINE_ID`, else derived from `/etc/machine-id`, else generated and kept in the state directory.
///
/// It stays the same over reboots unless it was generated in a state directory that does not survive them.
pub fn machine_id() -> Result<MachineId> {
    machine_id_in(&base_from_env()?)
}

pub(super) fn machine_id_in(base: &Path) -> Result<MachineId> {
    if let Some(text) = std::env::var_os(ENV_MACHINE_ID) {
        return parse(&text.to_string_lossy());
    }
    derive(base, Path::new("/etc/machine-id"))
}

/// What people call this machine: `CXL_MACHINE_ID` as it is given, else, or where that is an identity already, the system's host name.
/// Empty where neither can be read: a machine may do without.
pub(super) fn name() -> String {
    let given = std::env::var_os(ENV_MACHINE_ID).map(|text| text.to_string_lossy().trim().to_owned());
    name_of(given, Path::new("/proc/sys/kernel/hostname"))
}

fn name_of(given: Option<String>, host_name: &Path) -> String {
    let given = given.filter(|text| identity_in(text).is_none());
    given.unwrap_or_else(|| read_text(host_name).ok().flatten().unwrap_or_default())
}

/// The identity that a text of 32 hexadecimal digits is.
fn identity_in(text: &str) -> Option<MachineId> {
    let is_identity = text.len() == 32 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    let number = is_identity.then(|| u128::from_str_radix(text, 16).ok()).flatten();
    number.map(|number| MachineId(number.to_be_bytes()))
}

fn parse(text: &str) -> Result<MachineId> {
    let text = text.trim();
    if text.is_empty() {
        return Err(Error::Invalid(format!("{ENV_MACHINE_ID} is set but empty: give it a text of this machine's own, or unset it")));
    }
    let id = identity_in(text).unwrap_or_else(|| digest(&[b"cxl-pool machine", text.as_bytes()]));
    if id.is_none() { Err(Error::Invalid(format!("{ENV_MACHINE_ID} cannot be all zero"))) } else { Ok(id) }
}

/// The identity that the system has, mixed with the state directory: two that do not share their locks must not share their identity.
fn derive(base: &Path, system: &Path) -> Result<MachineId> {
    let base_text = base.as_os_str().as_bytes();
    // An image that was not booted yet says "uninitialized"; an empty file is common in containers.
    let system_text = read_text(system)?.filter(|text| identity_in(text).is_some());
    match system_text {
        Some(text) => Ok(digest(&[b"cxl-pool system", text.as_bytes(), base_text])),
        None => Ok(digest(&[b"cxl-pool generated", generate(base)?.as_bytes(), base_text])),
    }
}

/// The text kept in the state directory, made when there is none.
fn generate(base: &Path) -> Result<String> {
    let path = base.join("machine-id");
    let failed = |doing: &'static str| move |source| Error::Os { what: format!("{doing} a machine id in the state directory"), source };
    super::state::make_directory(base)?;
    if let Some(text) = read_text(&path)? {
        return Ok(text);
    }
    // Written aside and linked into place: the second process finds a complete file, and takes that one.
    let nonce = u128::from_le_bytes(super::random_bytes()?);
    let aside = base.join(format!(".machine-id-{nonce:032x}"));
    let mut file = std::fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(&aside).map_err(failed("creating"))?;
    let written =
        file.write_all(format!("{nonce:032x}").as_bytes()).and_then(|()| file.sync_all()).and_then(|()| {
            match std::fs::hard_link(&aside, &path) {
                Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => Err(error),
                _ => Ok(()),
            }
        });
    // The file aside has served; a failure to remove it leaves litter and no harm.
    let _ = std::fs::remove_file(&aside);
    written.map_err(failed("keeping"))?;
    read_text(&path)?.ok_or_else(|| Error::NotFound(format!("the machine id just written to {}", path.display())))
}

/// The trimmed text of a small file; `None` when it is missing or empty.
fn read_text(path: &Path) -> Result<Option<String>> {
    let mut text = String::new();
    match std::fs::File::open(path).and_then(|file| file.take(MAX_TEXT_BYTES).read_to_string(&mut text)) {
        Ok(_) => Ok(Some(text.trim().to_owned()).filter(|text| !text.is_empty())),
        Err(source) if source.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(Error::Os { what: format!("reading {}", path.display()), source }),
    }
}

/// FNV-1a, 128 bits, over the parts and their lengths. It keeps accidents apart; a collision with a machine of one's own gains nothing.
pub(super) fn digest(parts: &[&[u8]]) -> MachineId {
    const OFFSET: u128 = 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d;
    const PRIME: u128 = 0x0000_0000_0100_0000_0000_0000_0000_013b;
    let mut hash = OFFSET;
    for part in parts {
        let len = (part.len() as u64).to_le_bytes();
        for &byte in part.iter().chain(&len) {
            hash = (hash ^ u128::from(byte)).wrapping_mul(PRIME);
        }
    }
    // All zero means "no machine".
    MachineId(hash.max(1).to_be_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hex_is_taken_as_it_is_and_other_text_is_hashed() {
        let id = parse("00112233445566778899aabbccddeeff").unwrap();
        assert_eq!(id.to_string(), "00112233445566778899aabbccddeeff");
        assert_ne!(parse("rack1-node7").unwrap(), parse("rack1-node8").unwrap());
        assert_eq!(parse(" rack1-node7\n").unwrap(), parse("rack1-node7").unwrap());
        assert_ne!(parse("+0112233445566778899aabbccddeeff").unwrap(), parse("00112233445566778899aabbccddeeff").unwrap());
        assert!(parse(" ").is_err());
        assert!(parse(&"0".repeat(32)).is_err());
        // Published test vector of the empty input, without the length that `digest` appends.
        assert_eq!(digest(&[]).to_string(), "6c62272e07bb014262b821756295c58d");
    }

    #[test]
    fn the_name_is_the_given_text_or_else_the_host_name() {
        let root = tempfile::tempdir().unwrap();
        let host_name = root.path().join("hostname");
        std::fs::write(&host_name, "node7\n").unwrap();
        let given = |text: &str| name_of(Some(text.into()), &host_name);
        assert_eq!(given("rack1/prefill"), "rack1/prefill");
        assert_eq!(given(&"0f".repeat(16)), "node7", "an id is no name");
        assert_eq!(name_of(None, &host_name), "node7");
        assert_eq!(name_of(None, &root.path().join("missing")), "");
    }

    #[test]
    fn another_state_directory_is_another_machine() {
        let root = tempfile::tempdir().unwrap();
        let system = root.path().join("system");
        std::fs::write(&system, "00112233445566778899aabbccddeeff\n").unwrap();
        let (a, b) = (root.path().join("a"), root.path().join("b"));
        assert_eq!(derive(&a, &system).unwrap(), derive(&a, &system).unwrap());
        assert_ne!(derive(&a, &system).unwrap(), derive(&b, &system).unwrap());
        assert!(!a.exists(), "nothing is generated while the system has an id");
    }

    #[test]
    fn many_that_generate_at_once_agree() {
        let root = tempfile::tempdir().unwrap();
        let base = root.path().join("state");
        let system = root.path().join("system");
        std::fs::write(&system, "uninitialized\n").unwrap();
        let ids: Vec<_> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..16).map(|_| scope.spawn(|| derive(&base, &system).unwrap())).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert!(ids.iter().all(|id| *id == ids[0]), "{ids:?}");
        assert_eq!(std::fs::read_dir(&base).unwrap().count(), 1, "only the id is left");
    }
}
