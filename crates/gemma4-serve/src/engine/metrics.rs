//! The engine's metrics, in the text format of Prometheus.

use prometheus::{
    Encoder, Histogram, HistogramOpts, IntCounter, IntCounterVec, IntGauge, Opts, Registry,
    TextEncoder,
    proto::{LabelPair, MetricFamily},
};

/// The label that names the device of an engine, if a server has several.
pub(super) const DEVICE: &str = "device";

/// The metrics of an engine.
#[derive(Clone, Debug)]
pub struct Metrics {
    registry: Registry,
    /// The number of requests in the queue, before their prefill.
    pub queued: IntGauge,
    /// The number of requests whose prompts are being prefilled.
    pub prefilling: IntGauge,
    /// The number of answers that are being decoded.
    pub running: IntGauge,
    /// The largest number of KV cache tokens that the admitted answers can need.
    pub reserved_tokens: IntGauge,
    /// The size of the KV cache on the device, in bytes.
    pub cache_bytes: IntGauge,
    /// The numbers of finished, failed, cancelled and refused requests. A finished request with several answers counts
    /// once per answer.
    pub requests: IntCounterVec,
    /// The size of the keys and values of earlier prompts on the device, in bytes.
    pub prefix_cache_bytes: IntGauge,
    /// The number of prefilled prompt tokens, without cached tokens.
    pub prompt_tokens: IntCounter,
    /// The number of prompts that ran in one pass with other prompts.
    pub packed_prompts: IntCounter,
    /// The number of prompt tokens whose keys and values came from an earlier prompt.
    pub cached_prompt_tokens: IntCounter,
    /// The number of generated tokens.
    pub generated_tokens: IntCounter,
    /// The seconds from the arrival of a request to its first token.
    pub first_token: Histogram,
    /// The seconds between two consecutive tokens of an answer.
    pub between_tokens: Histogram,
    /// The seconds from the arrival of a request to the start of its prefill.
    pub waiting: Histogram,
}

impl Metrics {
    /// Creates metrics in a new Prometheus registry.
    pub fn new() -> Self {
        // The names of the metrics are valid and distinct, so no registration fails.
        Self::try_new().expect("the metrics have valid and distinct names")
    }

    fn try_new() -> prometheus::Result<Self> {
        let registry = Registry::new_custom(Some("gemma4".into()), None)?;
        let gauge = |name: &str, help: &str| {
            let gauge = IntGauge::new(name, help)?;
            registry.register(Box::new(gauge.clone()))?;
            prometheus::Result::Ok(gauge)
        };
        let counter = |name: &str, help: &str| {
            let counter = IntCounter::new(name, help)?;
            registry.register(Box::new(counter.clone()))?;
            prometheus::Result::Ok(counter)
        };
        let histogram = |name: &str, help: &str| {
            let buckets = prometheus::exponential_buckets(0.001, 2.0, 17)?;
            let histogram = Histogram::with_opts(HistogramOpts::new(name, help).buckets(buckets))?;
            registry.register(Box::new(histogram.clone()))?;
            prometheus::Result::Ok(histogram)
        };
        let requests = IntCounterVec::new(
            Opts::new("requests_total", "Requests by outcome"),
            &["outcome"],
        )?;
        registry.register(Box::new(requests.clone()))?;
        Ok(Self {
            queued: gauge(
                "queued_requests",
                "Requests that wait for a place in the batch",
            )?,
            prefilling: gauge(
                "prefilling_requests",
                "Requests whose prompts are being read",
            )?,
            running: gauge("running_answers", "Answers in the batch")?,
            reserved_tokens: gauge("reserved_tokens", "Tokens for which KV cache is reserved")?,
            cache_bytes: gauge("kv_cache_bytes", "Bytes of the KV cache on the device")?,
            prefix_cache_bytes: gauge(
                "prefix_cache_bytes",
                "Bytes of the keys and values of earlier prompts",
            )?,
            requests,
            prompt_tokens: counter("prompt_tokens_total", "Prompt tokens that were read")?,
            packed_prompts: counter(
                "packed_prompts_total",
                "Prompts that were read in one pass with other prompts",
            )?,
            cached_prompt_tokens: counter(
                "cached_prompt_tokens_total",
                "Prompt tokens that were taken over from earlier prompts",
            )?,
            generated_tokens: counter("generated_tokens_total", "Generated tokens")?,
            first_token: histogram(
                "time_to_first_token_seconds",
                "Time from the arrival of a request to its first token",
            )?,
            between_tokens: histogram(
                "time_between_tokens_seconds",
                "Time between two tokens of an answer",
            )?,
            waiting: histogram(
                "queue_time_seconds",
                "Time from the arrival of a request to its admission",
            )?,
            registry,
        })
    }

    /// Returns all metrics in Prometheus's text format.
    pub fn text(&self) -> String {
        text_of(&self.registry.gather())
    }

    /// Returns the metrics, each with a label that names the device.
    pub(super) fn families_of(&self, device: &str) -> Vec<MetricFamily> {
        let mut families = self.registry.gather();
        for metric in families.iter_mut().flat_map(MetricFamily::mut_metric) {
            let mut label = LabelPair::default();
            label.set_name(DEVICE.into());
            label.set_value(device.into());
            let mut labels = metric.take_label();
            labels.insert(0, label);
            metric.set_label(labels);
        }
        families
    }
}

/// Returns metrics in Prometheus's text format.
pub(super) fn text_of(families: &[MetricFamily]) -> String {
    let mut bytes = Vec::new();
    // The encoder fails only for a metric without a value, and no registry of an engine contains such a metric.
    match TextEncoder::new().encode(families, &mut bytes) {
        Ok(()) => String::from_utf8_lossy(&bytes).into_owned(),
        Err(error) => format!("# error: {error}\n"),
    }
}

impl Default for Metrics {
    fn default() -> Self {
        Self::new()
    }
}
