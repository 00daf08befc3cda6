//! Gradients with the activations of only one layer in memory at a time: gradient checkpointing (Chen et al. 2016,
//! arXiv:1604.06174).
//!
//! Burn's own checkpointing keeps the outputs of all GEMMs, which take most of the memory at long context. This module
//! keeps only the input of each layer. The backward recomputes the layers from the last to the first.

use crate::error::Gemma4Error;
use crate::model::cache::key_values::{KeyValues, SharedKeyValues};
use crate::model::cache::slots::Slots;
use crate::model::forward::{Text, last_positions};
use crate::model::layer::ops::ResidualStream;
use crate::model::prefill_ops::{KvDestination, PrefillOps, Rotations};
use crate::model::row_rules::RowRules;
use crate::model::soft_tokens::CallMedia;
use crate::model::{Gemma4Model, Logits};
use crate::op::attach::attach;
use crate::op::column_slice::ColumnSlice;
use crate::train::packing::Packing;
use burn::{
    module::{Module, ModuleVisitor, Param},
    optim::GradientsParams,
    tensor::{DType, GradientCheckpointingStrategy, Gradients, Int, Tensor},
};
use std::collections::BTreeMap;

impl Gemma4Model {
    /// Computes a loss of the hidden states and the gradients of all parameters. The gradients equal those of
    /// [`Tensor::backward`]. The backward recomputes each layer, so only one layer's activations are in memory. The
    /// recomputation costs one more forward.
    ///
    /// The closure `loss` receives the hidden states. The hidden states come from
    /// [`hidden_packed`](Self::hidden_packed) if a packing is given, and otherwise from [`hidden`](Self::hidden).
    ///
    /// # Shapes
    /// - `tokens`: `[batch, positions]`
    /// - argument of `loss`: `[batch, requested positions, hidden]`
    /// - returned loss: `[1]`
    ///
    /// ```
    /// # use burn::tensor::{Device, Int, Tensor};
    /// # use burn_gemma4::{Gemma4Model, LoadOptions, Logits};
    /// # fn main() -> Result<(), burn_gemma4::Gemma4Error> {
    /// # let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/embedded");
    /// let device = Device::flex().autodiff();
    /// let model = Gemma4Model::load(folder, &device, LoadOptions::new())?;
    /// let tokens = Tensor::<2, Int>::from_data([[2, 17, 5, 44]], &device);
    /// let next = Tensor::<2, Int>::from_data([[17, 5, 44, 1]], &device);
    /// let (loss, gradients) =
    ///     model.gradients(tokens, None, Logits::All, |hidden| model.loss(hidden, next))?;
    /// assert!(loss.into_scalar::<f32>() > 0.0);
    /// assert!(gradients.get::<1>(model.norm.weight.id).is_some());
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// Returns an error in these cases:
    ///
    /// - The shape of the tokens differs from the shape of the packing.
    /// - A packing comes with any [`Logits`] other than [`Logits::All`].
    /// - `asked` requests no position.
    /// - The model has [quantized weights](crate::model::layer::Weight), and trains parameters outside a LoRA adapter.
    ///
    /// Passes on the errors of [`forward`](Self::forward) and of `loss`.
    ///
    /// # Panics
    /// Panics if the model's device has no autodiff, or if the loss does not depend on the hidden states.
    pub fn gradients(
        &self,
        tokens: Tensor<2, Int>,
        packing: Option<&Packing>,
        asked: Logits,
        loss: impl FnOnce(Tensor<3>) -> Result<Tensor<1>, Gemma4Error>,
    ) -> Result<(Tensor<1>, GradientsParams), Gemma4Error> {
        self.check_trainable()?;
        if let Some(packing) = packing {
            packing.check(&tokens)?;
            if asked != Logits::All {
                return Err(Gemma4Error::Argument {
                    argument: "asked",
                    reason: format!(
                        "is {asked:?}; with a packing only {:?} is supported",
                        Logits::All
                    ),
                });
            }
        }
        if asked.of(tokens.dims()[1]) == 0 {
            return Err(Gemma4Error::Argument {
                argument: "asked",
                reason: format!("is {asked:?}, which leaves nothing to learn from"),
            });
        }
        // Remove autodiff from the tokens, so that the forward records no autodiff graph. Burn would keep this graph
        // until the next backward.
        let tokens = self.read_tokens(tokens.inner())?;
        let text = match packing {
            Some(packing) => self.packed_text(&tokens, packing),
            None => self.whole_text(&tokens),
        };
        let found = self.gradients_by_layer(text, asked, loss)?;
        Ok((found.loss, found.parameters))
    }

