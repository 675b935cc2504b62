// SPDX-License-Identifier: Apache-2.0

use super::*;
use crate::coherence::LineLoad;

#[test]
fn texts_choose_the_implementation() {
    let parse = |text: &str| text.parse::<CoherenceOptions>().unwrap();
    assert_eq!(parse(""), CoherenceOptions::default());
    assert_eq!(parse("native"), CoherenceOptions::default());
    assert_eq!(parse("native:load=words").instructions.unwrap().load, LineLoad::Words);
    let emulator = EmulatorOptions { seed: 7, noise: 4, ..EmulatorOptions::default() };
    assert_eq!(parse("emulated:seed=7,noise=4").emulator, Some(emulator));
    assert_eq!(parse(&format!("emulated:{emulator}")).emulator, Some(emulator));
    assert_eq!(parse("emulated").emulator, Some(EmulatorOptions::default()));
}

#[test]
fn other_texts_are_refused() {
    for text in ["nativ", "hardware", ":x", "emulated:seed", "emulated:seed=-1", "emulated:noise=9999999999", "emulated:x=1", "native:x"] {
        assert!(matches!(text.parse::<CoherenceOptions>(), Err(Error::Invalid(_))), "{text:?}");
    }
}
