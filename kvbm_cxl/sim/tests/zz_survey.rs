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
        match scenario(seed) {
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
