//! The files of a LoRA adapter, and the assignment of their tensors to the matrices of a model.

use super::config::{AdapterConfig, Scaling};
use crate::checkpoint::files::uncompiled;
use crate::checkpoint::names::{
    HEAD, Names, is_of_audio, is_of_tower, is_of_vision, projected_name,
};
use crate::checkpoint::source::floats;
use crate::config::Gemma4Config;
use crate::error::{Gemma4Error, TensorProblem, read};
use burn::tensor::TensorData;
use safetensors::SafeTensors;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

pub(super) const CONFIG: &str = "adapter_config.json";
pub(super) const WEIGHTS: &str = "adapter_model.safetensors";
/// The prefix of every module name in an adapter's file. PEFT wraps the model in a PEFT module, which adds this prefix.
pub(super) const WRAPPED: &str = "base_model.model.";
/// The prefix of the module names of towers, after [`WRAPPED`].
pub(super) const TOWERS: &str = "model.";
/// The suffixes of the tensor names in an adapter's file. The first is for `A`, `[rank, in_features]`, and the second
/// is for `B`, `[out_features, rank]`.
pub(super) const FACTORS: [&str; 2] = [".lora_A.weight", ".lora_B.weight"];

/// The contents of an adapter's files.
pub(super) struct AdapterFiles {
    config: AdapterConfig,
    config_path: PathBuf,
    path: PathBuf,
    bytes: Vec<u8>,
}

impl AdapterFiles {
    /// Reads the files of the adapter in `folder`.
    pub fn open(folder: &Path) -> Result<Self, Gemma4Error> {
        let config_path = folder.join(CONFIG);
        let config = AdapterConfig::parse(&read(&config_path)?)
            .map_err(|reason| malformed(&config_path, reason))?;
        let path = folder.join(WEIGHTS);
        let bytes = read(&path)?;
        Ok(Self {
            config,
            config_path,
            path,
            bytes,
        })
    }

    /// Returns the parts of a model for which the adapter has factors.
    ///
    /// # Errors
    /// Returns an error if the file of the factors is malformed.
    pub fn parts(&self) -> Result<AdaptedParts, Gemma4Error> {
        let tensors = self.tensors()?;
        let has = |is_part: fn(&str) -> bool| {
            let mut names = tensors.names().into_iter().map(uncompiled);
            names.any(|name| name.strip_prefix(WRAPPED).is_some_and(is_part))
        };
        Ok(AdaptedParts {
            text: has(|name| !is_of_tower(name)),
            vision: has(is_of_vision),
            audio: has(is_of_audio),
        })
    }

    /// Prepares the assignment of the tensors to the matrices of a text model.
    pub fn reader(&self) -> Result<AdapterReader<'_>, Gemma4Error> {
        let mut reader = self.reader_of_all()?;
        let all = reader.rest.len();
        let is_of_tower = |name: &String| name.strip_prefix(WRAPPED).is_some_and(is_of_tower);
        reader.rest.retain(|name| !is_of_tower(name));
        let of_towers = all - reader.rest.len();
        if reader.rest.is_empty() {
            return Err(malformed(
                &self.path,
                format!("has no tensors except {of_towers} of vision and audio towers"),
            ));
        }
        if of_towers > 0 {
            reader.of_towers = Some(format!(
                "{WEIGHTS}: {of_towers} factors of vision and audio towers are not used; the text model does not need them, but images are refused if the vision has factors, and audio if the audio has factors"
            ));
        }
        let rest = reader.rest.iter();
        reader.names = Names::among(rest.filter_map(|name| name.strip_prefix(WRAPPED)));
        Ok(reader)
    }

    /// Prepares the assignment of the tensors to the matrices of the vision or the audio. `is_part` is true for the names
    /// of its tensors, and `is_projected` if the part has no tower.
    pub fn reader_of_part(
        &self,
        is_part: fn(&str) -> bool,
        is_projected: bool,
    ) -> Result<AdapterReader<'_>, Gemma4Error> {
        let mut reader = self.reader_of_all()?;
        reader.is_projected = is_projected;
        let is_part = |name: &String| name.strip_prefix(WRAPPED).is_some_and(is_part);
        reader.rest.retain(is_part);
        Ok(reader)
    }

    fn tensors(&self) -> Result<SafeTensors<'_>, Gemma4Error> {
        SafeTensors::deserialize(&self.bytes).map_err(|error| {
            malformed(&self.path, format!("not a whole safetensors file: {error}"))
        })
    }

    /// Prepares the assignment of all tensors.
    fn reader_of_all(&self) -> Result<AdapterReader<'_>, Gemma4Error> {
        let malformed = |reason| malformed(&self.path, reason);
        let tensors = self.tensors()?;
        if tensors.is_empty() {
            return Err(malformed("has no tensors".into()));
        }
        let mut in_file = BTreeMap::new();
        for name in tensors.names() {
            if let Some(other) = in_file.insert(uncompiled(name), name.to_owned()) {
                return Err(malformed(format!(
                    "{name} and {other} name the same tensor"
                )));
            }
        }
        Ok(AdapterReader {
            files: self,
            tensors,
            rest: in_file.keys().cloned().collect(),
            in_file,
            names: Names::of_text(),
            warnings: self.config.warnings.clone(),
            of_towers: None,
            is_projected: false,
            is_applied: false,
            problems: Vec::new(),
            refusal: None,
        })
    }
}

