// SPDX-License-Identifier: Apache-2.0
//! The header against the library: numbers, structures, signatures and symbols.

mod common;

use common::{Folder, compiles, here};
use cxl_shm::status::Status;
use cxl_shm::types::{STRUCTURES, constants};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::process::Command;

const SHORT_NAMES: [&str; 3] = ["shmalloc", "shfree", "clflush"];

fn header() -> String {
    ["cxl_shm.h", "cxl_shm_gpu.h"].map(|name| std::fs::read_to_string(here().join("include").join(name)).unwrap()).concat()
}

/// The header without comments.
fn code() -> String {
    let text = header();
    let mut code = String::new();
    let mut rest = text.as_str();
    while let Some((before, behind)) = rest.split_once("/*") {
        code.push_str(before);
        rest = behind.split_once("*/").unwrap().1;
    }
    code + rest
}

fn is_name(c: char) -> bool {
    c.is_ascii_alphanumeric() || c == '_'
}

/// Every `name(` of the header, macros apart.
fn declared() -> BTreeSet<String> {
    let code = code();
    let lines = code.lines().filter(|line| !line.trim_start().starts_with('#'));
    lines
        .flat_map(|line| {
            line.match_indices('(').map(|(at, _)| line[..at].rsplit(|c| !is_name(c)).next().unwrap().to_owned()).collect::<Vec<_>>()
        })
        .filter(|name| name.starts_with("cxl_shm_") || SHORT_NAMES.contains(&name.as_str()))
        .collect()
}

/// Names of the header that begin with `prefix`, each with what follows it.
fn names(prefix: &str) -> BTreeSet<String> {
    code().split(|c| !is_name(c)).filter(|word| word.starts_with(prefix)).map(str::to_owned).collect()
}

/// The exported functions, as C prototypes, from the Rust sources.
fn prototypes() -> BTreeMap<String, String> {
    let mut found = BTreeMap::new();
    let entries = std::fs::read_dir(here().join("src/api")).unwrap().map(|entry| entry.unwrap().path());
    for path in entries.filter(|path| path.is_file()) {
        let text = std::fs::read_to_string(path).unwrap();
        for function in text.split("#[unsafe(no_mangle)]").skip(1) {
            let signature = function.split_once('{').unwrap().0.split_whitespace().collect::<Vec<_>>().join(" ");
            let (name, rest) = signature.split_once("extern \"C\" fn ").unwrap().1.split_once('(').unwrap();
            let (arguments, result) = rest.split_once(')').unwrap();
            let arguments: Vec<String> = arguments
                .split(',')
                .map(str::trim)
                .filter(|argument| !argument.is_empty())
                .map(|a| c_type(a.split_once(": ").unwrap().1))
                .collect();
            let arguments = if arguments.is_empty() { "void".to_owned() } else { arguments.join(", ") };
            let result = result.trim().strip_prefix("-> ").map_or("void".to_owned(), c_type);
            assert!(found.insert(name.to_owned(), format!("{result} {name}({arguments});")).is_none(), "{name} twice");
        }
    }
    found
}

fn c_type(rust: &str) -> String {
    let rust = rust.trim();
    if let Some(pointee) = rust.strip_prefix("*mut ") {
        return format!("{} *", c_type(pointee));
    }
    if let Some(pointee) = rust.strip_prefix("*const ") {
        return format!("const {} *", c_type(pointee));
    }
    if let Some(pointee) = rust.strip_prefix("Out<").and_then(|rest| rest.strip_suffix('>')) {
        return format!("{} *", c_type(pointee));
    }
    if let Some(pointee) = rust.strip_prefix("In<").and_then(|rest| rest.strip_suffix('>')) {
        return format!("const {} *", c_type(pointee));
    }
    let c = match rust {
        "c_int" => "int",
        "c_char" => "char",
        "c_void" => "void",
        "u8" => "uint8_t",
        "u32" => "uint32_t",
        "i32" => "int32_t",
        "i64" => "int64_t",
        "u64" => "uint64_t",
        "usize" => "size_t",
        "CxlPool" => "cxl_pool_t",
        "CxlLock" => "cxl_lock_t",
        "CxlRing" => "cxl_ring_t",
        "CxlDevice" => "cxl_device_t",
        "CxlGpu" => "cxl_gpu_t",
        "CxlGpuCopy" => "cxl_gpu_copy_t",
        "CxlGpuQueued" => "cxl_gpu_queued_t",
        "ShmPtr" => "shm_ptr_t",
        "Options" => "cxl_shm_options_t",
        "FormatOptions" => "cxl_shm_format_options_t",
        "Info" => "cxl_shm_info_t",
        "LockInfo" => "cxl_lock_info_t",
        "CacheOptions" => "cxl_shm_cache_options_t",
        "BlockId" => "cxl_shm_block_id_t",
        "Piece" => "cxl_shm_piece_t",
        "Copy" => "cxl_shm_copy_t",
        "Block" => "cxl_shm_block_t",
        "Count" => "cxl_shm_count_t",
        "GpuOptions" => "cxl_shm_gpu_options_t",
        "GpuInfo" => "cxl_shm_gpu_info_t",
        "GpuPiece" => "cxl_shm_gpu_piece_t",
        "GpuBlock" => "cxl_shm_gpu_block_t",
        "Option<LogFn>" => "cxl_shm_log_fn",
        other => panic!("no C type is known for {other}"),
    };
    c.to_owned()
}

