//! Low-rank adapters (Hu et al. 2021, arXiv:2106.09685), trained by Burn and stored as PEFT stores them.

use super::{
    adapter_config::{AdapterConfig, Scaling},
    create,
    files::TensorFiles,
    names::{HEAD, Names, is_of_tower, uncompiled},
    stored, upload_f32, write_file, write_tensors,
};
use crate::{
    Gemma4Config, Gemma4Error, Gemma4Model, TensorProblem, error::read, op::linear::product,
};
use burn::{
    module::{Lora, LoraAdapter, Module, ModuleMapper, Param, ParamGroup},
    tensor::{DType, Device, FloatDType, Tensor},
};
use safetensors::{SafeTensors, View};
use serde_json::json;
use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
};

const CONFIG: &str = "adapter_config.json";
const WEIGHTS: &str = "adapter_model.safetensors";
/// Before a module's name in the file: how PEFT wraps a model.
const WRAPPED: &str = "base_model.model.";
/// After it: the factor that reads the input, `[rank, columns in]`, and the one that writes, `[columns out, rank]`.
const FACTORS: [&str; 2] = [".lora_A.weight", ".lora_B.weight"];

/// Which matrices of a model get an adapter, and of which kind: `weight + alpha / rank · B · A`, where `A` and `B` have
/// `rank` rows and columns.
///
/// ```
/// use burn::tensor::Device;
/// use burn_gemma4::{Adapter, Gemma4Model, LoadOptions};
///
/// # fn main() -> Result<(), burn_gemma4::Gemma4Error> {
/// let device = Device::flex().autodiff();
/// # let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/embedded");
/// let model = Gemma4Model::load(folder, &device, LoadOptions::new())?;
/// let adapter = Adapter::new(8, 16.0);
/// let model = adapter.attach(model)?; // as before, with nothing to train but the adapter
/// # let folder = std::env::temp_dir().join(format!("adapter-{}", std::process::id()));
/// adapter.save(&model, &folder, "gemma-4-E2B")?;
/// # std::fs::remove_dir_all(folder).expect("a folder to remove");
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Adapter {
    /// Columns of the one factor and rows of the other.
    pub rank: usize,
    /// The adapter counts `alpha / rank` times.
    pub alpha: f64,
    /// The matrices, by the names of their modules.
    pub modules: Vec<String>,
}

impl Adapter {
    /// An adapter of all matrices of attention and of the dense feed-forward networks.
    pub fn new(rank: usize, alpha: f64) -> Self {
        let modules = [
            "q_proj",
            "k_proj",
            "v_proj",
            "o_proj",
            "gate_proj",
            "up_proj",
            "down_proj",
        ];
        Self {
            rank,
            alpha,
            modules: modules.map(String::from).into(),
        }
    }

    /// Freezes the model and attaches Burn's low-rank adapters, which add nothing until they are trained. Their factors are in
    /// f32, whatever the model is in, and are multiplied with rows in the rows' dtype. Quantized matrices stay quantized beneath them
    /// (Dettmers et al. 2023, arXiv:2305.14314).
    ///
    /// # Errors
    /// [`Gemma4Error::Argument`] where the rank is 0, alpha over it is no number in f32, the model has no such matrices or an adapter already, or
    /// one is smaller than the rank.
    pub fn attach(&self, model: Gemma4Model) -> Result<Gemma4Model, Gemma4Error> {
        let refuse = |argument, reason| Err(Gemma4Error::Argument { argument, reason });
        if self.rank == 0 {
            return refuse("rank", "has to be at least 1".into());
        }
        if !((self.alpha / self.rank as f64) as f32).is_finite() {
            let reason = format!("{} over the rank {} is no number", self.alpha, self.rank);
            return refuse("alpha", reason);
        }
        let parameters = stored(&model, DType::F32);
        if parameters.iter().any(|(path, _)| path.ends_with(".lora.a")) {
            let reason = "has an adapter already, which has to be merged first";
            return refuse("model", reason.into());
        }
        let whole = parameters.into_iter();
        let whole = whole.map(|(path, tensor)| (path, tensor.shape().to_vec()));
        let quantized = model.quantized_weights().into_iter();
        let quantized = quantized.map(|(path, numbers)| (path, numbers.shape));
        let matrices: Vec<(String, Vec<usize>)> = whole
            .chain(quantized)
            .filter(|(path, shape)| shape.len() == 2 && self.adapts(path))
            .collect();
        if matrices.is_empty() {
            return refuse(
                "modules",
                format!("the model has none of {:?}", self.modules),
            );
        }
        let small = |(_, shape): &&(String, Vec<usize>)| shape.iter().any(|size| *size < self.rank);
        if let Some((path, shape)) = matrices.iter().find(small) {
            let rank = self.rank;
            return refuse("rank", format!("is {rank}, but {path} is {shape:?}"));
        }
        let paths: Vec<String> = matrices.into_iter().map(|(path, _)| path).collect();
        let lora = Lora::new(self.rank, self.alpha).set_dtype(FloatDType::F32);
        let lora = lora.set_param_group(ParamGroup::from_paths(paths));
        // Factors stay while steps come and go: apart from these, they are not looked through for each place that a step needs.
        let device = model.device();
        Ok(device.memory_persistent_allocations(model, move |model| {
            let mut lora = lora.clone();
            let mut model = model.apply_lora(lora.clone());
            for (path, weight) in model.weights_mut() {
                weight.attach(&path, &mut lora);
            }
            model
        }))
    }

