//! Quantizes a whole checkpoint: reads the source's files and writes new files, one matrix at a time. The module needs
//! no device.

mod folder;
mod gguf;
mod tokenizer;

use super::{
    files::TensorFiles,
    folder::Folder,
    loader::{Expected, check, written_dtype},
    options::{LoadProgress, Quantization},
    source::{Source, WeightSource},
};
use crate::config::Gemma4Config;
use crate::config::quantization::{QuantizationSchemes, schemes_of};
use crate::config::unknown_files::missing;
use crate::error::{Gemma4Error, TensorProblem};
use crate::model::Gemma4Model;
use crate::quant::quantize::QuantTarget;
use burn::{
    module::Module,
    tensor::{DType, Device},
};
use std::{
    cell::RefCell,
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    sync::Arc,
};

/// A summary of the checkpoint that [`quantize_checkpoint`] has written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QuantizedCheckpoint {
    /// The size of the weight file in bytes.
    pub bytes: u64,
    /// The paths of the parameters that stay unquantized because their row length is not a multiple of the block size.
    pub whole: Vec<String>,
    /// Descriptions of the parts of the source checkpoint that the GGUF file lacks, such as vision and audio towers.
    pub left_out: Vec<String>,
}

/// Writes a quantized copy of a checkpoint to `to`. The original checkpoint is in the folder `from`.
///
/// If the name `to` ends in `.gguf`, in upper or lower case, the output is a GGUF file. Otherwise the output is a
/// folder.
///
/// In a GGUF file, all weights that [`LoadOptions::quantization`](super::LoadOptions::quantization) would quantize are
/// stored in blocks of Q8_0 or Q4_0. Bit by bit, these blocks equal those of llama.cpp's quantizer. A weight whose rows
/// do not consist of whole blocks keeps its float dtype. All other weights, such as norms, are stored in f32. The file
/// also has the tokenizer, the chat template and the sampling defaults. Only the text model of a multimodal checkpoint
/// is written.
///
/// In a folder, the linear layers and the projection of the per-layer embeddings are stored in the format of
/// compressed-tensors. The scheme is symmetric `pack-quantized` with 8 or 4 bits. Each group of 32 elements shares one
/// scale, which has the checkpoint's dtype. Each expert's matrices are separate tensors, as llm-compressor writes them.
/// Embeddings, the head, routers and everything outside the text model are copied unchanged, because the loaders of
/// other programs do not support these weights in packed form.
///
/// The output appears under its final name only when it is complete. The host holds about one matrix at a time.
///
/// # Errors
/// Returns an error in these cases:
///
/// - The file or folder `to` exists already, or a file cannot be written.
/// - The folder `from` is not a complete checkpoint of Gemma 4. For example, `from` is a drafter or has quantized
///   weights.
/// - No matrix has rows that consist of whole blocks, or a weight has an element that is NaN or infinite.
/// - The requested format is neither [`Q8`](Quantization::Q8) nor [`Q4`](Quantization::Q4).
/// - GGUF cannot express the configuration or the tokenizer.
pub fn quantize_checkpoint(
    from: impl AsRef<Path>,
    to: impl AsRef<Path>,
    form: Quantization,
    mut on_progress: impl FnMut(LoadProgress<'_>),
) -> Result<QuantizedCheckpoint, Gemma4Error> {
    let (from, to) = (from.as_ref(), to.as_ref());
    let target = form.target().ok_or_else(|| Gemma4Error::Argument {
        argument: "form",
        reason: format!("is {form:?}; weights can be written as Q8 or Q4"),
    })?;
    refuse_existing(to)?;
    let is_gguf = to
        .extension()
        .is_some_and(|extension| extension.eq_ignore_ascii_case("gguf"));
    let unsupported = |reason: &str| Gemma4Error::Unsupported {
        path: from.into(),
        reason: reason.into(),
    };
    if from.is_file() {
        return Err(unsupported(
            "is a file; expected a folder in Hugging Face's layout, with safetensors files",
        ));
    }
    let path = from.join("config.json");
    let config = Gemma4Config::from_file(&path)?;
    let json = fs::read_to_string(&path).map_err(|source| missing(path, source))?;
    if !schemes_of(&json)?.is_empty() {
        return Err(unsupported(
            "its weights are quantized already; quantize the original checkpoint instead",
        ));
    }
    let files = Arc::new(TensorFiles::open(from)?);
    let weights = Folder::of(files.clone(), QuantizationSchemes::default());
    weights.refuse_mlx(from)?;
    let mut model = Gemma4Model::new(&config, &Device::default());
    let mut expected = Expected::default();
    model.visit(&mut expected);
    let total_bytes = check(from, &weights, &config, &expected)?;
    let quantized = model
        .weights_mut()
        .into_iter()
        .map(|(path, _)| path)
        .filter(|path| is_gguf || !folder::TABLES.contains(&path.as_str()))
        .collect();
    let export = Export {
        from,
        json: &json,
        config: &config,
        weights: &weights,
        dtype: written_dtype(&weights, &expected.parameters),
        parameters: expected.parameters,
        quantized,
        target,
        report: RefCell::new(Report {
            on_progress: &mut on_progress,
            bytes: 0,
            total_bytes,
            problem: None,
        }),
    };
    export.refuse_nothing()?;
    match is_gguf {
        true => export.write_gguf(to),
        false => export.write_folder(&files, to),
    }
}

fn refuse_existing(path: &Path) -> Result<(), Gemma4Error> {
    match path.symlink_metadata() {
        Ok(_) => Err(Gemma4Error::Argument {
            argument: "out",
            reason: format!("{} is there already", path.display()),
        }),
        Err(_) => Ok(()),
    }
}

/// The state of a checkpoint's export to a quantized form.
struct Export<'a> {
    from: &'a Path,
    /// The contents of the source checkpoint's `config.json`.
    json: &'a str,
    config: &'a Gemma4Config,
    weights: &'a Folder,
    /// The dtype of most of the checkpoint's elements.
    dtype: DType,
    /// The path and shape of each parameter.
    parameters: Vec<(String, Vec<usize>)>,
    /// The paths of the parameters that the output format can quantize if their row length is a multiple of the block size.
    quantized: BTreeSet<String>,
    target: QuantTarget,
    report: RefCell<Report<'a>>,
}