/// A source file that only compiles if the header says what the library is. `assertion` is the keyword of the language.
fn assertions(assertion: &str) -> String {
    let mut text = String::from("#include \"cxl_shm.h\"\n");
    let mut claim = |condition: String| writeln!(text, "{assertion}({condition}, \"{}\");", condition.replace('"', "'")).unwrap();
    for (name, value) in constants() {
        claim(format!("{name} == {value}ull"));
    }
    for (name, status) in Status::ALL {
        claim(format!("{name} == {}", *status as i32));
    }
    for (name, part) in ["MAJOR", "MINOR", "PATCH"].iter().zip(env!("CARGO_PKG_VERSION").split('.')) {
        claim(format!("CXL_SHM_VERSION_{name} == {part}"));
    }
    for (structure, size, fields) in STRUCTURES {
        claim(format!("sizeof({structure}) == {size}"));
        for (field, offset, size) in *fields {
            claim(format!("offsetof({structure}, {field}) == {offset}"));
            claim(format!("sizeof((({structure}*)0)->{field}) == {size}"));
        }
    }
    claim("sizeof(cxl_lock_t) == 4 && sizeof(cxl_ring_t) == 8 && sizeof(shm_ptr_t) == 8 && sizeof(cxl_shm_status) == 4".to_owned());
    if assertion == "static_assert" {
        text.push_str("extern \"C\" {\n");
    }
    prototypes().values().for_each(|prototype| writeln!(text, "{prototype}").unwrap());
    if assertion == "static_assert" {
        text.push_str("}\n");
    }
    text
}

#[test]
fn numbers_structures_and_signatures_agree() {
    let folder = Folder::new();
    for (name, assertion) in [("check.c", "_Static_assert"), ("check.cpp", "static_assert")] {
        let path = folder.path(name);
        let text = assertions(assertion);
        std::fs::write(&path, &text).unwrap();
        if let Some(result) = compiles(&folder, &path) {
            assert_eq!(result, Ok(()), "{name}");
            // The same file with one number, one offset or one argument off does not compile.
            for (right, wrong) in [
                ("CXL_SHM_E_FORKED == -21", "CXL_SHM_E_FORKED == -22"),
                ("offsetof(cxl_shm_info_t, slot) == ", "1 + offsetof(cxl_shm_info_t, slot) == "),
                ("int cxl_shm_free_lock(cxl_lock_t)", "long cxl_shm_free_lock(cxl_lock_t)"),
            ] {
                assert!(text.contains(right), "{right}");
                std::fs::write(&path, text.replace(right, wrong)).unwrap();
                assert!(compiles(&folder, &path).unwrap().is_err(), "{name}: {wrong}");
            }
        }
    }
}

#[test]
fn nothing_is_declared_that_the_library_does_not_know() {
    let statuses = Status::ALL.iter().map(|(name, _)| (*name).to_owned());
    let known: BTreeSet<String> = constants().into_iter().map(|(name, _)| name).chain(statuses).collect();
    // Families of names and the guards of the header itself.
    let own =
        ["CXL_SHM_H", "CXL_SHM_GPU_H", "CXL_SHM_NO_SHORT_NAMES", "CXL_SHM_VERSION_MAJOR", "CXL_SHM_VERSION_MINOR", "CXL_SHM_VERSION_PATCH"];
    let unknown: Vec<String> =
        names("CXL_SHM_").into_iter().filter(|name| !known.contains(name.as_str()) && !own.contains(&name.as_str())).collect();
    assert!(unknown.is_empty(), "{unknown:?}");
    assert_eq!(declared(), prototypes().into_keys().collect());
}

#[test]
fn exactly_the_declared_functions_are_exported() {
    let library = common::built().join("libcxl_shm.so");
    let output = match Command::new("nm").args(["-D", "--defined-only"]).arg(&library).output() {
        Ok(output) => output,
        Err(error) => {
            println!("skipped: nm does not run: {error}");
            return;
        }
    };
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).unwrap();
    let exported: BTreeSet<String> = text.lines().map(|line| line.rsplit(' ').next().unwrap().to_owned()).collect();
    assert_eq!(exported, declared());
}

#[test]
fn the_soname_has_the_major_version() {
    let Ok(output) = Command::new("readelf").arg("-d").arg(common::built().join("libcxl_shm.so")).output() else {
        println!("skipped: readelf does not run");
        return;
    };
    let text = String::from_utf8_lossy(&output.stdout);
    let soname = format!("[libcxl_shm.so.{}]", env!("CARGO_PKG_VERSION_MAJOR"));
    assert!(text.lines().any(|line| line.contains("SONAME") && line.contains(&soname)), "{text}");
}
