//! The forward pass from token ids to hidden states: all layers in order.

use super::adapters::PassAdapters;
use super::cache::Cache;
use super::cache::key_values::SharedKeyValues;
#[cfg(feature = "cube")]
use super::decode_ops::DecodeOps;
use super::layer::RmsNorm;
use super::layer::ops::{LayerOps, ResidualStream};
use super::logits::Logits;
use super::observe::{Observer, Site};
use super::prefill_ops::{KvDestination, PrefillOps, Rotations};
use super::row_rules::RowRules;
use super::soft_tokens::CallMedia;
use super::text_model::Gemma4Model;
use super::tokens::Tokens;
#[cfg(feature = "cube")]
use crate::config::LayerType;
use crate::op::column_slice::ColumnSlice;
#[cfg(feature = "cube")]
use crate::op::rope::RotationTables;
use crate::op::{flat_rows, linear, rope::Positions};
use burn::tensor::{DType, Int, Tensor};
#[cfg(feature = "cube")]
use burn::tensor::{Device, TensorData};
use std::ops::Range;

/// The inputs of a forward pass, as device tensors.
#[derive(Clone)]
pub(crate) struct Text {
    /// The token ids, `[batch, positions]`.
    pub ids: Tensor<2, Int>,
    /// The tokens' [rows](Gemma4Model::host_rows) of the per-layer embedding table, if the table is in host memory.
    pub from_host: Option<Tensor<2>>,
    /// The cosines and sines of the rotary embedding (RoPE) at the tokens' positions.
    pub rotations: Rotations,
    /// The rules that decide which keys tokens see if the call has no KV cache.
    pub rules: RowRules,
    /// The adapters that the rows select, or `None` if no row selects an adapter.
    pub adapters: Option<PassAdapters>,
    /// The images and audio clips, whose soft tokens stand in the place of some tokens' embeddings.
    pub media: CallMedia,
}

/// The KV cache to which a call appends tokens, and the positions of these tokens.
pub(crate) struct After<'a> {
    pub cache: &'a mut Cache,
    /// The positions of the tokens that the call appends.
    pub positions: Positions,
}

impl Gemma4Model {
    /// Prepares the inputs for rows that contain one whole document each.
    pub(crate) fn whole_text(&self, tokens: &Tokens) -> Text {
        let [_, count] = tokens.ids.dims();
        self.text(tokens, &Positions::Range { first: 0, count })
    }

    /// Prepares the inputs for tokens at `positions`. Each row contains one document.
    pub(crate) fn text(&self, tokens: &Tokens, positions: &Positions) -> Text {
        let Tokens {
            ids,
            on_host,
            media,
        } = tokens;
        let device = ids.device();
        Text {
            ids: ids.clone(),
            from_host: self.host_rows(on_host, &device.clone().without_autodiff()),
            rotations: Rotations::new(&self.rope, positions, self.dtype(), &device),
            rules: RowRules::default(),
            adapters: None,
            media: media.clone(),
        }
    }

    /// Returns the normalized output of the last layer, `[batch, asked, hidden]`. `asked` is the number of positions
    /// that `logits` requests.
    ///
    /// If `asked` is 0, the shared KV layers at the end of the model do not run. The result is then the output of the
    /// last layer that ran, without the norm. Callers ignore it.
    pub(crate) fn hidden_states<O: Observer>(
        &self,
        text: Text,
        after: Option<After<'_>>,
        logits: Logits,
        observer: &mut O,
    ) -> Tensor<3> {
        let Text {
            ids,
            from_host,
            rotations,
            rules,
            adapters,
            media,
        } = text;
        let adapters = adapters.as_ref();
        let [batch, count] = ids.dims();
        let asked = logits.of(count);
        let device = ids.device();

        let (embedded, embeddings) =
            self.embedded_rows(&ids, from_host, &media, adapters, observer);
        let hidden = embedded.dims()[1];

        let (destination, positions) = match after {
            Some(After { cache, positions }) => {
                let mut call = cache.call(count, &device, self.is_accelerated());
                cache.see_images(&mut call, &media, &device);
                (KvDestination::Cache(cache, Box::new(call)), Some(positions))
            }
            None => (KvDestination::Dropped, None),
        };
        let mut any_rows = PrefillOps {
            batch,
            rotations,
            window: self.config.sliding_window,
            rules,
            destination,
            adapters,
            mlp_recompute: self.mlp_recompute,
            observer,
        };
        let mut shared = SharedKeyValues::default();
        let own = 0..self.config.first_shared_layer();
        let stream = ResidualStream::new(embedded);
        let stream = self.layers(own, stream, embeddings.as_ref(), &mut shared, &mut any_rows);
        if let KvDestination::Cache(cache, call) = &mut any_rows.destination {
            cache.advance(call);
        }

        if asked == 0 {
            return stream.into_rows().reshape([batch, count, hidden]);
        }
        // Run the remaining layers only for the requested positions. All remaining layers are shared KV layers, which
        // compute each position independently of the other positions.
        let rest = self.config.first_shared_layer()..self.config.num_layers();
        let last = |rows| last_positions(rows, batch, asked);
        let (stream, embeddings) = (
            ResidualStream::new(last(stream.into_rows())),
            embeddings.map(last),
        );
        let mut stream = match &positions {
            #[cfg(feature = "cube")]
            Some(positions)
                if asked == 1 && count > 1 && !rest.is_empty() && DecodeOps::serve(self, batch) =>
            {
                let after = &mut |_| ();
                let dtype = self.dtype();
                let few_rows = self.last_position(positions, batch, dtype, &device, after);
                let mut few_rows = DecodeOps {
                    adapters,
                    ..few_rows
                };
                self.layers(
                    rest,
                    stream,
                    embeddings.as_ref(),
                    &mut shared,
                    &mut few_rows,
                )
            }
            _ => {
                if asked < count {
                    any_rows.rotations = any_rows.rotations.last(asked);
                }
                self.layers(
                    rest,
                    stream,
                    embeddings.as_ref(),
                    &mut shared,
                    &mut any_rows,
                )
            }
        };
        let normed = stream.norm(&self.norm).reshape([batch, asked, hidden]);
        any_rows
            .observer
            .observe(Site::FinalNorm, || normed.clone());
        normed
    }