    fn adapts(&self, path: &str) -> bool {
        let Some(path) = path.strip_suffix(".weight") else {
            return false;
        };
        let module = path.rsplit('.').next().unwrap_or(path);
        path.starts_with("layers.") && self.modules.iter().any(|name| name == module)
    }

    /// What PEFT matches the whole names of a model's modules with, in either class. A list of last names would adapt towers, too,
    /// which have modules of the same names.
    fn pattern(&self) -> String {
        let modules = self.modules.join("|");
        format!(r"model\.(?:language_model\.)?layers\.\d+\.(?:[^.]+\.)*(?:{modules})")
    }

    /// Writes the adapters that [`attach`](Self::attach) gave to `model` into `folder`, as PEFT does: `adapter_config.json`,
    /// which names the checkpoint `base`, and `adapter_model.safetensors`, in f32.
    ///
    /// Where `base` is a multimodal checkpoint's folder, modules have the names of `Gemma4ForConditionalGeneration`, whose
    /// towers are left alone; else those of `Gemma4ForCausalLM`. PEFT loads them into the other class, too, by a `key_mapping` of
    /// `model.language_model.` to `model.`, or back.
    ///
    /// # Errors
    /// Where `base` is a folder without a checkpoint that can be read, and where a file cannot be written.
    pub fn save(
        &self,
        model: &Gemma4Model,
        folder: impl AsRef<Path>,
        base: &str,
    ) -> Result<(), Gemma4Error> {
        let folder = folder.as_ref();
        let prefix = match Path::new(base).is_dir() {
            true => Names::of(&TensorFiles::open(Path::new(base))?).prefix,
            false => Names::of_text().prefix,
        };
        let file = json!({
            "peft_type": "LORA",
            "r": self.rank,
            "lora_alpha": self.alpha,
            "target_modules": self.pattern(),
            "base_model_name_or_path": base,
            "task_type": "CAUSAL_LM",
            "bias": "none",
            "fan_in_fan_out": false,
            "use_dora": false,
            "use_rslora": false,
            "modules_to_save": null,
            "rank_pattern": {},
            "alpha_pattern": {},
        });
        let json = serde_json::to_string_pretty(&file)
            .map_err(|error| Gemma4Error::Config(error.to_string()))?;
        create(folder)?;
        // Burn's first factor writes and its second one reads, since the matrices here are [columns out, columns in].
        let [reads, writes] = FACTORS;
        let factors =
            stored(&model.valid(), DType::F32)
                .into_iter()
                .filter_map(|(path, tensor)| {
                    let (path, suffix) = match path.strip_suffix(".weight.lora.a") {
                        Some(path) => (path, writes),
                        None => (path.strip_suffix(".weight.lora.b")?, reads),
                    };
                    Some((format!("{WRAPPED}{prefix}{path}{suffix}"), tensor))
                });
        write_tensors(&folder.join(WEIGHTS), None, factors)?;
        write_file(&folder.join(CONFIG), json.as_bytes())
    }
}

impl Gemma4Model {
    /// Adds the low-rank adapter in `folder` to the weights: `adapter_config.json` and `adapter_model.safetensors`, as
    /// [`Adapter::save`] and PEFT write them. Quantized weights that it adds to become whole.
    ///
    /// # Errors
    /// Where a file is missing or not what it should be, where a tensor does not fit the model or is not of the rank that
    /// `adapter_config.json` says (all of them named), and for adapters of another kind.
    pub fn merge_adapter(self, folder: impl AsRef<Path>) -> Result<Self, Gemma4Error> {
        self.with_adapter(folder.as_ref(), Way::Merged)
    }

