//! The soft tokens of images and audio clips in the rows of a training batch.

use crate::error::Gemma4Error;
use crate::model::Gemma4Model;
use crate::model::forward::Text;
use crate::model::row_rules::RowRules;
use crate::model::soft_tokens::{CallMedia, SoftTokenGrid};
use crate::model::tokens::Tokens;
use crate::op::attach::attach;
use crate::train::packing::Packing;
use burn::tensor::{DType, Device, Gradients, Int, Tensor, TensorData};
use std::ops::Range;

/// The soft tokens of an image or an audio clip in a row of a batch.
pub(crate) struct PlacedSoftTokens {
    pub row: usize,
    /// The positions of the row in which the soft tokens stand.
    pub positions: Range<usize>,
    /// The soft tokens, `[positions, hidden]`.
    pub soft_tokens: Tensor<2>,
    /// True if the soft tokens see each other in both directions in sliding layers.
    pub is_bidirectional: bool,
}

/// The soft tokens of all images and audio clips in a batch of rows, as tensors of the batch's shape.
/// [`MediaTowers::place`](crate::MediaTowers::place) computes them.
///
/// A batch without images and clips can have soft tokens too: of no places. Its tensors have the shapes of all other
/// batches of a data set then, which a captured graph needs.
#[derive(Clone, Debug)]
pub struct PlacedMedia {
    pub(crate) grid: SoftTokenGrid,
    /// The row and the positions of each image and each clip, in any order.
    places: Vec<(usize, Range<usize>)>,
    /// The row and the positions of each image whose soft tokens see each other in both directions. `None` if the model
    /// has no such images.
    blocks: Option<Vec<(usize, Range<usize>)>>,
}

impl PlacedMedia {
    /// Arranges soft tokens in rows. `shape` is `[batch, positions]`, and `hidden` is the hidden size of the text model,
    /// whose dtype and device the result has. `has_blocks` is true if the model has images that see in both directions.
    ///
    /// # Errors
    /// Returns [`Gemma4Error::Argument`] if a medium is outside of the rows.
    pub(crate) fn new(
        shape: [usize; 2],
        hidden: usize,
        (device, dtype): (&Device, DType),
        media: Vec<PlacedSoftTokens>,
        has_blocks: bool,
    ) -> Result<Self, Gemma4Error> {
        let [batch, positions] = shape;
        let is_outside =
            |one: &&PlacedSoftTokens| one.row >= batch || one.positions.end > positions;
        if let Some(one) = media.iter().find(is_outside) {
            return Err(Gemma4Error::Argument {
                argument: "media",
                reason: format!(
                    "has an image or audio in row {} at {:?}; expected at most {batch} rows of {positions} positions",
                    one.row, one.positions
                ),
            });
        }
        let mut is_soft = vec![0; batch * positions];
        // Row 0 stands for all positions without a soft token.
        let mut sources = vec![0; batch * positions];
        let mut rows = vec![Tensor::zeros([1, hidden], (device, dtype))];
        let mut next = 1;
        for one in &media {
            for position in one.positions.clone() {
                let index = one.row * positions + position;
                is_soft[index] = 1;
                sources[index] = next;
                next += 1;
            }
            rows.push(one.soft_tokens.clone().cast(dtype));
        }
        let integers = |values: Vec<i32>, shape: [usize; 2]| {
            Tensor::<2, Int>::from_data(TensorData::new(values, shape), (device, DType::I32))
        };
        let count = batch * positions;
        let sources = integers(sources, [1, count]).reshape([count]);
        let rows = Tensor::cat(rows, 0).select(0, sources);
        let place = |one: &PlacedSoftTokens| (one.row, one.positions.clone());
        let blocks = media.iter().filter(|one| one.is_bidirectional);
        Ok(Self {
            grid: SoftTokenGrid {
                rows: rows.reshape([batch, positions, hidden]),
                is_soft: integers(is_soft, shape),
            },
            blocks: has_blocks.then(|| blocks.map(place).collect()),
            places: media.iter().map(place).collect(),
        })
    }

