// SPDX-License-Identifier: Apache-2.0
//! How a pool is named: the same text in `CXL_POOL`, on command lines and in the C and Python interfaces.
//!
//! ```text
//! spec  = item *("," item)
//! item  = an absolute path | "offset=" size | "size=" size
//!       | "metadata=" an absolute path | "metadata_offset=" size | "metadata_size=" size
//! size  = decimal number, then optionally K, M, G or T (powers of 1024), then optionally "iB"
//! ```
//!
//! `/dev/dax0.0,/dev/dax1.0` is a pool over two devices; their order does not matter once the pool is formatted. `/dev/shm/kv,size=1G`
//! is a file. The size is that of **each** device: how much of it a format uses, and how long a missing file is made. An existing pool
//! is opened by what its superblock says, so every process may carry the size or leave it out.
//!
//! `/dev/dax0.0,offset=64G,size=64G` is a part of a device: several pools lie side by side on it, each begun where its offset says. The
//! offset, too, is that on **each** device, and belongs to the pool's name: every process carries it. It is a multiple of the device
//! header (2 MiB), and of the device's alignment.
//!
//! `/dev/dax0.0,metadata=/dev/dax1.0` keeps the pool's metadata on `/dev/dax1.0` and its payload on `/dev/dax0.0`. `offset=` and `size=`
//! are then those of the payload's devices; the device of the metadata has its own, `metadata_offset=` and `metadata_size=`.

use super::{Access, Device, Sysfs};
use crate::error::{Error, Result};
use crate::limits::{DEVICE_HEADER_BYTES, MAX_DEVICES};
use std::path::{Path, PathBuf};

/// Names the devices of a pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PoolSpec {
    devices: Vec<PathBuf>,
    offset_bytes: u64,
    size_bytes: Option<u64>,
    metadata: Option<DevicePart>,
}

/// One device of a pool: the part of it that the pool has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DevicePart {
    /// The device.
    pub path: PathBuf,
    /// Where the part begins, in bytes.
    pub offset_bytes: u64,
    /// Its length in bytes; `None` = to the device's end.
    pub size_bytes: Option<u64>,
}

impl DevicePart {
    /// All of a device.
    pub fn whole(path: impl Into<PathBuf>) -> DevicePart {
        DevicePart { path: path.into(), offset_bytes: 0, size_bytes: None }
    }

    /// Opens it from its offset to the device's end: how much of that is a pool's, its superblock says. Nothing is created and nothing
    /// written.
    ///
    /// # Errors
    /// Those of [`Device::open`] and [`Device::part`].
    pub fn open(&self, access: Access, sysfs: &Sysfs) -> Result<Device> {
        Device::open(&self.path, access, sysfs)?.part(self.offset_bytes, None)
    }
}

/// Reads the name of a pool that has one device, and no other for its metadata.
impl std::str::FromStr for DevicePart {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let spec = PoolSpec::parse(text)?;
        let mut parts = spec.parts();
        match (parts.next(), parts.next()) {
            (Some(part), None) => Ok(part),
            _ => Err(Error::Invalid(format!("{text:?} names several devices: name one"))),
        }
    }
}

impl std::fmt::Display for DevicePart {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&label(&self.path.to_string_lossy(), self.offset_bytes))
    }
}

/// The name of a device for people: with the offset, where it is a part that does not begin where the device does.
pub(super) fn label(path: &str, offset_bytes: u64) -> String {
    if offset_bytes == 0 { path.into() } else { format!("{path},offset={offset_bytes}") }
}

impl PoolSpec {
    /// Environment variable with the pool's name.
    pub const ENV_POOL: &'static str = "CXL_POOL";

    /// A pool over `devices`, each used up to `size_bytes` by a format.
    ///
    /// # Errors
    /// [`Error::Invalid`] for no device, too many, one named twice, or a path that is not absolute.
    pub fn new(devices: Vec<PathBuf>, size_bytes: Option<u64>) -> Result<Self> {
        if devices.is_empty() {
            return Err(Error::Invalid("a pool needs at least one device: name it like /dev/dax0.0 or /dev/shm/kv".into()));
        }
        if devices.len() > MAX_DEVICES {
            return Err(Error::Invalid(format!("{} devices are named, a pool has at most {MAX_DEVICES}", devices.len())));
        }
        for (index, path) in devices.iter().enumerate() {
            check_path(path)?;
            if devices[..index].contains(path) {
                return Err(Error::Invalid(format!("{} is named twice", path.display())));
            }
        }
        PoolSpec { devices, offset_bytes: 0, size_bytes: None, metadata: None }.with_size(size_bytes)
    }

