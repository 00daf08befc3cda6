//! The description of a LoRA adapter: its training on a model, and its files.

use super::files::{CONFIG, FACTORS, TOWERS, WEIGHTS, WRAPPED};
use crate::checkpoint::files::TensorFiles;
use crate::checkpoint::media_towers::MediaTowers;
use crate::checkpoint::names::Names;
use crate::checkpoint::{create, stored, write_file, write_tensors};
use crate::error::Gemma4Error;
use crate::model::Gemma4Model;
use crate::model::weights::refuse_mobile;
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
    /// The adapted matrices of the text model, each named by the last part of its module's name, such as `q_proj`.
    /// Without any, [`attach`](Self::attach) freezes the text model.
    pub modules: Vec<String>,
    /// The adapted parts of vision and audio, which [`attach_towers`](Self::attach_towers) adapts.
    pub towers: TowerTargets,
}

/// The parts of vision and audio whose linear layers an adapter adapts. The default is none of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TowerTargets {
    /// True for the projections of soft tokens to the text model.
    pub projectors: bool,
    /// True for the towers, and for 12B's projection of pixels.
    pub towers: bool,
}

impl TowerTargets {
    /// True if a part is adapted.
    pub fn any(self) -> bool {
        self.projectors || self.towers
    }

    /// True if the matrix at `path` in the towers is adapted.
    fn adapts(self, path: &str) -> bool {
        let is_projector = PROJECTORS.iter().any(|part| path.starts_with(part));
        path.ends_with(".weight")
            && match is_projector {
                true => self.projectors,
                false => self.towers,
            }
    }
}

