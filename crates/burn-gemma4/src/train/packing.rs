//! Documents packed into rows, as training reads them.

use crate::{
    Gemma4Error, Gemma4Model, Logits,
    model::{forward::Text, per_layer::Tokens},
    op::rope::Positions,
};
use burn::tensor::{Bool, Device, Int, Tensor, TensorData};

/// Which tokens of a batch belong together: documents one after another in rows of one length.
///
/// [`Gemma4Model::forward_packed`](crate::Gemma4Model::forward_packed) gives each document the logits that it has alone:
/// its positions begin at 0, and it sees no other.
///
/// ```
/// use burn_gemma4::Packing;
///
/// // Two rows of six tokens. What its documents leave of a row is padding.
/// let packing = Packing::new(vec![vec![2, 4], vec![5]], 6)?;
/// assert_eq!([packing.batch(), packing.positions()], [2, 6]);
/// # Ok::<(), burn_gemma4::Gemma4Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Packing {
    /// The lengths of each row's documents, padding included as one more.
    rows: Vec<Vec<usize>>,
    /// Which of a row's documents is padding: the one at this index, if it is there.
    padding: Vec<usize>,
    positions: usize,
}

impl Packing {
    /// Rows of `positions` tokens, each of which holds documents of the lengths `rows[row]` in their order, and after them
    /// padding.
    ///
    /// # Errors
    /// [`Gemma4Error::Argument`] where a row's documents are longer than it.
    pub fn new(mut rows: Vec<Vec<usize>>, positions: usize) -> Result<Self, Gemma4Error> {
        let padding = rows.iter().map(Vec::len).collect();
        for (index, row) in rows.iter_mut().enumerate() {
            let used = row
                .iter()
                .fold(0usize, |sum, length| sum.saturating_add(*length));
            let Some(rest) = positions.checked_sub(used) else {
                return Err(Gemma4Error::Argument {
                    argument: "rows",
                    reason: format!(
                        "row {index} has {used} tokens, more than {positions} positions"
                    ),
                });
            };
            row.extend((rest > 0).then_some(rest));
        }
        Ok(Self {
            rows,
            padding,
            positions,
        })
    }

    /// Rows.
    pub fn batch(&self) -> usize {
        self.rows.len()
    }

    /// Tokens of a row, padding included.
    pub fn positions(&self) -> usize {
        self.positions
    }

    /// `[batch, positions]`: whether the next column holds the next token of the same document, so that the logits there
    /// have something to predict. `false` at the end of each document and for padding.
    pub fn predicts(&self, device: &Device) -> Tensor<2, Bool> {
        let mut predicts = Vec::with_capacity(self.batch() * self.positions);
        for (row, padding) in self.rows.iter().zip(&self.padding) {
            for (document, length) in row.iter().enumerate() {
                let is_text = document != *padding;
                predicts.extend((1..=*length).map(|next| is_text && next < *length));
            }
        }
        Tensor::from_data(TensorData::new(predicts, self.shape()), device)
    }

    /// Refuses tokens of another shape.
    pub(crate) fn check(&self, tokens: &Tensor<2, Int>) -> Result<(), Gemma4Error> {
        let (found, expected) = (tokens.dims(), self.shape());
        match found == expected {
            true => Ok(()),
            false => Err(Gemma4Error::Argument {
                argument: "tokens",
                reason: format!("has the shape {found:?}, but the packing has {expected:?}"),
            }),
        }
    }

    /// The tokens' positions in their documents.
    pub(crate) fn rotary_positions(&self) -> Positions {
        let of_row = |row: &Vec<usize>| row.iter().flat_map(|length| 0..*length).collect();
        Positions::Each(self.rows.iter().map(of_row).collect())
    }

    /// `[batch, positions]`: the number of the document that each token belongs to.
    pub(crate) fn segments(&self, device: &Device) -> Tensor<2, Int> {
        let mut segments = Vec::with_capacity(self.batch() * self.positions);
        for row in &self.rows {
            for (document, length) in row.iter().enumerate() {
                segments.extend(std::iter::repeat_n(document as i32, *length));
            }
        }
        Tensor::from_data(TensorData::new(segments, self.shape()), device)
    }

    fn shape(&self) -> [usize; 2] {
        [self.batch(), self.positions]
    }
}

impl Gemma4Model {
    /// The logits of every position of packed documents, `[batch, positions]` to `[batch, positions, vocabulary]`: each
    /// document's are those that [`forward`](Self::forward) gives it alone. What it gives padding means nothing.
    ///
    /// # Errors
    /// Where the tokens' shape is not the packing's, and as [`forward`](Self::forward).
    pub fn forward_packed(
        &self,
        tokens: Tensor<2, Int>,
        packing: &Packing,
    ) -> Result<Tensor<3>, Gemma4Error> {
        Ok(self.logits(self.hidden_packed(tokens, packing)?))
    }

    /// [`hidden`](Self::hidden) of every position of packed documents: [`forward_packed`](Self::forward_packed) before the
    /// head.
    ///
    /// # Errors
    /// Where the tokens' shape is not the packing's, and as [`forward`](Self::forward).
    pub fn hidden_packed(
        &self,
        tokens: Tensor<2, Int>,
        packing: &Packing,
    ) -> Result<Tensor<3>, Gemma4Error> {
        packing.check(&tokens)?;
        let text = self.packed_text(&self.read_tokens(tokens)?, packing);
        Ok(self.hidden_states(text, None, Logits::All, &mut ()))
    }

    /// Tokens of the packing's shape.
    pub(crate) fn packed_text(&self, tokens: &Tokens, packing: &Packing) -> Text {
        Text {
            segments: Some(packing.segments(&tokens.ids.device())),
            ..self.text(tokens, &packing.rotary_positions())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn packing() -> Packing {
        Packing::new(vec![vec![2, 3], vec![6], vec![], vec![1, 0, 1]], 6).expect("rows that fit")
    }

    #[test]
    fn what_documents_leave_is_padding() {
        let segments = packing().segments(&Device::default()).into_data();
        let expected = [[0, 0, 1, 1, 1, 2], [0; 6], [0; 6], [0, 2, 3, 3, 3, 3]];
        assert_eq!(
            segments.iter::<i64>().collect::<Vec<_>>(),
            expected.concat()
        );
    }

    #[test]
    fn positions_begin_anew_with_each_document() {
        let Positions::Each(rows) = packing().rotary_positions() else {
            panic!("each row has its own");
        };
        let expected = [
            [0, 1, 0, 1, 2, 0],
            [0, 1, 2, 3, 4, 5],
            [0, 1, 2, 3, 4, 5],
            [0, 0, 0, 1, 2, 3],
        ];
        assert_eq!(rows, expected);
    }

    #[test]
    fn ends_and_padding_predict_nothing() {
        let predicts = packing().predicts(&Device::default()).into_data();
        let expected = [
            [true, false, true, true, false, false],
            [true, true, true, true, true, false],
            [false; 6],
            [false; 6],
        ];
        assert_eq!(
            predicts.iter::<bool>().collect::<Vec<_>>(),
            expected.concat()
        );
    }

    #[test]
    fn rows_that_are_too_long_are_named() {
        for rows in [vec![vec![6], vec![4, 3]], vec![vec![], vec![usize::MAX, 2]]] {
            let error = Packing::new(rows, 6).expect_err("a row that is too long");
            assert!(error.to_string().contains("row 1 has"), "{error}");
        }
    }
}
