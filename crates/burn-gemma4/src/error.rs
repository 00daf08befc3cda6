//! The errors about checkpoints, prompts and requests, and the conversion of panics to errors.

use crate::escaped::Escaped;
use std::panic::{AssertUnwindSafe, catch_unwind, set_hook, take_hook};
use std::path::{Path, PathBuf};

/// An error from loading or running a model. Every message names the file, tensor or argument at fault.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Gemma4Error {
    /// A file or folder cannot be read.
    #[error("{}: {source}", escaped_path(path))]
    Io {
        /// The path of the file or folder.
        path: PathBuf,
        /// The error that the operating system returned.
        #[source]
        source: std::io::Error,
    },
    /// A file exists but has malformed contents.
    #[error("{}: {}", escaped_path(path), Escaped::lines(reason))]
    Malformed {
        /// The path of the file.
        path: PathBuf,
        /// The defect that was found in the file.
        reason: String,
    },
    /// A file or a checkpoint has a format that this crate cannot load.
    #[error("{}: {}", escaped_path(path), Escaped::lines(reason))]
    Unsupported {
        /// The path of the file or of the checkpoint's folder.
        path: PathBuf,
        /// The format that was found, and what the user can do.
        reason: String,
    },
    /// A configuration that is impossible for a Gemma 4 text model, or that this crate does not support.
    #[error("config.json: {}", Escaped::lines(_0))]
    Config(String),
    /// Some tensors of the checkpoint do not fit the model.
    #[error("{}: {}", escaped_path(path), list(problems))]
    Tensors {
        /// The path of the checkpoint's folder or file.
        path: PathBuf,
        /// The list of problems. Each problem concerns one tensor.
        problems: Vec<TensorProblem>,
    },
    /// The tokenizer cannot encode a text, or its vocabulary lacks a token that this crate needs.
    #[error("tokenizer: {}", Escaped::lines(_0))]
    Tokenizer(String),
    /// A chat template cannot be parsed, or rejects the conversation.
    #[error("chat template: {}", Escaped::lines(_0))]
    ChatTemplate(String),
    /// An argument has a value that is invalid for the model.
    #[error("{argument}: {}", Escaped::lines(reason))]
    Argument {
        /// The argument's name.
        argument: &'static str,
        /// The value that the argument has, and the values that are valid.
        reason: String,
    },
    /// The caller wanted to train all weights of a model that has [quantized weights](crate::model::layer::Weight).
    #[error(
        "cannot train quantized weights: attach a LoRA adapter, or load the model unquantized for full fine-tuning"
    )]
    Quantized,
    /// The device failed, or does not support an operation or dtype that the model needs.
    #[error("device: {}", Escaped::lines(_0))]
    Device(String),
}

