// SPDX-License-Identifier: Apache-2.0

use super::*;

const BARE: CpuFeatures =
    CpuFeatures { movdir64b: false, enqcmd: false, avx512: false, avx2: false, clflushopt: false, clwb: false, line_bytes: LINE_BYTES };

#[test]
fn every_choice_reads_back_from_its_name() {
    for &choice in LineWrite::ALL {
        assert_eq!(choice.name().parse::<LineWrite>().unwrap(), choice);
    }
    let best = Instructions::best().unwrap();
    assert_eq!(Instructions::parse(&best.to_string()).unwrap(), best);
    assert_eq!(Instructions::parse("").unwrap(), best);
    let chosen = Instructions::parse("load=words, write=stores-flush").unwrap();
    assert_eq!(chosen, Instructions { load: LineLoad::Words, write: LineWrite::StoresFlush, ..best });
}

#[test]
fn lines_stay_whole_where_one_instruction_writes_and_one_loads_them() {
    let best = Instructions::best().unwrap();
    for (write, load, whole) in [
        (LineWrite::Movdir64b, LineLoad::Avx512, true),
        (LineWrite::Avx512, LineLoad::Avx512, true),
        (LineWrite::Movdir64b, LineLoad::Words, false),
        (LineWrite::StoresClwb, LineLoad::Avx512, false),
        (LineWrite::StoresDcCvac, LineLoad::Words, false),
    ] {
        assert_eq!(Instructions { write, load, ..best }.keep_lines_whole(), whole, "{write}, {load}");
    }
}

#[test]
fn nonsense_is_refused_by_name() {
    for text in ["write", "write=", "write=clflush", "flush=movdir64b", "speed=9", "=", "load=Words"] {
        assert!(matches!(Instructions::parse(text), Err(Error::Invalid(_))), "{text:?}");
    }
    let message = Instructions::parse("flush=clwb").unwrap_err().to_string();
    assert!(message.contains("clwb") && message.contains("flushing"), "{message}");
}

#[test]
fn a_bare_cpu_still_has_every_role_and_nothing_more() {
    let write = LineWrite::best(&BARE).unwrap();
    assert_eq!(write, if ARM { LineWrite::StoresDcCvac } else { LineWrite::StoresFlush });
    assert_eq!(LineLoad::best(&BARE).unwrap(), LineLoad::Words);
    assert_eq!(LineFlush::best(&BARE).unwrap(), if ARM { LineFlush::DcCivac } else { LineFlush::Clflush });
    assert_eq!(LineCopy::best(&BARE).unwrap(), if ARM { LineCopy::Stnp } else { LineCopy::Sse2 });
    let rich = Instructions { load: LineLoad::Avx512, ..Instructions::best().unwrap() };
    assert!(matches!(rich.check(&BARE), Err(Error::Invalid(_))));
}

#[test]
fn ctr_el0_tells_the_line() {
    assert_eq!(arm_line_bytes(0x8444_c004), 64, "Neoverse N1");
    assert_eq!(arm_line_bytes(0x8445_c004), 128);
}

#[test]
fn a_cpu_with_other_lines_is_refused() {
    let best = Instructions::best().unwrap();
    let cpu = CpuFeatures { line_bytes: 128, ..CpuFeatures::detect() };
    assert!(best.check(&cpu).unwrap_err().to_string().contains("128"));
}
