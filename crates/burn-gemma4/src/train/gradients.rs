//! Gradients with the activations of one layer in memory at a time (Chen et al. 2016, arXiv:1604.06174).
//!
//! Burn's own checkpointing computes cheap operations anew and keeps the outputs of all matrix products, which at long
//! context are most of the memory. Here only what goes into each layer is kept, and the backward computes layer after layer
//! once more, the last one first.

use crate::{
    Gemma4Error, Gemma4Model, Logits, Packing,
    model::{
        any_rows::{AnyRows, Rotations},
        cache::{
            key_values::{KeyValues, SharedKeyValues},
            slots::Slots,
        },
        forward::{Text, last_positions},
        layer::operators::{Columns, Stream},
    },
    op::{attach::attach, flat_rows, linear},
};
use burn::{
    module::{Module, ModuleVisitor, Param},
    optim::GradientsParams,
    tensor::{DType, GradientCheckpointingStrategy, Gradients, Int, Tensor},
};
use std::collections::BTreeMap;

impl Gemma4Model {
    /// A loss of the hidden states that [`hidden`](Self::hidden) gives, or [`hidden_packed`](Self::hidden_packed) with a
    /// packing, and the gradients of all parameters: those that [`Tensor::backward`] gives, in the memory of one layer's
    /// activations, for the time of one more forward.
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
    /// Where the tokens' shape is not the packing's, where a packing comes with other positions than [`Logits::All`],
    /// where the model has [quantized weights](crate::layer::Weight) and others of it than a low-rank adapter are to be trained, as
    /// [`forward`](Self::forward), and those of `loss`.
    ///
    /// # Panics
    /// Without autodiff on the model's device, or if the loss does not depend on the states.
    pub fn gradients(
        &self,
        tokens: Tensor<2, Int>,
        packing: Option<&Packing>,
        asked: Logits,
        loss: impl FnOnce(Tensor<3>) -> Result<Tensor<1>, Gemma4Error>,
    ) -> Result<(Tensor<1>, GradientsParams), Gemma4Error> {
        self.refuse_training_quantized()?;
        if let Some(packing) = packing {
            packing.check(&tokens)?;
            if asked != Logits::All {
                return Err(Gemma4Error::Argument {
                    argument: "asked",
                    reason: format!(
                        "is {asked:?}; with a packing it has to be {:?}",
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
        // Burn keeps a graph until the next backward, so that the forward has to do without.
        let tokens = self.read_tokens(tokens.inner())?;
        let text = match packing {
            Some(packing) => self.packed_text(&tokens, packing),
            None => self.whole_text(&tokens),
        };
        self.gradients_by_layer(text, asked, loss)
    }

    /// [`gradients`](Self::gradients) of a text without autodiff. Nothing here depends on the host but the shapes.
    pub(crate) fn gradients_by_layer(
        &self,
        text: Text,
        asked: Logits,
        loss: impl FnOnce(Tensor<3>) -> Result<Tensor<1>, Gemma4Error>,
    ) -> Result<(Tensor<1>, GradientsParams), Gemma4Error> {
        let plain = self.valid();
        let pass = Pass::new(self, &text, asked);
        let Text { ids, from_host, .. } = text;
        let embeds = self.trains_embeddings();
        let from_host_again = from_host.clone().filter(|_| embeds);
        let (mut kept, stream) = pass.forward(&plain, &ids, from_host);
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

        if !embeds {
            return Ok((loss.detach(), sum));
        }
        let stream = flat_rows(self.embed_tokens.forward(ids.clone()));
        let embeddings = self.per_layer_embeddings(&ids, from_host_again, &stream, linear::rows);
        let mut objective = attach(pass.zero(), stream, of_stream);
        if let Some(embeddings) = embeddings {
            of_embeddings.reverse();
            objective = attach(objective, embeddings, Tensor::cat(of_embeddings, 1));
        }
        if objective.is_tracked() {
            add(&mut sum, objective.backward(), self);
        }
        Ok((loss.detach(), sum))
    }

    /// Whether something is trained of what the layers' input is made of.
    fn trains_embeddings(&self) -> bool {
        let mut trained = Trained(false);
        self.embed_tokens.visit(&mut trained);
        self.embed_tokens_per_layer.visit(&mut trained);
        self.split_table.visit(&mut trained);
        self.per_layer_model_projection.visit(&mut trained);
        self.per_layer_projection_norm.visit(&mut trained);
        trained.0
    }
}

/// Whether a module has a parameter that is trained.
struct Trained(bool);

impl ModuleVisitor for Trained {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.0 |= param.base().is_require_grad();
    }
}

/// What all layers of a pass have in common.
struct Pass<'a> {
    /// With autodiff.
    model: &'a Gemma4Model,
    strategy: GradientCheckpointingStrategy,
    batch: usize,
    /// Positions of the text.
    count: usize,
    /// How many of the last ones are asked for.
    asked: usize,
    /// Of all positions.
    rotations: Rotations,
    /// Of those asked for.
    last_rotations: Rotations,
    segments: Option<Tensor<2, Int>>,
}

/// What the backward needs of the forward, without autodiff.
struct Kept {
    /// What goes into each layer, `[rows, hidden]`.
    streams: Vec<Tensor<2>>,
    /// `[rows, layers · columns]`.
    embeddings: Option<Tensor<2>>,
    /// The keys and values that later layers read.
    shared: SharedKeyValues,
}

/// A layer's backward.
struct Objective {
    layer: usize,
    /// Leaves: the stream, and the layer's per-layer embedding.
    input: Tensor<2>,
    embedding: Option<Tensor<2>>,
    /// The gradient by what the layer makes of them.
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
            segments: text.segments.clone(),
        }
    }

    /// The positions that a layer is computed for, the last ones: those that read an earlier layer's keys and values need
    /// no others than those asked for.
    fn computed(&self, layer: usize) -> usize {
        match self.model.config().is_shared(layer) {
            true => self.asked,
            false => self.count,
        }
    }

    /// A layer's per-layer embedding, at the positions that it is computed for.
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

    /// An objective with nothing attached to it.
    fn zero(&self) -> Tensor<1> {
        Tensor::zeros([1], (&self.model.device(), DType::F32))
    }

    /// Everything up to the last layer's stream, at the positions asked for, by the model without autodiff.
    fn forward(
        &self,
        plain: &Gemma4Model,
        ids: &Tensor<2, Int>,
        from_host: Option<Tensor<2>>,
    ) -> (Kept, Tensor<2>) {
        let config = plain.config();
        let mut stream = flat_rows(plain.embed_tokens.forward(ids.clone()));
        let mut kept = Kept {
            streams: Vec::new(),
            embeddings: plain.per_layer_embeddings(ids, from_host, &stream, linear::rows),
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

    /// A layer's output, and its keys and values if they are its own; else it reads `shared`.
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
        let mut operators = AnyRows {
            batch: self.batch,
            rotations: rotations.clone(),
            window: model.config().sliding_window,
            segments: self.segments.clone(),
            cache: None,
            // A layer that is computed anew has all of it for a moment only.
            mlp_anew: false,
            observer: &mut (),
        };
        let (stream, own) = model.layers[layer].forward(
            Stream::new(stream),
            embedding.map(Columns::all),
            shared,
            model.norm_after(layer),
            &mut operators,
        );
        (stream.into_rows(), own)
    }

    /// The gradients by a layer's stream and by its per-layer embedding; those of its parameters are added to `sum`, and those
    /// of the keys and values that it reads to `of_shared`, by the layer that made them.
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

    /// Those of the last positions, of rows.
    fn last(&self, rows: Tensor<2>, positions: usize) -> Tensor<2> {
        last_positions(rows, self.batch, positions)
    }

    /// The gradient of all positions' rows, of which that of the last ones is known and the others' is 0.
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

/// Adds the gradients of a module's parameters to those that are there.
fn add<M: Module>(sum: &mut GradientsParams, gradients: Gradients, module: &M) {
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
