//! Tests the server in this process, with the model that burn-gemma4 contains. Each module covers one hazard.

mod harness;

mod anthropic;
mod concurrency;
mod files;
mod malformed;
mod malformed_requests;
mod openai;
mod responses;
mod tools;
