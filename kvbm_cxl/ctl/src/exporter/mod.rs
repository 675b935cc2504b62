// SPDX-License-Identifier: Apache-2.0
//! `cxlctl exporter`: what every host of a pool does, for Prometheus.

mod families;
mod server;

use crate::cli::ExporterArgs;
use crate::output::{Exit, Failure, Out};
use crate::pool_view::{PoolView, cells};
use cxl_pool::cache::survey::CacheSummary;
use cxl_pool::metrics::CONTENT_TYPE;
use cxl_pool::pool::Pool;
use server::Answer;
use std::net::{SocketAddr, TcpListener};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Largest age of the cells' metrics: reading all cells of a large pool takes long.
const CELLS_MAX_AGE: Duration = Duration::from_secs(10);

pub fn run(pool: Option<&str>, args: &ExporterArgs, out: &mut Out) -> Result<Exit, Failure> {
    let spec = pool.map(str::to_owned);
    // A pool that cannot be opened is said now; one that goes away later is said in the answers.
    let source = Source { pool: Some(crate::pool::open(pool, true)?), ..Source::new(spec, Duration::from_millis(args.max_age_ms)) };
    let wanted = SocketAddr::new(args.address, args.port);
    let listening = |error| Failure::new(Exit::Failed, format!("listening on {wanted}: {error}; choose another --port"));
    let listener = TcpListener::bind(wanted).map_err(listening)?;
    let address = listener.local_addr().map_err(listening)?;
    let url = format!("http://{address}/metrics");
    out.answer(|| serde_json::json!({"listening": address.to_string(), "url": url}), || format!("listening on {url}\n"))?;
    out.flush()?;
    let source = Mutex::new(source);
    server::serve(&listener, move |path| match path {
        "/metrics" => source.lock().unwrap_or_else(PoisonError::into_inner).metrics(),
        _ => Answer::refusal("404 Not Found", "the metrics are at /metrics"),
    })
}

/// Where the answers come from.
struct Source {
    spec: Option<String>,
    max_age: Duration,
    /// `None` after a look failed, until the next one opens it again: it may have been formatted meanwhile.
    pool: Option<Pool>,
    last: Option<(Instant, String)>,
    cells: Option<(Instant, Option<CacheSummary>)>,
}

impl Source {
    fn new(spec: Option<String>, max_age: Duration) -> Source {
        Source { spec, max_age, pool: None, last: None, cells: None }
    }

    fn metrics(&mut self) -> Answer {
        if let Some((at, text)) = &self.last
            && at.elapsed() < self.max_age
        {
            return Answer { status: "200 OK", content_type: CONTENT_TYPE, body: text.clone() };
        }
        self.last = None;
        match self.look() {
            Ok(text) => {
                self.last = Some((Instant::now(), text.clone()));
                Answer { status: "200 OK", content_type: CONTENT_TYPE, body: text }
            }
            Err(failure) => {
                (self.pool, self.cells) = (None, None);
                Answer::refusal("503 Service Unavailable", failure.message())
            }
        }
    }

    fn look(&mut self) -> Result<String, Failure> {
        let pool = match self.pool.take() {
            Some(pool) => pool,
            None => crate::pool::open(self.spec.as_deref(), true)?,
        };
        let view = PoolView::of(&pool)?;
        let known = refresh(self.cells.take(), CELLS_MAX_AGE.min(10 * self.max_age), || cells(&pool).map_err(Failure::from))?;
        let mut text = String::new();
        families::render(&pool, &view, known.1.as_ref(), &mut text);
        self.cells = Some(known);
        self.pool = Some(pool);
        Ok(text)
    }
}

/// The known value until it is older than `max_age`, else the result of a new look. Its age counts from the end of the look, which may take
/// longer than `max_age`: else it would be too old at once.
fn refresh<T>(known: Option<(Instant, T)>, max_age: Duration, look: impl FnOnce() -> Result<T, Failure>) -> Result<(Instant, T), Failure> {
    if let Some(known) = known.filter(|(at, _)| at.elapsed() < max_age) {
        return Ok(known);
    }
    let found = look()?;
    Ok((Instant::now(), found))
}

#[cfg(test)]
mod tests;
