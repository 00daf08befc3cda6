//! Repeats the requests of a file that the server refuses for now, after another request has ended.

use std::cell::Cell;
use std::future::Future;
use tokio::sync::Notify;

/// The number of waiting requests that one ended request wakes. Each attempt prepares a request with its images, so
/// waking all of them would cost the square of their number. With two, the number of active requests can grow again.
const WOKEN: usize = 2;

/// The requests of a file that are answered at the same time, in one task.
#[derive(Debug, Default)]
pub(crate) struct BatchRetries {
    /// The number of requests that are being answered. Requests that wait to be repeated do not count.
    active: Cell<usize>,
    /// The number of attempts that have begun.
    begun: Cell<u64>,
    /// Wakes requests that wait when a request has ended, in the order in which they began to wait.
    ended: Notify,
}

impl BatchRetries {
    /// Calls `attempt` until its result is not refused for now. A refused request waits until another one has ended,
    /// because the memory that it lacks belongs to another one. The result of a request that was alone is final.
    ///
    /// # Errors
    /// Returns the error of `attempt`.
    pub async fn answer<T, E, A: Future<Output = Result<T, E>>>(
        &self,
        attempt: impl Fn() -> A,
        is_refused: impl Fn(&T) -> bool,
    ) -> Result<T, E> {
        loop {
            self.active.set(self.active.get() + 1);
            self.begun.set(self.begun.get() + 1);
            let (was_alone, begun) = (self.active.get() == 1, self.begun.get());
            let outcome = attempt().await;
            self.active.set(self.active.get() - 1);
            let is_final = match &outcome {
                Ok(answer) => !is_refused(answer) || was_alone && self.begun.get() == begun,
                Err(_) => true,
            };
            if is_final {
                for _ in 0..WOKEN {
                    self.ended.notify_one();
                }
                return outcome;
            }
            // If no other request is left that could end, this one is repeated at once, and alone.
            if self.active.get() > 0 {
                self.ended.notified().await;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::future::join_all;
    use std::convert::Infallible;
    use tokio::task::yield_now;

    async fn answers(needs: &[usize]) -> Vec<bool> {
        answers_and_attempts(needs).await.0
    }

    /// Answers requests that each need `need` parts of a memory of 10, in several steps. Returns the answers and the
    /// number of attempts.
    async fn answers_and_attempts(needs: &[usize]) -> (Vec<bool>, usize) {
        let (retries, free) = (BatchRetries::default(), Cell::new(10usize));
        let attempts = Cell::new(0);
        let (retries, free, attempts) = (&retries, &free, &attempts);
        let answers = needs.iter().map(|need| async move {
            let attempt = || async {
                attempts.set(attempts.get() + 1);
                let mut parts = 0;
                while parts < *need {
                    yield_now().await;
                    let Some(left) = free.get().checked_sub(1) else {
                        free.set(free.get() + parts);
                        return Ok::<_, Infallible>(false);
                    };
                    free.set(left);
                    parts += 1;
                }
                yield_now().await;
                free.set(free.get() + parts);
                Ok(true)
            };
            let outcome = retries.answer(attempt, |answered| !answered).await;
            outcome.expect("attempts are infallible")
        });
        let answered = join_all(answers).await;
        assert_eq!(free.get(), 10);
        (answered, attempts.get())
    }

    #[tokio::test]
    async fn answer_wakes_few_requests_when_one_ends() {
        for need in [10, 4, 1] {
            let (answered, attempts) = answers_and_attempts(&[need; 200]).await;
            assert_eq!(answered, [true; 200]);
            assert!(attempts <= (1 + WOKEN) * 200, "{need}: {attempts}");
        }
    }

    #[tokio::test]
    async fn answer_repeats_requests_until_there_is_memory() {
        assert_eq!(answers(&[7, 7, 7, 2, 10, 9, 1]).await, [true; 7]);
        assert_eq!(answers(&[10; 12]).await, [true; 12]);
    }

    #[tokio::test]
    async fn answer_that_never_fits_is_final() {
        assert_eq!(answers(&[11]).await, [false]);
        assert_eq!(answers(&[4, 11, 8, 11]).await, [true, false, true, false]);
    }
}
