//! An adapter on the device, which sequences can select.

use super::pass::Factors;
use crate::error::Gemma4Error;
use crate::model::Gemma4Model;
use burn::module::{ParamId, list_param_ids};
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// The identity of a loaded adapter. An adapter that is loaded a second time gets another identity.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AdapterId(u64);

impl AdapterId {
    fn next() -> Self {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        Self(COUNT.fetch_add(1, Ordering::Relaxed))
    }
}

/// A LoRA adapter on the device, beside the weights of the model for which it was read. A prefill selects the adapter
/// by [`Prefill::with_adapter`](crate::Prefill::with_adapter).
#[derive(Debug)]
pub struct LoadedAdapter {
    id: AdapterId,
    /// The ids of the model's parameters. The adapter applies to this model only.
    model: Arc<[ParamId]>,
    /// The factors by the parameter id of their projection's weight.
    factors: Arc<HashMap<ParamId, Factors>>,
    /// True if the adapter changes the vision, which is not supported.
    changes_vision: bool,
    /// True if the adapter changes the audio, which is not supported.
    changes_audio: bool,
}

impl LoadedAdapter {
    /// `changes` tells whether the adapter changes the vision and the audio.
    pub(crate) fn new(
        model: Arc<[ParamId]>,
        factors: HashMap<ParamId, Factors>,
        [changes_vision, changes_audio]: [bool; 2],
    ) -> Self {
        Self {
            id: AdapterId::next(),
            model,
            factors: Arc::new(factors),
            changes_vision,
            changes_audio,
        }
    }

    /// The identity of the adapter.
    pub fn id(&self) -> AdapterId {
        self.id
    }

    /// The size of the adapter's matrices on the device in bytes. A batch in which a sequence had the adapter holds a
    /// second copy, until the batch is empty or the adapter is unloaded.
    pub fn bytes(&self) -> usize {
        self.factors.values().map(Factors::bytes).sum()
    }

    pub(super) fn factors(&self) -> &Arc<HashMap<ParamId, Factors>> {
        &self.factors
    }

    /// Refuses images if the adapter changes the vision. Images would run through a vision without these changes.
    pub(crate) fn check_images(&self) -> Result<(), Gemma4Error> {
        match self.changes_vision {
            false => Ok(()),
            true => Err(Gemma4Error::Argument {
                argument: "image",
                reason: "the adapter of the request changes the vision, which is not supported"
                    .into(),
            }),
        }
    }

    /// Refuses audio if the adapter changes the audio. Clips would run through an audio tower without these changes.
    pub(crate) fn check_audio(&self) -> Result<(), Gemma4Error> {
        match self.changes_audio {
            false => Ok(()),
            true => Err(Gemma4Error::Argument {
                argument: "audio",
                reason: "the adapter of the request changes the audio, which is not supported"
                    .into(),
            }),
        }
    }

    /// Refuses another model than the one for which the adapter was read. Its weights have other parameter ids, so the
    /// adapter would change none of them.
    pub(crate) fn check(&self, model: &Gemma4Model) -> Result<(), Gemma4Error> {
        match list_param_ids(model)[..] == self.model[..] {
            true => Ok(()),
            false => Err(Gemma4Error::Argument {
                argument: "adapter",
                reason: "was read for another model; expected the model of the prefill".into(),
            }),
        }
    }
}
