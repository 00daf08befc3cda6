//! Packed sequences: training rows of equal length that hold several documents each.

use crate::error::Gemma4Error;
use crate::model::forward::Text;
use crate::model::row_rules::RowRules;
use crate::model::tokens::Tokens;
use crate::model::{Gemma4Model, Logits};
use crate::op::rope::Positions;
use crate::train::media::PlacedMedia;
use burn::tensor::{Bool, Device, Int, Tensor, TensorData};
use std::ops::Range;

/// The document lengths of a batch of packed sequences. Each row holds its documents one after another.
///
/// [`Gemma4Model::forward_packed`](crate::model::Gemma4Model::forward_packed) computes the logits of each document as
/// if the document were alone: positions begin at 0, and tokens attend to no other document.
///
/// ```
/// use burn_gemma4::Packing;
///
/// // Two rows of six tokens. The tokens after a row's documents are padding.
/// let packing = Packing::new(vec![vec![2, 4], vec![5]], 6)?;
/// assert_eq!([packing.batch(), packing.positions()], [2, 6]);
/// # Ok::<(), burn_gemma4::Gemma4Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Packing {
    /// The lengths of the documents in each row. If a row ends with padding, the last length is the length of the
    /// padding.
    rows: Vec<Vec<usize>>,
    /// The number of documents in each row. If a row has padding, this number is also the index of the padding's length
    /// in the row's list of lengths.
    padding: Vec<usize>,
    positions: usize,
}

impl Packing {
    /// Creates a packing with rows of `positions` tokens. Row `row` contains documents with the lengths `rows[row]`, in
    /// this order, then padding.
    ///
    /// # Errors
    /// Returns [`Gemma4Error::Argument`] if the documents of a row have more tokens than the row.
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

    /// Returns the number of rows.
    pub fn batch(&self) -> usize {
        self.rows.len()
    }

    /// Returns the number of tokens in a row, including padding.
    pub fn positions(&self) -> usize {
        self.positions
    }

    /// Returns a mask `[batch, positions]`, which is true where the next token belongs to the same document. The mask
    /// is false at the last token of each document and in the padding.
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

    /// Returns an error if the shape of the tokens differs from the shape of the packing.
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

    /// Returns the position of each token within its document.
    pub(crate) fn rotary_positions(&self) -> Positions {
        let of_row = |row: &Vec<usize>| row.iter().flat_map(|length| 0..*length).collect();
        Positions::Each(self.rows.iter().map(of_row).collect())
    }

    /// Returns the positions of each document in a row. The last of them may be padding.
    pub(crate) fn documents(&self, row: usize) -> Vec<Range<usize>> {
        let mut start = 0;
        let lengths = self.rows[row].iter();
        lengths
            .map(|length| {
                let document = start..start + length;
                start = document.end;
                document
            })
            .collect()
    }

    /// Returns the positions of the document that contains `position` of a row.
    pub(crate) fn document(&self, row: usize, position: usize) -> Range<usize> {
        let mut documents = self.documents(row).into_iter();
        let document = documents.find(|document| document.contains(&position));
        document.expect("documents and padding fill the row")
    }

    /// Returns the index of each token's document within its row, `[batch, positions]`.
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
    /// Computes the logits of every position of packed documents.
    ///
    /// Each document has the logits that [`forward`](Self::forward) returns for the document alone. The logits of the
    /// padding are meaningless.
    ///
    /// # Shapes
    /// - `tokens`: `[batch, positions]`
    /// - logits: `[batch, positions, vocabulary]`
    ///
    /// # Errors
    /// Returns an error if the shape of the tokens differs from the shape of the packing. Passes on the errors of
    /// [`forward`](Self::forward).
    pub fn forward_packed(
        &self,
        tokens: Tensor<2, Int>,
        packing: &Packing,
    ) -> Result<Tensor<3>, Gemma4Error> {
        Ok(self.logits(self.hidden_packed(tokens, packing)?))
    }

    /// Computes the [`hidden`](Self::hidden) states at every position of packed documents. These states are the input
    /// of the head in [`forward_packed`](Self::forward_packed).
    ///
    /// # Shapes
    /// - `tokens`: `[batch, positions]`
    /// - states: `[batch, positions, hidden]`
    ///
    /// # Errors
    /// Returns an error if the shape of the tokens differs from the shape of the packing. Passes on the errors of
    /// [`forward`](Self::forward).
    pub fn hidden_packed(
        &self,
        tokens: Tensor<2, Int>,
        packing: &Packing,
    ) -> Result<Tensor<3>, Gemma4Error> {
        self.hidden_of_rows(tokens, packing, None)
    }

    /// Computes the states of [`hidden_packed`](Self::hidden_packed), with the soft tokens of images and audio clips in
    /// the place of tokens. The tokens in these places can be any tokens of the vocabulary.
    ///
    /// # Shapes
    /// - `tokens`: `[batch, positions]`
    /// - states: `[batch, positions, hidden]`
    ///
    /// # Errors
    /// Returns an error if the shape of the tokens differs from the shape of the packing or of `media`, or if a document
    /// ends within an image or a clip. Passes on the errors of [`forward`](Self::forward).
    pub fn hidden_packed_with_media(
        &self,
        tokens: Tensor<2, Int>,
        packing: &Packing,
        media: &PlacedMedia,
    ) -> Result<Tensor<3>, Gemma4Error> {
        self.hidden_of_rows(tokens, packing, Some(media))
    }

    fn hidden_of_rows(
        &self,
        tokens: Tensor<2, Int>,
        packing: &Packing,
        media: Option<&PlacedMedia>,
    ) -> Result<Tensor<3>, Gemma4Error> {
        packing.check(&tokens)?;
        if let Some(media) = media {
            media.check(tokens.dims(), Some(packing))?;
        }
        let text = self.training_text(&self.read_tokens(tokens)?, Some(packing), media);
        Ok(self.hidden_states(text, None, Logits::All, &mut ()))
    }

    /// Creates the model input for packed documents. `tokens` must have the packing's shape.
    pub(crate) fn packed_text(&self, tokens: &Tokens, packing: &Packing) -> Text {
        Text {
            rules: RowRules {
                segments: Some(packing.segments(&tokens.ids.device())),
                sliding: None,
            },
            ..self.text(tokens, &packing.rotary_positions())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn packing() -> Packing {
        Packing::new(vec![vec![2, 3], vec![6], vec![], vec![1, 0, 1]], 6)
            .expect("the documents fit into their rows")
    }

    #[test]
    fn segments_after_documents_are_padding() {
        let segments = packing().segments(&Device::default()).into_data();
        let expected = [[0, 0, 1, 1, 1, 2], [0; 6], [0; 6], [0, 2, 3, 3, 3, 3]];
        assert_eq!(
            segments.iter::<i64>().collect::<Vec<_>>(),
            expected.concat()
        );
    }

    #[test]
    fn rotary_positions_restart_at_each_document() {
        let Positions::Each(rows) = packing().rotary_positions() else {
            panic!("packed rows have positions of their own");
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
    fn predicts_at_ends_and_padding_is_false() {
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
    fn new_with_too_long_row_fails_with_row_index() {
        for rows in [vec![vec![6], vec![4, 3]], vec![vec![], vec![usize::MAX, 2]]] {
            let error = Packing::new(rows, 6).expect_err("row 1 is too long");
            assert!(error.to_string().contains("row 1 has"), "{error}");
        }
    }
}
