//! Decodes the images and audio clips of batches, on threads of the host.

use super::medium::{ExampleMedium, Prepared};
use burn_gemma4::{BatchMedia, PromptEncoder};
use std::fmt;
use std::sync::Arc;
use std::thread::{self, JoinHandle};

/// The largest number of images and clips that are decoded at once. It bounds the memory: decoding an image of the most
/// pixels takes up to 1 GiB.
const THREADS: usize = 4;

/// The reason why an image or an audio clip of a batch cannot be decoded, with the line of its file.
#[derive(Debug)]
pub(crate) struct MediaError(String);

impl fmt::Display for MediaError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for MediaError {}

/// The images and clips of some batches, which threads of the host decode while the device computes.
pub(crate) struct BatchPreparation(JoinHandle<Result<Vec<BatchMedia>, String>>);

impl BatchPreparation {
    /// Begins to prepare batches. Each batch is a list of rows, each with its images and clips.
    pub fn begin(batches: Vec<Vec<Vec<ExampleMedium>>>, encoder: Arc<PromptEncoder>) -> Self {
        Self(thread::spawn(move || prepare(&batches, &encoder)))
    }

    /// Waits for the batches.
    ///
    /// # Errors
    /// Returns an error that names the line of a medium that cannot be decoded.
    pub fn finish(self) -> Result<Vec<BatchMedia>, MediaError> {
        match self.0.join() {
            Ok(prepared) => prepared.map_err(MediaError),
            Err(panic) => std::panic::resume_unwind(panic),
        }
    }
}

/// Prepares the images and clips of batches, in order.
pub(super) fn prepare(
    batches: &[Vec<Vec<ExampleMedium>>],
    encoder: &PromptEncoder,
) -> Result<Vec<BatchMedia>, String> {
    let all: Vec<&ExampleMedium> = batches.iter().flatten().flatten().collect();
    let share = all.len().div_ceil(THREADS).max(1);
    let prepared = thread::scope(|scope| {
        let threads: Vec<_> = all
            .chunks(share)
            .map(|media| {
                let prepare = || {
                    media
                        .iter()
                        .map(|one| one.medium.prepare(encoder))
                        .collect()
                };
                scope.spawn(prepare)
            })
            .collect();
        let results = threads.into_iter().map(|thread| match thread.join() {
            Ok(prepared) => prepared,
            Err(panic) => std::panic::resume_unwind(panic),
        });
        results.collect::<Result<Vec<Vec<Prepared>>, String>>()
    })?;
    let mut prepared = prepared.into_iter().flatten();
    let of_batch = |rows: &Vec<Vec<ExampleMedium>>| {
        let mut batch = BatchMedia::default();
        for (row, media) in rows.iter().enumerate() {
            for (medium, prepared) in media.iter().zip(prepared.by_ref()) {
                prepared.add_to(&mut batch, row, medium.tokens.start);
            }
        }
        batch
    };
    Ok(batches.iter().map(of_batch).collect())
}
