//! LoRA adapters (low-rank adaptation, Hu et al. 2021, arXiv:2106.09685), in PEFT's file format.

use super::{
    adapter_config::{AdapterConfig, Scaling},
    create,
    files::{TensorFiles, uncompiled},
    names::{HEAD, Names, is_of_tower},
    stored, upload_f32, write_file, write_tensors,
};
use crate::config::Gemma4Config;
use crate::error::{Gemma4Error, TensorProblem, read};
use crate::model::Gemma4Model;
use crate::op::linear::product;
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
/// The prefix of every module name in an adapter's file. PEFT wraps the model in a PEFT module, which adds this prefix.
const WRAPPED: &str = "base_model.model.";
/// The suffixes of the tensor names in an adapter's file. The first is for `A`, `[rank, in_features]`, and the second
/// is for `B`, `[out_features, rank]`.
const FACTORS: [&str; 2] = [".lora_A.weight", ".lora_B.weight"];

/// A description of a LoRA adapter: the matrices that it adapts, its rank and its scale.
///
/// An adapted matrix becomes `weight + alpha / rank · B · A`, where `A` has `rank` rows and `B` has `rank` columns.
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
/// let model = adapter.attach(model)?; // the same outputs; only the adapter is trainable
/// # let folder = std::env::temp_dir().join(format!("adapter-{}", std::process::id()));
/// adapter.save(&model, &folder, "gemma-4-E2B")?;
/// # std::fs::remove_dir_all(folder).expect("the saved adapter's folder can be removed");
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Adapter {
    /// The rank: the number of rows of `A` and the number of columns of `B`.
    pub rank: usize,
    /// The numerator `alpha` of the scale `alpha / rank`. The scale multiplies `B · A`.
    pub alpha: f64,
    /// The adapted matrices, each named by the last part of its module's name, such as `q_proj`.
    pub modules: Vec<String>,
}

impl Adapter {
    /// Creates an adapter of all attention matrices and of all matrices of the dense feed-forward networks.
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

    /// Freezes the model and attaches Burn's LoRA adapters, which do not change the outputs until they are trained.
    ///
    /// The matrices `A` and `B` are stored in f32, whatever the model's dtype is. Quantized matrices stay quantized (QLoRA,
    /// Dettmers et al. 2023, arXiv:2305.14314).
    ///
    /// # Errors
    /// Returns [`Gemma4Error::Argument`] in these cases:
    ///
    /// - The rank is 0 or larger than a dimension of a matrix.
    /// - The scale `alpha / rank` is not finite in f32.
    /// - The model has none of the named matrices, or the model already has an adapter.
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
        // The adapter's matrices live through all training steps, so this call allocates them in persistent memory. The
        // allocator does not search persistent memory for temporary tensors.
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

    /// Returns the regular expression that PEFT matches against the names of a model's modules. The expression covers
    /// whole names, because short names such as `q_proj` would also match modules of the vision and audio towers.
    fn pattern(&self) -> String {
        let modules = self.modules.join("|");
        format!(r"model\.(?:language_model\.)?layers\.\d+\.(?:[^.]+\.)*(?:{modules})")
    }

    /// Writes the adapter that [`attach`](Self::attach) added to `model` into `folder`, in PEFT's format and in f32.
    ///
    /// The files are `adapter_config.json` and `adapter_model.safetensors`. `adapter_config.json` names `base` as the
    /// checkpoint that the adapter changes. If `base` is the folder of a multimodal checkpoint, the written module
    /// names are those of `Gemma4ForConditionalGeneration`. Otherwise the written module names are those of
    /// `Gemma4ForCausalLM`. With a `key_mapping` from `model.language_model.` to `model.`, or the reverse, PEFT can
    /// translate the names of one class to those of the other.
    ///
    /// # Errors
    /// Returns an error if `base` is a folder without a readable checkpoint, or if a file cannot be written.
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
        // Burn adds `a · b` to a weight, and PEFT adds `B · A`. The weights are `[out_features, in_features]`, so Burn's `a`
        // is PEFT's `B`, and Burn's `b` is PEFT's `A`.
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
    /// Adds the LoRA adapter in `folder` to the weights.
    ///
    /// The folder holds `adapter_config.json` and `adapter_model.safetensors`, as [`Adapter::save`] and PEFT write them.
    /// Quantized weights are dequantized if the adapter changes them.
    ///
    /// # Errors
    /// Returns an error if a file is missing or malformed, or if the adapter is not a LoRA adapter. If tensors do not
    /// fit the model or the rank in `adapter_config.json`, the error lists all such tensors.
    pub fn merge_adapter(self, folder: impl AsRef<Path>) -> Result<Self, Gemma4Error> {
        self.with_adapter(folder.as_ref(), Way::Merged)
    }

