//! Access to the model's weights by parameter path, and statistics about the weights.

use super::{
    Gemma4Model,
    layer::weight::{AnyWeight, QuantizedNumbers},
    layer::{DecoderLayer, Experts, Linear},
};
use crate::error::Gemma4Error;
use burn::{
    module::{LoraAdapter, Module, ModuleVisitor, Param, Reparameterization},
    tensor::{DType, Int, Tensor},
};
use std::collections::BTreeSet;

impl Gemma4Model {
    /// Returns the size of the parameters on the model's device in bytes. A quantized weight counts with its packed size.
    pub fn parameter_bytes(&self) -> usize {
        self.held().bytes
    }

    /// True if at least one weight is quantized.
    pub fn is_quantized(&self) -> bool {
        self.held().is_quantized
    }

    /// Returns the dtype of the checkpoint, or `None` for a model without a checkpoint. A quantized weight counts as
    /// bf16.
    pub fn written_dtype(&self) -> Option<DType> {
        self.written
    }

    fn held(&self) -> Held {
        let mut held = Held::default();
        self.visit(&mut held);
        held
    }

    /// Refuses a change to a model from a mobile checkpoint. `action` says what is refused, such as `training`.
    ///
    /// # Errors
    /// Returns [`Gemma4Error::Argument`] if the model was loaded from a mobile checkpoint.
    pub(crate) fn refuse_if_mobile(&self, action: &str) -> Result<(), Gemma4Error> {
        refuse_mobile(self.is_mobile, "model", action)
    }

    /// Checks that the parameters that require gradients can be trained. [`loss`](Self::loss) and
    /// [`gradients`](Self::gradients) make this check too.
    ///
    /// ```
    /// use burn::tensor::Device;
    /// use burn_gemma4::{Gemma4Model, LoadOptions};
    ///
    /// # fn main() -> Result<(), burn_gemma4::Gemma4Error> {
    /// # let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/embedded");
    /// let model = Gemma4Model::load(folder, &Device::flex().autodiff(), LoadOptions::new())?;
    /// model.check_trainable()?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// Returns an error if the model has quantized weights, and a weight that is not an adapter requires gradients. Also
    /// returns an error if the model was loaded from a mobile checkpoint, because the rounding of activations has no
    /// gradient.
    pub fn check_trainable(&self) -> Result<(), Gemma4Error> {
        self.refuse_if_mobile("training")?;
        let held = self.held();
        match held.is_quantized && held.trains_weights {
            false => Ok(()),
            true => Err(Gemma4Error::Quantized),
        }
    }

    /// Returns all weights that can be quantized, with their parameter paths.
    pub(crate) fn weights_mut(&mut self) -> Vec<(String, &mut dyn AnyWeight)> {
        let mut weights: Vec<(String, &mut dyn AnyWeight)> = Vec::new();
        let mut add = |path: String, weight| weights.push((path, weight));
        add("embed_tokens.weight".into(), &mut self.embed_tokens.weight);
        if let Some(table) = &mut self.embed_tokens_per_layer {
            add("embed_tokens_per_layer.weight".into(), &mut table.weight);
        }
        if let Some(table) = &mut self.split_table {
            for (index, part) in table.parts.iter_mut().enumerate() {
                add(format!("split_table.parts.{index}"), part);
            }
        }
        let (linears, experts) = linears_and_experts(
            [&mut self.per_layer_model_projection, &mut self.lm_head],
            &mut self.layers,
        );
        for (path, linear) in linears {
            add(format!("{path}.weight"), &mut linear.weight);
        }
        for (path, experts) in experts {
            add(format!("{path}.gate_up_proj"), &mut experts.gate_up_proj);
            add(format!("{path}.down_proj"), &mut experts.down_proj);
        }
        weights
    }

    /// Returns all linear projections outside of experts and routers, with their paths.
    pub(crate) fn linears_mut(&mut self) -> Vec<(String, &mut Linear)> {
        let of_model = [&mut self.per_layer_model_projection, &mut self.lm_head];
        linears_and_experts(of_model, &mut self.layers).0
    }

    /// Returns the quantized weights, with their parameter paths.
    pub(crate) fn quantized_weights(&self) -> Vec<(String, QuantizedNumbers)> {
        let mut model = self.clone();
        let weights = model.weights_mut().into_iter();
        let quantized = weights.map(|(path, weight)| Some((path, weight.quantized()?)));
        quantized.flatten().collect()
    }
}

