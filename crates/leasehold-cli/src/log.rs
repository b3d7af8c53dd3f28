//! Warnings of the stores, which happen while nothing else fails: a password file that can't be read, a login that is refused on an open
//! connection, certificates that are not read again. What the engine logs of leases the commands report by themselves.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use leasehold_store::event_text::text_of;
use tracing::level_filters::LevelFilter;
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};

use crate::output::{Level, message};

/// The log targets of the crates of stores. The warnings that [`Client::warnings`](leasehold::Client::warnings) has, too, are of
/// `leasehold`.
const STORES: &str = "leasehold_";

/// `serve` has a log of its own; and a connection for messages that ends is opened again, while waiters ask.
const OTHERS: [&str; 2] = ["leasehold_serve", "leasehold_redis::subscriber"];

/// The same text is printed once within this time.
const INTERVAL: Duration = Duration::from_secs(60);

/// How many texts are known. They are few, unless one has a number in it.
const MAX_TEXTS: usize = 100;

/// Prints them from now on.
pub(crate) fn print_warnings() {
    // An error means that it does so already.
    let _ = tracing::subscriber::set_global_default(Printer::default());
}

#[derive(Default)]
struct Printer {
    printed: Mutex<BTreeMap<String, Instant>>,
}

impl Printer {
    fn is_due(&self, text: &str) -> bool {
        let mut printed = self.printed.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        printed.retain(|_, at| now.duration_since(*at) < INTERVAL);
        let is_due = printed.len() < MAX_TEXTS && !printed.contains_key(text);
        if is_due {
            printed.insert(text.to_owned(), now);
        }
        is_due
    }
}

impl Subscriber for Printer {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        let target = metadata.target();
        let is_other = OTHERS.iter().any(|other| target.starts_with(other));
        metadata.is_event() && target.starts_with(STORES) && !is_other
    }

    fn max_level_hint(&self) -> Option<LevelFilter> {
        Some(LevelFilter::WARN)
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        let text = text_of(event);
        if self.is_due(&text) {
            message(Level::Warn, "store_warning", format_args!("warning: {text}"));
        }
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn same_text_is_printed_once_in_a_while() {
        let printer = Printer::default();
        assert!(printer.is_due("a") && !printer.is_due("a") && printer.is_due("b"));
        let earlier = Instant::now().checked_sub(INTERVAL).unwrap();
        printer.printed.lock().unwrap().insert("a".to_owned(), earlier);
        assert!(printer.is_due("a") && !printer.is_due("a") && !printer.is_due("b"));
        for number in 0..2 * MAX_TEXTS {
            printer.is_due(&number.to_string());
        }
        assert_eq!(printer.printed.lock().unwrap().len(), MAX_TEXTS);
    }
}
