//! Tests the server within the test process, with the small model that burn-gemma4 embeds.

mod cases;
mod client;
mod conversations;
mod harness;
mod pictures;
mod socket;

mod adapters;
mod anthropic;
mod audio;
mod bodies;
mod concurrency;
mod devices;
mod embeddings;
mod files;
mod images;
mod malformed;
mod malformed_audio;
mod malformed_bytes;
mod malformed_fields;
mod malformed_images;
mod malformed_requests;
mod malformed_tables;
mod openai;
mod prefixes;
mod random_requests;
mod request_log;
mod responses;
mod shutdown;
mod tools;
mod vision;
mod vision_engine;
