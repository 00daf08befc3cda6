//! The metrics of an embedding engine, in the text format of Prometheus.

use super::super::metrics::text_of;
use super::queue::Pass;
use prometheus::{IntCounter, IntCounterVec, IntGauge, Opts, Registry};

/// The metrics of an embedding engine.
#[derive(Debug)]
pub(super) struct EmbeddingMetrics {
    registry: Registry,
    queued: IntGauge,
    requests: IntCounterVec,
    texts: IntCounter,
    tokens: IntCounter,
    passes: IntCounter,
}

impl EmbeddingMetrics {
    pub fn new() -> Self {
        // The names of the metrics are valid and distinct, so no registration fails.
        Self::try_new().expect("the metrics have valid and distinct names")
    }

    fn try_new() -> prometheus::Result<Self> {
        let registry = Registry::new_custom(Some("gemma4".into()), None)?;
        let queued = IntGauge::new(
            "queued_requests",
            "Requests with texts that wait for a pass",
        )?;
        registry.register(Box::new(queued.clone()))?;
        let requests = Opts::new("requests_total", "Requests by outcome");
        let requests = IntCounterVec::new(requests, &["outcome"])?;
        registry.register(Box::new(requests.clone()))?;
        let counter = |name: &str, help: &str| {
            let counter = IntCounter::new(name, help)?;
            registry.register(Box::new(counter.clone()))?;
            prometheus::Result::Ok(counter)
        };
        Ok(Self {
            queued,
            requests,
            texts: counter("embedded_texts_total", "Texts that were embedded")?,
            tokens: counter(
                "prompt_tokens_total",
                "Tokens of the texts that were embedded",
            )?,
            passes: counter(
                "embedding_passes_total",
                "Passes of the model over packed texts",
            )?,
            registry,
        })
    }

    pub fn queued(&self, requests: usize) {
        self.queued.set(requests as i64);
    }

    /// Counts the end of a request by its outcome.
    pub fn ended(&self, outcome: &str) {
        self.requests.with_label_values(&[outcome]).inc();
    }

    /// Counts a pass that begins.
    pub fn begin(&self, pass: &Pass) {
        self.passes.inc();
        self.texts.inc_by(pass.texts().len() as u64);
        self.tokens.inc_by(pass.tokens() as u64);
    }

    pub fn text(&self) -> String {
        text_of(&self.registry.gather())
    }
}
