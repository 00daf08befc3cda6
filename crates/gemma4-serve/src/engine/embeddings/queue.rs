//! The queue of requests for embeddings, and the passes that threads take from it.

use super::Embeddings;
use super::metrics::EmbeddingMetrics;
use crate::engine::supervise::supervise;
use crate::error::RequestError;
use burn_gemma4::{EmbeddingGemma, Gemma4Error};
use std::any::Any;
use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use tokio::sync::oneshot;

/// A request in the queue or in a pass.
pub(super) struct Job {
    pub dimensions: Option<usize>,
    state: Mutex<Progress>,
}

/// The progress of a request.
struct Progress {
    /// The texts. A text that a pass has taken is empty.
    texts: Vec<Vec<u32>>,
    /// The index of the first text that no pass has taken.
    next: usize,
    embeddings: Vec<Option<Vec<f32>>>,
    /// The number of texts without an embedding.
    left: usize,
    /// `None` after the outcome was sent.
    sender: Option<oneshot::Sender<Result<Embeddings, RequestError>>>,
    /// The request's reservation of memory, which ends with the outcome.
    memory: Option<Box<dyn Any + Send>>,
}

impl Job {
    pub fn new(
        texts: Vec<Vec<u32>>,
        dimensions: Option<usize>,
        sender: oneshot::Sender<Result<Embeddings, RequestError>>,
        memory: Box<dyn Any + Send>,
    ) -> Arc<Self> {
        let count = texts.len();
        Arc::new(Self {
            dimensions,
            state: Mutex::new(Progress {
                texts,
                next: 0,
                embeddings: vec![None; count],
                left: count,
                sender: Some(sender),
                memory: Some(memory),
            }),
        })
    }

    /// Stores the embedding of a text. The last embedding and the first error end the request.
    pub fn set(
        &self,
        index: usize,
        embedding: Result<Vec<f32>, RequestError>,
        metrics: &EmbeddingMetrics,
    ) {
        let mut state = lock(&self.state);
        match embedding {
            Ok(embedding) => state.embeddings[index] = Some(embedding),
            Err(error) => return state.end(Err(error), metrics),
        }
        state.left -= 1;
        if state.left == 0 {
            let embeddings = std::mem::take(&mut state.embeddings);
            state.end(Ok(embeddings.into_iter().flatten().collect()), metrics);
        }
    }

    /// Takes up to `count` texts with up to `tokens` tokens. If `is_first`, takes a text even if it has more tokens.
    /// Returns the indices and the tokens of the texts.
    fn take(&self, tokens: usize, count: usize, is_first: bool) -> Vec<(usize, Vec<u32>)> {
        let mut state = lock(&self.state);
        let mut taken = Vec::new();
        let mut left = tokens;
        while state.next < state.texts.len() && taken.len() < count {
            let index = state.next;
            let count = state.texts[index].len();
            if count > left && !(is_first && taken.is_empty()) {
                break;
            }
            left = left.saturating_sub(count);
            taken.push((index, std::mem::take(&mut state.texts[index])));
            state.next += 1;
        }
        taken
    }

    /// True if no pass needs a text of the request.
    fn is_taken(&self) -> bool {
        let state = lock(&self.state);
        state.next >= state.texts.len() || state.sender.is_none()
    }

    /// True if the client has left. The request then has ended.
    fn is_abandoned(&self) -> bool {
        let mut state = lock(&self.state);
        let is_closed = state.sender.as_ref().is_some_and(|one| one.is_closed());
        if is_closed {
            state.sender = None;
            state.memory = None;
        }
        is_closed
    }
}

impl Progress {
    /// Counts the outcome and sends it, unless the request has ended before.
    fn end(&mut self, outcome: Result<Embeddings, RequestError>, metrics: &EmbeddingMetrics) {
        self.memory = None;
        let Some(sender) = self.sender.take() else {
            return;
        };
        metrics.ended(match &outcome {
            _ if sender.is_closed() => "cancelled",
            Ok(_) => "finished",
            Err(_) => "failed",
        });
        // Ignore a failed send: the client has left.
        let _ = sender.send(outcome);
    }
}