/// The parts of a model for which an adapter has factors.
pub(crate) struct AdaptedParts {
    pub text: bool,
    pub vision: bool,
    pub audio: bool,
}

impl AdaptedParts {
    /// Reads the names of the factors of the adapter in `folder`.
    ///
    /// # Errors
    /// Returns an error if a file is missing or malformed.
    pub fn of(folder: &Path) -> Result<Self, Gemma4Error> {
        AdapterFiles::open(folder)?.parts()
    }
}

fn malformed(path: &Path, reason: String) -> Gemma4Error {
    Gemma4Error::Malformed {
        path: path.into(),
        reason,
    }
}

/// The adapter of one matrix, in f32. The matrix changes by `B · A · scale`.
pub(super) struct MatrixFactors {
    /// `A`, `[rank, in_features]`.
    pub reads: TensorData,
    /// `B`, `[out_features, rank]`.
    pub writes: TensorData,
    pub scale: f64,
    /// The name of `B` in the file, for messages.
    pub name: String,
}

/// Assigns the tensors of an adapter's file to the matrices of a model, and records the tensors that do not fit.
pub(super) struct AdapterReader<'a> {
    files: &'a AdapterFiles,
    tensors: SafeTensors<'a>,
    /// The file's tensors. A key is a tensor's name without the parts that `torch.compile` adds, and the value is the
    /// full name in the file.
    in_file: BTreeMap<String, String>,
    /// The naming scheme of the model that PEFT adapted.
    names: Names,
    /// Warnings for the user.
    pub warnings: Vec<String>,
    /// A warning about factors of towers, if the file has such factors besides those of the text model.
    pub of_towers: Option<String>,
    /// True for the modules of vision or audio without a tower, which have other names in Hugging Face Transformers.
    is_projected: bool,
    /// Tensors of the file that have not been assigned to a matrix yet.
    rest: BTreeSet<String>,
    /// True if a tensor of the file belongs to a matrix of the model.
    is_applied: bool,
    problems: Vec<TensorProblem>,
    /// The error message of the last failed lookup, or `None`. A lookup searches the adapter's configuration for the
    /// rank and scale of a module.
    refusal: Option<String>,
}

