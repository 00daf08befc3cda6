//! The weights of a model, whole or quantized, by the paths of their parameters.

use super::{
    Gemma4Model,
    layer::weight::{AnyWeight, QuantizedNumbers},
};
use crate::Gemma4Error;
use burn::{
    module::{LoraAdapter, Module, ModuleVisitor, Param, Reparameterization},
    tensor::{DType, Int, Tensor},
};
use std::collections::BTreeSet;

impl Gemma4Model {
    /// Bytes that the parameters take, on the model's device: of quantized weights the words, whatever they stand for.
    pub fn parameter_bytes(&self) -> usize {
        self.held().bytes
    }

    /// Whether some of the weights are quantized.
    pub fn is_quantized(&self) -> bool {
        self.held().is_quantized
    }

    /// The dtype of the checkpoint that the model was loaded from; nothing for a model without one. Weights that are quantized in
    /// the checkpoint count as bf16.
    pub fn written_dtype(&self) -> Option<DType> {
        self.written
    }

    fn held(&self) -> Held {
        let mut held = Held::default();
        self.visit(&mut held);
        held
    }

    /// # Errors
    /// Where some of the weights are quantized, and others are to be trained that are no adapter's.
    pub(crate) fn refuse_training_quantized(&self) -> Result<(), Gemma4Error> {
        let held = self.held();
        match held.is_quantized && held.trains_weights {
            false => Ok(()),
            true => Err(Gemma4Error::Quantized),
        }
    }

    /// Every weight that may be quantized.
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
        for (name, linear) in [
            (
                "per_layer_model_projection",
                &mut self.per_layer_model_projection,
            ),
            ("lm_head", &mut self.lm_head),
        ] {
            if let Some(linear) = linear {
                add(format!("{name}.weight"), &mut linear.weight);
            }
        }
        for (index, layer) in self.layers.iter_mut().enumerate() {
            let (attention, mlp) = (&mut layer.self_attn, &mut layer.mlp);
            let linears = [
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
            for (name, linear) in linears {
                if let Some(linear) = linear {
                    add(format!("layers.{index}.{name}.weight"), &mut linear.weight);
                }
            }
            if let Some(experts) = &mut layer.experts {
                let path = |name: &str| format!("layers.{index}.experts.{name}");
                add(path("gate_up_proj"), &mut experts.gate_up_proj);
                add(path("down_proj"), &mut experts.down_proj);
            }
        }
        weights
    }

    /// The quantized weights by their paths.
    pub(crate) fn quantized_weights(&self) -> Vec<(String, QuantizedNumbers)> {
        let mut model = self.clone();
        let weights = model.weights_mut().into_iter();
        let quantized = weights.map(|(path, weight)| Some((path, weight.quantized()?)));
        quantized.flatten().collect()
    }
}

/// The form of a model's weights, for people: `whole`, or the bits of their codes. The table of per-layer embeddings does not
/// count, because it is no parameter where it stays on the host.
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

/// What parameters take.
#[derive(Default)]
struct Held {
    bytes: usize,
    is_quantized: bool,
    /// Some that are no adapter's.
    trains_weights: bool,
    /// How many adapters this is within.
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

    /// The model's only integers are words.
    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<D, Int>>) {
        let words = param.val();
        self.bytes += words.dims().iter().product::<usize>() * words.dtype().size();
        self.is_quantized = true;
    }
}