    /// As [`merge_adapter`](Self::merge_adapter), but the layers' quantized weights stay as they are: what the adapter adds goes through its
    /// factors, in the dtype that the model computes in, and is not rounded with the weights, as when it was trained over them.
    ///
    /// # Errors
    /// As [`merge_adapter`](Self::merge_adapter).
    pub fn attach_adapter(self, folder: impl AsRef<Path>) -> Result<Self, Gemma4Error> {
        self.with_adapter(folder.as_ref(), Way::Beside)
    }

    fn with_adapter(self, folder: &Path, way: Way) -> Result<Self, Gemma4Error> {
        let path = folder.join(CONFIG);
        let malformed = |path: &Path, reason: String| Gemma4Error::Malformed {
            path: path.into(),
            reason,
        };
        let config =
            AdapterConfig::parse(&read(&path)?).map_err(|reason| malformed(&path, reason))?;
        let path = folder.join(WEIGHTS);
        let bytes = read(&path)?;
        let tensors = SafeTensors::deserialize(&bytes)
            .map_err(|error| malformed(&path, format!("not a whole safetensors file: {error}")))?;
        if tensors.is_empty() {
            return Err(malformed(&path, "has no tensors".into()));
        }
        let mut in_file = BTreeMap::new();
        for name in tensors.names() {
            if let Some(other) = in_file.insert(uncompiled(name), name) {
                return Err(malformed(&path, format!("{name} is {other}, too")));
            }
        }
        let mut warnings = config.warnings.clone();
        let mut rest: BTreeSet<String> = in_file.keys().cloned().collect();
        rest.retain(|name| !name.strip_prefix(WRAPPED).is_some_and(is_of_tower));
        let of_towers = in_file.len() - rest.len();
        if rest.is_empty() {
            return Err(malformed(
                &path,
                format!("has no tensors but {of_towers} of vision and audio towers"),
            ));
        }
        if of_towers > 0 {
            warnings.push(format!(
                "{WEIGHTS}: {of_towers} factors of vision and audio towers are not used; text needs none of them"
            ));
        }
        let names = Names::among(rest.iter().filter_map(|name| name.strip_prefix(WRAPPED)));
        let mut merger = Merger {
            prefix: names.prefix,
            config,
            rest,
            in_file,
            tensors: &tensors,
            path: Vec::new(),
            problems: Vec::new(),
            refusal: None,
        };
        let mut model = self;
        model.warnings.extend(warnings);
        for (path, weight) in model.weights_mut() {
            let Some(matrix) = path.strip_suffix(".weight") else {
                continue;
            };
            if !merger.adds_to(matrix) {
                continue;
            }
            // Products beside those of layers know no adapters.
            let beside = match way == Way::Beside && path.starts_with("layers.") {
                true => weight.without_adapter(),
                false => None,
            };
            match beside {
                Some((shape, dtype, device)) => {
                    if let Some((factors, scale)) = merger.factors(matrix, shape, &device) {
                        let [a, b] = factors.map(|factor| Param::from_tensor(factor.cast(dtype)));
                        weight.adapt(LoraAdapter { a, b, scale });
                    }
                }
                // What is added to quantized weights needs whole ones.
                None => weight.dequantize(),
            }
        }
        let model = model.map(&mut merger);
        if let Some(reason) = merger.refusal {
            return Err(malformed(&folder.join(CONFIG), reason));
        }
        let mut problems = merger.problems;
        let extra = merger.rest.into_iter();
        let extra = extra.filter(|name| !is_unread(name, &names, model.config()));
        problems.extend(extra.map(|name| TensorProblem::Extra { name }));
        match problems.is_empty() {
            true => Ok(model),
            false => Err(Gemma4Error::Tensors { path, problems }),
        }
    }
}

/// Whether a factor is of keys or values that a layer does not make, since it reads an earlier layer's.
fn is_unread(name: &str, names: &Names, config: &Gemma4Config) -> bool {
    let module = FACTORS.iter().find_map(|suffix| name.strip_suffix(suffix));
    let module = module.and_then(|module| module.strip_prefix(WRAPPED));
    module.is_some_and(|module| {
        names.is_ours(module) && names.is_ignored(&format!("{module}.weight"), config)
    })
}

