//! Adapters that each request selects: read on any thread, and uploaded by the thread that owns the model.

use super::files::{AdaptedParts, AdapterFiles, MatrixFactors};
use crate::config::Gemma4Config;
use crate::error::{Gemma4Error, TensorProblem};
use crate::model::Gemma4Model;
use crate::model::adapters::{Factors, LoadedAdapter};
use crate::model::weights::refuse_mobile;
use burn::module::{ParamId, list_param_ids};
use burn::tensor::{DType, Tensor, TensorData};
use std::collections::HashMap;
use std::fmt;
use std::path::Path;
use std::sync::Arc;

/// The modules outside the layers for which requests cannot select adapters.
const UNSERVED: [&str; 3] = ["embed_tokens", "embed_tokens_per_layer", "lm_head"];
/// The parts of the paths of such modules inside the layers.
const UNSERVED_OF_LAYERS: [&str; 2] = [".router", ".experts"];

/// The linear projections of one model to which adapters apply. The description holds no device tensors, so any thread
/// can read adapters for the model.
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::Device;
/// use burn_gemma4::{Adapter, AdapterTargets, CacheKind, Gemma4, LoadOptions, Prefill};
/// use std::sync::Arc;
///
/// let gemma = Gemma4::embedded(&Device::flex(), LoadOptions::new())?;
/// # let folder = std::env::temp_dir().join(format!("adapter-targets-{}", std::process::id()));
/// # let adapter = Adapter::new(2, 4.0);
/// # let tracked = Gemma4::embedded(&Device::flex().autodiff(), LoadOptions::new())?;
/// # adapter.save(&adapter.attach(tracked.model().clone())?, &folder, "embedded")?;
/// let weights = AdapterTargets::of(gemma.model()).read(&folder)?;
/// let adapter = Arc::new(weights.upload(gemma.model())?);
/// let prefill = Prefill::new(gemma.model(), vec![2, 30], CacheKind::default())?;
/// let prefill = prefill.with_adapter(&adapter)?;
/// assert_eq!(prefill.remaining(), 2);
/// # std::fs::remove_dir_all(folder).expect("the saved adapter's folder can be removed");
/// # }
/// # Ok::<(), burn_gemma4::Gemma4Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct AdapterTargets {
    /// The ids of the model's parameters.
    model: Arc<[ParamId]>,
    config: Gemma4Config,
    /// The dtype in which the model computes.
    dtype: DType,
    projections: Vec<Projection>,
    /// True if the model comes from a mobile checkpoint, so that it takes no adapters.
    is_mobile: bool,
}

/// A linear projection of the model.
#[derive(Clone, Debug)]
struct Projection {
    /// The path of the module.
    path: String,
    /// The id of the weight's parameter.
    weight: ParamId,
    /// The shape of the weight, `[columns out, columns in]`.
    shape: [usize; 2],
}

/// The weights of an adapter in host memory, in the dtype of the model for which they were read.
pub struct AdapterWeights {
    model: Arc<[ParamId]>,
    /// The scaled factors of each adapted projection: the parameter id of its weight, `A`, and `B · scale`.
    factors: Vec<(ParamId, [TensorData; 2])>,
    warnings: Vec<String>,
    /// The towers for which the adapter has factors, which are not read.
    towers: AdaptedParts,
}

impl fmt::Debug for AdapterWeights {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AdapterWeights")
            .field("projections", &self.factors.len())
            .field("warnings", &self.warnings)
            .finish_non_exhaustive()
    }
}

impl AdapterTargets {
    /// Describes a model. Later changes of the model's weights, such as a quantization, need a new description.
    pub fn of(model: &Gemma4Model) -> Self {
        let mut clone = model.clone();
        let projections = clone
            .weights_mut()
            .into_iter()
            .filter_map(|(path, weight)| {
                let path = path.strip_suffix(".weight")?.to_owned();
                let is_served = !UNSERVED.contains(&path.as_str());
                let shape = <[usize; 2]>::try_from(weight.shape()).ok()?;
                is_served.then(|| Projection {
                    path,
                    weight: weight.id(),
                    shape,
                })
            });
        Self {
            model: list_param_ids(model).into(),
            config: model.config().clone(),
            dtype: model.dtype(),
            projections: projections.collect(),
            is_mobile: model.is_mobile,
        }
    }

