//! The description of a LoRA adapter: its training on a model, and its files.

use super::files::{CONFIG, FACTORS, WEIGHTS, WRAPPED};
use crate::checkpoint::files::TensorFiles;
use crate::checkpoint::names::Names;
use crate::checkpoint::{create, stored, write_file, write_tensors};
use crate::error::Gemma4Error;
use crate::model::Gemma4Model;
use burn::{
    module::{Lora, Module, ParamGroup},
    tensor::{DType, FloatDType},
};
use safetensors::View;
use serde_json::json;
use std::path::Path;

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
    /// The matrices `A` and `B` are stored in f32, whatever the model's dtype is. Quantized matrices stay quantized
    /// (QLoRA, Dettmers et al. 2023, arXiv:2305.14314).
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
        // Burn adds `a · b` to a weight, and PEFT adds `B · A`. The weights are `[out_features, in_features]`, so
        // Burn's `a` is PEFT's `B`, and Burn's `b` is PEFT's `A`.
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