/// Where an adapter goes that is read.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    /// Into the weights.
    Merged,
    /// Beside quantized weights of layers, and into all others.
    Beside,
}

/// Adds the products of an adapter's factors to the parameters that they belong to.
struct Merger<'a> {
    tensors: &'a SafeTensors<'a>,
    /// The tensors' names in the file by those without `torch.compile`'s parts.
    in_file: BTreeMap<String, &'a str>,
    /// Before a parameter's path in the model that PEFT adapted.
    prefix: &'static str,
    config: AdapterConfig,
    path: Vec<String>,
    /// Tensors of the file that belong to no parameter so far.
    rest: BTreeSet<String>,
    problems: Vec<TensorProblem>,
    /// A fault of the configuration that only a module's name brings to light.
    refusal: Option<String>,
}

impl Merger<'_> {
    /// The name that the module of the matrix at `path` has in the model that PEFT adapted.
    fn module(&self, path: &str) -> String {
        // A head is beside the model that has all else.
        match HEAD.strip_suffix(".weight") == Some(path) {
            true => path.into(),
            false => format!("{}{path}", self.prefix),
        }
    }

    /// Of the factors of the matrix at `path`.
    fn names(&self, path: &str) -> [String; 2] {
        let module = self.module(path);
        FACTORS.map(|suffix| format!("{WRAPPED}{module}{suffix}"))
    }

    /// Whether the adapter has something to add to the matrix at `path`.
    fn adds_to(&self, path: &str) -> bool {
        let names = self.names(path);
        names.iter().any(|name| self.rest.contains(name))
    }

    /// `[columns out, columns in]` in f32: what the adapter adds to the matrix at `path`, if it has something to add.
    fn delta(&mut self, path: &str, shape: [usize; 2], device: &Device) -> Option<Tensor<2>> {
        let ([writes, reads], scale) = self.factors(path, shape, device)?;
        Some(product(writes, reads) * scale)
    }

    /// The factors of that in f32, `[columns out, rank]` and `[rank, columns in]`, and what their product is multiplied by.
    fn factors(
        &mut self,
        path: &str,
        shape: [usize; 2],
        device: &Device,
    ) -> Option<([Tensor<2>; 2], f64)> {
        if !self.adds_to(path) {
            return None;
        }
        let Scaling { rank, scale } = match self.config.scaling(&self.module(path)) {
            Ok(scaling) => scaling,
            Err(reason) => {
                self.refusal = Some(reason);
                return None;
            }
        };
        let names = self.names(path);
        let [output, input] = shape;
        let [reads, writes] = [([rank, input], 0), ([output, rank], 1)];
        let [reads, writes] = [(&names[0], reads), (&names[1], writes)]
            .map(|(name, (expected, of_rank))| self.factor(name, expected, of_rank, device));
        Some(([writes?, reads?], scale))
    }

    /// The factor called `name`, whose dimension `of_rank` is the rank.
    fn factor(
        &mut self,
        name: &str,
        expected: [usize; 2],
        of_rank: usize,
        device: &Device,
    ) -> Option<Tensor<2>> {
        self.rest.remove(name);
        let of_another_rank = |found: &[usize]| match *found {
            [rows, columns] => [rows, columns][1 - of_rank] == expected[1 - of_rank],
            _ => false,
        };
        let in_file = self.in_file.get(name).copied().unwrap_or(name);
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
            Ok(view) => match upload_f32(&view, expected, device) {
                Some(tensor) => return Some(tensor),
                None => TensorProblem::Dtype {
                    name: name.into(),
                    found: format!("{:?}", view.dtype()),
                },
            },
        };
        self.problems.push(problem);
        None
    }
}

impl ModuleMapper for Merger<'_> {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let path = self.path.join(".");
        let (Some(path), Ok(shape)) = (
            path.strip_suffix(".weight"),
            <[usize; 2]>::try_from(param.lazy_shape().to_vec()),
        ) else {
            return param;
        };
        let device = param.lazy_device().without_autodiff();
        let Some(delta) = self.delta(path, shape, &device) else {
            return param;
        };
        let weight = param.val().inner();
        let dtype = weight.dtype();
        let merged = (weight.cast(DType::F32) + delta.reshape(param.shape())).cast(dtype);
        let id = param.id;
        param.transform_for_load(merged, id)
    }
}
