//! The endpoints of Anthropic's Messages API.

mod blocks;
pub(crate) mod messages;
mod request;
mod writer;
