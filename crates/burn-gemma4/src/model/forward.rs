//! Tokens to hidden states: all layers, one after the other.

#[cfg(feature = "cube")]
use super::few_rows::FewRows;
use super::{
    Gemma4Model, Logits,
    any_rows::{AnyRows, Rotations},
    cache::{Cache, key_values::SharedKeyValues},
    layer::{
        RmsNorm,
        operators::{Columns, Operators, Stream},
    },
    observe::{Observer, Site},
    per_layer::Tokens,
};
use crate::op::{flat_rows, linear, rope::Positions};
#[cfg(feature = "cube")]
use crate::{LayerType, op::rope::RotationTables};
use burn::tensor::{DType, Int, Tensor};
#[cfg(feature = "cube")]
use burn::tensor::{Device, TensorData};
use std::ops::Range;

/// What a pass over a text reads, all of it on the device.
#[derive(Clone)]
pub(crate) struct Text {
    /// `[batch, positions]`.
    pub ids: Tensor<2, Int>,
    /// Of a table on the host, the tokens' [rows](Gemma4Model::host_rows).
    pub from_host: Option<Tensor<2>>,
    /// Of the tokens' positions.
    pub rotations: Rotations,
    /// `[batch, positions]`: the document of each token, where a row has several.
    pub segments: Option<Tensor<2, Int>>,
}

/// What the tokens of a call come after.
pub(crate) struct After<'a> {
    pub cache: &'a mut Cache,
    /// Theirs.
    pub positions: Positions,
}

impl Gemma4Model {
    /// Rows of one whole document each.
    pub(crate) fn whole_text(&self, tokens: &Tokens) -> Text {
        let [_, count] = tokens.ids.dims();
        self.text(tokens, &Positions::Range { first: 0, count })
    }

    /// Tokens at these positions, of one document a row.
    pub(crate) fn text(&self, tokens: &Tokens, positions: &Positions) -> Text {
        let Tokens { ids, on_host } = tokens;
        let device = ids.device();
        Text {
            ids: ids.clone(),
            from_host: self.host_rows(on_host, &device.clone().without_autodiff()),
            rotations: Rotations::new(&self.rope, positions, self.dtype(), &device),
            segments: None,
        }
    }

    /// The last layer's stream, normalised, of the positions whose logits are asked for: `[batch, asked, hidden]`. Where there are
    /// none, that of the last layer with keys and values of its own, as it is.
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
            segments,
        } = text;
        let [batch, count] = ids.dims();
        let asked = logits.of(count);
        let device = ids.device();

        let embedded = self.embed_tokens.forward(ids.clone());
        observer.observe(Site::Embedding, || embedded.clone());
        let embedded = flat_rows(embedded);
        let hidden = embedded.dims()[1];
        let embeddings = self.per_layer_embeddings(&ids, from_host, &embedded, linear::rows);
        if let Some(embeddings) = &embeddings {
            let layers = self.config.num_layers();
            let columns = self.config.hidden_size_per_layer_input;
            observer.observe(Site::PerLayerEmbeddings, || {
                embeddings.clone().reshape([batch, count, layers, columns])
            });
        }

        let (cache, positions) = match after {
            Some(After { cache, positions }) => {
                let call = cache.call(count, &device);
                (Some((cache, call)), Some(positions))
            }
            None => (None, None),
        };
        let mut any_rows = AnyRows {
            batch,
            rotations,
            window: self.config.sliding_window,
            segments,
            cache,
            mlp_anew: self.mlp_anew,
            observer,
        };
        let mut shared = SharedKeyValues::default();
        let own = 0..self.config.first_shared_layer();
        let stream = Stream::new(embedded);
        let stream = self.layers(own, stream, embeddings.as_ref(), &mut shared, &mut any_rows);
        if let Some((cache, call)) = &mut any_rows.cache {
            cache.advance(call);
        }

        if asked == 0 {
            return stream.into_rows().reshape([batch, count, hidden]);
        }
        // From here on, positions only read what earlier layers have left.
        let rest = self.config.first_shared_layer()..self.config.num_layers();
        let last = |rows| last_positions(rows, batch, asked);
        let (stream, embeddings) = (Stream::new(last(stream.into_rows())), embeddings.map(last));
        let mut stream = match &positions {
            #[cfg(feature = "cube")]
            Some(positions)
                if asked == 1 && count > 1 && !rest.is_empty() && FewRows::serve(self, batch) =>
            {
                let after = &mut |_| ();
                let dtype = self.dtype();
                let mut few_rows = self.last_position(positions, batch, dtype, &device, after);
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

    /// The layers of a range, one after the other. `shared` has what earlier ones have left for layers without keys and values
    /// of their own, and gets what these leave. `embeddings` are all layers' per-layer embeddings, `[rows, layers · columns]`.
    pub(crate) fn layers(
        &self,
        range: Range<usize>,
        mut stream: Stream,
        embeddings: Option<&Tensor<2>>,
        shared: &mut SharedKeyValues,
        operators: &mut impl Operators,
    ) -> Stream {
        let count = self.config.hidden_size_per_layer_input;
        for index in range {
            let kind = self.config.layer_types[index];
            let embedding = embeddings.map(|rows| Columns {
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

    /// The norm that the stream goes through after a layer.
    pub(crate) fn norm_after(&self, layer: usize) -> &RmsNorm {
        match self.layers.get(layer + 1) {
            Some(next) => &next.input_layernorm,
            None => &self.norm,
        }
    }

    /// The operators for each sequence's last position in layers that read earlier ones' keys and values.
    #[cfg(feature = "cube")]
    pub(crate) fn last_position<'a>(
        &self,
        positions: &Positions,
        batch: usize,
        dtype: DType,
        device: &Device,
        after: &'a mut dyn FnMut(super::observe::Part),
    ) -> FewRows<'a> {
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
        FewRows {
            batch,
            positions: Tensor::from_data(TensorData::new(last, [batch]), (device, DType::I32)),
            sliding: tables(LayerType::Sliding),
            full: tables(LayerType::Full),
            targets: None,
            after,
        }
    }
}

/// Of rows `[batch · positions, columns]`, those of the last `count` positions.
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