    /// Computes the [`gradients`](Self::gradients) for tensors without autodiff. Except in some mixture-of-experts
    /// models, the computation needs no data on the host, so a CUDA graph can capture it.
    pub(crate) fn gradients_by_layer(
        &self,
        text: Text,
        asked: Logits,
        loss: impl FnOnce(Tensor<3>) -> Result<Tensor<1>, Gemma4Error>,
    ) -> Result<BatchGradients, Gemma4Error> {
        let plain = self.valid();
        let pass = Pass::new(self, &text, asked);
        let Text {
            ids,
            from_host,
            media,
            ..
        } = text;
        let embeds = self.trains_embeddings() || media.leaf().is_some();
        let from_host_again = from_host.clone().filter(|_| embeds);
        let (mut kept, stream) = pass.forward(&plain, &ids, from_host, &media.without_autodiff());
        let mut sum = GradientsParams::new();

        let [_, hidden] = stream.dims();
        let stream = pass.leaf(stream);
        let states = self.norm.forward(stream.clone());
        let loss = loss(states.reshape([pass.batch, pass.asked, hidden]))?;
        let mut gradients = loss.backward();
        let mut of_stream = of_leaf(&stream, &mut gradients);
        add(&mut sum, gradients, self);

        let mut of_shared = BTreeMap::new();
        let mut of_embeddings = Vec::new();
        while let Some(input) = kept.streams.pop() {
            let layer = kept.streams.len();
            let of_output = pass.padded(of_stream, pass.computed(layer));
            let objective = Objective {
                layer,
                input: pass.leaf(input),
                embedding: pass
                    .embedding(&kept, layer)
                    .map(|embedding| pass.leaf(embedding)),
                of_output,
            };
            let of_embedding;
            (of_stream, of_embedding) = pass.backward(objective, &kept, &mut of_shared, &mut sum);
            of_embeddings.extend(of_embedding.map(|gradient| pass.padded(gradient, pass.count)));
        }

        let mut found = BatchGradients {
            loss: loss.detach(),
            parameters: sum,
            soft_tokens: None,
        };
        if !embeds {
            return Ok(found);
        }
        let (stream, embeddings) = self.embedded_rows(&ids, from_host_again, &media, None, &mut ());
        let mut objective = attach(pass.zero(), stream, of_stream);
        if let Some(embeddings) = embeddings {
            of_embeddings.reverse();
            objective = attach(objective, embeddings, Tensor::cat(of_embeddings, 1));
        }
        if objective.is_tracked() {
            let mut gradients = objective.backward();
            found.soft_tokens = (media.leaf()).and_then(|leaf| leaf.grad_remove(&mut gradients));
            add(&mut found.parameters, gradients, self);
        }
        Ok(found)
    }

    /// True if a parameter of the token embeddings or of the per-layer embeddings is trained. The projection and the
    /// norm of the per-layer embeddings count as well.
    fn trains_embeddings(&self) -> bool {
        let mut trained = HasTrainable(false);
        self.embed_tokens.visit(&mut trained);
        self.embed_tokens_per_layer.visit(&mut trained);
        self.split_table.visit(&mut trained);
        self.per_layer_model_projection.visit(&mut trained);
        self.per_layer_projection_norm.visit(&mut trained);
        trained.0
    }
}

/// The loss of a batch, and the gradients of the loss.
pub(crate) struct BatchGradients {
    /// The loss, `[1]` without autodiff.
    pub loss: Tensor<1>,
    /// The gradients of the parameters of the text model.
    pub parameters: GradientsParams,
    /// The gradient of the rows of soft tokens, `[batch, positions, hidden]`, if these rows are a leaf of the autodiff
    /// graph.
    pub soft_tokens: Option<Tensor<3>>,
}

/// A visitor that sets its flag to true when it finds a trainable parameter.
pub(crate) struct HasTrainable(pub bool);

impl ModuleVisitor for HasTrainable {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.0 |= param.base().is_require_grad();
    }
}

/// The data that all layers use in one forward and backward.
struct Pass<'a> {
    /// The model, on a device with autodiff.
    model: &'a Gemma4Model,
    strategy: GradientCheckpointingStrategy,
    batch: usize,
    /// The number of positions in each sequence.
    count: usize,
    /// The number of positions at the end of each sequence for which hidden states are requested.
    asked: usize,
    /// The rotary tables of all positions.
    rotations: Rotations,
    /// The rotary tables of the positions for which hidden states are requested.
    last_rotations: Rotations,
    rules: RowRules,
}