/// The progress of the export, and the first problem that the export has met.
struct Report<'a> {
    on_progress: &'a mut dyn FnMut(LoadProgress<'_>),
    /// The number of source bytes that have been processed.
    bytes: usize,
    total_bytes: usize,
    /// The first problem that makes a weight impossible to write.
    problem: Option<TensorProblem>,
}

impl<'a> Export<'a> {
    fn source(&self, path: &str) -> Source<'a> {
        self.weights
            .get(path)
            .unwrap_or_else(|problem| unreachable!("the tensors were checked before: {problem}"))
    }

    /// True if a parameter is quantized: the output format can quantize it, and its row length is a multiple of the block
    /// size.
    fn is_quantized(&self, path: &str, shape: &[usize]) -> bool {
        let columns = shape.last().copied().unwrap_or(0);
        self.quantized.contains(path) && self.target.layout(columns).is_some()
    }

    /// Returns the paths of parameters that stay unquantized only because their row length is not a multiple of the block
    /// size.
    fn whole(&self) -> Vec<String> {
        let parameters = self.parameters.iter();
        let whole = parameters.filter(|(path, shape)| {
            self.quantized.contains(path) && !self.is_quantized(path, shape)
        });
        whole.map(|(path, _)| path.clone()).collect()
    }

    fn refuse_nothing(&self) -> Result<(), Gemma4Error> {
        match self.whole().len() == self.quantized.len() {
            false => Ok(()),
            true => Err(Gemma4Error::Unsupported {
                path: self.from.into(),
                reason: "no matrix has rows of whole blocks of 32 numbers, so there is nothing to quantize"
                    .into(),
            }),
        }
    }

    /// Reports to the progress callback that a tensor has been written. The tensor occupies `bytes` bytes in the source.
    fn is_written(&self, tensor: &str, bytes: usize) {
        let mut report = self.report.borrow_mut();
        report.bytes += bytes;
        let (bytes, total_bytes) = (report.bytes, report.total_bytes);
        (report.on_progress)(LoadProgress {
            tensor,
            bytes,
            total_bytes,
        });
    }

    /// Records that the weight called `name` has an element that is NaN or infinite.
    fn is_no_number(&self, name: &str) {
        let problem = TensorProblem::NoNumber { name: name.into() };
        self.report.borrow_mut().problem.get_or_insert(problem);
    }

    /// Returns the recorded problem with a weight as an error. If no problem is recorded, returns `outcome`. A recorded
    /// problem says more than the error of the file's writer in `outcome`.
    fn finish<T>(&self, outcome: Result<T, Gemma4Error>) -> Result<T, Gemma4Error> {
        match self.report.borrow_mut().problem.take() {
            None => outcome,
            Some(problem) => Err(Gemma4Error::Tensors {
                path: PathBuf::from(self.from),
                problems: vec![problem],
            }),
        }
    }

    fn written(&self, file: &Path, left_out: Vec<String>) -> QuantizedCheckpoint {
        QuantizedCheckpoint {
            bytes: file.metadata().map_or(0, |metadata| metadata.len()),
            whole: self.whole(),
            left_out,
        }
    }
}
