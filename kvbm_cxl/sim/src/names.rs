// SPDX-License-Identifier: Apache-2.0
//! The names of every mutant and every point of the production code, read from its sources.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::Path;

/// The names that occur in some sources, sorted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Names {
    /// Arguments of `mutant!("...")`.
    pub mutants: Vec<&'static str>,
    /// Arguments of `point!("...")`.
    pub points: Vec<&'static str>,
}

/// The names in the sources of cxl-pool.
///
/// # Errors
/// The sources are not next to this crate, or cannot be read.
pub fn of_pool() -> io::Result<Names> {
    in_sources(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../pool/src"))
}

/// The names in every `.rs` file below `folder`. Comment lines do not count.
///
/// # Errors
/// A file cannot be read.
pub fn in_sources(folder: &Path) -> io::Result<Names> {
    let (mut mutants, mut points) = (BTreeSet::new(), BTreeSet::new());
    visit(folder, &mut |source| {
        for line in source.lines().filter(|line| !line.trim_start().starts_with("//")) {
            collect(line, "mutant!(\"", &mut mutants);
            collect(line, "point!(\"", &mut points);
        }
    })?;
    // A few hundred short names per test process: they live as long as it, as the literals they stand for do.
    let keep = |names: BTreeSet<String>| names.into_iter().map(|name| &*name.leak()).collect();
    Ok(Names { mutants: keep(mutants), points: keep(points) })
}

fn visit(folder: &Path, file: &mut impl FnMut(&str)) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.is_dir() {
            visit(&path, file)?;
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            file(&fs::read_to_string(&path)?);
        }
    }
    Ok(())
}

fn collect(line: &str, opening: &str, names: &mut BTreeSet<String>) {
    for rest in line.split(opening).skip(1) {
        if let Some((name, _)) = rest.split_once('"') {
            names.insert(name.into());
        }
    }
}
