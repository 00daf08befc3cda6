//! The engine of an embedding model: a thread for each device, which embeds the texts of many requests together.

mod metrics;
mod queue;

use super::supervise::supervise;
use crate::error::{ErrorKind, RequestError};
use burn_gemma4::{DeviceUse, EmbeddingGemma, Gemma4Error};
use metrics::EmbeddingMetrics;
use queue::{Job, Pass, Queue};
use std::future::Future;
use std::ops::Deref;
use std::sync::{Arc, Mutex};
use tokio::sync::oneshot;

/// A request for the embeddings of texts.
#[derive(Debug)]
pub struct EmbeddingRequest<M = ()> {
    /// The tokens of each text, with those that the tokenizer adds.
    pub texts: Vec<Vec<u32>>,
    /// The number of elements to which the embeddings are truncated, or `None` for whole embeddings.
    pub dimensions: Option<usize>,
    /// A value that is dropped when the request has ended, such as a reservation of memory.
    pub memory: M,
}

/// The embeddings of the texts of a request, in the order of the texts.
pub type Embeddings = Vec<Vec<f32>>;

/// The engine of an embedding model. Clones share the engine. The engine [drains](Self::drain) when the last clone is
/// dropped.
///
/// The engine has a thread for each device. A thread takes texts from the queue for a pass of up to
/// [`EmbeddingGemma::PASS_TOKENS`] tokens. After each pass the next request is first, so that a request with many texts
/// does not delay the others.
///
/// ```no_run
/// use burn_gemma4::{EmbedOptions, EmbeddingGemma};
/// use gemma4_serve::engine::{EmbeddingEngine, EmbeddingEngineOptions, EmbeddingRequest};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let model = EmbeddingGemma::from_pretrained("embeddinggemma-2", &Default::default())?;
/// let texts = vec![model.tokens("Mars is red.", &EmbedOptions::new())?];
/// let models = vec![("cpu".to_owned(), model)];
/// let (engine, end) = EmbeddingEngine::start(models, EmbeddingEngineOptions::default())?;
/// let request = EmbeddingRequest { texts, dimensions: Some(256), memory: () };
/// let runtime = tokio::runtime::Builder::new_current_thread().build()?;
/// let embeddings = runtime.block_on(engine.submit(request)?)?;
/// assert_eq!(embeddings[0].len(), 256);
/// engine.drain();
/// runtime.block_on(end)?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct EmbeddingEngine(Arc<Owner>);

/// The options of the engine of an embedding model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EmbeddingEngineOptions {
    /// The largest number of requests that wait. Further requests are refused.
    pub max_queue: usize,
    /// The largest number of tokens of a text, which bounds the memory of a pass. The checkpoint's limit holds if it is
    /// smaller.
    pub context: usize,
}

impl Default for EmbeddingEngineOptions {
    /// 256 requests, and texts of up to [`EmbeddingGemma::PASS_TOKENS`] tokens.
    fn default() -> Self {
        Self {
            max_queue: 256,
            context: EmbeddingGemma::PASS_TOKENS,
        }
    }
}

/// The part of the engine that its threads do not own. Dropping the last clone of the engine thus ends the threads.
#[derive(Debug)]
struct Owner(Arc<Shared>);

impl Drop for Owner {
    fn drop(&mut self) {
        self.0.queue.drain();
    }
}

impl Deref for Owner {
    type Target = Shared;

    fn deref(&self) -> &Shared {
        &self.0
    }
}

#[derive(Debug)]
struct Shared {
    queue: Queue,
    model: EmbeddingGemma,
    devices: Vec<String>,
    max_queue: usize,
    metrics: EmbeddingMetrics,
}

