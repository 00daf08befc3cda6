//! Text before and after the model: the tokenizer, chat templates, stop strings, and the division of generated text
//! into answer, thoughts and tool calls.

pub(crate) mod chat;
pub(crate) mod parts;
pub(crate) mod stop;
pub(crate) mod tokenizer;