/// The beginnings of the paths of projections to the text model.
const PROJECTORS: [&str; 2] = ["embed_vision.", "embed_audio."];

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
            towers: TowerTargets::default(),
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
    /// - The model comes from a mobile checkpoint.
    pub fn attach(&self, model: Gemma4Model) -> Result<Gemma4Model, Gemma4Error> {
        self.check()?;
        model.refuse_if_mobile("training")?;
        if self.modules.is_empty() {
            return Ok(model.no_grad());
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
        let lora = self.lora(matrices)?;
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

    /// Freezes the towers of a data set and attaches adapters to the linear layers of [`towers`](Self::towers), as
    /// [`attach`](Self::attach) does with the text model. Convolutions, norms and embeddings stay frozen.
    ///
    /// # Errors
    /// Returns [`Gemma4Error::Argument`] in the cases in which [`attach`](Self::attach) does.
    pub fn attach_towers(&self, towers: MediaTowers) -> Result<MediaTowers, Gemma4Error> {
        self.check()?;
        refuse_mobile(towers.is_mobile(), "towers", "training")?;
        if !self.towers.any() {
            return Ok(towers.no_grad());
        }
        let parameters = stored(&towers, DType::F32).into_iter();
        let parameters = parameters.map(|(path, tensor)| (path, tensor.shape().to_vec()));
        let parameters: Vec<(String, Vec<usize>)> = parameters.collect();
        if parameters.iter().any(|(path, _)| path.ends_with(".lora.a")) {
            let reason = "has an adapter already, which has to be merged first";
            return refuse("towers", reason.into());
        }
        let is_adapted = |(path, shape): &(String, Vec<usize>)| {
            shape.len() == 2 && self.towers.adapts(MediaTowers::path_in_checkpoint(path))
        };
        let matrices: Vec<_> = parameters.into_iter().filter(is_adapted).collect();
        if matrices.is_empty() {
            let reason = format!("the towers have no matrices for {:?}", self.towers);
            return refuse("towers", reason);
        }
        let lora = self.lora(matrices)?;
        let device = towers.device();
        Ok(device
            .memory_persistent_allocations(towers, move |towers| towers.apply_lora(lora.clone())))
    }

    /// Checks the rank and the scale.
    fn check(&self) -> Result<(), Gemma4Error> {
        if self.rank == 0 {
            return refuse("rank", "has to be at least 1".into());
        }
        if !((self.alpha / self.rank as f64) as f32).is_finite() {
            let reason = format!("{} over the rank {} is no number", self.alpha, self.rank);
            return refuse("alpha", reason);
        }
        Ok(())
    }

    /// Returns Burn's LoRA for some matrices, each a path and a shape.
    fn lora(&self, matrices: Vec<(String, Vec<usize>)>) -> Result<Lora, Gemma4Error> {
        let small = |(_, shape): &&(String, Vec<usize>)| shape.iter().any(|size| *size < self.rank);
        if let Some((path, shape)) = matrices.iter().find(small) {
            let rank = self.rank;
            return refuse("rank", format!("is {rank}, but {path} is {shape:?}"));
        }
        let paths: Vec<String> = matrices.into_iter().map(|(path, _)| path).collect();
        let lora = Lora::new(self.rank, self.alpha).set_dtype(FloatDType::F32);
        Ok(lora.set_param_group(ParamGroup::from_paths(paths)))
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
        let mut patterns = Vec::new();
        if !self.modules.is_empty() {
            let modules = self.modules.join("|");
            patterns.push(format!(
                r"model\.(?:language_model\.)?layers\.\d+\.(?:[^.]+\.)*(?:{modules})"
            ));
        }
        if self.towers.projectors {
            patterns.push(
                r"model\.embed_(?:vision|audio)\.(?:multimodal_embedder\.)?embedding_projection"
                    .into(),
            );
        }
        if self.towers.towers {
            // The linear layers with bounds are modules named `linear` in Hugging Face Transformers.
            patterns.push(
                r"model\.(?:vision|audio)_tower\..*\.(?:linear|input_proj|input_proj_linear|relative_k_proj)"
                    .into(),
            );
            patterns.push(r"model\.audio_tower\.output_proj".into());
            patterns.push(r"model\.embed_vision\.patch_dense".into());
        }
        match &patterns[..] {
            [pattern] => pattern.clone(),
            _ => patterns.join("|"),
        }
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
        self.save_with_towers(model, None, folder, base)
    }

    /// Writes the adapter as [`save`](Self::save) does, with the factors that [`attach_towers`](Self::attach_towers)
    /// added to `towers`. All factors have the names of `Gemma4ForConditionalGeneration` and of its unified variant then,
    /// and `base` is not read.
    ///
    /// # Errors
    /// Returns the errors of [`save`](Self::save).
    pub fn save_with_towers(
        &self,
        model: &Gemma4Model,
        towers: Option<&MediaTowers>,
        folder: impl AsRef<Path>,
        base: &str,
    ) -> Result<(), Gemma4Error> {
        let folder = folder.as_ref();
        let prefix = match towers {
            // Only multimodal checkpoints have towers, so `base` need not be readable.
            Some(_) => Names::of_multimodal(),
            None if Path::new(base).is_dir() => Names::of(&TensorFiles::open(Path::new(base))?),
            None => Names::of_text(),
        }
        .prefix;
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
        let of_model = stored(&model.valid(), DType::F32).into_iter();
        let of_model = of_model.map(|(path, tensor)| (format!("{prefix}{path}"), tensor));
        let of_towers = towers.map(|towers| stored(&towers.valid(), DType::F32));
        let of_towers = of_towers.into_iter().flatten().map(|(path, tensor)| {
            let name = MediaTowers::name_in_transformers(&path);
            (format!("{TOWERS}{name}"), tensor)
        });
        let factors = of_model.chain(of_towers).filter_map(|(path, tensor)| {
            let (path, suffix) = match path.strip_suffix(".weight.lora.a") {
                Some(path) => (path, writes),
                None => (path.strip_suffix(".weight.lora.b")?, reads),
            };
            Some((format!("{WRAPPED}{path}{suffix}"), tensor))
        });
        write_tensors(&folder.join(WEIGHTS), None, factors)?;
        write_file(&folder.join(CONFIG), json.as_bytes())
    }
}

fn refuse<T>(argument: &'static str, reason: String) -> Result<T, Gemma4Error> {
    Err(Gemma4Error::Argument { argument, reason })
}