impl EmbeddingEngine {
    /// Starts a thread for each model. All models have been loaded from the same checkpoint. `models` holds the name of
    /// each model's device. The returned future completes with the reason when a thread fails, or with `Ok` after a
    /// [drain](Self::drain).
    ///
    /// # Errors
    /// Returns [`Gemma4Error::Argument`] if there is no model, if the models differ, if `max_queue` is 0, or if `context`
    /// is too small for any text. Returns [`Gemma4Error::Device`] if a thread cannot be started.
    pub fn start(
        models: Vec<(String, EmbeddingGemma)>,
        options: EmbeddingEngineOptions,
    ) -> Result<
        (
            Self,
            impl Future<Output = Result<(), String>> + Send + Sync + use<>,
        ),
        Gemma4Error,
    > {
        let refuse = |argument, reason: &str| {
            let reason = reason.to_owned();
            Err(Gemma4Error::Argument { argument, reason })
        };
        let Some((_, first)) = models.first() else {
            return refuse("models", "is empty; expected at least one model");
        };
        let is_other = |model: &EmbeddingGemma| {
            model.config() != first.config() || model.model().dtype() != first.model().dtype()
        };
        if models.iter().any(|(_, model)| is_other(model)) {
            return refuse("models", "differ; expected the same checkpoint and dtype");
        }
        if options.max_queue == 0 {
            return refuse("max_queue", "is 0; expected at least 1");
        }
        let first = first.clone().with_max_tokens(options.context)?;
        let limit = |(device, model): (String, EmbeddingGemma)| {
            Ok((device, model.with_max_tokens(options.context)?))
        };
        let models = models.into_iter().map(limit);
        let models = models.collect::<Result<Vec<_>, Gemma4Error>>()?;
        let shared = Arc::new(Shared {
            queue: Queue::default(),
            model: first,
            devices: models.iter().map(|(device, _)| device.clone()).collect(),
            max_queue: options.max_queue,
            metrics: EmbeddingMetrics::new(),
        });
        let engine = Self(Arc::new(Owner(shared.clone())));
        let (ended, outcome) = oneshot::channel();
        let ended = Arc::new(End {
            sender: Mutex::new(Some(ended)),
        });
        let is_single = models.len() == 1;
        for (device, model) in models {
            let (shared, ended) = (shared.clone(), ended.clone());
            let place = match is_single {
                true => String::new(),
                false => format!("{device}: "),
            };
            let work = move || {
                let run = || shared.run(&model, &place);
                if let Err(reason) = supervise(|| model.on_stream_of_weights(run)) {
                    shared.queue.fail(reason.clone());
                    ended.send(Err(reason));
                }
                // The last thread drops the last `End`, which reports that all threads have ended.
                drop(ended);
            };
            std::thread::Builder::new()
                .name("embeddings".into())
                .spawn(work)
                .map_err(|error| {
                    engine.drain();
                    Gemma4Error::Device(format!("cannot start a thread: {error}"))
                })?;
        }
        drop(ended);
        // The sender is not dropped without a value: `End` sends one.
        let end = async move { outcome.await.unwrap_or(Ok(())) };
        Ok((engine, end))
    }

    /// Submits a request. Dropping the returned future cancels the request: its texts that have not begun do not run.
    ///
    /// # Errors
    /// Returns an error if a text is not valid for the model, if the queue is full, or if the engine is draining or has
    /// failed. The future returns an error if an embedding is not finite, or if the engine fails.
    pub fn submit<M: Send + 'static>(
        &self,
        request: EmbeddingRequest<M>,
    ) -> Result<impl Future<Output = Result<Embeddings, RequestError>> + Send + use<M>, RequestError>
    {
        let shared = &self.0;
        let EmbeddingRequest {
            texts,
            dimensions,
            memory,
        } = request;
        if let Some(dimensions) = dimensions {
            shared.model.config().check_dimensions(dimensions)?;
        }
        if texts.is_empty() {
            let reason = "is empty; expected at least 1 text";
            return Err(RequestError::field("input", reason));
        }
        for (index, text) in texts.iter().enumerate() {
            let checked = shared.model.check_tokens(text);
            checked.map_err(|error| at_input(index, error))?;
        }
        self.check_open()?;
        let (sender, receiver) = oneshot::channel();
        let job = Job::new(texts, dimensions, sender, Box::new(memory));
        if !shared.queue.push(job, shared.max_queue, &shared.metrics) {
            self.check_open()?;
            return Err(self.refuse_full());
        }
        let shared = shared.0.clone();
        Ok(async move {
            match receiver.await {
                Ok(outcome) => outcome,
                // The job was dropped without an outcome, because the engine has ended.
                Err(_) => Err(shared.failure().unwrap_or_else(draining)),
            }
        })
    }

    /// Checks that a request can be submitted at this moment. [`submit`](Self::submit) checks the same again.
    ///
    /// # Errors
    /// Returns [`ErrorKind::Internal`] if a thread has failed, [`ErrorKind::Draining`] after [`drain`](Self::drain), and
    /// [`ErrorKind::Busy`] if the queue is full.
    pub fn check_open(&self) -> Result<(), RequestError> {
        if let Some(error) = self.failure() {
            return Err(error);
        }
        if self.is_draining() {
            return Err(draining());
        }
        match self.0.queue.has_place(self.0.max_queue, &self.0.metrics) {
            true => Ok(()),
            false => Err(self.refuse_full()),
        }
    }

    fn refuse_full(&self) -> RequestError {
        self.0.metrics.ended("refused");
        let message = format!(
            "the queue is full with {} requests; try again later",
            self.0.max_queue
        );
        RequestError::new(ErrorKind::Busy, message)
    }

    /// Lets the engine finish the submitted requests, and refuse all further requests. The threads then end.
    pub fn drain(&self) {
        self.0.queue.drain();
    }

    /// True if [`drain`](Self::drain) has been called.
    pub fn is_draining(&self) -> bool {
        self.0.queue.is_draining()
    }

    /// Returns the reason why a thread has failed, or `None` if no thread has failed.
    pub fn failure(&self) -> Option<RequestError> {
        self.0.failure()
    }

    /// The model, with its tokenizer and prompts.
    pub fn model(&self) -> &EmbeddingGemma {
        &self.0.model
    }

    /// The names of the devices.
    pub fn devices(&self) -> &[String] {
        &self.0.devices
    }

    /// Returns the metrics in Prometheus's text format.
    pub fn metrics_text(&self) -> String {
        self.0.metrics.text()
    }
}

