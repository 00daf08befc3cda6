//! Converts conversations to prompts, and parses the tool calls in answers.

mod conversation;
mod prompt;
mod tool_call;
mod tool_grammar;

pub use conversation::{ChatMessage, Content, Part, Tool, ToolChoice};
pub use prompt::TextModel;
pub(crate) use prompt::of_field;
pub use tool_call::{ToolCall, parse as parse_tool_call};
pub use tool_grammar::grammar as tool_grammar;
