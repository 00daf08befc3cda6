//! The numbers of answers that the clients of a soak have asked for, and the comparison with the server's counts.

use crate::cases::Case;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};

/// The numbers of answers to requests that were sent completely.
#[derive(Debug, Default)]
pub struct Sent {
    /// Answers that the server must have counted: their requests got the head of a response.
    counted: AtomicU64,
    /// Answers whose clients left before the head of the response. The server may have seen the end of the connection
    /// before the request reached the engine.
    uncertain: AtomicU64,
}

impl Sent {
    /// Counts a request whose client has read the whole response.
    pub fn whole(&self, case: &Case) {
        self.left(case, true);
    }

    /// Counts a request whose client has left. `has_head` is true if the head of the response had arrived.
    pub fn left(&self, case: &Case, has_head: bool) {
        let count = if has_head {
            &self.counted
        } else {
            &self.uncertain
        };
        let answers = case.body["n"].as_u64().unwrap_or(1);
        count.fetch_add(answers, Ordering::SeqCst);
    }

    /// Checks that the server has finished, cancelled or refused each answer.
    ///
    /// # Errors
    /// Returns the numbers if the server has lost an answer, or has counted one twice.
    pub fn check(
        &self,
        before: &BTreeMap<String, f64>,
        after: &BTreeMap<String, f64>,
    ) -> Result<(), String> {
        let value = |outcomes: &BTreeMap<String, f64>, name: &str| {
            outcomes.get(name).copied().unwrap_or_default() as u64
        };
        let outcomes = ["finished", "cancelled", "refused"]
            .map(|name| value(after, name).saturating_sub(value(before, name)));
        let ended: u64 = outcomes.iter().sum();
        let counted = self.counted.load(Ordering::SeqCst);
        let most = counted + self.uncertain.load(Ordering::SeqCst);
        let [finished, cancelled, refused] = outcomes;
        println!(
            "answers: {counted} sent for certain, at most {most}; \
             {ended} ended: {finished} finished, {cancelled} cancelled, {refused} refused"
        );
        match (counted..=most).contains(&ended) {
            true => Ok(()),
            false => Err(format!(
                "{ended} answers have ended; expected {counted} to {most}"
            )),
        }
    }
}