impl fmt::Debug for Job {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Job")
            .field("dimensions", &self.dimensions)
            .finish_non_exhaustive()
    }
}

/// A text of a pass: the request, and the index of the text in the request.
#[derive(Debug)]
pub(super) struct Place {
    pub job: Arc<Job>,
    pub index: usize,
}

/// The texts of a pass, of one or several requests.
#[derive(Debug, Default)]
pub(super) struct Pass {
    texts: Vec<Vec<u32>>,
    places: Vec<Place>,
}

impl Pass {
    pub fn texts(&self) -> &[Vec<u32>] {
        &self.texts
    }

    pub fn places(&self) -> &[Place] {
        &self.places
    }

    pub fn tokens(&self) -> usize {
        self.texts.iter().map(Vec::len).sum()
    }
}

/// The queue of requests.
#[derive(Debug, Default)]
pub(super) struct Queue {
    state: Mutex<QueueState>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct QueueState {
    jobs: VecDeque<Arc<Job>>,
    is_draining: bool,
    failure: Option<String>,
}

impl Queue {
    fn lock(&self) -> MutexGuard<'_, QueueState> {
        lock(&self.state)
    }

    /// True if the queue has fewer than `limit` requests whose clients wait.
    pub fn has_place(&self, limit: usize, metrics: &EmbeddingMetrics) -> bool {
        self.lock().has_place(limit, metrics)
    }

    /// Appends a request. Returns false if the queue has `limit` requests whose clients wait, or takes none.
    pub fn push(&self, job: Arc<Job>, limit: usize, metrics: &EmbeddingMetrics) -> bool {
        let mut state = self.lock();
        if state.is_draining || state.failure.is_some() || !state.has_place(limit, metrics) {
            return false;
        }
        state.jobs.push_back(job);
        metrics.queued(state.jobs.len());
        drop(state);
        self.changed.notify_one();
        true
    }

