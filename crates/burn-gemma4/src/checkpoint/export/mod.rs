//! Quantizes a whole checkpoint: reads the source's files and writes new files, one matrix at a time. The module needs
//! no device.

mod folder;
mod gguf;
mod metadata;
mod mixture;
pub(super) mod options;
mod tokenizer;

use self::mixture::Mixture;
use self::options::{ExportForm, ExportOptions};
use super::{
    files::TensorFiles,
    folder::Folder,
    loader::{Expected, check, written_dtype},
    options::LoadProgress,
    source::{Source, WeightSource},
};
use crate::config::Gemma4Config;
use crate::config::quantization::{QuantizationSchemes, schemes_of};
use crate::config::unknown_files::missing;
use crate::error::{Gemma4Error, TensorProblem};
use crate::model::Gemma4Model;
use crate::quant::blocks::BlockFormat;
use burn::{
    module::Module,
    tensor::{DType, Device},
};
use std::{
    cell::RefCell,
    collections::{BTreeMap, BTreeSet},
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
    /// The paths of the parameters whose rows are not multiples of 256 elements, in a mixture of K formats. Such a
    /// parameter has a format with blocks of 32 elements, and may have more bits.
    pub small_blocks: Vec<String>,
    /// The paths of the quantized parameters that the importance matrix does not contain, except for embeddings and the
    /// head. The list is empty without an importance matrix.
    pub without_importance: Vec<String>,
    /// The number of elements of the text model's parameters in each of ggml's types. The map is empty for a folder.
    pub types: BTreeMap<String, usize>,
    /// The number of bytes of these elements in the GGUF file. It is 0 for a folder.
    pub parameter_bytes: u64,
    /// Descriptions of the parts of the source checkpoint that the GGUF file lacks, such as vision and audio towers.
    pub left_out: Vec<String>,
}

/// Writes a quantized copy of a checkpoint to `to`. The original checkpoint is in the folder `from`.
///
/// If the name `to` ends in `.gguf`, in upper or lower case, the output is a GGUF file. Otherwise the output is a
/// folder.
///
/// In a GGUF file, all weights that [`LoadOptions::quantization`](super::LoadOptions::quantization) would quantize are
/// stored in blocks. Bit by bit, these blocks equal those of llama.cpp's quantizer. [`Q8`](ExportForm::Q8) and
/// [`Q4`](ExportForm::Q4) have the same format for all weights. A mixture of K formats has the formats that llama.cpp
/// chooses, and leaves the projection of the per-layer embeddings as it is. A weight whose rows do not consist of whole
/// blocks keeps its float dtype. All other weights, such as norms, are stored in f32. The file also has the tokenizer,
/// the chat template and the sampling defaults. Only the text model of a multimodal checkpoint is written.
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
/// - The output is a folder, and the form is neither [`Q8`](ExportForm::Q8) nor [`Q4`](ExportForm::Q4).
/// - An importance matrix is given for a folder or for [`Q8`](ExportForm::Q8), or is of another model.
/// - GGUF cannot express the configuration or the tokenizer.
pub fn quantize_checkpoint<'a>(
    from: impl AsRef<Path>,
    to: impl AsRef<Path>,
    options: impl Into<ExportOptions<'a>>,
    mut on_progress: impl FnMut(LoadProgress<'_>),
) -> Result<QuantizedCheckpoint, Gemma4Error> {
    let (from, to) = (from.as_ref(), to.as_ref());
    let options = options.into();
    refuse_existing(to)?;
    let is_gguf = to
        .extension()
        .is_some_and(|extension| extension.eq_ignore_ascii_case("gguf"));
    refuse_what_only_gguf_stores(options, is_gguf)?;
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
    let large: BTreeSet<String> = model
        .weights_mut()
        .into_iter()
        .map(|(path, _)| path)
        .collect();
    let unread = weights.unread(&config);
    let paths = large.iter().chain(&unread).map(String::as_str);
    let mixture = Mixture::new(options.form, options.importance.is_some(), &config, paths);
    let mut formats = BTreeMap::new();
    for (path, shape) in &expected.parameters {
        let is_table = folder::TABLES.contains(&path.as_str());
        if large.contains(path) && mixture.is_quantized(path) && (is_gguf || !is_table) {
            let columns = shape.last().copied().unwrap_or(0);
            formats.insert(path.clone(), mixture.format(path, columns));
        }
    }
    let export = Export {
        from,
        json: &json,
        config: &config,
        weights: &weights,
        dtype: written_dtype(&weights, &expected.parameters),
        parameters: expected.parameters,
        large,
        formats,
        options,
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

/// Refuses K formats and importance matrices for folders, and importance matrices for Q8_0.
fn refuse_what_only_gguf_stores(
    options: ExportOptions<'_>,
    is_gguf: bool,
) -> Result<(), Gemma4Error> {
    let form = options.form;
    let refused = |argument, reason| Err(Gemma4Error::Argument { argument, reason });
    match options.importance {
        _ if !is_gguf && form.target().is_none() => refused(
            "form",
            format!("{form} exists in GGUF files only; let the name of the output end with .gguf"),
        ),
        Some(_) if !is_gguf => refused(
            "importance",
            "a folder does not use an importance matrix; let the name of the output end with .gguf"
                .into(),
        ),
        Some(_) if form == ExportForm::Q8 => refused(
            "importance",
            "Q8_0 does not use an importance matrix; expected a form with fewer bits".into(),
        ),
        _ => Ok(()),
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
    /// The paths of the matrices and embeddings. An unquantized one keeps the checkpoint's dtype.
    large: BTreeSet<String>,
    /// The formats of the parameters that the output form quantizes. The format is `None` if the parameter stays
    /// unquantized because its row length is not a multiple of the block size.
    formats: BTreeMap<String, Option<BlockFormat>>,
    options: ExportOptions<'a>,
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

    /// Returns the format of a quantized parameter, or `None` if the parameter stays unquantized.
    fn format(&self, path: &str) -> Option<BlockFormat> {
        self.formats.get(path).copied().flatten()
    }

    /// Returns the paths of parameters that stay unquantized only because their row length is not a multiple of the block
    /// size.
    fn whole(&self) -> Vec<String> {
        let whole = self.formats.iter().filter(|(_, format)| format.is_none());
        whole.map(|(path, _)| path.clone()).collect()
    }

    /// Returns the paths of the parameters with smaller blocks than the form's format, because of their row length.
    fn small_blocks(&self) -> Vec<String> {
        let numbers = self.options.form.base().numbers();
        let has_other_rows = |(path, shape): &&(String, Vec<usize>)| {
            let columns = shape.last().copied().unwrap_or(0);
            self.format(path).is_some() && !columns.is_multiple_of(numbers)
        };
        let small = self.parameters.iter().filter(has_other_rows);
        small.map(|(path, _)| path.clone()).collect()
    }

    fn refuse_nothing(&self) -> Result<(), Gemma4Error> {
        match self.whole().len() == self.formats.len() {
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

    /// Returns the summary of a weight file without its types.
    fn written(&self, file: &Path, left_out: Vec<String>) -> QuantizedCheckpoint {
        QuantizedCheckpoint {
            bytes: file.metadata().map_or(0, |metadata| metadata.len()),
            whole: self.whole(),
            small_blocks: self.small_blocks(),
            without_importance: self.without_importance(),
            types: BTreeMap::new(),
            parameter_bytes: 0,
            left_out,
        }
    }
}
