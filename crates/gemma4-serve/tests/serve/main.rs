//! Tests the server in the process of the tests, with the small model that burn-gemma4 embeds.

mod harness;

mod anthropic;
mod concurrency;
mod files;
mod malformed;
mod malformed_requests;
mod openai;
mod responses;
mod tools;
