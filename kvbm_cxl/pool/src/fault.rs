// SPDX-License-Identifier: Apache-2.0
//! Named fault points of the production code, compiled in only with the feature `faults`.
//!
//! - `mutant!("no_seal")` is true while the test drops that rule; a shipped build folds it to `false`.
//! - `point!("lock.requested")` is a place where a test may crash or pause the running host.
//!
//! Both names are string literals, so `cxl-sim` can list every one of them from the sources and prove that each was visited or killed.

/// True while a test has dropped the rule of this name; always false in a shipped build.
macro_rules! mutant {
    ($name:literal) => {{
        #[cfg(feature = "faults")]
        {
            $crate::fault::is_dropped($name)
        }
        #[cfg(not(feature = "faults"))]
        {
            false
        }
    }};
}

/// A named place of a protocol where a test may crash or pause the host; nothing in a shipped build.
macro_rules! point {
    ($name:literal) => {{
        #[cfg(feature = "faults")]
        {
            $crate::fault::visit($name)
        }
    }};
}

pub(crate) use {mutant, point};

#[cfg(feature = "faults")]
mod active {
    use std::cell::{Cell, RefCell};
    use std::rc::Rc;

    type Visitor = Rc<dyn Fn(&'static str)>;

    thread_local! {
        static DROPPED: Cell<Option<&'static str>> = const { Cell::new(None) };
        static VISITOR: RefCell<Option<Visitor>> = const { RefCell::new(None) };
    }

    /// Drops the rule `name` on this thread until the next call.
    pub fn drop_rule(name: Option<&'static str>) {
        DROPPED.set(name);
    }

    /// Installs what runs at every point that this thread passes.
    pub fn on_point(visitor: Option<Visitor>) {
        VISITOR.set(visitor);
    }

    pub(crate) fn is_dropped(name: &'static str) -> bool {
        DROPPED.get() == Some(name)
    }

    pub(crate) fn visit(name: &'static str) {
        // Cloned out, because the visitor may switch to a coroutine that passes a point itself.
        let visitor = VISITOR.with_borrow(Clone::clone);
        if let Some(visitor) = visitor {
            visitor(name);
        }
    }
}

#[cfg(feature = "faults")]
pub use active::{drop_rule, on_point};
#[cfg(feature = "faults")]
pub(crate) use active::{is_dropped, visit};
