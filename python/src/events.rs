// SPDX-License-Identifier: Apache-2.0
//! What happens to the blocks of this process's cache, for listeners in Python.

use crate::failure::{Failure, Outcome};
use crate::handle::Native;
use crate::names::Namespace;
use cxl_pool::cache::BlockKey;
use cxl_pool::cache::events::{Change, Received, RecvError, Subscriber};
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use std::time::{Duration, Instant};

/// How often a waiting thread looks for signals (Ctrl-C).
const LOOK: Duration = Duration::from_millis(100);

/// One event.
#[pyclass(frozen, module = "kvbm_cxl")]
pub struct Event {
    #[pyo3(get)]
    kind: &'static str,
    #[pyo3(get)]
    sequence: Option<u64>,
    #[pyo3(get)]
    namespace: Option<Namespace>,
    key: Option<BlockKey>,
    parent: Option<BlockKey>,
    #[pyo3(get)]
    cell: Option<u64>,
    #[pyo3(get)]
    len_bytes: Option<u64>,
    #[pyo3(get)]
    lost: u64,
}

impl From<Received> for Event {
    fn from(received: Received) -> Event {
        let none = Event { kind: "lost", sequence: None, namespace: None, key: None, parent: None, cell: None, len_bytes: None, lost: 0 };
        let event = match received {
            Received::Lagged(lost) => return Event { lost, ..none },
            Received::Event(event) => event,
        };
        let none = Event { sequence: Some(event.sequence), ..none };
        match event.change {
            Change::Stored { key, parent, namespace, cell, len_bytes } => Event {
                kind: "stored",
                namespace: Some(Namespace(namespace)),
                key: Some(key),
                parent,
                cell: Some(cell),
                len_bytes: Some(len_bytes),
                ..none
            },
            Change::Removed { key, namespace, cell } => {
                Event { kind: "removed", namespace: Some(Namespace(namespace)), key: Some(key), cell: Some(cell), ..none }
            }
            Change::Evicted { key, namespace, cell } => {
                Event { kind: "evicted", namespace: Some(Namespace(namespace)), key: Some(key), cell: Some(cell), ..none }
            }
            Change::Cleared { namespace } => Event { kind: "cleared", namespace: Some(Namespace(namespace)), ..none },
        }
    }
}

#[pymethods]
impl Event {
    #[getter]
    fn key<'py>(&self, py: Python<'py>) -> Option<Bound<'py, PyBytes>> {
        self.key.map(|key| PyBytes::new(py, &key.0))
    }

    #[getter]
    fn parent<'py>(&self, py: Python<'py>) -> Option<Bound<'py, PyBytes>> {
        self.parent.map(|key| PyBytes::new(py, &key.0))
    }

    fn __repr__(&self) -> String {
        match self.kind {
            "lost" => format!("Event(kind=\"lost\", lost={})", self.lost),
            kind => format!("Event(kind={kind:?}, sequence={:?}, key={:?})", self.sequence.unwrap_or(0), self.key),
        }
    }
}

/// A listener.
#[pyclass(frozen, module = "kvbm_cxl")]
pub struct Events(Native<Subscriber>);

impl Events {
    pub fn new(subscriber: Subscriber) -> Self {
        Events(Native::new(subscriber))
    }

    /// What comes first before `deadline`, if anything does.
    fn next_before(&self, py: Python<'_>, deadline: Option<Instant>) -> PyResult<Option<Received>> {
        let subscriber = self.0.get("the subscription")?;
        loop {
            let left = deadline.map_or(LOOK, |deadline| deadline.saturating_duration_since(Instant::now()));
            match py.detach(|| subscriber.recv_timeout(left.min(LOOK))) {
                Ok(received) => return Ok(Some(received)),
                Err(RecvError::Closed) => return Err(Failure::closed("the cache that the events are of").into()),
                Err(RecvError::Empty) if left <= LOOK && deadline.is_some() => return Ok(None),
                Err(RecvError::Empty) => py.check_signals()?,
            }
        }
    }

    fn waiting(&self) -> Outcome<Vec<Event>> {
        Ok(self.0.get("the subscription")?.try_iter().map(Event::from).collect())
    }
}

#[pymethods]
impl Events {
    #[pyo3(signature = (timeout_ms=0))]
    fn poll(&self, py: Python<'_>, timeout_ms: u64) -> PyResult<Vec<Event>> {
        // A time too far away to express is waited for without end.
        let deadline = Instant::now().checked_add(Duration::from_millis(timeout_ms));
        let Some(first) = self.next_before(py, deadline)? else { return Ok(Vec::new()) };
        let mut events = vec![Event::from(first)];
        events.extend(self.waiting()?);
        Ok(events)
    }

    fn __iter__(slf: PyRef<'_, Self>) -> PyRef<'_, Self> {
        slf
    }

    fn __next__(&self, py: Python<'_>) -> PyResult<Option<Event>> {
        match self.next_before(py, None) {
            Ok(received) => Ok(received.map(Event::from)),
            // All events were returned: the end of the iteration.
            Err(error) if error.get_type(py).name()?.to_cow()? == "ClosedError" => Ok(None),
            Err(error) => Err(error),
        }
    }
}