/// Refuses a change to the model or the towers in `argument` if `is_mobile` is true. See
/// [`Gemma4Model::refuse_if_mobile`].
pub(crate) fn refuse_mobile(
    is_mobile: bool,
    argument: &'static str,
    action: &str,
) -> Result<(), Gemma4Error> {
    match is_mobile {
        false => Ok(()),
        true => Err(Gemma4Error::Argument {
            argument,
            reason: format!(
                "comes from a mobile checkpoint (quant_method \"gemma\"), whose static scales round activations; {action} is not supported with it; use the original checkpoint, or the one whose name ends with -qat-w4a16-ct"
            ),
        }),
    }
}

/// Modules with their paths.
type Paths<'a, M> = Vec<(String, &'a mut M)>;

/// Returns all linear projections outside of experts and routers, and all experts. `of_model` are the model's
/// `per_layer_model_projection` and `lm_head`.
fn linears_and_experts<'a>(
    of_model: [&'a mut Option<Linear>; 2],
    layers: &'a mut [DecoderLayer],
) -> (Paths<'a, Linear>, Paths<'a, Experts>) {
    let names = ["per_layer_model_projection", "lm_head"];
    let of_model = names.into_iter().zip(of_model);
    let mut linears: Paths<Linear> = of_model
        .filter_map(|(name, linear)| Some((name.to_owned(), linear.as_mut()?)))
        .collect();
    let mut all_experts = Vec::new();
    for (index, layer) in layers.iter_mut().enumerate() {
        let (attention, mlp) = (&mut layer.self_attn, &mut layer.mlp);
        let of_layer = [
            ("self_attn.q_proj", Some(&mut attention.q_proj)),
            ("self_attn.k_proj", attention.k_proj.as_mut()),
            ("self_attn.v_proj", attention.v_proj.as_mut()),
            ("self_attn.o_proj", Some(&mut attention.o_proj)),
            ("mlp.gate_proj", Some(&mut mlp.gate_proj)),
            ("mlp.up_proj", Some(&mut mlp.up_proj)),
            ("mlp.down_proj", Some(&mut mlp.down_proj)),
            ("per_layer_input_gate", layer.per_layer_input_gate.as_mut()),
            ("per_layer_projection", layer.per_layer_projection.as_mut()),
        ];
        let of_layer = of_layer.into_iter();
        linears.extend(
            of_layer.filter_map(|(name, linear)| Some((format!("layers.{index}.{name}"), linear?))),
        );
        let experts = layer.experts.as_mut();
        all_experts.extend(experts.map(|experts| (format!("layers.{index}.experts"), experts)));
    }
    (linears, all_experts)
}

/// Describes the format of the model's weights: `whole`, or quantized to some number of bits. The per-layer embedding
/// table does not count.
pub(crate) fn form_of_weights(model: &Gemma4Model) -> String {
    let mut model = model.clone();
    let is_table =
        |path: &str| path.starts_with("embed_tokens_per_layer") || path.starts_with("split_table");
    let weights = model.weights_mut().into_iter();
    let weights = weights.filter(|(path, _)| !is_table(path));
    let bits: BTreeSet<usize> = weights.filter_map(|(_, weight)| weight.bits()).collect();
    let bits: Vec<String> = bits.iter().map(usize::to_string).collect();
    match bits.is_empty() {
        true => "whole".into(),
        false => format!("quantized to {} bits", bits.join(" and ")),
    }
}

/// Statistics about the parameters, collected by a visitor.
#[derive(Default)]
struct Held {
    bytes: usize,
    is_quantized: bool,
    /// True if a parameter outside the adapters requires gradients.
    trains_weights: bool,
    /// The number of adapter modules that enclose the module being visited.
    adapters: usize,
}

impl ModuleVisitor for Held {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.adapters += usize::from(name == LoraAdapter::NAME);
    }

    fn exit_module(&mut self, name: &str, _container_type: &str) {
        self.adapters -= usize::from(name == LoraAdapter::NAME);
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let dtype = param.base().dtype();
        self.trains_weights |= self.adapters == 0 && param.base().is_require_grad();
        self.bytes += param.lazy_shape().num_elements() * dtype.size();
    }

    /// Counts an integer parameter. All integer parameters of the model are packed quantized weights.
    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<D, Int>>) {
        let words = param.val();
        self.bytes += words.dims().iter().product::<usize>() * words.dtype().size();
        self.is_quantized = true;
    }
}
