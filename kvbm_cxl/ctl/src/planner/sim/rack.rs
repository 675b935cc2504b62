// SPDX-License-Identifier: Apache-2.0
//! A rack at work.

use super::caches::{Caches, Match, Tier, tick};
use super::device::{Devices, Part, Way};
use super::events::{Event, Events};
use super::outcome::{Counts, Outcome, Served};
use super::{Ns, Routing, Setup, Step, What, ns};
use crate::planner::error::{PlanError, Planned};
use std::collections::VecDeque;

#[derive(Default)]
struct Instance {
    /// Requests that wait, and what the router expects each to take.
    queue: VecDeque<(u32, Ns)>,
    expected: Ns,
    /// When the request under way is done.
    free: Ns,
    is_busy: bool,
    work: Ns,
    /// Chains that are to be published, the one under way first.
    publishes: VecDeque<u32>,
    dram_free: Ns,
    network_free: Ns,
}

impl Instance {
    fn backlog(&self, now: Ns) -> Ns {
        self.free.saturating_sub(now).saturating_add(self.expected)
    }
}

#[derive(Clone, Copy, Default)]
struct Progress {
    arrival: Ns,
    first_token: Option<Ns>,
    /// The next one of its session, and whether that one is due and waits for this one.
    next: Option<u32>,
    is_awaited: bool,
}

pub struct Run<'a> {
    setup: &'a Setup<'a>,
    caches: Caches<'a>,
    devices: Devices,
    instances: Vec<Instance>,
    served: Vec<Served>,
    progress: Vec<Progress>,
    events: Events,
    counts: Counts,
    turn: usize,
    now: Ns,
    steps: Vec<Step>,
}

fn lost() -> PlanError {
    PlanError::Unsound("an event names a request or an instance that is not there".into())
}

impl<'a> Run<'a> {
    pub fn new(setup: &'a Setup<'a>) -> Self {
        let mut progress = vec![Progress::default(); setup.trace.requests.len()];
        for (number, request) in setup.trace.requests.iter().enumerate() {
            if let Some(previous) = request.previous.and_then(|previous| progress.get_mut(previous as usize)) {
                previous.next = Some(number as u32);
            }
        }
        Run {
            progress,
            setup,
            caches: Caches::new(setup),
            devices: Devices::new(setup.rack, setup.block_bytes(), setup.trace.blocks.len()),
            instances: (0..setup.rack.instances as usize).map(|_| Instance::default()).collect(),
            served: vec![Served::default(); setup.trace.requests.len()],
            events: Events::default(),
            counts: Counts::default(),
            turn: 0,
            now: 0,
            steps: Vec::with_capacity(2 * setup.trace.requests.len()),
        }
    }

    fn step(&mut self, what: What, request: u32, instance: usize) {
        self.steps.push(Step { at: self.now, what, request, instance: instance as u32 });
    }

    pub fn run(mut self) -> Planned<(Outcome, Vec<Step>)> {
        self.enter_due(0);
        while let Some((now, event)) = self.events.next() {
            self.now = now;
            match event {
                Event::Due { request } => self.due(request)?,
                Event::Arrived { request } => self.arrived(request)?,
                Event::Computed { request, instance } => self.computed(request, instance as usize)?,
                Event::Saved { request, instance } => {
                    self.step(What::Enters, request, instance as usize);
                    self.caches.enter(Tier::Dram, instance as usize, self.chain(request), now)?;
                }
                Event::Published { request, instance } => self.finish_publish(request, instance as usize)?,
            }
        }
        let work: Vec<Ns> = self.instances.iter().map(|instance| instance.work).collect();
        Ok((Outcome::of(&self.served, self.counts, &work, self.devices.load(self.now), self.now)?, self.steps))
    }

