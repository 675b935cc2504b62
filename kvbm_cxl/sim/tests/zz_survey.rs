//! Runs many seeds and lists all that fail.
use cxl_sim::scenarios;
#[test]
fn survey() {
    let number = |name: &str, or: u64| std::env::var(name).ok().and_then(|v| v.parse::<u64>().ok()).unwrap_or(or);
    let name = std::env::var("SCEN").unwrap_or("cache".into());
    let (name, scenario) = scenarios::ALL.iter().find(|of| of.0 == name).unwrap();
    let (from, count) = (number("FROM", 0), number("COUNT", 100));
    let mutant: Option<&'static str> = std::env::var("MUTANT").ok().map(|m| &*m.leak());
    let most = number("MOST", 20);
    let (mut failed, mut steps) = (0, 0);
    let begin = std::time::Instant::now();
    cxl_pool::fault::drop_rule(mutant);
    let mut ran = 0;
    for seed in from..from + count {
        ran += 1;
        let planned = std::env::var("POINT").ok().map(|p| cxl_sim::Planned {
            when: cxl_sim::When::Point(&*p.leak(), 1 + seed % 4),
            host: None,
            fault: match std::env::var("FAULT").as_deref() {
                Ok("machine") => cxl_sim::Fault::CrashMachine { restart_after_ns: Some(1_000_000) },
                Ok("process") => cxl_sim::Fault::CrashProcess { restart_after_ns: Some(1_000_000) },
                Ok("thread") => cxl_sim::Fault::PauseThread { for_ns: 30_000_000 },
                _ => cxl_sim::Fault::PauseHost { for_ns: 30_000_000 },
            },
        });
        match if planned.is_some() { scenarios::cache::run_with(seed, planned) } else { scenario(seed) } {
            Ok(stats) => steps += stats.steps,
            Err(failure) => {
                failed += 1;
                println!("{name} {mutant:?} seed {seed} step {}: {}", failure.step, &failure.reason[..failure.reason.len().min(700)]);
                if std::env::var_os("TRACE").is_some() {
                    std::fs::write("/tmp/b/trace.txt", failure.trace.join("\n")).unwrap();
                }
                if failed >= most {
                    break;
                }
            }
        }
    }
    println!("{name} {mutant:?}: {ran} seeds, {failed} failed, {steps} steps, {:.1} s", begin.elapsed().as_secs_f32());
}
