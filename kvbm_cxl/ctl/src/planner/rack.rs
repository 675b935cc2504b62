// SPDX-License-Identifier: Apache-2.0
//! A rack put together: defaults, then a preset, then the file, then measurements, then options; the last one to say a number counts.

use crate::planner::error::{Origin, PlanError, Planned};
use crate::planner::keys::{Form, KEYS, Key, Rack};
use crate::planner::presets::{DEFAULT, PRESETS, Preset};
use std::path::Path;
use toml::de::{DeTable, DeValue};

/// One number, by the name of its key, and where it stands.
#[derive(Clone, Debug)]
pub struct Given {
    pub name: String,
    pub value: f64,
    pub origin: Origin,
}

#[derive(Debug, Default)]
pub struct RackFile {
    /// The preset that it begins from.
    pub preset: Option<(String, Origin)>,
    pub numbers: Vec<Given>,
}

/// A rack, and where each number is from.
#[derive(Debug)]
pub struct Described {
    pub rack: Rack,
    /// The preset that it begins from.
    pub preset: &'static Preset,
    /// In the order of [`KEYS`]; none for defaults.
    pub origins: Vec<Option<Origin>>,
}

pub fn preset(name: &str, origin: Origin) -> Planned<&'static Preset> {
    PRESETS.iter().find(|preset| preset.name == name).ok_or_else(|| PlanError::Unknown {
        origin,
        what: "preset",
        given: name.into(),
        known: PRESETS.iter().map(|preset| preset.name).collect(),
    })
}

/// Puts a rack together. `named` is the preset of the command line, which counts before that of the file.
pub fn describe(named: Option<&str>, file: RackFile, measured: Vec<Given>, options: Vec<Given>) -> Planned<Described> {
    let preset = match (named, file.preset) {
        (Some(name), _) => preset(name, Origin::Option(format!("--preset {name}")))?,
        (None, Some((name, origin))) => preset(&name, origin)?,
        (None, None) => preset(DEFAULT, Origin::Option("--preset".into()))?,
    };
    let mut values: Vec<Option<f64>> = KEYS.iter().map(|key| key.default).collect();
    let mut origins: Vec<Option<Origin>> = vec![None; KEYS.len()];
    let of_preset = preset.values.iter().map(|&(name, value)| Given {
        name: name.into(),
        value,
        origin: Origin::Option(format!("preset {}", preset.name)),
    });
    for given in of_preset.chain(file.numbers).chain(measured).chain(options) {
        let (index, key) = find(&given)?;
        check(key, &given)?;
        if let (Some(value), Some(origin)) = (values.get_mut(index), origins.get_mut(index)) {
            (*value, *origin) = (Some(given.value), Some(given.origin));
        }
    }
    let missing = |key: &'static Key| PlanError::Missing { name: key.name, meaning: key.meaning };
    let values: Vec<f64> = values.iter().zip(KEYS).map(|(value, key)| value.ok_or_else(|| missing(key))).collect::<Planned<_>>()?;
    let rack = Rack::of(&values).ok_or_else(|| PlanError::Unsound("a rack has too few numbers".into()))?;
    Ok(Described { rack, preset, origins })
}

fn find(given: &Given) -> Planned<(usize, &'static Key)> {
    KEYS.iter().enumerate().find(|(_, key)| key.name == given.name).ok_or_else(|| PlanError::Unknown {
        origin: given.origin.clone(),
        what: "key",
        given: given.name.clone(),
        known: KEYS.iter().map(|key| key.name).collect(),
    })
}

fn check(key: &Key, given: &Given) -> Planned<()> {
    let (least, most) = key.range;
    let unit = match key.form {
        Form::Real => "a number",
        Form::Whole => "a whole number",
        Form::Flag => "false or true, or a whole number",
    };
    if (least..=most).contains(&given.value) && (key.form == Form::Real || given.value.fract() == 0.0) {
        return Ok(());
    }
    let (origin, name) = (given.origin.clone(), key.name.into());
    Err(PlanError::OutOfRange { origin, name, given: given.value.to_string(), least, most, unit })
}