    /// Attaches the LoRA adapter in `folder` without merging it into the layers' quantized weights.
    ///
    /// The folder holds the files of [`merge_adapter`](Self::merge_adapter). The quantized weights stay quantized. The
    /// forward pass adds the adapter's output to the output of the quantized matrix, as in QLoRA training. The adapters
    /// of all other matrices are merged into the weights.
    ///
    /// # Errors
    /// Returns the errors of [`merge_adapter`](Self::merge_adapter).
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
                return Err(malformed(
                    &path,
                    format!("{name} and {other} name the same tensor"),
                ));
            }
        }
        let mut warnings = config.warnings.clone();
        let mut rest: BTreeSet<String> = in_file.keys().cloned().collect();
        rest.retain(|name| !name.strip_prefix(WRAPPED).is_some_and(is_of_tower));
        let of_towers = in_file.len() - rest.len();
        if rest.is_empty() {
            return Err(malformed(
                &path,
                format!("has no tensors except {of_towers} of vision and audio towers"),
            ));
        }
        if of_towers > 0 {
            warnings.push(format!(
                "{WEIGHTS}: {of_towers} factors of vision and audio towers are not used; the text model does not need them"
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
            // The adapter of a layer's quantized linear projection can stay beside the weight. The adapters of all
            // other matrices are merged into the weights.
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
                // A merge changes the weight, so a quantized weight is dequantized first.
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

/// True if `name` is the `A` or `B` tensor of a K or V projection, and the model lacks this projection. Layers that
/// share an earlier layer's KV cache have no K and V projections.
fn is_unread(name: &str, names: &Names, config: &Gemma4Config) -> bool {
    let module = FACTORS.iter().find_map(|suffix| name.strip_suffix(suffix));
    let module = module.and_then(|module| module.strip_prefix(WRAPPED));
    module.is_some_and(|module| {
        names.is_ours(module) && names.is_ignored(&format!("{module}.weight"), config)
    })
}

/// The way in which a loaded adapter is applied to the weights.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    /// Adds the adapter's update `B · A · scale` to every adapted weight.
    Merged,
    /// Keeps the adapter's `A` and `B` beside the layers' quantized weights, and adds `B · A · scale` to all other
    /// adapted weights.
    Beside,
}

/// A module mapper that adds `B · A · scale` to each parameter that the adapter changes.
struct Merger<'a> {
    tensors: &'a SafeTensors<'a>,
    /// The file's tensors. A key is a tensor's name without the parts that `torch.compile` adds, and the value is the
    /// full name in the file.
    in_file: BTreeMap<String, &'a str>,
    /// The prefix of parameter names in the model that PEFT adapted. The prefix precedes the parameter's path in this
    /// crate's model.
    prefix: &'static str,
    config: AdapterConfig,
    path: Vec<String>,
    /// Tensors of the file that have not been assigned to a parameter yet.
    rest: BTreeSet<String>,
    problems: Vec<TensorProblem>,
    /// The error message of the last failed lookup, or `None`. A lookup searches the adapter's configuration for the
    /// rank and scale of a module.
    refusal: Option<String>,
}

impl Merger<'_> {
    /// Returns the name of the module that holds the matrix at `path`. The name is the one in the model that PEFT
    /// adapted.
    fn module(&self, path: &str) -> String {
        // The output projection, `lm_head`, gets no prefix. The prefix names the module of the text model, and
        // `lm_head` is outside of this module.
        match HEAD.strip_suffix(".weight") == Some(path) {
            true => path.into(),
            false => format!("{}{path}", self.prefix),
        }
    }

    /// Returns the tensor names of `A` and `B` in the file, for the matrix at `path`.
    fn names(&self, path: &str) -> [String; 2] {
        let module = self.module(path);
        FACTORS.map(|suffix| format!("{WRAPPED}{module}{suffix}"))
    }

    /// True if the adapter has an `A` or a `B` for the matrix at `path`.
    fn adds_to(&self, path: &str) -> bool {
        let names = self.names(path);
        names.iter().any(|name| self.rest.contains(name))
    }

    /// Returns the update `B · A · scale` of the matrix at `path`, `[out_features, in_features]` in f32. Returns `None` if
    /// the adapter does not change the matrix.
    fn delta(&mut self, path: &str, shape: [usize; 2], device: &Device) -> Option<Tensor<2>> {
        let ([writes, reads], scale) = self.factors(path, shape, device)?;
        Some(product(writes, reads) * scale)
    }

    /// Loads three parts of the adapter of the matrix at `path`: `B`, `[out_features, rank]` in f32, `A`,
    /// `[rank, in_features]` in f32, and the scale of `B · A`.
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

    /// Loads the tensor `name`, which is an `A` or a `B`, and checks the tensor's shape. `of_rank` is the index of the
    /// dimension that must have the size of the rank.
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