impl Shared {
    fn failure(&self) -> Option<RequestError> {
        let reason = self.queue.failure()?;
        let message = format!("the engine has failed: {reason}");
        Some(RequestError::new(ErrorKind::Internal, message))
    }

    /// Embeds texts until the engine has drained or failed. Returns the reason of a failure, after `place`.
    fn run(&self, model: &EmbeddingGemma, place: &str) -> Result<(), String> {
        let device = model.model().device();
        while let Some(pass) = self
            .queue
            .next_pass(EmbeddingGemma::PASS_TOKENS, &self.metrics)
        {
            self.metrics.begin(&pass);
            self.queue.run(pass, place, |pass| {
                // The use ends with the pass, because other threads wait for it, such as one that opens another device.
                let in_use = DeviceUse::begin(&device);
                let embeddings = model.try_embed_tokens(pass.texts());
                drop(in_use);
                self.finish(pass, embeddings?);
                Ok(())
            })?;
        }
        Ok(())
    }

    /// Sends the embeddings of a pass to their requests.
    fn finish(&self, pass: &Pass, embeddings: Vec<Result<Vec<f32>, Gemma4Error>>) {
        for (place, embedding) in pass.places().iter().zip(embeddings) {
            let embedding = embedding.map(|embedding| match place.job.dimensions {
                Some(dimensions) => self.model.truncated(embedding, dimensions),
                None => embedding,
            });
            let embedding = embedding.map_err(|error| at_input(place.index, error));
            place.job.set(place.index, embedding, &self.metrics);
        }
    }
}

/// Reports the end of all threads when the last thread drops it.
struct End {
    sender: Mutex<Option<oneshot::Sender<Result<(), String>>>>,
}

impl End {
    fn send(&self, outcome: Result<(), String>) {
        let mut sender = self
            .sender
            .lock()
            .unwrap_or_else(|error| error.into_inner());
        if let Some(sender) = sender.take() {
            // Ignore a failed send: the receiver is gone if the server has ended first.
            let _ = sender.send(outcome);
        }
    }
}

impl Drop for End {
    fn drop(&mut self) {
        self.send(Ok(()));
    }
}

fn draining() -> RequestError {
    RequestError::new(ErrorKind::Draining, "the server is shutting down")
}

/// Converts an error about one text of a request.
pub(crate) fn at_input(index: usize, error: Gemma4Error) -> RequestError {
    match error {
        Gemma4Error::Argument {
            argument: "text" | "tokens" | "prompt",
            reason,
        } => RequestError {
            field: Some("input".into()),
            ..RequestError::field(format!("input[{index}]"), reason)
        },
        other => other.into(),
    }
}