impl AdapterReader<'_> {
    /// Returns the name of the module that holds the matrix at `path`. The name is the one in the model that PEFT
    /// adapted.
    fn module(&self, path: &str) -> String {
        // The output projection, `lm_head`, gets no prefix. The prefix names the module of the text model, and
        // `lm_head` is outside of this module.
        match HEAD.strip_suffix(".weight") == Some(path) {
            true => path.into(),
            false if self.is_projected => format!("{}{}", self.names.prefix, projected_name(path)),
            false => format!("{}{path}", self.names.prefix),
        }
    }

    /// Returns the tensor names of `A` and `B` in the file, for the matrix at `path`.
    fn names(&self, path: &str) -> [String; 2] {
        let module = self.module(path);
        FACTORS.map(|suffix| format!("{WRAPPED}{module}{suffix}"))
    }

    /// True if the adapter has an `A` or a `B` for the matrix at `path`.
    pub fn adds_to(&self, path: &str) -> bool {
        let names = self.names(path);
        names.iter().any(|name| self.rest.contains(name))
    }

    /// Returns the adapter of the matrix at `path`, `[out_features, in_features]`. Returns `None` if the adapter does
    /// not change the matrix, or if the tensors do not fit.
    pub fn factors(&mut self, path: &str, shape: [usize; 2]) -> Option<MatrixFactors> {
        if !self.adds_to(path) {
            return None;
        }
        self.is_applied = true;
        let Scaling { rank, scale } = match self.files.config.scaling(&self.module(path)) {
            Ok(scaling) => scaling,
            Err(reason) => {
                self.refusal = Some(reason);
                return None;
            }
        };
        let [of_reads, of_writes] = self.names(path);
        let [output, input] = shape;
        let reads = self.factor(&of_reads, [rank, input], 0);
        let writes = self.factor(&of_writes, [output, rank], 1);
        Some(MatrixFactors {
            reads: reads?,
            writes: writes?,
            scale,
            name: of_writes,
        })
    }

    /// Returns the tensor `name`, which is an `A` or a `B`, in f32, and checks the tensor's shape. `of_rank` is the
    /// index of the dimension that must have the size of the rank.
    fn factor(&mut self, name: &str, expected: [usize; 2], of_rank: usize) -> Option<TensorData> {
        self.rest.remove(name);
        let of_another_rank = |found: &[usize]| match *found {
            [rows, columns] => [rows, columns][1 - of_rank] == expected[1 - of_rank],
            _ => false,
        };
        let in_file = self.in_file.get(name).map_or(name, String::as_str);
        let problem = match self.tensors.tensor(in_file) {
            Err(_) => TensorProblem::Missing { name: name.into() },
            Ok(view) if view.shape() != expected && of_another_rank(view.shape()) => {
                TensorProblem::Rank {
                    name: name.into(),
                    found: view.shape()[of_rank],
                    expected: expected[of_rank],
                }
            }
            Ok(view) if view.shape() != expected => TensorProblem::Shape {
                name: name.into(),
                found: view.shape().to_vec(),
                expected: expected.into(),
            },
            Ok(view) => match floats(&view, expected) {
                Some(data) => return Some(data),
                None => TensorProblem::Dtype {
                    name: name.into(),
                    found: format!("{:?}", view.dtype()),
                },
            },
        };
        self.problems.push(problem);
        None
    }

    /// Records a tensor that cannot be used.
    pub fn refuse(&mut self, problem: TensorProblem) {
        self.problems.push(problem);
    }

    /// Records all tensors whose matrix satisfies `is_unserved`. The predicate receives the path of the matrix's
    /// module.
    pub fn refuse_unserved(&mut self, is_unserved: impl Fn(&str) -> bool) {
        let prefix = self.names.prefix;
        let module = |name: &str| {
            let module = name.strip_prefix(WRAPPED)?;
            let end = module.find(".lora_")?;
            let module = &module[..end];
            Some(module.strip_prefix(prefix).unwrap_or(module).to_owned())
        };
        let (unserved, rest) = std::mem::take(&mut self.rest)
            .into_iter()
            .partition(|name| module(name).is_some_and(|module| is_unserved(&module)));
        self.rest = rest;
        let unserved: BTreeSet<String> = unserved;
        let unserved = unserved.into_iter();
        self.problems
            .extend(unserved.map(|name| TensorProblem::Unserved { name }));
    }

    /// Ends the assignment to a model of the given configuration.
    ///
    /// # Errors
    /// Returns an error that lists the tensors that do not fit the model. Returns an error if no tensor belongs to a
    /// matrix of the model.
    pub fn finish(self, config: &Gemma4Config) -> Result<(), Gemma4Error> {
        self.finish_with(|name, names| is_unread(name, names, config))
    }

    /// Ends the assignment to the vision or the audio.
    ///
    /// # Errors
    /// Returns the errors of [`finish`](Self::finish).
    pub fn finish_part(self) -> Result<(), Gemma4Error> {
        self.finish_with(|_, _| false)
    }

    /// Ends the assignment. `is_unread` is true for tensors that no matrix of the model reads.
    fn finish_with(self, is_unread: impl Fn(&str, &Names) -> bool) -> Result<(), Gemma4Error> {
        if let Some(reason) = self.refusal {
            return Err(malformed(&self.files.config_path, reason));
        }
        let mut problems = self.problems;
        let (unread, extra): (Vec<_>, Vec<_>) = self
            .rest
            .into_iter()
            .partition(|name| is_unread(name, &self.names));
        problems.extend(extra.into_iter().map(|name| TensorProblem::Extra { name }));
        let path = self.files.path.clone();
        match problems.is_empty() {
            true if self.is_applied => Ok(()),
            true => Err(malformed(
                &path,
                format!(
                    "none of its tensors changes the model; all {} belong to layers that share keys and values",
                    unread.len()
                ),
            )),
            false => Err(Gemma4Error::Tensors { path, problems }),
        }
    }
}

/// True if `name` is the `A` or `B` tensor of a K or V projection, and the model lacks this projection. Layers that
/// share an earlier layer's KV cache have no K and V projections.
fn is_unread(name: &str, names: &Names, config: &Gemma4Config) -> bool {
    let module = FACTORS.iter().find_map(|suffix| name.strip_suffix(suffix));
    let module = module.and_then(|module| module.strip_prefix(WRAPPED));
    module.is_some_and(|module| {
        names.is_ours(module) && names.is_ignored(&format!("{module}.weight"), config)
    })
}