    /// The same with another size of each device, in bytes.
    ///
    /// # Errors
    /// [`Error::Invalid`] for zero.
    pub fn with_size(self, size_bytes: Option<u64>) -> Result<Self> {
        match size_bytes {
            Some(0) => Err(Error::Invalid("the size of a pool's devices cannot be zero".into())),
            _ => Ok(PoolSpec { size_bytes, ..self }),
        }
    }

    /// The same without sizes: they say how a pool is made, not which one it is.
    pub fn without_sizes(self) -> Self {
        let metadata = self.metadata.map(|part| DevicePart { size_bytes: None, ..part });
        PoolSpec { size_bytes: None, metadata, ..self }
    }

    /// The same at `offset_bytes` of each device.
    ///
    /// # Errors
    /// [`Error::Partition`] with the next right offset when no pool can begin there, whatever the device.
    pub fn with_offset(self, offset_bytes: u64) -> Result<Self> {
        match super::check_unit(offset_bytes, DEVICE_HEADER_BYTES) {
            Err(problem) => Err(Error::Partition { device: self.to_string(), problem }),
            Ok(()) => Ok(PoolSpec { offset_bytes, ..self }),
        }
    }

    /// The same with its metadata on a device of its own; `None` = on the devices of the payload.
    ///
    /// # Errors
    /// [`Error::Invalid`] as [`PoolSpec::new`], and for a size of zero; [`Error::Partition`] as [`PoolSpec::with_offset`].
    pub fn with_metadata(self, metadata: Option<DevicePart>) -> Result<Self> {
        let Some(part) = metadata else { return Ok(PoolSpec { metadata: None, ..self }) };
        check_path(&part.path)?;
        if self.devices.contains(&part.path) {
            return Err(Error::Invalid(format!("{} is named twice: for the payload and for the metadata", part.path.display())));
        }
        if self.devices.len() == MAX_DEVICES {
            return Err(Error::Invalid(format!("{MAX_DEVICES} devices and one for metadata are named, a pool has at most {MAX_DEVICES}")));
        }
        if part.size_bytes == Some(0) {
            return Err(Error::Invalid("the size of the metadata's device cannot be zero".into()));
        }
        match super::check_unit(part.offset_bytes, DEVICE_HEADER_BYTES) {
            Err(problem) => Err(Error::Partition { device: part.path.display().to_string(), problem }),
            Ok(()) => Ok(PoolSpec { metadata: Some(part), ..self }),
        }
    }

    /// Parses the text form that the module documentation gives.
    pub fn parse(text: &str) -> Result<Self> {
        let mut devices = Vec::new();
        let mut metadata = None;
        // The names of the sizes, what they are called where one is given twice, and those found.
        let names =
            [("size=", "sizes"), ("offset=", "offsets"), ("metadata_size=", "metadata sizes"), ("metadata_offset=", "metadata offsets")];
        let mut sizes = [None; 4];
        for item in text.split(',').map(str::trim) {
            let named = names.iter().zip(&mut sizes).find_map(|((name, many), size)| Some((item.strip_prefix(name)?, many, size)));
            if let Some((value, many, size)) = named {
                if size.replace(parse_size(value)?).is_some() {
                    return Err(Error::Invalid(format!("{text:?} gives two {many}")));
                }
            } else if let Some(path) = item.strip_prefix("metadata=") {
                if metadata.replace(PathBuf::from(path)).is_some() {
                    return Err(Error::Invalid(format!("{text:?} names two devices for metadata: a pool has one or none")));
                }
            } else if item.starts_with('/') {
                devices.push(PathBuf::from(item));
            } else {
                return Err(Error::Invalid(format!(
                    "{item:?} in the pool name {text:?} is neither an absolute path nor size=, offset= or metadata=: write it like \
                     /dev/dax0.0,/dev/dax1.0 or /dev/shm/kv,size=1G or /dev/dax0.0,offset=64G,size=64G or \
                     /dev/dax0.0,metadata=/dev/dax1.0"
                )));
            }
        }
        let [size_bytes, offset_bytes, metadata_size, metadata_offset] = sizes;
        if metadata.is_none() && (metadata_size.is_some() || metadata_offset.is_some()) {
            return Err(Error::Invalid(format!("{text:?} says where metadata lies on a device that it does not name: add metadata=PATH")));
        }
        let part = |path| DevicePart { path, offset_bytes: metadata_offset.unwrap_or(0), size_bytes: metadata_size };
        PoolSpec::new(devices, size_bytes)?.with_offset(offset_bytes.unwrap_or(0))?.with_metadata(metadata.map(part))
    }

