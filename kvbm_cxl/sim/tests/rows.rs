// SPDX-License-Identifier: Apache-2.0
//! Rows of fences and deaths that a manager writes: what is known of a row that was lost, and what must not come to stand in one.

#[path = "../../pool/tests/cache/bench.rs"]
#[allow(dead_code)] // The tests of the pool use the rest.
mod bench;
#[path = "../../pool/tests/common/load.rs"]
mod load;

use bench::{Bench, PATIENCE};
use cxl_pool::fault::drop_rule;
use cxl_pool::host::Host;
use cxl_pool::line::Line;
use cxl_pool::media::{Binding, DeathLine, FenceLine, Identity, JoinBox, MediaLine};
use cxl_pool::pool::Pool;
use cxl_sim::names;
use std::time::{Duration, Instant};

/// Slots of hosts of which there are only lines.
const SILENT: u32 = 3;
const OTHER: u32 = 2;
/// The seat of a machine that is not there: machine 2.
const OTHER_SEAT: u64 = 1;
/// Rounds after which a manager has looked at every line more than once.
const ROUNDS: u32 = 60;

/// A machine with the manager's role, whose rounds the test runs.
struct Manager {
    pool: Pool,
    host: Host,
}

impl Manager {
    fn new(bench: &Bench) -> Manager {
        let (pool, host) = bench.join(1);
        Manager { pool, host }
    }

    /// Rounds without `rule`, until `is_done`.
    fn serve(&self, rule: Option<&'static str>, mut is_done: impl FnMut() -> bool) {
        let deadline = Instant::now() + PATIENCE;
        drop_rule(rule);
        while !is_done() {
            assert!(Instant::now() < deadline, "the manager does not get through");
            // A row that is lost is an error of the rounds that need it.
            let _ = self.host.service_round();
            std::thread::sleep(Duration::from_millis(1));
        }
        drop_rule(None);
    }

    fn serve_rounds(&self, rule: Option<&'static str>) {
        let begin = (Instant::now(), self.host.config().heartbeat_ms);
        let mut rounds = 0;
        // With each beat it looks at what it serves, and between two of them at what hosts ask for.
        let least = Duration::from_millis(6 * begin.1);
        self.serve(rule, || {
            rounds += 1;
            rounds > ROUNDS && begin.0.elapsed() > least
        });
    }

    fn line<T: MediaLine>(&self, index: u64) -> T {
        self.pool.lines().fetch(index).unwrap()
    }

    /// What this manager binds a slot to.
    fn bound(&self, slot: u32) -> u32 {
        self.line::<Binding>(u64::from(slot)).incarnation
    }

    /// A machine asks for a slot that nobody has had.
    fn ask_for(&self, slot: u32) {
        let word = [0x40 + slot as u8; 16];
        let ask = JoinBox { slot, machine: word, nonce: word, ..JoinBox::default() };
        self.pool.lines().publish(u64::from(slot), ask).unwrap();
    }

    fn bind(&self, rule: Option<&'static str>, slot: u32) -> u32 {
        self.ask_for(slot);
        self.serve(rule, || self.bound(slot) != 0);
        self.bound(slot)
    }

    /// The first line of a seat's row is left as by a writer that stops in the middle of it. Returns what it was.
    fn lose_row(&self, seat: u64) -> (u64, Line) {
        let index = seat * self.pool.layout().geometry().fence_lines();
        let offset = self.pool.layout().line_offset(FenceLine::REGION, index).unwrap();
        let whole = self.pool.lines().fetch_raw(offset).unwrap();
        let mut torn = whole;
        torn.0[..4].iter_mut().for_each(|byte| *byte ^= 0xff);
        self.write(offset, &torn);
        assert!(self.pool.lines().fetch::<FenceLine>(index).is_err());
        (offset, whole)
    }

    fn write(&self, offset: u64, line: &Line) {
        self.pool.lines().memory().write_line(offset, line).unwrap();
        self.pool.lines().memory().fence_stores();
    }
}