/// The results of the forward that the backward needs. The tensors have no autodiff.
struct Kept {
    /// The input of each layer: the residual stream, `[rows, hidden]`.
    streams: Vec<Tensor<2>>,
    /// The per-layer embeddings, `[rows, layers · columns]`.
    embeddings: Option<Tensor<2>>,
    /// The keys and values that several layers share. The first of these layers computes the keys and values, and the
    /// later layers read them.
    shared: SharedKeyValues,
}

/// The data with which the backward of one layer begins.
struct Objective {
    layer: usize,
    /// The inputs of the layer, as leaves of the autodiff graph: the residual stream `input`, and the per-layer
    /// `embedding`.
    input: Tensor<2>,
    embedding: Option<Tensor<2>>,
    /// The gradient with respect to the layer's output.
    of_output: Tensor<2>,
}

impl<'a> Pass<'a> {
    fn new(model: &'a Gemma4Model, text: &Text, asked: Logits) -> Self {
        let [batch, count] = text.ids.dims();
        let asked = asked.of(count);
        let weight = model.norm.weight.val();
        let strategy = weight.gradient_checkpointing_strategy();
        Self {
            model,
            strategy: strategy.expect("gradients need a device with autodiff"),
            batch,
            count,
            asked,
            last_rotations: text.rotations.last(asked),
            rotations: text.rotations.clone(),
            rules: text.rules.clone(),
        }
    }

    /// Returns the number of positions, at the end of each sequence, for which a layer computes its output. A layer
    /// with its own keys and values computes all positions. A layer that shares an earlier layer's keys and values
    /// computes only the requested positions.
    fn computed(&self, layer: usize) -> usize {
        match self.model.config().is_shared(layer) {
            true => self.asked,
            false => self.count,
        }
    }

    /// Returns the per-layer embedding of one layer, for the positions that the layer computes.
    fn embedding(&self, kept: &Kept, layer: usize) -> Option<Tensor<2>> {
        let embeddings = kept.embeddings.clone()?;
        let count = self.model.config().hidden_size_per_layer_input;
        let embedding = embeddings.narrow(1, layer * count, count);
        Some(self.last(embedding, self.computed(layer)))
    }

    fn leaf<const D: usize>(&self, tensor: Tensor<D>) -> Tensor<D> {
        tensor
            .autodiff()
            .with_gradient_checkpointing_strategy(self.strategy)
            .require_grad()
    }

    /// Returns a loss of zero. [`attach`] then lets the backward of this loss start from already computed gradients.
    fn zero(&self) -> Tensor<1> {
        Tensor::zeros([1], (&self.model.device(), DType::F32))
    }

    /// Runs the forward without autodiff. Returns the results that the backward needs, and the last layer's output at
    /// the requested positions.
    fn forward(
        &self,
        plain: &Gemma4Model,
        ids: &Tensor<2, Int>,
        from_host: Option<Tensor<2>>,
        media: &CallMedia,
    ) -> (Kept, Tensor<2>) {
        let config = plain.config();
        let (mut stream, embeddings) = plain.embedded_rows(ids, from_host, media, None, &mut ());
        let mut kept = Kept {
            streams: Vec::new(),
            embeddings,
            shared: SharedKeyValues::default(),
        };
        let is_read = |source| {
            let mut shared = config.first_shared_layer()..config.num_layers();
            shared.any(|layer| config.key_value_source(layer) == source)
        };
        for layer in 0..config.num_layers() {
            stream = self.last(stream, self.computed(layer));
            let embedding = self.embedding(&kept, layer);
            let shared = kept.shared.get(config.layer_types[layer]);
            kept.streams.push(stream.clone());
            let own;
            (stream, own) = self.layer(plain, layer, stream, embedding, shared);
            if let Some(own) = own.filter(|_| is_read(layer)) {
                kept.shared.set(config.layer_types[layer], own);
            }
        }
        (kept, self.last(stream, self.asked))
    }

