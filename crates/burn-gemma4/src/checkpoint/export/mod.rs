//! Whole checkpoints into quantized ones, from file to file: a matrix at a time, on no device.

mod folder;
mod gguf;
mod tokenizer;

use super::{
    Expected, LoadProgress, Quantization, check, files::TensorFiles, folder::Folder,
    source::Source, source::Weights, written_dtype,
};
use crate::{
    Gemma4Config, Gemma4Error, Gemma4Model, TensorProblem, checkpoint::missing,
    config::quantization::schemes_of, quantized::quantize::Target,
};
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

/// What [`quantize_checkpoint`] has written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QuantizedCheckpoint {
    /// Bytes of the weights' file.
    pub bytes: u64,
    /// The matrices that stay whole since their rows are no whole blocks, by the paths of the model's parameters.
    pub whole: Vec<String>,
    /// What the source has and a GGUF file does not, such as towers.
    pub left_out: Vec<String>,
}

/// Writes the checkpoint in the folder `from` with quantized weights to `to`: a GGUF file where `.gguf` is its ending, in any case, else a folder.
///
/// A GGUF file has the weights that [`LoadOptions::quantization`](super::LoadOptions::quantization) quantizes in blocks of Q8_0 or Q4_0, bit
/// by bit as llama.cpp's quantizer makes them, and what stays in f32, or a matrix in its own dtype; with the tokenizer, the chat template and
/// the defaults of sampling, as llama.cpp's converter writes them. Of a multimodal checkpoint it has the text model.
///
/// A folder has the products of the layers, and of the projection of per-layer embeddings, as compressed-tensors packs them: `pack-quantized`,
/// symmetric, 8 or 4 bits in groups of 32 with a scale in the checkpoint's dtype. Experts are one by one, as llm-compressor writes them.
/// Embeddings, the head, routers and all that is not of the text model are as they were: other loaders know no other. So are the files beside
/// the weights.
///
/// What is written comes to its place when it is complete, and the host holds about a matrix of it at a time.
///
/// # Errors
/// Where `to` is there already, `from` is no whole checkpoint of Gemma 4 (a drafter, a file, weights that are quantized: each by name), no
/// matrix has rows of whole blocks, a weight is no finite number, the form is neither [`Q8`](Quantization::Q8) nor [`Q4`](Quantization::Q4), a
/// GGUF file has no words for the configuration or the tokenizer, and where a file cannot be written.
pub fn quantize_checkpoint(
    from: impl AsRef<Path>,
    to: impl AsRef<Path>,
    form: Quantization,
    mut on_progress: impl FnMut(LoadProgress<'_>),
) -> Result<QuantizedCheckpoint, Gemma4Error> {
    let (from, to) = (from.as_ref(), to.as_ref());
    let target = form.target().ok_or_else(|| Gemma4Error::Argument {
        argument: "form",
        reason: format!("is {form:?}; weights are written as Q8 or as Q4"),
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
            "is a file; what is quantized is a folder as Hugging Face has it, with safetensors",
        ));
    }
    let path = from.join("config.json");
    let config = Gemma4Config::from_file(&path)?;
    let json = fs::read_to_string(&path).map_err(|source| missing(path, source))?;
    if !schemes_of(&json)?.is_empty() {
        return Err(unsupported(
            "its weights are quantized by compressed-tensors already; take the checkpoint that they were made of",
        ));
    }
    let files = Arc::new(TensorFiles::open(from)?);
    let weights = Folder::of(files.clone(), Vec::new());
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

/// A checkpoint on its way.
struct Export<'a> {
    from: &'a Path,
    /// Its `config.json`.
    json: &'a str,
    config: &'a Gemma4Config,
    weights: &'a Folder,
    /// The dtype of most of its numbers.
    dtype: DType,
    /// Path and shape.
    parameters: Vec<(String, Vec<usize>)>,
    /// The paths of those that may be quantized in what is written.
    quantized: BTreeSet<String>,
    target: Target,
    report: RefCell<Report<'a>>,
}

/// What is told on the way.
struct Report<'a> {
    on_progress: &'a mut dyn FnMut(LoadProgress<'_>),
    /// Bytes of the source that are written.
    bytes: usize,
    total_bytes: usize,
    /// The first weight that cannot be written.
    problem: Option<TensorProblem>,
}

impl<'a> Export<'a> {
    fn source(&self, path: &str) -> Source<'a> {
        self.weights
            .get(path)
            .unwrap_or_else(|problem| unreachable!("checked: {problem}"))
    }

    /// Whether a parameter has rows of whole blocks, which is asked of those that may be quantized.
    fn is_quantized(&self, path: &str, shape: &[usize]) -> bool {
        let columns = shape.last().copied().unwrap_or(0);
        self.quantized.contains(path) && self.target.layout(columns).is_some()
    }

    /// Those that may be quantized and are not.
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
                reason: "no matrix has rows of whole blocks of 32 numbers, so that there is nothing to quantize"
                    .into(),
            }),
        }
    }

    /// A tensor of so many bytes in the source is written.
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

    /// Takes down that the weight called `name` is no finite numbers.
    fn is_no_number(&self, name: &str) {
        let problem = TensorProblem::NoNumber { name: name.into() };
        self.report.borrow_mut().problem.get_or_insert(problem);
    }

    /// What is wrong with the weights, before what went wrong with the file.
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