    /// The pool that `CXL_POOL` names.
    ///
    /// # Errors
    /// [`Error::Invalid`] if it is not set, or names no pool.
    pub fn from_env() -> Result<Self> {
        match std::env::var(Self::ENV_POOL) {
            Ok(text) => PoolSpec::parse(&text),
            Err(std::env::VarError::NotUnicode(_)) => Err(Error::Invalid(format!("{} is not UTF-8", Self::ENV_POOL))),
            Err(std::env::VarError::NotPresent) => Err(Error::Invalid(format!(
                "{} is not set: name the pool's devices in it, like /dev/dax0.0,/dev/dax1.0 or /dev/shm/kv,size=1G",
                Self::ENV_POOL
            ))),
        }
    }

    /// The devices of the payload, in the order given.
    pub fn devices(&self) -> impl ExactSizeIterator<Item = &Path> {
        self.devices.iter().map(PathBuf::as_path)
    }

    /// The same with the part of each that is the pool's.
    pub fn payload_parts(&self) -> impl ExactSizeIterator<Item = DevicePart> {
        let (offset_bytes, size_bytes) = (self.offset_bytes, self.size_bytes);
        self.devices.iter().map(move |path| DevicePart { path: path.clone(), offset_bytes, size_bytes })
    }

    /// The part of all devices that is the pool's, in the order in which a format numbers them: that of the metadata first.
    pub fn parts(&self) -> impl Iterator<Item = DevicePart> {
        self.metadata.clone().into_iter().chain(self.payload_parts())
    }

    /// The device that carries the metadata alone, if the name has one.
    pub fn metadata(&self) -> Option<&DevicePart> {
        self.metadata.as_ref()
    }

    /// Where on each device of the payload the pool begins, in bytes.
    pub fn offset_bytes(&self) -> u64 {
        self.offset_bytes
    }

    /// How much of each device of the payload a format uses, and how long a missing file is made, in bytes.
    pub fn size_bytes(&self) -> Option<u64> {
        self.size_bytes
    }
}

impl std::str::FromStr for PoolSpec {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        PoolSpec::parse(text)
    }
}

impl std::fmt::Display for PoolSpec {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for (index, path) in self.devices.iter().enumerate() {
            write!(f, "{}{}", if index == 0 { "" } else { "," }, path.display())?;
        }
        if self.offset_bytes > 0 {
            write!(f, ",offset={}", self.offset_bytes)?;
        }
        self.size_bytes.map_or(Ok(()), |size| write!(f, ",size={size}"))?;
        let Some(part) = &self.metadata else { return Ok(()) };
        write!(f, ",metadata={}", part.path.display())?;
        if part.offset_bytes > 0 {
            write!(f, ",metadata_offset={}", part.offset_bytes)?;
        }
        part.size_bytes.map_or(Ok(()), |size| write!(f, ",metadata_size={size}"))
    }
}

fn check_path(path: &Path) -> Result<()> {
    if !path.is_absolute() {
        return Err(Error::Invalid(format!("{path:?} is not an absolute path: every process must mean the same device by it")));
    }
    if path.as_os_str().as_encoded_bytes().contains(&0) {
        return Err(Error::Invalid(format!("{path:?} has a zero byte in it")));
    }
    Ok(())
}

/// Parses a size in bytes: a decimal number with an optional K, M, G or T (powers of 1024), itself with an optional "iB".
pub fn parse_size(text: &str) -> Result<u64> {
    let wrong = || Error::Invalid(format!("{text:?} is not a size: write it like 4096, 512M or 1G (powers of 1024)"));
    let digits = text.len() - text.trim_start_matches(|c: char| c.is_ascii_digit()).len();
    let (number, suffix) = text.split_at(digits);
    let shift = match suffix.strip_suffix("iB").filter(|unit| !unit.is_empty()).unwrap_or(suffix) {
        "" => 0,
        "K" | "k" => 10,
        "M" | "m" => 20,
        "G" | "g" => 30,
        "T" | "t" => 40,
        _ => return Err(wrong()),
    };
    let number: u64 = number.parse().map_err(|_| wrong())?;
    number.checked_mul(1 << shift).ok_or_else(wrong)
}

#[cfg(test)]
mod tests;
