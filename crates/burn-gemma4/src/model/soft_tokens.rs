//! Soft tokens: rows that stand in the place of token embeddings, such as those of an image.

use burn::tensor::Tensor;
use std::ops::Range;

/// The soft tokens of an image or an audio clip in a call of the model.
#[derive(Clone, Debug)]
pub(crate) struct SoftTokens {
    /// The index of the sequence.
    pub sequence: usize,
    /// The columns of the call in which the soft tokens stand.
    pub columns: Range<usize>,
    /// The soft tokens, `[columns, hidden]`.
    pub rows: Tensor<2>,
    /// True if the soft tokens see each other in both directions in sliding layers.
    pub is_bidirectional: bool,
}

/// The images and audio clips in a call of the model.
#[derive(Clone, Debug, Default)]
pub(crate) struct CallMedia(pub Vec<SoftTokens>);

impl CallMedia {
    /// Puts the soft tokens in the place of token embeddings, `[batch, columns, hidden]`.
    pub fn placed(&self, mut embedded: Tensor<3>) -> Tensor<3> {
        let [_, _, hidden] = embedded.dims();
        for SoftTokens {
            sequence,
            columns,
            rows,
            ..
        } in &self.0
        {
            let place = [*sequence..sequence + 1, columns.clone(), 0..hidden];
            let rows = rows.clone().cast(embedded.dtype()).unsqueeze::<3>();
            embedded = embedded.slice_assign(place, rows);
        }
        embedded
    }

    /// Returns the columns of the image that contains `column` of a sequence, if the image's soft tokens see each other in
    /// both directions.
    pub fn block(&self, sequence: usize, column: usize) -> Option<Range<usize>> {
        let mut blocks = self.0.iter().filter(|one| one.is_bidirectional);
        let block = blocks.find(|one| one.sequence == sequence && one.columns.contains(&column));
        block.map(|block| block.columns.clone())
    }

    /// True if the soft tokens of some image see each other in both directions.
    pub fn has_blocks(&self) -> bool {
        let mut blocks = self.0.iter().filter(|one| one.is_bidirectional);
        blocks.any(|block| block.columns.len() > 1)
    }
}