    /// Waits for requests, and takes the texts of a pass with up to `tokens` tokens and
    /// [`EmbeddingGemma::PASS_TEXTS`] texts. A longer text is a pass of its own. If requests remain, wakes another thread.
    /// Returns `None` after a drain, when the queue is empty, and after a failure.
    pub fn next_pass(&self, tokens: usize, metrics: &EmbeddingMetrics) -> Option<Pass> {
        let mut state = self.lock();
        loop {
            if state.failure.is_some() {
                return None;
            }
            let pass = state.take_pass(tokens, metrics);
            metrics.queued(state.jobs.len());
            if !pass.texts.is_empty() {
                if !state.jobs.is_empty() {
                    // A push wakes one thread, but the texts of a large request are for all devices.
                    self.changed.notify_one();
                }
                return Some(pass);
            }
            if state.is_draining {
                return None;
            }
            let waited = self.changed.wait(state);
            state = waited.unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Runs `work` on a pass. A failure is recorded before the pass is dropped, so that its requests learn the reason.
    ///
    /// # Errors
    /// Returns the reason if `work` fails or panics. `place` names the device in it.
    pub fn run(
        &self,
        pass: Pass,
        place: &str,
        work: impl FnOnce(&Pass) -> Result<(), Gemma4Error>,
    ) -> Result<(), String> {
        let outcome = supervise(|| work(&pass)).map_err(|reason| format!("{place}{reason}"));
        if let Err(reason) = &outcome {
            self.fail(reason.clone());
        }
        outcome
    }

    pub fn drain(&self) {
        self.lock().is_draining = true;
        self.changed.notify_all();
    }

    pub fn is_draining(&self) -> bool {
        self.lock().is_draining
    }

    /// Records the first failure, and drops all requests.
    pub fn fail(&self, reason: String) {
        let mut state = self.lock();
        state.failure.get_or_insert(reason);
        let jobs = std::mem::take(&mut state.jobs);
        drop(state);
        drop(jobs);
        self.changed.notify_all();
    }

    pub fn failure(&self) -> Option<String> {
        self.lock().failure.clone()
    }
}

impl QueueState {
    /// True if the queue has fewer than `limit` requests. Drops the requests of clients that have left from a full queue.
    fn has_place(&mut self, limit: usize, metrics: &EmbeddingMetrics) -> bool {
        if self.jobs.len() >= limit {
            self.jobs.retain(|job| {
                let is_abandoned = job.is_abandoned();
                if is_abandoned {
                    metrics.ended("cancelled");
                }
                !is_abandoned
            });
            metrics.queued(self.jobs.len());
        }
        self.jobs.len() < limit
    }

    fn take_pass(&mut self, tokens: usize, metrics: &EmbeddingMetrics) -> Pass {
        let mut pass = Pass::default();
        let mut left = tokens;
        let mut unfinished = None;
        while let Some(job) = self.jobs.pop_front() {
            if job.is_abandoned() {
                metrics.ended("cancelled");
                continue;
            }
            if job.is_taken() {
                continue;
            }
            let count = EmbeddingGemma::PASS_TEXTS - pass.texts.len();
            let taken = job.take(left, count, pass.texts.is_empty());
            for (index, text) in taken {
                left = left.saturating_sub(text.len());
                pass.texts.push(text);
                let job = job.clone();
                pass.places.push(Place { job, index });
            }
            if !job.is_taken() {
                unfinished = Some(job);
                break;
            }
        }
        // The rest of a large request goes behind the others.
        self.jobs.extend(unfinished);
        pass
    }
}

/// Locks a mutex. A poisoned lock is ignored: the state is consistent even after a panic.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    type Outcome = oneshot::Receiver<Result<Embeddings, RequestError>>;

    fn job(lengths: &[usize]) -> (Arc<Job>, Outcome) {
        let (sender, receiver) = oneshot::channel();
        let texts = lengths.iter().map(|length| vec![1; *length]);
        let job = Job::new(texts.collect(), None, sender, Box::new(()));
        (job, receiver)
    }

    fn lengths(pass: &Pass) -> Vec<usize> {
        pass.texts().iter().map(Vec::len).collect()
    }

    #[test]
    fn next_pass_alternates_between_a_large_and_other_requests() {
        let (queue, metrics) = (Queue::default(), EmbeddingMetrics::new());
        let (large, mut large_outcome) = job(&[4, 4, 4, 20]);
        let (small, mut small_outcome) = job(&[3]);
        for job in [&large, &small] {
            assert!(queue.push(job.clone(), 2, &metrics));
        }
        let (third, _) = job(&[1]);
        assert!(!queue.push(third, 2, &metrics), "the queue is full");
        let next = || queue.next_pass(10, &metrics).expect("there are texts");
        let passes = [next(), next(), next()];
        assert_eq!(
            passes.each_ref().map(lengths),
            [vec![4, 4], vec![3, 4], vec![20]]
        );
        for pass in &passes {
            for place in pass.places() {
                let embedding = Ok(vec![place.index as f32]);
                place.job.set(place.index, embedding, &metrics);
            }
        }
        let found = large_outcome.try_recv().expect("the request has ended");
        let expected = (0..4).map(|index| vec![index as f32]).collect();
        assert_eq!(found, Ok(expected));
        assert_eq!(
            small_outcome.try_recv().expect("it has ended"),
            Ok(vec![vec![0.0]])
        );
        queue.drain();
        assert!(queue.next_pass(10, &metrics).is_none());
        let (late, _) = job(&[1]);
        assert!(!queue.push(late, 2, &metrics), "the queue drains");
    }

    #[test]
    fn next_pass_skips_requests_whose_clients_have_left() {
        let (queue, metrics) = (Queue::default(), EmbeddingMetrics::new());
        let (left, outcome) = job(&[1]);
        let (waiting, _outcome) = job(&[2]);
        for job in [left, waiting] {
            assert!(queue.push(job, 2, &metrics));
        }
        drop(outcome);
        let pass = queue.next_pass(10, &metrics).expect("there is a text");
        assert_eq!(lengths(&pass), [2]);
        assert!(metrics.text().contains("outcome=\"cancelled\"} 1"));
    }

    #[test]
    fn next_pass_wakes_another_thread_if_texts_remain() {
        let queue = Arc::new(Queue::default());
        let (sender, passes) = std::sync::mpsc::channel();
        for _ in 0..2 {
            let (queue, sender) = (queue.clone(), sender.clone());
            std::thread::spawn(move || {
                let pass = queue.next_pass(4, &EmbeddingMetrics::new());
                sender.send(pass.map(|pass| lengths(&pass)))
            });
        }
        // Both threads wait before the request arrives, so that one notification does not reach both.
        std::thread::sleep(Duration::from_millis(100));
        let (large, _outcome) = job(&[4, 4]);
        assert!(queue.push(large, 2, &EmbeddingMetrics::new()));
        for _ in 0..2 {
            let pass = passes.recv_timeout(Duration::from_secs(60));
            assert_eq!(pass.expect("each thread gets a pass"), Some(vec![4]));
        }
    }

    #[test]
    fn next_pass_has_a_limited_number_of_texts() {
        let (queue, metrics) = (Queue::default(), EmbeddingMetrics::new());
        let (first, _one) = job(&[1; 5]);
        let (second, _two) = job(&[1; EmbeddingGemma::PASS_TEXTS]);
        for job in [first, second] {
            assert!(queue.push(job, 2, &metrics));
        }
        let passes = [(); 2].map(|()| queue.next_pass(8192, &metrics).expect("there are texts"));
        let counts = passes.map(|pass| pass.texts().len());
        assert_eq!(counts, [EmbeddingGemma::PASS_TEXTS, 5]);
    }

    #[test]
    fn push_to_a_full_queue_drops_requests_whose_clients_have_left() {
        let (queue, metrics) = (Queue::default(), EmbeddingMetrics::new());
        let (left, outcome) = job(&[1]);
        assert!(queue.push(left, 1, &metrics));
        let (waiting, _outcome) = job(&[2]);
        assert!(
            !queue.push(waiting.clone(), 1, &metrics),
            "the queue is full"
        );
        drop(outcome);
        assert!(queue.push(waiting, 1, &metrics));
        assert!(metrics.text().contains("outcome=\"cancelled\"} 1"));
    }

    #[test]
    fn panic_in_a_pass_is_known_before_its_requests_end() {
        struct Memory(Arc<Queue>);
        impl Drop for Memory {
            fn drop(&mut self) {
                // The client learns of the end of its request at this moment.
                assert_eq!(self.0.failure().as_deref(), Some("cuda:1: kernel 3 failed"));
            }
        }
        let (queue, metrics) = (Arc::new(Queue::default()), EmbeddingMetrics::new());
        let (sender, mut outcome) = oneshot::channel();
        let memory = Box::new(Memory(queue.clone()));
        let job = Job::new(vec![vec![1]], None, sender, memory);
        assert!(queue.push(job, 1, &metrics));
        let pass = queue.next_pass(10, &metrics).expect("there is a text");
        let ended = queue.run(pass, "cuda:1: ", |_| panic!("kernel {} failed", 3));
        assert_eq!(ended, Err("cuda:1: kernel 3 failed".into()));
        assert!(outcome.try_recv().is_err());
    }

    #[test]
    fn failure_drops_the_requests() {
        let (queue, metrics) = (Queue::default(), EmbeddingMetrics::new());
        let (waiting, mut outcome) = job(&[1]);
        assert!(queue.push(waiting, 2, &metrics));
        queue.fail("kernel 3 failed".into());
        queue.fail("later".into());
        assert!(outcome.try_recv().is_err());
        assert_eq!(queue.failure().as_deref(), Some("kernel 3 failed"));
        assert!(queue.next_pass(10, &metrics).is_none());
    }

    #[test]
    fn error_of_one_text_ends_its_request_alone() {
        let (job, mut outcome) = job(&[1, 1]);
        let metrics = EmbeddingMetrics::new();
        let error = RequestError::field("input[0]", "is not finite");
        job.set(0, Err(error.clone()), &metrics);
        assert_eq!(outcome.try_recv().expect("it has ended"), Err(error));
        assert!(job.is_taken(), "the other text does not run");
        job.set(1, Ok(vec![]), &metrics);
        let text = metrics.text();
        assert!(text.contains("outcome=\"failed\"} 1"), "{text}");
        assert!(!text.contains("finished"), "{text}");
    }
}
