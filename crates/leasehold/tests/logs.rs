//! What the log hears of an outage: each lease once, and once more when that is over.

use std::fmt;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use leasehold::{Client, Loss};
use leasehold_testkit::{Server, until};
use tracing::field::{Field, Visit};
use tracing::{Event, Level, Metadata, Subscriber, span};

static LINES: Mutex<Vec<String>> = Mutex::new(Vec::new());

/// Remembers what a program would see that prints all but what is for developers.
struct Log;

struct Line(String);

impl Visit for Line {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        use fmt::Write as _;
        let _ = write!(self.0, " {field}={value:?}");
    }
}

impl Subscriber for Log {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= Level::INFO
    }

    fn new_span(&self, _span: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }

    fn record(&self, _span: &span::Id, _values: &span::Record<'_>) {}

    fn record_follows_from(&self, _span: &span::Id, _follows: &span::Id) {}

    fn event(&self, event: &Event<'_>) {
        let mut line = Line(event.metadata().level().to_string());
        event.record(&mut line);
        LINES.lock().unwrap_or_else(PoisonError::into_inner).push(line.0);
    }

    fn enter(&self, _span: &span::Id) {}

    fn exit(&self, _span: &span::Id) {}
}

/// The lines about the mutex of this name, in their order.
fn lines_about(name: &str) -> Vec<String> {
    let lines = LINES.lock().unwrap_or_else(PoisonError::into_inner);
    lines.iter().filter(|line| line.contains(&format!("mutex {name:?}"))).cloned().collect()
}

fn assert_lines(name: &str, expected: &[&str]) {
    let lines = lines_about(name);
    let is_as_expected =
        lines.len() == expected.len() && lines.iter().zip(expected).all(|(line, part)| line.contains(part));
    assert!(is_as_expected, "of {name} {expected:?} was expected, not {lines:#?}");
}

#[tokio::test]
async fn outage_is_logged_once_per_lease_and_once_at_its_end() {
    tracing::subscriber::set_global_default(Log).unwrap();
    let server = Server::on_socket();
    let client = Client::connect(&server.url()).await.unwrap();
    // Each is long enough for a pause of the machine before its first renewal, and after the outage.
    let long = Duration::from_secs(30);
    let kept = [client.mutex("one").ttl(long), client.mutex("two").ttl(long)];
    let kept = [kept[0].lock().await.unwrap(), kept[1].lock().await.unwrap()];
    let lost = client.mutex("lost").ttl(Duration::from_secs(12)).lock().await.unwrap();
    let given_back = client.mutex("back").ttl(long).lock().await.unwrap();
    server.signal("STOP");
    assert!(given_back.release().await.is_err());
    assert_eq!(lost.lost().await, Loss::Expired);
    for guard in &kept {
        // More than one renewal has failed, and none has succeeded.
        until(async || guard.remaining() < Duration::from_secs(14)).await;
    }
    assert_lines("one", &["lease not renewed"]);
    server.signal("CONT");
    until(async || kept.iter().all(|guard| guard.remaining() > long / 2)).await;
    until(async || lines_about("back").len() == 2).await;
    for name in ["one", "two"] {
        assert_lines(name, &["lease not renewed", "lease renewed again"]);
    }
    assert_lines("lost", &["lease not renewed", "lease lost"]);
    assert_lines("back", &["lease not released yet", "lease released after retries"]);
}