    /// Checks that the soft tokens are for tokens of the given shape, and that no document divides an image or a clip.
    pub(crate) fn check(
        &self,
        shape: [usize; 2],
        packing: Option<&Packing>,
    ) -> Result<(), Gemma4Error> {
        let refuse = |reason| {
            let argument = "media";
            Err(Gemma4Error::Argument { argument, reason })
        };
        let found = self.grid.is_soft.dims();
        if found != shape {
            return refuse(format!(
                "is for tokens {found:?}, but the tokens have {shape:?}"
            ));
        }
        let Some(packing) = packing else {
            return Ok(());
        };
        for (row, positions) in &self.places {
            let document = packing.document(*row, positions.start);
            if positions.end > document.end {
                return refuse(format!(
                    "has an image or audio in row {row} at {positions:?}, which the end of a document at {} divides",
                    document.end
                ));
            }
        }
        Ok(())
    }

    /// True if the soft tokens depend on trained parameters of towers.
    pub(crate) fn is_tracked(&self) -> bool {
        self.grid.rows.is_tracked()
    }

    /// Returns the same soft tokens as a leaf of the autodiff graph.
    pub(crate) fn leaf(&self) -> Self {
        let rows = &self.grid.rows;
        let leaf = rows.clone().inner().autodiff();
        let leaf = match rows.gradient_checkpointing_strategy() {
            Some(strategy) => leaf.with_gradient_checkpointing_strategy(strategy),
            None => leaf,
        };
        Self {
            grid: SoftTokenGrid {
                rows: leaf.require_grad(),
                is_soft: self.grid.is_soft.clone(),
            },
            ..self.clone()
        }
    }

    /// Runs the backward of the towers from the gradient of the soft tokens, `[batch, positions, hidden]`.
    pub(crate) fn backward(&self, gradient: Tensor<3>) -> Gradients {
        let rows = self.grid.rows.clone();
        let zero = Tensor::zeros([1], (&rows.device(), DType::F32));
        let gradient = gradient.cast(rows.dtype());
        attach(zero, rows, gradient).backward()
    }

    /// Returns the interval of keys that each position sees in sliding layers, `[batch, positions]`. `window` is the
    /// number of keys of a window. Returns `None` if no image of the model sees in both directions.
    fn intervals(
        &self,
        packing: Option<&Packing>,
        window: usize,
        device: &Device,
    ) -> Option<[Tensor<2, Int>; 2]> {
        let blocks = self.blocks.as_ref()?;
        let [batch, positions] = self.grid.is_soft.dims();
        let mut starts = Vec::with_capacity(batch * positions);
        let mut ends = Vec::with_capacity(batch * positions);
        for row in 0..batch {
            let documents = match packing {
                Some(packing) => packing.documents(row),
                None => std::iter::once(0..positions).collect(),
            };
            for document in documents {
                for position in document.clone() {
                    let end = position + 1;
                    starts.push(end.saturating_sub(window).max(document.start) as i32);
                    ends.push(end as i32);
                }
            }
        }
        for (row, block) in blocks {
            let of_row = row * positions;
            ends[of_row + block.start..of_row + block.end].fill(block.end as i32);
        }
        let bound = |bounds: Vec<i32>| {
            let bounds = TensorData::new(bounds, [batch, positions]);
            Tensor::from_data(bounds, (device, DType::I32))
        };
        Some([bound(starts), bound(ends)])
    }
}