/// What the first seat's row says of a silent host once the row is lost and the next process of the machine has the role.
fn fenced_after_a_loss(rule: Option<&'static str>) -> (u32, u32) {
    let bench = Bench::new(&[(64, 4096)]);
    let (first, second) = (Manager::new(&bench), Manager::new(&bench));
    let incarnation = first.bind(rule, SILENT);
    first.serve(rule, || first.line::<FenceLine>(0).fenced[SILENT as usize] >= incarnation);
    first.host.leave().unwrap();
    first.lose_row(0);
    second.serve(None, || second.pool.lines().fetch::<FenceLine>(0).is_ok());
    (incarnation, second.line::<FenceLine>(0).fenced[SILENT as usize])
}

#[test]
fn a_row_that_is_lost_comes_back_with_every_fence() {
    let (fenced, found) = fenced_after_a_loss(None);
    assert_eq!(found, fenced);
    let (fenced, found) = fenced_after_a_loss(Some("rows.fence_not_remembered"));
    assert!(found < fenced);
}

/// What a slot is bound to while the row of another seat is lost, and once that is back. The row has the next incarnation fenced.
fn bound_beside_a_loss(rule: Option<&'static str>) -> (u32, u32) {
    let bench = Bench::new(&[(64, 4096)]);
    let manager = Manager::new(&bench);
    let index = OTHER_SEAT * manager.pool.layout().geometry().fence_lines();
    let mut row = manager.line::<FenceLine>(index);
    row.fenced[SILENT as usize] = 1;
    manager.pool.lines().publish(index, row).unwrap();
    let (offset, whole) = manager.lose_row(OTHER_SEAT);
    manager.ask_for(SILENT);
    manager.serve_rounds(rule);
    let meanwhile = manager.bound(SILENT);
    manager.write(offset, &whole);
    manager.serve(rule, || manager.bound(SILENT) != 0);
    (meanwhile, manager.bound(SILENT))
}

#[test]
fn no_slot_is_bound_while_a_row_is_lost() {
    assert_eq!(bound_beside_a_loss(None), (0, 2), "above the fence that the row has");
    assert_eq!(bound_beside_a_loss(Some("rows.bound_beside_a_loss")).0, 1, "a host that is fenced already");
}

/// Up to which incarnation a slot counts as dead after a host reported the end of `ahead` incarnations beyond the one that is bound.
fn dead_after_a_report(rule: Option<&'static str>, ahead: u32) -> (u32, u32) {
    let bench = Bench::new(&[(64, 4096)]);
    let manager = Manager::new(&bench);
    let (incarnation, reporter) = (manager.bind(rule, SILENT), manager.bind(rule, OTHER));
    let report = Identity::report_of(SILENT, incarnation + ahead).unwrap();
    let identity = Identity { state: Identity::LIVE, incarnation: reporter, report, ..Identity::default() };
    manager.pool.lines().publish(OTHER.into(), identity).unwrap();
    manager.serve_rounds(rule);
    (incarnation, manager.line::<DeathLine>(0).dead[SILENT as usize])
}

#[test]
fn the_end_of_an_incarnation_that_is_not_known_is_no_proof() {
    let (bound, dead) = dead_after_a_report(None, 0);
    assert_eq!(dead, bound);
    assert_eq!(dead_after_a_report(None, 1).1, 0);
    let (bound, dead) = dead_after_a_report(Some("rows.ends_of_the_unbound"), 1);
    assert_eq!(dead, bound + 1, "the next host of the slot is dead before it joins");
}

#[test]
fn every_rule_of_rows_is_tried_here() {
    let tried = ["rows.bound_beside_a_loss", "rows.ends_of_the_unbound", "rows.fence_not_remembered"];
    let mut found = names::of_pool().expect("the pool's sources").mutants;
    found.retain(|name| name.starts_with("rows."));
    found.sort_unstable();
    assert_eq!(found, tried);
}
