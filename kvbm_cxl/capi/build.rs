// SPDX-License-Identifier: Apache-2.0
//! Gives the shared library its soname: programs bind to the major version, which alone breaks the binary interface.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libcxl_shm.so.{}", env!("CARGO_PKG_VERSION_MAJOR"));
}
