//! Trains [Gemma 4](burn_gemma4) with Burn's learner: from scratch, all weights of a checkpoint, or a LoRA adapter.
//!
//! A single process trains on one or several devices. Several processes, which `torchrun`, `srun` or `mpirun` starts, train one
//! model together. NCCL sums their gradients on NVIDIA GPUs, and MPI sums them on other devices.
//!
//! # Modules
//!
//! - [`data`]: reads documents from files, packs documents into rows, and joins rows into batches.
//! - [`train_step`]: the loss and the gradients of a training step.
//! - [`optim`]: AdamW and SGD with f32 master weights, gradient clipping, and loss scaling for f16.
//! - [`distributed`]: process groups, the all-reduce of gradients, and ZeRO-1.
//! - [`checkpoint`]: checkpoints that survive a crash, and the resumption of a run from a checkpoint.
//! - [`run`]: a whole training run. An epoch of Burn's learner is the interval between two checkpoints, because the
//!   learner writes checkpoints only at the end of an epoch.
//! - [`evaluation`]: cross entropy and perplexity of documents.
//!
//! # Example
//!
//! This example trains a LoRA adapter for the small model that `burn-gemma4` contains:
//!
//! ```no_run
//! use burn::tensor::Device;
//! use burn_gemma4::{Adapter, Gemma4, LoadOptions};
//! use gemma4_train::{
//!     args::TrainingArguments,
//!     data::{documents::read_documents, loader::Data, packing::pack},
//!     distributed::ProcessGroup,
//!     run::Run,
//! };
//! use std::{path::Path, sync::Arc};
//!
//! # fn main() -> Result<(), gemma4_train::Error> {
//! let arguments = TrainingArguments { steps: 100, lines: true, ..Default::default() };
//! let device = Device::default().autodiff();
//! let gemma = Gemma4::embedded(&device, LoadOptions::new())?;
//! let examples = read_documents(Path::new("conversations.jsonl"), &gemma)?
//!     .into_iter()
//!     .flat_map(|document| document.examples)
//!     .collect();
//! let (rows, _) = pack(examples, arguments.length);
//! let data = || Data {
//!     rows: rows.clone(),
//!     positions: arguments.length,
//!     batch: arguments.batch,
//!     padding: gemma.config().pad_token,
//!     encoder: None,
//! };
//! let adapter = Adapter::new(16, 32.0);
//! let run = Run {
//!     arguments: &arguments,
//!     learning_rate: 2e-4,
//!     devices: vec![device],
//!     has_transport: false,
//!     folder: Path::new("adapter/run"),
//!     resume: None,
//!     group: &Arc::new(ProcessGroup::single()),
//!     towers: None,
//!     before_first_step: None,
//! };
//! let outcome = run.train(adapter.attach(gemma.model().clone())?, data(), data())?;
//! adapter.save(&outcome.model, "adapter", "the embedded model")?;
//! # Ok(())
//! # }
//! ```
//!
//! # Messages
//!
//! The crate logs through the [`log`] crate with the target [`LOG_TARGET`]. Notes, such as the memory that a run needs,
//! have the level `Info`. An error that ends the whole process, instead of being returned, has the level `Error`.

pub mod args;
pub mod checkpoint;
pub mod data;
pub mod distributed;
mod error;
pub mod evaluation;
mod graph_capture;
pub mod optim;
pub mod presets;
mod progress_lines;
mod report;
pub mod run;
pub mod train_step;

pub use error::{Error, InvalidArgument};
pub use report::LOG_TARGET;