/// The reason why a tensor of a checkpoint does not fit the model.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum TensorProblem {
    /// The model needs the tensor, but the checkpoint does not contain it.
    #[error("{} is missing", Escaped::line(name))]
    Missing {
        /// The tensor's name in the file.
        name: String,
    },
    /// The checkpoint contains the tensor, but the model does not need it.
    #[error(
        "{} is not part of the model that the configuration describes",
        Escaped::line(name)
    )]
    Extra {
        /// The tensor's name in the file.
        name: String,
    },
    /// The tensor's shape in the file differs from its shape in the model.
    #[error(
        "{} has the shape {found:?}, the model that the configuration describes has {expected:?}",
        Escaped::line(name)
    )]
    Shape {
        /// The tensor's name in the file.
        name: String,
        /// The shape in the file.
        found: Vec<usize>,
        /// The shape in the model.
        expected: Vec<usize>,
    },
    /// The rank of a LoRA matrix differs from the rank in the adapter's configuration.
    #[error(
        "{} has the rank {found}, but r is {expected} in adapter_config.json",
        Escaped::line(name)
    )]
    Rank {
        /// The name of the LoRA matrix in the file.
        name: String,
        /// The rank of the LoRA matrix.
        found: usize,
        /// The rank according to the configuration.
        expected: usize,
    },
    /// The tensor's dtype is not one of the floating-point dtypes in which a model computes.
    #[error(
        "{} has the dtype {found}; expected F64, F32, F16 or BF16",
        Escaped::line(name)
    )]
    Dtype {
        /// The tensor's name in the file.
        name: String,
        /// The dtype in the file.
        found: String,
    },
    /// An element of a LoRA matrix is not a finite number in the model's dtype, after its multiplication by the scale.
    #[error(
        "{} has an element that is not finite in the model's dtype",
        Escaped::line(name)
    )]
    NotFinite {
        /// The name of the LoRA matrix in the file.
        name: String,
    },
    /// The LoRA matrix changes an embedding, the head, a router or an expert, for which requests cannot select
    /// adapters.
    #[error(
        "{} changes a module for which requests cannot select adapters; merge the adapter into the model",
        Escaped::line(name)
    )]
    Unserved {
        /// The name of the LoRA matrix in the file.
        name: String,
    },
    /// An element of the tensor cannot be quantized. The element is not finite, or is too large for the scale of the
    /// element's block, or its square times the importance overflows.
    #[error(
        "{} has an element that is no finite number, or too large for a block's scale or for its importance",
        Escaped::line(name)
    )]
    NoNumber {
        /// The tensor's name in the file.
        name: String,
    },
    /// A matrix's packed tensors do not match the packing that the configuration describes.
    #[error("{}: {}", Escaped::line(name), Escaped::line(reason))]
    Packing {
        /// The tensor's name in the file.
        name: String,
        /// The problem with the packing.
        reason: String,
    },
    /// The tensor has a type that this crate cannot read, such as an unsupported quantization format.
    #[error(
        "{} is in {found}, which is not supported; the nearest supported type is {nearest}",
        Escaped::line(name)
    )]
    Encoding {
        /// The tensor's name in the file.
        name: String,
        /// The tensor's type in the file.
        found: String,
        /// The supported type that is nearest in size.
        nearest: &'static str,
    },
}

impl Gemma4Error {
    /// Returns the error for a row of logits that are all NaN or −∞. No token can be chosen from such logits.
    pub(crate) fn no_number(logits: usize) -> Self {
        Self::Argument {
            argument: "logits",
            reason: format!("each of the {logits} is NaN or -inf"),
        }
    }
}

/// Escapes a path for a message. The path may come from an untrusted file.
fn escaped_path(path: &Path) -> Escaped<std::path::Display<'_>> {
    Escaped::line(path.display())
}

/// Reads the contents of a file.
pub(crate) fn read(path: &Path) -> Result<Vec<u8>, Gemma4Error> {
    std::fs::read(path).map_err(|source| Gemma4Error::Io {
        path: path.into(),
        source,
    })
}

/// Returns the path of an optional file in a checkpoint, or `None` if the file does not exist.
pub(crate) fn existing(folder: &Path, name: &str) -> Result<Option<PathBuf>, Gemma4Error> {
    let path = folder.join(name);
    match path.try_exists() {
        Ok(true) => Ok(Some(path)),
        Ok(false) => Ok(None),
        Err(source) => Err(Gemma4Error::Io { path, source }),
    }
}

/// Joins the first five problems into one text, and adds the number of further problems.
fn list(problems: &[TensorProblem]) -> String {
    const SHOWN: usize = 5;
    let mut text = problems
        .iter()
        .take(SHOWN)
        .map(ToString::to_string)
        .collect::<Vec<_>>()
        .join("; ");
    if problems.len() > SHOWN {
        text += &format!("; and {} more tensors", problems.len() - SHOWN);
    }
    text
}

/// Runs `work`. If `work` panics, returns the panic's message as an error.
///
/// While `work` runs, panics in all threads of the process print nothing.
///
/// # Errors
/// Returns the message of the panic.
///
/// ```
/// let outcome = burn_gemma4::catch_panic(|| -> u32 { panic!("no device") });
/// assert_eq!(outcome, Err("no device".to_string()));
/// ```
pub fn catch_panic<O>(work: impl FnOnce() -> O) -> Result<O, String> {
    // Replace the panic hook, because the caller reports the panic's message and the original hook would print it a
    // second time.
    let hook = take_hook();
    set_hook(Box::new(|_| ()));
    let result = catch_unwind(AssertUnwindSafe(work));
    set_hook(hook);
    result.map_err(|payload| {
        payload
            .downcast_ref::<String>()
            .cloned()
            .or_else(|| payload.downcast_ref::<&str>().map(|text| text.to_string()))
            .unwrap_or_else(|| "the program panicked without a message".into())
    })
}
