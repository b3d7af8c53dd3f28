//! leasehold's spans in OpenTelemetry: `cargo run -p leasehold-example-opentelemetry`.
//!
//! The program works under a lock inside of a span of its own, and prints each span as a line of JSON when it ends. leasehold's
//! spans `acquire`, `hold` and `release` are in the same trace, and `leasehold show` tells which trace holds the lock.
//!
//! To send the spans to a collector, add the crate `opentelemetry-otlp` and replace `with_simple_exporter` by
//! `with_batch_exporter(opentelemetry_otlp::SpanExporter::builder().with_tonic().build()?)`.

use std::error::Error;
use std::fmt::Debug;
use std::future::{Future, ready};
use std::io::Write;
use std::sync::{Mutex, PoisonError};

use opentelemetry::trace::{SpanId, TraceContextExt as _, TracerProvider as _};
use opentelemetry_sdk::error::{OTelSdkError, OTelSdkResult};
use opentelemetry_sdk::trace::{SdkTracerProvider, SpanData, SpanExporter};
use serde_json::{Map, Value, json};
use tracing::level_filters::LevelFilter;
use tracing::{Instrument as _, Span, info_span};
use tracing_opentelemetry::OpenTelemetrySpanExt as _;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::layer::{Layer as _, SubscriberExt as _};

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn Error>> {
    let provider = SdkTracerProvider::builder().with_simple_exporter(Lines::new(std::io::stdout())).build();
    let client = leasehold::Client::connect("memory:").await?;
    traced(&provider, async {
        let order = order(&client, 42).instrument(info_span!("order", number = 42));
        order.await
    })
    .await?;
    client.close().await?;
    provider.shutdown()?;
    Ok(())
}

/// Runs `work` with a subscriber that passes the program's spans, and leasehold's, to OpenTelemetry. A program does this once, with
/// `tracing_subscriber::util::SubscriberInitExt::init`.
async fn traced<T>(provider: &SdkTracerProvider, work: impl Future<Output = T>) -> T {
    // All of leasehold's spans have the level `debug`.
    let targets = Targets::new().with_default(LevelFilter::INFO).with_target("leasehold", LevelFilter::DEBUG);
    let layer = tracing_opentelemetry::layer().with_tracer(provider.tracer("shop")).with_filter(targets);
    let _guard = tracing::subscriber::set_default(tracing_subscriber::registry().with(layer));
    work.await
}

/// Ships an order. Returns the id of the trace in which the lock was held, as inspection shows it.
async fn order(client: &leasehold::Client, number: u32) -> Result<Option<String>, leasehold::Error> {
    let trace_id = Span::current().context().span().span_context().trace_id().to_string();
    let lock = client.mutex(format!("order:{number}")).trace_id(trace_id);
    let guard = lock.lock().await?;
    let holder = lock.inspect().await?.holders.remove(0);
    info_span!("ship").in_scope(|| ());
    guard.release().await?;
    Ok(holder.metadata.trace_id)
}

/// Writes each span as a line.
struct Lines<W>(Mutex<W>);

impl<W> Lines<W> {
    fn new(out: W) -> Self {
        Self(Mutex::new(out))
    }
}

impl<W> Debug for Lines<W> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Lines")
    }
}

impl<W: Write + Send> SpanExporter for Lines<W> {
    fn export(&self, batch: Vec<SpanData>) -> impl Future<Output = OTelSdkResult> + Send {
        let mut out = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let written = batch.iter().try_for_each(|span| writeln!(out, "{}", object(span)));
        ready(written.map_err(|error| OTelSdkError::InternalFailure(error.to_string())))
    }
}

fn object(span: &SpanData) -> Value {
    let attributes = span.attributes.iter();
    let attributes: Map<String, Value> =
        attributes.map(|pair| (pair.key.to_string(), pair.value.to_string().into())).collect();
    let parent = Some(span.parent_span_id).filter(|parent| *parent != SpanId::INVALID);
    json!({
        "trace_id": span.span_context.trace_id().to_string(),
        "span_id": span.span_context.span_id().to_string(),
        "parent_id": parent.map(|parent| parent.to_string()),
        "name": span.name,
        "micros": span.end_time.duration_since(span.start_time).unwrap_or_default().as_micros().to_string(),
        "attributes": attributes,
    })
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    /// What was written, for the test.
    #[derive(Clone, Default)]
    struct Written(Arc<Mutex<Vec<u8>>>);

    impl Write for Written {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    #[tokio::test]
    async fn spans_of_a_lock_are_exported_in_the_trace_of_the_program() {
        let written = Written::default();
        let provider = SdkTracerProvider::builder().with_simple_exporter(Lines::new(written.clone())).build();
        let client = leasehold::Client::connect("memory:").await.unwrap();
        let shown =
            traced(&provider, async { order(&client, 7).instrument(info_span!("order", number = 7)).await })
                .await
                .unwrap();
        provider.shutdown().unwrap();
        let text = String::from_utf8(written.0.lock().unwrap().clone()).unwrap();
        let spans: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        let named = |name: &str| {
            spans.iter().find(|span| span["name"] == name).unwrap_or_else(|| panic!("{name}: {text}"))
        };
        let order = named("order");
        assert_eq!(shown.as_deref(), order["trace_id"].as_str(), "what inspection shows");
        for name in ["acquire", "hold", "release", "ship"] {
            assert_eq!(named(name)["trace_id"], order["trace_id"], "{name}");
        }
        assert_eq!(named("acquire")["parent_id"], order["span_id"]);
        let attributes = &named("hold")["attributes"];
        assert_eq!((&attributes["lock"], &attributes["outcome"]), (&json!("order:7"), &json!("released")));
    }
}