impl Gemma4Model {
    /// Creates the model input for rows of training. Without a packing, each row is one document. The packing and the
    /// media must be [checked](PlacedMedia::check) for these tokens.
    pub(crate) fn training_text(
        &self,
        tokens: &Tokens,
        packing: Option<&Packing>,
        media: Option<&PlacedMedia>,
    ) -> Text {
        let Some(media) = media else {
            return match packing {
                Some(packing) => self.packed_text(tokens, packing),
                None => self.whole_text(tokens),
            };
        };
        let device = tokens.ids.device();
        let shape = tokens.ids.dims();
        // The embeddings in the places of media are not read, but the per-layer embeddings are: those of padding, as in
        // Hugging Face Transformers.
        let [_, positions] = shape;
        let mut on_host = tokens.on_host.clone();
        for (row, place) in &media.places {
            let of_row = row * positions;
            on_host[of_row + place.start..of_row + place.end].fill(self.config().pad_token);
        }
        let tokens = Tokens::upload(on_host, shape, &device);
        let text = self.training_text(&tokens, packing, None);
        Text {
            rules: RowRules {
                sliding: media.intervals(packing, self.config().sliding_window, &device),
                ..text.rules
            },
            media: CallMedia::Grid(Box::new(media.grid.clone())),
            ..text
        }
    }
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use super::*;

    fn placed(positions: Range<usize>, row: usize, has_blocks: bool) -> PlacedMedia {
        let device = Device::flex();
        let medium = PlacedSoftTokens {
            row,
            soft_tokens: Tensor::ones([positions.len(), 2], &device),
            positions,
            is_bidirectional: has_blocks,
        };
        let options = (&device, DType::F32);
        PlacedMedia::new([2, 6], 2, options, vec![medium], has_blocks).expect("within the rows")
    }

    #[test]
    fn intervals_of_packed_image_stay_in_its_document_and_window() {
        let packing = Packing::new(vec![vec![2, 4], vec![6]], 6).expect("the documents fit");
        let device = Device::flex();
        let find = |media: &PlacedMedia| {
            let bounds = media.intervals(Some(&packing), 3, &device)?;
            Some(bounds.map(|bound| bound.into_data().iter::<i64>().collect::<Vec<_>>()))
        };
        let [starts, ends] = find(&placed(3..5, 0, true)).expect("images see both ways");
        assert_eq!(starts, [0, 0, 2, 2, 2, 3, 0, 0, 0, 1, 2, 3]);
        assert_eq!(ends, [1, 2, 3, 5, 5, 6, 1, 2, 3, 4, 5, 6]);
        assert_eq!(find(&placed(3..5, 0, false)), None);
    }

    #[test]
    fn grid_has_soft_tokens_in_their_places_only() {
        let media = placed(3..5, 1, false);
        let rows = media.grid.rows.into_data();
        let expected: Vec<f32> = (0..24).map(|i| f32::from((18..22).contains(&i))).collect();
        assert_eq!(rows.iter::<f32>().collect::<Vec<_>>(), expected);
        let is_soft = media.grid.is_soft.into_data();
        let expected: Vec<i64> = (0..12).map(|i| i64::from((9..11).contains(&i))).collect();
        assert_eq!(is_soft.iter::<i64>().collect::<Vec<_>>(), expected);
    }

    #[test]
    fn check_of_divided_medium_or_other_shape_names_the_place() {
        let packing = Packing::new(vec![vec![4, 2], vec![6]], 6).expect("the documents fit");
        let media = placed(3..5, 0, true);
        media.check([2, 6], None).expect("each row is a document");
        for (shape, words) in [([2, 6], "row 0 at 3..5"), ([3, 4], "[3, 4]")] {
            let error = media.check(shape, Some(&packing)).expect_err("refused");
            assert!(error.to_string().contains(words), "{error}");
        }
        let medium = PlacedSoftTokens {
            row: 0,
            positions: 5..7,
            soft_tokens: Tensor::ones([2, 2], &Device::flex()),
            is_bidirectional: false,
        };
        let options = (&Device::flex(), DType::F32);
        let error = PlacedMedia::new([2, 6], 2, options, vec![medium], false);
        let error = error.expect_err("outside of the row").to_string();
        assert!(error.contains("row 0 at 5..7"), "{error}");
    }
}
