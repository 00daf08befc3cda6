//! The endpoints of OpenAI's APIs.

pub(crate) mod chat;
mod chat_request;
pub(crate) mod completions;
mod completions_request;
pub(crate) mod fields;
mod logprobs;
mod messages;
pub(crate) mod models;
pub(crate) mod responses;
mod responses_request;
mod responses_writer;
pub(crate) mod tools;

pub(crate) use completions_request::MAX_PROMPTS;