    /// Reads the LoRA adapter in `folder`, which holds `adapter_config.json` and `adapter_model.safetensors` in PEFT's
    /// format.
    ///
    /// # Errors
    /// Returns an error if a file is missing or malformed, or if the adapter is not a LoRA adapter. If tensors do not
    /// fit the model, or change a module other than a linear projection, the error lists all such tensors. Returns an
    /// error if no tensor changes the model, or if a value is not finite in the model's dtype. Returns an error if the
    /// model comes from a mobile checkpoint.
    pub fn read(&self, folder: impl AsRef<Path>) -> Result<AdapterWeights, Gemma4Error> {
        refuse_mobile(self.is_mobile, "model", "an adapter")?;
        let files = AdapterFiles::open(folder.as_ref())?;
        let mut reader = files.reader()?;
        let mut factors = Vec::new();
        for projection in &self.projections {
            let Some(found) = reader.factors(&projection.path, projection.shape) else {
                continue;
            };
            match self.scaled(&found) {
                Some(both) => factors.push((projection.weight, both)),
                None => reader.refuse(TensorProblem::NotFinite { name: found.name }),
            }
        }
        reader.refuse_unserved(is_unserved);
        let mut warnings = std::mem::take(&mut reader.warnings);
        warnings.extend(reader.of_towers.take());
        reader.finish(&self.config)?;
        Ok(AdapterWeights {
            model: self.model.clone(),
            factors,
            warnings,
            towers: files.parts()?,
        })
    }

    /// Returns `A` and `B · scale` in the model's dtype, or `None` if an element is not finite in this dtype. In a
    /// decode step, zeros multiply the `B` of other adapters. An element that is not finite would turn the zeros into
    /// NaN.
    fn scaled(&self, found: &MatrixFactors) -> Option<[TensorData; 2]> {
        let scale = found.scale as f32;
        let numbers: Vec<f32> = found.writes.iter::<f32>().map(|x| x * scale).collect();
        let writes = TensorData::new(numbers, found.writes.shape().clone());
        let both = [found.reads.clone(), writes].map(|factor| factor.convert_dtype(self.dtype));
        let are_finite = both
            .iter()
            .all(|factor| factor.iter::<f32>().all(f32::is_finite));
        are_finite.then_some(both)
    }
}

/// True if the module at `path` is a part of a model to which adapters per request cannot apply.
fn is_unserved(path: &str) -> bool {
    let of_layers = || {
        let mut parts = UNSERVED_OF_LAYERS.iter();
        path.starts_with("layers.") && parts.any(|part| path.contains(part))
    };
    UNSERVED.contains(&path) || of_layers()
}

impl AdapterWeights {
    /// Warnings for the user about tensors and settings that have no effect.
    pub fn warnings(&self) -> &[String] {
        &self.warnings
    }

    /// Uploads the adapter to the device of `model`. The caller must be the thread that runs the model, so that the
    /// adapter is on the model's device stream.
    ///
    /// # Errors
    /// Returns [`Gemma4Error::Argument`] if the adapter was read for another model. Returns [`Gemma4Error::Device`] if
    /// the device fails.
    pub fn upload(self, model: &Gemma4Model) -> Result<LoadedAdapter, Gemma4Error> {
        let (device, dtype) = (model.device(), model.dtype());
        let factors = self.factors.into_iter().map(|(weight, factors)| {
            let [reads, writes] = factors.map(|factor| Tensor::from_data(factor, (&device, dtype)));
            let factors = Factors {
                reads,
                writes,
                mask: None,
            };
            (weight, factors)
        });
        let factors: HashMap<ParamId, Factors> = factors.collect();
        let adapter =
            LoadedAdapter::new(self.model, factors, [self.towers.vision, self.towers.audio]);
        adapter.check(model)?;
        device
            .sync()
            .map_err(|error| Gemma4Error::Device(error.to_string()))?;
        Ok(adapter)
    }
}