    /// Computes a layer's output. If `shared` is `None`, also computes and returns the layer's keys and values.
    fn layer(
        &self,
        model: &Gemma4Model,
        layer: usize,
        stream: Tensor<2>,
        embedding: Option<Tensor<2>>,
        shared: Option<&KeyValues>,
    ) -> (Tensor<2>, Option<KeyValues>) {
        let rotations = match model.config().is_shared(layer) {
            true => &self.last_rotations,
            false => &self.rotations,
        };
        let mut operators = PrefillOps {
            batch: self.batch,
            rotations: rotations.clone(),
            window: model.config().sliding_window,
            rules: self.rules.clone(),
            destination: KvDestination::Dropped,
            adapters: None,
            // Keep the activations inside the feed-forward network. The backward recomputes one layer at a time, so
            // memory holds the activations of only that layer.
            mlp_recompute: false,
            observer: &mut (),
        };
        let (stream, own) = model.layers[layer].forward(
            ResidualStream::new(stream),
            embedding.map(ColumnSlice::all),
            shared,
            model.norm_after(layer),
            &mut operators,
        );
        (stream.into_rows(), own)
    }

    /// Computes the gradients with respect to a layer's inputs: the residual stream and the per-layer embedding.
    ///
    /// Adds the gradients of the layer's parameters to `sum`. Adds the gradients of shared keys and values to
    /// `of_shared`, under the index of the layer that computed these keys and values.
    fn backward(
        &self,
        objective: Objective,
        kept: &Kept,
        of_shared: &mut BTreeMap<usize, [Tensor<4>; 2]>,
        sum: &mut GradientsParams,
    ) -> (Tensor<2>, Option<Tensor<2>>) {
        let Objective {
            layer,
            input,
            embedding,
            of_output,
        } = objective;
        let config = self.model.config();
        let source = config.key_value_source(layer);
        let shared = kept.shared.get(config.layer_types[layer]);
        let read = shared.filter(|_| source != layer).map(|read| {
            KeyValues::new(
                Slots::Whole(self.leaf(read.key.clone().numbers())),
                Slots::Whole(self.leaf(read.value.clone().numbers())),
                read.visible.clone(),
            )
        });
        let (output, own) = self.layer(
            self.model,
            layer,
            input.clone(),
            embedding.clone(),
            read.as_ref(),
        );
        let mut sought = attach(self.zero(), output, of_output);
        if let (Some(own), Some([key, value])) = (own, of_shared.remove(&layer)) {
            sought = attach(
                attach(sought, own.key.numbers(), key),
                own.value.numbers(),
                value,
            );
        }
        let mut gradients = sought.backward();
        if let Some(read) = read {
            let new = [read.key, read.value].map(|leaf| of_leaf(&leaf.numbers(), &mut gradients));
            let added = match of_shared.remove(&source) {
                Some(old) => {
                    let [key, value] = new;
                    let [old_key, old_value] = old;
                    [old_key + key, old_value + value]
                }
                None => new,
            };
            of_shared.insert(source, added);
        }
        let of_input = of_leaf(&input, &mut gradients);
        let of_embedding = embedding.map(|leaf| of_leaf(&leaf, &mut gradients));
        add(sum, gradients, &self.model.layers[layer]);
        (of_input, of_embedding)
    }

    /// Returns the rows of the last `positions` positions of each sequence.
    fn last(&self, rows: Tensor<2>, positions: usize) -> Tensor<2> {
        last_positions(rows, self.batch, positions)
    }

    /// Extends a gradient that has rows only for the last `positions` positions of each sequence. The earlier positions
    /// get rows of zeros.
    fn padded(&self, gradient: Tensor<2>, positions: usize) -> Tensor<2> {
        let [rows, columns] = gradient.dims();
        let known = rows / self.batch;
        if known == positions {
            return gradient;
        }
        let options = (&gradient.device(), gradient.dtype());
        let zeros = Tensor::zeros([self.batch, positions - known, columns], options);
        let gradient = gradient.reshape([self.batch, known, columns]);
        Tensor::cat(vec![zeros, gradient], 1).reshape([self.batch * positions, columns])
    }
}

fn of_leaf<const D: usize>(leaf: &Tensor<D>, gradients: &mut Gradients) -> Tensor<D> {
    let gradient = leaf.grad_remove(gradients);
    gradient.expect("the objective depends on the leaf")
}

/// Adds the gradients of a module's parameters to `sum`.
pub(super) fn add<M: Module>(sum: &mut GradientsParams, gradients: Gradients, module: &M) {
    let mut new = GradientsParams::from_grads(gradients, module);
    module.visit(&mut Adder { sum, new: &mut new });
}

struct Adder<'a> {
    sum: &'a mut GradientsParams,
    new: &'a mut GradientsParams,
}

impl ModuleVisitor for Adder<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let Some(new) = self.new.remove::<D>(param.id) else {
            return;
        };
        let gradient = match self.sum.remove::<D>(param.id) {
            Some(old) => old + new,
            None => new,
        };
        self.sum.register(param.id, gradient);
    }
}