    /// Embeds the tokens `ids`, `[batch, positions]`. Returns the first residual stream, `[rows, hidden]`, and the
    /// per-layer embeddings of all layers, `[rows, layers · columns]`, if the model has them. The soft tokens of
    /// `media` replace the embeddings in their places.
    pub(crate) fn embedded_rows<O: Observer>(
        &self,
        ids: &Tensor<2, Int>,
        from_host: Option<Tensor<2>>,
        media: &CallMedia,
        adapters: Option<&PassAdapters>,
        observer: &mut O,
    ) -> (Tensor<2>, Option<Tensor<2>>) {
        let [batch, count] = ids.dims();
        let embedded = media.placed(self.embed_tokens.forward(ids.clone()));
        observer.observe(Site::Embedding, || embedded.clone());
        let embedded = flat_rows(embedded);
        let project = |input: Tensor<2>, weight| {
            let added = adapters
                .zip(self.per_layer_model_projection.as_ref())
                .and_then(|(adapters, linear)| adapters.added(&input, linear, linear::rows));
            let output = linear::rows(input, weight);
            match added {
                // Add as three dimensions: see `PrefillOps::of_text`.
                Some(added) => {
                    let [rows, columns] = output.dims();
                    let [output, added] =
                        [output, added].map(|part| part.reshape([1, rows, columns]));
                    flat_rows(output + added)
                }
                None => output,
            }
        };
        let embeddings = self.per_layer_embeddings(ids, from_host, media, &embedded, project);
        if let Some(embeddings) = &embeddings {
            let layers = self.config.num_layers();
            let columns = self.config.hidden_size_per_layer_input;
            observer.observe(Site::PerLayerEmbeddings, || {
                embeddings.clone().reshape([batch, count, layers, columns])
            });
        }
        (embedded, embeddings)
    }

    /// Runs a range of layers in order. The layers store their keys and values in `shared`, from which shared KV layers
    /// read. `embeddings`, `[rows, layers · columns]`, holds the per-layer embeddings of all layers.
    pub(crate) fn layers(
        &self,
        range: Range<usize>,
        mut stream: ResidualStream,
        embeddings: Option<&Tensor<2>>,
        shared: &mut SharedKeyValues,
        operators: &mut impl LayerOps,
    ) -> ResidualStream {
        let count = self.config.hidden_size_per_layer_input;
        for index in range {
            let kind = self.config.layer_types[index];
            let embedding = embeddings.map(|rows| ColumnSlice {
                rows: rows.clone(),
                start: index * count,
                count,
            });
            let (layer, next) = (&self.layers[index], self.norm_after(index));
            let own;
            (stream, own) = layer.forward(stream, embedding, shared.get(kind), next, operators);
            if let Some(own) = own {
                shared.set(kind, own);
            }
        }
        stream
    }

    /// Returns the norm that follows a layer: the next layer's input norm, or the final norm.
    pub(crate) fn norm_after(&self, layer: usize) -> &RmsNorm {
        match self.layers.get(layer + 1) {
            Some(next) => &next.input_layernorm,
            None => &self.norm,
        }
    }

    /// Creates the decode operations that run shared KV layers for the last position of each sequence.
    #[cfg(feature = "cube")]
    pub(crate) fn last_position<'a>(
        &self,
        positions: &Positions,
        batch: usize,
        dtype: DType,
        device: &Device,
        after: &'a mut dyn FnMut(super::observe::Part),
    ) -> DecodeOps<'a> {
        let last: Vec<i32> = match positions {
            Positions::Range { first, count } => vec![(first + count - 1) as i32; batch],
            Positions::Each(rows) => rows
                .iter()
                .filter_map(|row| row.last())
                .map(|position| *position as i32)
                .collect(),
        };
        let reach = positions.end();
        let tables = |kind| -> RotationTables { self.rope.tables(kind, reach, dtype, device) };
        DecodeOps {
            batch,
            positions: Tensor::from_data(TensorData::new(last, [batch]), (device, DType::I32)),
            sliding: tables(LayerType::Sliding),
            full: tables(LayerType::Full),
            targets: None,
            adapters: None,
            after,
        }
    }
}

/// Returns the last `count` positions of each sequence, `[batch · count, columns]`. `rows` is
/// `[batch · positions, columns]`.
pub(crate) fn last_positions(rows: Tensor<2>, batch: usize, count: usize) -> Tensor<2> {
    let [all, columns] = rows.dims();
    if all == batch * count {
        return rows;
    }
    let positions = all / batch;
    rows.reshape([batch, positions, columns])
        .narrow(1, positions - count, count)
        .reshape([batch * count, columns])
}