    fn chain(&self, request: u32) -> &'a [u32] {
        let trace = self.setup.trace;
        trace.requests.get(request as usize).map_or(&[], |request| trace.chain(request))
    }

    fn progress(&mut self, request: u32) -> Planned<&mut Progress> {
        self.progress.get_mut(request as usize).ok_or_else(lost)
    }

    fn instance(&mut self, instance: usize) -> Planned<&mut Instance> {
        self.instances.get_mut(instance).ok_or_else(lost)
    }

    fn served(&mut self, request: u32) -> Planned<&mut Served> {
        self.served.get_mut(request as usize).ok_or_else(lost)
    }

    /// Enters when a request is due, if there is one of this number.
    fn enter_due(&mut self, request: u32) {
        if let Some(found) = self.setup.trace.requests.get(request as usize) {
            self.events.at(ns(found.arrival_s), Event::Due { request });
        }
    }

    fn due(&mut self, request: u32) -> Planned<()> {
        self.enter_due(request + 1);
        let now = self.now;
        let previous = self.setup.trace.requests.get(request as usize).and_then(|request| request.previous);
        let Some(previous) = previous else { return self.arrived(request) };
        let before = self.progress(previous)?;
        match before.first_token {
            Some(at) if at <= now => self.arrived(request),
            Some(at) => {
                self.events.at(at, Event::Arrived { request });
                Ok(())
            }
            None => {
                before.is_awaited = true;
                Ok(())
            }
        }
    }

    /// Tokens that are computed: the last one always, because its output is the first one of the answer.
    fn computed_tokens(&self, request: u32, found: usize) -> (u64, u64) {
        let input = self.setup.trace.requests.get(request as usize).map_or(0, |request| request.input_tokens);
        let cached = (found as u64 * self.setup.trace.block_tokens).min(input.saturating_sub(1));
        (cached, input - cached)
    }

    /// What a request takes at an instance once it is taken up and nothing else uses the devices.
    fn expected(&self, request: u32, found: Match) -> Ns {
        let (cached, new) = self.computed_tokens(request, found.blocks());
        let dram_s = found.dram as f64 * self.setup.block_bytes() / (self.setup.rack.dram_read_gb_s * 1e9);
        ns(dram_s + self.devices.alone_s(found.pool, Way::Read) + self.setup.compute_s(cached, new))
    }

    fn arrived(&mut self, request: u32) -> Planned<()> {
        let now = self.now;
        self.counts.requests_in += 1;
        self.progress(request)?.arrival = now;
        let (instance, expected) = self.route(request);
        let chosen = self.instance(instance)?;
        if chosen.is_busy {
            chosen.expected = chosen.expected.saturating_add(expected);
            chosen.queue.push_back((request, expected));
            return Ok(());
        }
        chosen.free = now;
        self.start(request, instance)
    }

    fn route(&mut self, request: u32) -> (usize, Ns) {
        let (count, chain) = (self.instances.len(), self.chain(request));
        let expected = |instance| self.expected(request, self.caches.find(instance, chain));
        // From the next in turn on, so that equals take turns.
        let in_turn = (0..count).map(|step| (self.turn + step) % count);
        let backlog = |instance: usize| self.instances.get(instance).map_or(Ns::MAX, |instance| instance.backlog(self.now));
        let chosen = match self.setup.routing {
            Routing::RoundRobin => None,
            Routing::LeastLoaded => in_turn.min_by_key(|&instance| backlog(instance)),
            Routing::PrefixAware => in_turn.min_by_key(|&instance| backlog(instance).saturating_add(expected(instance))),
        };
        let chosen = chosen.unwrap_or(self.turn % count.max(1));
        let expected = expected(chosen);
        self.turn = (chosen + 1) % count.max(1);
        (chosen, expected)
    }

    fn start(&mut self, request: u32, instance: usize) -> Planned<()> {
        let (chain, now) = (self.chain(request), self.now);
        self.step(What::Asks, request, instance);
        let found = self.caches.find(instance, chain);
        let used = chain.get(..found.blocks()).unwrap_or_default();
        let from_pool: Vec<u32> = used.iter().copied().filter(|&block| self.caches.tier_of(instance, block) == Some(Tier::Pool)).collect();
        let block_bytes = self.setup.block_bytes();
        let dram_bytes = found.dram as f64 * block_bytes;
        let after_dram = now.saturating_add(ns(dram_bytes / (self.setup.rack.dram_read_gb_s * 1e9)));
        let read = self.transfer(after_dram, &from_pool, Way::Read)?;
        self.count_hits(instance, request, used);
        self.caches.use_all(instance, used, now);
        let (cached, new) = self.computed_tokens(request, found.blocks());
        let done = read.saturating_add(ns(self.setup.compute_s(cached, new)));
        self.counts.asked_tokens += cached + new;
        self.counts.computed_tokens += new;
        self.counts.dram_read_bytes += dram_bytes;
        self.counts.pool_read_bytes += from_pool.len() as f64 * block_bytes;
        let arrival = self.progress(request)?.arrival;
        let served = self.served(request)?;
        (served.wait, served.read, served.compute) = (now - arrival, read - now, done - read);
        let chosen = self.instance(instance)?;
        (chosen.is_busy, chosen.free) = (true, done);
        chosen.work = chosen.work.saturating_add(done - now);
        self.events.at(done, Event::Computed { request, instance: instance as u32 });
        Ok(())
    }

    /// Tokens by where they were found. The last token of a prompt is computed although its block is there.
    fn count_hits(&mut self, instance: usize, request: u32, used: &[u32]) {
        let (mut left, _) = self.computed_tokens(request, used.len());
        for &block in used {
            let tokens = left.min(self.setup.trace.block_tokens);
            left -= tokens;
            match self.caches.tier_of(instance, block) {
                Some(Tier::Hbm) => self.counts.hbm_tokens += tokens,
                Some(Tier::Dram) => self.counts.dram_tokens += tokens,
                Some(Tier::Pool) => self.counts.pool_tokens += tokens,
                None => {}
            }
        }
    }

    fn transfer(&mut self, at: Ns, blocks: &[u32], way: Way) -> Planned<Ns> {
        let mut parts = Vec::with_capacity(blocks.len());
        for &block in blocks {
            let named = self.setup.trace.blocks.get(block as usize).ok_or_else(lost)?;
            parts.push(Part { block, named, device: self.caches.device(block, self.devices.count()) });
        }
        self.devices.transfer(at, &parts, way, tick(at))
    }

    fn computed(&mut self, request: u32, instance: usize) -> Planned<()> {
        let (chain, now, block_bytes) = (self.chain(request), self.now, self.setup.block_bytes());
        self.counts.requests_out += 1;
        self.caches.enter(Tier::Hbm, instance, chain, now)?;
        if self.setup.system.has_dram() {
            let bytes = self.caches.missing(Tier::Dram, instance, chain).len() as f64 * block_bytes;
            self.counts.dram_written_bytes += bytes;
            let write = ns(bytes / (self.setup.rack.dram_write_gb_s * 1e9));
            let own = self.instance(instance)?;
            own.dram_free = own.dram_free.max(now).saturating_add(write);
            let end = own.dram_free;
            self.events.at(end, Event::Saved { request, instance: instance as u32 });
        }
        if self.setup.system.has_pool() {
            self.instance(instance)?.publishes.push_back(request);
            if self.instance(instance)?.publishes.len() == 1 {
                self.publish(request, instance)?;
            }
        }
        if self.setup.rack.disaggregated == 0.0 {
            self.first_token(request, now)?;
        } else if !self.setup.system.has_pool() {
            let bytes = chain.len() as f64 * block_bytes;
            self.counts.network_bytes += bytes;
            let (gb_s, latency_s) = (self.setup.rack.network_gb_s, self.setup.rack.network_latency_us / 1e6);
            let own = self.instance(instance)?;
            own.network_free = own.network_free.max(now).saturating_add(ns(bytes / (gb_s * 1e9)));
            let end = own.network_free.saturating_add(ns(latency_s));
            self.first_token(request, end)?;
        }
        self.next(instance)
    }

    fn next(&mut self, instance: usize) -> Planned<()> {
        let own = self.instance(instance)?;
        own.is_busy = false;
        let Some((request, expected)) = own.queue.pop_front() else { return Ok(()) };
        own.expected = own.expected.saturating_sub(expected);
        self.start(request, instance)
    }

    fn publish(&mut self, request: u32, instance: usize) -> Planned<()> {
        let missing = self.caches.missing(Tier::Pool, instance, self.chain(request));
        self.counts.pool_written_bytes += missing.len() as f64 * self.setup.block_bytes();
        let end = self.transfer(self.now, &missing, Way::Write)?;
        self.events.at(end, Event::Published { request, instance: instance as u32 });
        Ok(())
    }

    fn finish_publish(&mut self, request: u32, instance: usize) -> Planned<()> {
        let (chain, now) = (self.chain(request), self.now);
        self.step(What::Enters, request, instance);
        self.caches.enter(Tier::Pool, instance, chain, now)?;
        if self.setup.rack.disaggregated != 0.0 {
            self.counts.pool_read_bytes += chain.len() as f64 * self.setup.block_bytes();
            let end = self.transfer(now, chain, Way::Read)?;
            self.first_token(request, end)?;
        }
        let own = self.instance(instance)?;
        own.publishes.pop_front();
        match own.publishes.front().copied() {
            Some(next) => self.publish(next, instance),
            None => Ok(()),
        }
    }

    /// The instances are done with a request at this time: it has its first token some overhead later, and then the next one of its session
    /// may come.
    fn first_token(&mut self, request: u32, done: Ns) -> Planned<()> {
        let at = done.saturating_add(ns(self.setup.rack.overhead_ms / 1e3));
        let progress = self.progress(request)?;
        progress.first_token = Some(at);
        let (arrival, awaited) = (progress.arrival, progress.next.filter(|_| progress.is_awaited));
        if let Some(request) = awaited {
            self.events.at(at, Event::Arrived { request });
        }
        let served = self.served(request)?;
        served.ttft = at - arrival;
        served.hand_over = served.ttft - served.wait - served.read - served.compute;
        Ok(())
    }
}
