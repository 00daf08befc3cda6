//! What can be wrong with a checkpoint, a prompt or a request.

use crate::escaped::Escaped;
use std::path::{Path, PathBuf};

/// Why a model could not be loaded or asked. Every message names the file, tensor or argument at fault.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Gemma4Error {
    /// A file or folder that cannot be read.
    #[error("{}: {source}", escaped_path(path))]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// What the system said.
        #[source]
        source: std::io::Error,
    },
    /// A file that is there and does not hold what it should.
    #[error("{}: {}", escaped_path(path), Escaped::lines(reason))]
    Malformed {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// A file, or a checkpoint, of a kind that this crate does not load.
    #[error("{}: {}", escaped_path(path), Escaped::lines(reason))]
    Unsupported {
        /// The file, or the checkpoint's folder.
        path: PathBuf,
        /// What it is.
        reason: String,
    },
    /// A configuration that no Gemma 4 text model has, or that this crate does not compute.
    #[error("config.json: {}", Escaped::lines(_0))]
    Config(String),
    /// Tensors of the checkpoint that do not fit the model.
    #[error("{}: {}", escaped_path(path), list(problems))]
    Tensors {
        /// The checkpoint's folder or file.
        path: PathBuf,
        /// What is wrong, tensor by tensor.
        problems: Vec<TensorProblem>,
    },
    /// Text that the tokenizer does not take, or tokens that it does not know.
    #[error("tokenizer: {}", Escaped::lines(_0))]
    Tokenizer(String),
    /// A chat template that does not parse, or that refuses the conversation.
    #[error("chat template: {}", Escaped::lines(_0))]
    ChatTemplate(String),
    /// An argument that does not fit the model.
    #[error("{argument}: {}", Escaped::lines(reason))]
    Argument {
        /// The argument's name.
        argument: &'static str,
        /// What it is and what it should be.
        reason: String,
    },
    /// A model with [quantized weights](crate::layer::Weight), of which others than those of an adapter are to be trained.
    #[error(
        "the model's weights are quantized: an adapter over them is trained, or all weights of a model that is loaded whole"
    )]
    Quantized,
    /// A device that does not do what the model needs.
    #[error("device: {}", Escaped::lines(_0))]
    Device(String),
}

/// One tensor of a checkpoint that does not fit.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum TensorProblem {
    /// The model has it, the checkpoint does not.
    #[error("{} is missing", Escaped::line(name))]
    Missing {
        /// Its name in the file.
        name: String,
    },
    /// The checkpoint has it, the model does not.
    #[error(
        "{} is not part of the model that the configuration describes",
        Escaped::line(name)
    )]
    Extra {
        /// Its name in the file.
        name: String,
    },
    /// Its shape is not the model's.
    #[error(
        "{} has the shape {found:?}, the model that the configuration describes has {expected:?}",
        Escaped::line(name)
    )]
    Shape {
        /// Its name in the file.
        name: String,
        /// The file's shape.
        found: Vec<usize>,
        /// The model's shape.
        expected: Vec<usize>,
    },
    /// A factor of an adapter that is not of the rank that the adapter's configuration says.
    #[error(
        "{} has the rank {found}, but r is {expected} in adapter_config.json",
        Escaped::line(name)
    )]
    Rank {
        /// Its name in the file.
        name: String,
        /// The factor's rank.
        found: usize,
        /// The configuration's.
        expected: usize,
    },
    /// Its elements are not floating-point numbers that a model computes in.
    #[error(
        "{} has the dtype {found}, which is none of F64, F32, F16, BF16",
        Escaped::line(name)
    )]
    Dtype {
        /// Its name in the file.
        name: String,
        /// The file's dtype.
        found: String,
    },
    /// Some of it cannot be quantized.
    #[error(
        "{} has something that is no finite number, or too large for a block's scale",
        Escaped::line(name)
    )]
    NoNumber {
        /// Its name in the file.
        name: String,
    },
    /// It is packed in another way than the configuration says.
    #[error("{}: {}", Escaped::line(name), Escaped::line(reason))]
    Packing {
        /// Its name in the file.
        name: String,
        /// What is wrong.
        reason: String,
    },
    /// It is quantized in a way that is not read.
    #[error(
        "{} is in {found}, which is none of F64, F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K, Q6_K",
        Escaped::line(name)
    )]
    Encoding {
        /// Its name in the file.
        name: String,
        /// The file's type of it.
        found: String,
    },
}

impl Gemma4Error {
    /// Logits none of which says anything, so that there is no token to take.
    pub(crate) fn no_number(logits: usize) -> Self {
        Self::Argument {
            argument: "logits",
            reason: format!("each of the {logits} is NaN or -inf"),
        }
    }
}

/// A path for a message: an index of shards names files, too.
fn escaped_path(path: &Path) -> Escaped<std::path::Display<'_>> {
    Escaped::line(path.display())
}

/// A file's contents.
pub(crate) fn read(path: &Path) -> Result<Vec<u8>, Gemma4Error> {
    std::fs::read(path).map_err(|source| Gemma4Error::Io {
        path: path.into(),
        source,
    })
}

/// The path of a file that a checkpoint may have.
pub(crate) fn existing(folder: &Path, name: &str) -> Result<Option<PathBuf>, Gemma4Error> {
    let path = folder.join(name);
    match path.try_exists() {
        Ok(true) => Ok(Some(path)),
        Ok(false) => Ok(None),
        Err(source) => Err(Gemma4Error::Io { path, source }),
    }
}

/// Enough to see what is wrong, not a screen for every layer of the model.
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
