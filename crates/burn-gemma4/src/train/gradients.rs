//! Gradients with the activations of one layer in memory at a time (Chen et al. 2016, arXiv:1604.06174).
//!
//! Burn's own checkpointing computes cheap operations anew and keeps the outputs of all matrix products, which at long
//! context are most of the memory. Here only what goes into each layer is kept, and the backward computes layer after layer
//! once more, the last one first.

use crate::{
    Gemma4Error, Gemma4Model, LayerType, Logits, Packing,
    model::layer::{
        attention::{KeyValues, Visible},
        decoder::Observed,
    },
    op::{
        attach::attach,
        linear,
        rope::{Positions, Rotation},
    },
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
    /// Where the tokens' shape is not the packing's, where a packing comes with other positions than [`Logits::All`], as
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
        // Burn keeps a graph until the next backward, so that the forward has to do without.
        let tokens = tokens.inner();
        self.check_tokens(&tokens)?;
        let plain = self.valid();
        let pass = Pass::new(self, &tokens, packing, asked);
        if pass.asked == 0 {
            return Err(Gemma4Error::Argument {
                argument: "asked",
                reason: format!("is {asked:?}, which leaves nothing to learn from"),
            });
        }
        let (mut kept, stream) = pass.forward(&plain, tokens.clone());
        let mut sum = GradientsParams::new();

        let stream = pass.leaf(stream);
        let loss = loss(self.norm.forward(stream.clone()))?;
        let mut gradients = loss.backward();
        let mut of_stream = of_leaf(&stream, &mut gradients);
        add(&mut sum, gradients, self);

        let mut of_sources = BTreeMap::new();
        let mut of_inputs = Vec::new();
        while let Some(input) = kept.streams.pop() {
            let layer = kept.streams.len();
            let of_output = padded(of_stream, pass.computed(layer));
            let objective = Objective {
                layer,
                input: pass.leaf(input),
                own_input: kept
                    .own_input(layer, pass.computed(layer))
                    .map(|input| pass.leaf(input)),
                of_output,
            };
            let of_own_input;
            (of_stream, of_own_input) = pass.backward(objective, &kept, &mut of_sources, &mut sum);
            of_inputs.extend(of_own_input.map(|gradient| padded(gradient, pass.count)));
        }

        let stream = self.embed_tokens.forward(tokens.clone());
        let inputs = self.per_layer_embeddings(tokens, &stream, linear::project);
        let mut objective = attach(pass.zero(), stream, of_stream);
        if let Some(inputs) = inputs {
            of_inputs.reverse();
            objective = attach(objective, inputs, Tensor::stack(of_inputs, 2));
        }
        // With frozen tables, nothing is left to be trained.
        if objective.is_tracked() {
            add(&mut sum, objective.backward(), self);
        }
        Ok((loss.detach(), sum))
    }
}

/// What all layers of a pass have in common.
struct Pass<'a> {
    /// With autodiff.
    model: &'a Gemma4Model,
    strategy: GradientCheckpointingStrategy,
    /// Positions of the text.
    count: usize,
    /// How many of the last ones are asked for.
    asked: usize,
    /// Of all positions, and of those asked for.
    sliding: [Rotation; 2],
    full: [Rotation; 2],
    segments: Option<Tensor<2, Int>>,
}

/// What the backward needs of the forward, without autodiff.
struct Kept {
    /// What goes into each layer.
    streams: Vec<Tensor<3>>,
    /// `[batch, positions, layers, columns]`.
    inputs: Option<Tensor<4>>,
    /// The keys and values that later layers read, by the layer that made them.
    sources: BTreeMap<usize, KeyValues>,
}

/// A layer's backward.
struct Objective {
    layer: usize,
    /// Leaves: the stream, and the layer's own input.
    input: Tensor<3>,
    own_input: Option<Tensor<3>>,
    /// The gradient by what the layer makes of them.
    of_output: Tensor<3>,
}

impl Kept {
    /// A layer's own input, at the positions that it is computed for.
    fn own_input(&self, layer: usize, positions: usize) -> Option<Tensor<3>> {
        let inputs = self.inputs.clone()?;
        let [_, count, _, _] = inputs.dims();
        let inputs = inputs.narrow(1, count - positions, positions);
        Some(inputs.narrow(2, layer, 1).squeeze_dim(2))
    }
}

