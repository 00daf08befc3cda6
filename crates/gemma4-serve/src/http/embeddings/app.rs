//! The state that the handlers of a server of an embedding model share.

use super::super::app::{HttpApp, ServerOptions, now};
use super::super::body_memory::BodyPool;
use super::super::media::shown;
use crate::engine::EmbeddingEngine;
use crate::error::{ErrorKind, RequestError};

/// The state that all handlers share.
#[derive(Debug)]
pub(super) struct EmbeddingApp {
    pub engine: EmbeddingEngine,
    pub bodies: BodyPool,
    pub options: ServerOptions,
    pub started: u64,
}

impl HttpApp for EmbeddingApp {
    fn options(&self) -> &ServerOptions {
        &self.options
    }

    fn bodies(&self) -> &BodyPool {
        &self.bodies
    }
}

impl EmbeddingApp {
    pub fn new(engine: EmbeddingEngine, options: ServerOptions) -> Self {
        Self {
            engine,
            bodies: BodyPool::new(options.body_memory, options.max_body),
            started: now().as_secs(),
            options,
        }
    }

    /// Checks the name of the model in a request.
    ///
    /// # Errors
    /// Returns [`ErrorKind::NotFound`] for any name but the model's.
    pub fn check_model(&self, name: &str) -> Result<(), RequestError> {
        let model = &self.options.model;
        match name == model {
            true => Ok(()),
            false => Err(RequestError {
                kind: ErrorKind::NotFound,
                message: format!(
                    "model: {:?} does not exist; expected {model:?}",
                    shown(name)
                ),
                field: Some("model".into()),
            }),
        }
    }
}