/// Reads `KEY=VALUE` of the command line.
pub fn option(text: &str) -> Planned<Given> {
    let origin = Origin::Option(format!("--set {text}"));
    let malformed = |what: &str| PlanError::Malformed {
        origin: origin.clone(),
        what: what.into(),
        remedy: "give KEY=NUMBER, as device.latency_ns=640".into(),
    };
    let (name, value) = text.split_once('=').ok_or_else(|| malformed("no ="))?;
    let value = match value.trim() {
        "true" => 1.0,
        "false" => 0.0,
        number => number.parse().map_err(|_| malformed("not a number after the ="))?,
    };
    Ok(Given { name: name.trim().into(), value, origin })
}

pub fn read(path: &Path) -> Planned<RackFile> {
    let file = path.display().to_string();
    let text = std::fs::read_to_string(path).map_err(|source| PlanError::Unusable { file: file.clone(), source })?;
    parse(&file, &text)
}

pub fn parse(file: &str, text: &str) -> Planned<RackFile> {
    let at = |offset: usize| {
        let before = text.as_bytes().get(..offset.min(text.len())).unwrap_or_default();
        Origin::Line { file: file.into(), line: 1 + before.iter().filter(|&&byte| byte == b'\n').count() }
    };
    let malformed = |offset: usize, what: String, remedy: &str| PlanError::Malformed { origin: at(offset), what, remedy: remedy.into() };
    let table = DeTable::parse(text).map_err(|error| {
        let what = format!("not TOML ({})", error.message().replace('\n', ", "));
        malformed(error.span().map_or(0, |span| span.start), what, "`cxl-plan rack` prints a file to begin with")
    })?;
    let mut read = RackFile::default();
    for (name, value) in table.get_ref() {
        let (section, offset) = (name.get_ref().as_ref(), name.span().start);
        match value.get_ref() {
            DeValue::String(preset) if section == "preset" => read.preset = Some((preset.to_string(), at(offset))),
            DeValue::Table(section_table) if section != "preset" => {
                for (name, value) in section_table {
                    let (name, offset) = (format!("{section}.{}", name.get_ref()), name.span().start);
                    let value = number(value.get_ref()).ok_or_else(|| {
                        malformed(offset, format!("{name} is no number but of type {}", value.get_ref().type_str()), "give a number")
                    })?;
                    read.numbers.push(Given { name, value, origin: at(offset) });
                }
            }
            other => {
                let what = format!("{section} is of type {}", other.type_str());
                return Err(malformed(offset, what, "give preset = \"NAME\" and sections such as [device]; `cxl-plan rack` prints them"));
            }
        }
    }
    Ok(read)
}

fn number(value: &DeValue<'_>) -> Option<f64> {
    match value {
        DeValue::Integer(integer) => i64::from_str_radix(integer.as_str(), integer.radix()).ok().map(|number| number as f64),
        DeValue::Float(float) => float.as_str().parse().ok(),
        DeValue::Boolean(flag) => Some(f64::from(u8::from(*flag))),
        _ => None,
    }
}

impl Described {
    /// The rack as a file that gives the same rack again.
    pub fn toml(&self) -> String {
        let mut text = format!("# {}.\npreset = \"{}\"\n", self.preset.source, self.preset.name);
        let mut last = "";
        for ((key, value), origin) in KEYS.iter().zip(self.rack.values()).zip(&self.origins) {
            let (section, name) = key.name.split_once('.').unwrap_or(("", key.name));
            if section != last {
                text.push_str(&format!("\n[{section}]\n"));
                last = section;
            }
            let from = origin.as_ref().map_or("default".into(), Origin::to_string).replace('\n', " ");
            let shown = match (key.form, value != 0.0) {
                (Form::Flag, flag) => flag.to_string(),
                _ => value.to_string(),
            };
            text.push_str(&format!("{name} = {shown}  # {}; {from}\n", key.meaning));
        }
        text
    }
}