impl<'a> Pass<'a> {
    fn new(
        model: &'a Gemma4Model,
        tokens: &Tensor<2, Int>,
        packing: Option<&Packing>,
        asked: Logits,
    ) -> Self {
        let [_, count] = tokens.dims();
        let asked = asked.of(count);
        let device = tokens.device();
        let positions = match packing {
            Some(packing) => packing.rotary_positions(),
            None => Positions::Range { first: 0, count },
        };
        let [sliding, full] = [LayerType::Sliding, LayerType::Full].map(|kind| {
            let rope = &model.rope;
            let all = rope.rotation(kind, &positions, model.dtype(), &device);
            [all.clone(), all.last(asked)]
        });
        let table = model.embed_tokens.weight.val();
        let strategy = table.gradient_checkpointing_strategy();
        Self {
            model,
            strategy: strategy.expect("gradients need a device with autodiff"),
            count,
            asked,
            sliding,
            full,
            segments: packing.map(|packing| packing.segments(&device)),
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
    fn forward(&self, plain: &Gemma4Model, tokens: Tensor<2, Int>) -> (Kept, Tensor<3>) {
        let config = plain.config();
        let mut stream = plain.embed_tokens.forward(tokens.clone());
        let mut kept = Kept {
            streams: Vec::new(),
            inputs: plain.per_layer_embeddings(tokens, &stream, linear::project),
            sources: BTreeMap::new(),
        };
        let is_read = |source| {
            let mut shared = config.first_shared_layer()..config.num_layers();
            shared.any(|layer| config.key_value_source(layer) == source)
        };
        for layer in 0..config.num_layers() {
            stream = last(stream, self.computed(layer));
            let own_input = kept.own_input(layer, self.computed(layer));
            let read = kept.sources.get(&config.key_value_source(layer));
            kept.streams.push(stream.clone());
            let own;
            (stream, own) = self.layer(plain, layer, stream, own_input, read);
            kept.sources
                .extend(own.filter(|_| is_read(layer)).map(|own| (layer, own)));
        }
        (kept, last(stream, self.asked))
    }

    /// A layer's output, and its keys and values if they are its own; else it reads those of `source`.
    fn layer(
        &self,
        model: &Gemma4Model,
        layer: usize,
        stream: Tensor<3>,
        own_input: Option<Tensor<3>>,
        source: Option<&KeyValues>,
    ) -> (Tensor<3>, Option<KeyValues>) {
        let config = model.config();
        let kind = config.layer_types[layer];
        let [all, asked] = match kind {
            LayerType::Sliding => &self.sliding,
            LayerType::Full => &self.full,
        };
        let rotation = if config.is_shared(layer) { asked } else { all };
        let module = &model.layers[layer];
        let normed = module.input_layernorm.forward(stream.clone());
        let own = module.self_attn.key_value(&normed, rotation);
        let own = own.map(|(key, value)| {
            let visible = Visible {
                segments: self.segments.clone(),
                ..Visible::in_order(kind, config.sliding_window)
            };
            KeyValues::new(key, value, visible)
        });
        let read = own.as_ref().or(source);
        let read = read.expect("a layer without keys comes after the layer that it reads");
        let mut observed = Observed {
            layer,
            observer: &mut (),
        };
        let stream = module.attention(stream, normed, rotation, read, &mut observed);
        let output = module.feed_forward(stream, own_input, &mut observed);
        (output, own)
    }

    /// The gradients by a layer's stream and by its own input; those of its parameters are added to `sum`, and those of the
    /// keys and values that it reads to `of_sources`.
    fn backward(
        &self,
        objective: Objective,
        kept: &Kept,
        of_sources: &mut BTreeMap<usize, [Tensor<4>; 2]>,
        sum: &mut GradientsParams,
    ) -> (Tensor<3>, Option<Tensor<3>>) {
        let Objective {
            layer,
            input,
            own_input,
            of_output,
        } = objective;
        let source = self.model.config().key_value_source(layer);
        let read = (source != layer).then(|| {
            let read = &kept.sources[&source];
            KeyValues::new(
                self.leaf(read.key.clone()),
                self.leaf(read.value.clone()),
                read.visible.clone(),
            )
        });
        let (output, own) = self.layer(
            self.model,
            layer,
            input.clone(),
            own_input.clone(),
            read.as_ref(),
        );
        let mut sought = attach(self.zero(), output, of_output);
        if let (Some(own), Some([key, value])) = (own, of_sources.remove(&layer)) {
            sought = attach(attach(sought, own.key, key), own.value, value);
        }
        let mut gradients = sought.backward();
        if let Some(read) = read {
            let new = [read.key, read.value].map(|leaf| of_leaf(&leaf, &mut gradients));
            let added = match of_sources.remove(&source) {
                Some(old) => {
                    let [key, value] = new;
                    let [old_key, old_value] = old;
                    [old_key + key, old_value + value]
                }
                None => new,
            };
            of_sources.insert(source, added);
        }
        let of_input = of_leaf(&input, &mut gradients);
        let of_own_input = own_input.map(|leaf| of_leaf(&leaf, &mut gradients));
        add(sum, gradients, &self.model.layers[layer]);
        (of_input, of_own_input)
    }
}

/// The last positions.
fn last(stream: Tensor<3>, positions: usize) -> Tensor<3> {
    let [_, count, _] = stream.dims();
    stream.narrow(1, count - positions, positions)
}

/// The gradient of all positions, of which that of the last ones is known and the others' is 0.
fn padded(gradient: Tensor<3>, positions: usize) -> Tensor<3> {
    let [batch, known, columns] = gradient.dims();
    if known == positions {
        return gradient;
    }
    let options = (&gradient.device(), gradient.dtype());
    let zeros = Tensor::zeros([batch, positions - known, columns], options);
    Tensor::cat(vec![zeros, gradient], 1)
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
