//! Packs documents into rows of one length.

use crate::data::media::ExampleMedium;
use std::collections::BTreeSet;

/// A row of packed documents.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Row {
    /// The tokens of the documents, one document after the other. In a batch, padding fills the rest of the row.
    pub tokens: Vec<u32>,
    /// The id of the next token in the same document, or −1 at positions that the loss does not count.
    pub targets: Vec<i32>,
    /// The number of tokens of each document in the row.
    pub documents: Vec<usize>,
    /// The images and audio clips, in the places of their placeholders in the row.
    pub media: Vec<ExampleMedium>,
}

/// The target value at positions that the loss does not count.
const IGNORED: i32 = -1;

/// The tokens of an example, with a flag for each token. The flag is true for tokens to train on.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Example {
    /// The token ids.
    pub tokens: Vec<u32>,
    /// True for each token to train on, and false for each token of context.
    pub learned: Vec<bool>,
    /// The images and audio clips, in the order of their placeholders. Their placeholders are never trained on.
    pub media: Vec<ExampleMedium>,
}

impl Example {
    /// Cuts the example to its first `positions` tokens, or before the first image or audio clip that does not fit. Returns
    /// `None` if none of these tokens can be trained on. No token precedes the first token, so it cannot be trained on.
    pub fn within(mut self, positions: usize) -> Option<Self> {
        // The end token of a medium must fit too. The token before the placeholders is the begin token.
        let too_long = self
            .media
            .iter()
            .position(|one| one.tokens.end >= positions);
        let positions = match too_long {
            Some(index) => positions.min(self.media[index].tokens.start - 1),
            None => positions,
        };
        self.media.truncate(too_long.unwrap_or(self.media.len()));
        self.tokens.truncate(positions);
        self.learned.truncate(positions);
        let learns = self.learned.iter().skip(1).any(|learned| *learned);
        learns.then_some(self)
    }
}

/// Cuts documents into rows of `positions` tokens. All rows except the last are full. If a document does not fit into a
/// row, its remaining tokens continue in the next row. Every token except the first of a document is a target exactly
/// once.
pub fn cut(documents: impl IntoIterator<Item = Vec<u32>>, positions: usize) -> Vec<Row> {
    let mut rows = Vec::new();
    let mut row = Row::empty();
    for document in documents {
        let mut rest = &document[..];
        // A row never begins with the last token of a document, because this token has no next token that could be its target.
        while rest.len() > 1 {
            let length = rest.len().min(positions - row.tokens.len());
            let next = rest[1..].iter().map(|token| *token as i32);
            row.targets.extend(next.chain([IGNORED]).take(length));
            row.tokens.extend(&rest[..length]);
            row.documents.push(length);
            rest = &rest[length..];
            if row.tokens.len() == positions {
                rows.push(std::mem::replace(&mut row, Row::empty()));
            }
        }
    }
    rows.extend((!row.tokens.is_empty()).then_some(row));
    rows
}

/// Packs examples into rows of at most `positions` tokens, by best fit in descending order of length. An example is
/// never divided among rows, so an example that is longer than a row is cut to `positions` tokens. Examples without a
/// token to train on are dropped. Returns the rows, and the number of examples that were longer than a row.
pub fn pack(examples: Vec<Example>, positions: usize) -> (Vec<Row>, usize) {
    let longer = |example: &Example| example.tokens.len() > positions;
    let too_long = examples.iter().filter(|example| longer(example)).count();
    let fitting = examples
        .into_iter()
        .filter_map(|example| example.within(positions));
    let mut examples: Vec<Example> = fitting.collect();
    // The sort is stable, so examples of equal length stay in the order of the file.
    examples.sort_by_key(|example| std::cmp::Reverse(example.tokens.len()));
    let lengths: Vec<usize> = examples
        .iter()
        .map(|example| example.tokens.len())
        .collect();
    let row = |indices: Vec<usize>| Row::of(indices.into_iter().map(|index| &examples[index]));
    let rows = bin_pack(&lengths, positions).into_iter().map(row);
    (rows.collect(), too_long)
}

/// Distributes examples with the given lengths over rows of at most `positions` tokens, by best fit. Returns the indices of
/// the examples in each row.
pub fn bin_pack(lengths: &[usize], positions: usize) -> Vec<Vec<usize>> {
    let mut rows: Vec<Vec<usize>> = Vec::new();
    // Each entry is a row: the number of tokens that still fit into the row, and the row's index.
    let mut open = BTreeSet::new();
    for (index, length) in lengths.iter().enumerate() {
        let fitting = open.range((*length, 0)..).next().copied();
        let (room, row) = fitting.unwrap_or((positions, rows.len()));
        open.remove(&(room, row));
        if row == rows.len() {
            rows.push(Vec::new());
        }
        rows[row].push(index);
        open.insert((room.saturating_sub(*length), row));
    }
    rows
}

impl Row {
    fn empty() -> Self {
        Self {
            tokens: Vec::new(),
            targets: Vec::new(),
            documents: Vec::new(),
            media: Vec::new(),
        }
    }

    /// Returns a row with these examples, one after the other.
    pub fn of<'a>(examples: impl IntoIterator<Item = &'a Example>) -> Self {
        let mut row = Self::empty();
        for example in examples {
            row.push(example);
        }
        row
    }

    fn push(&mut self, example: &Example) {
        let start = self.tokens.len();
        let media = example.media.iter().map(|one| ExampleMedium {
            tokens: start + one.tokens.start..start + one.tokens.end,
            medium: one.medium.clone(),
        });
        self.media.extend(media);
        let next = example.tokens.iter().zip(&example.learned).skip(1);
        let next = next.map(|(token, learned)| match learned {
            true => *token as i32,
            false => IGNORED,
        });
        self.targets.extend(next.chain([IGNORED]));
        self.documents.push(example.tokens.len());
        self.tokens.extend(&example.tokens);
    }

    /// Returns the number of targets that the loss counts.
    pub fn counted(&self) -> usize {
        let counted = self.targets.iter().filter(|target| **target >= 0);
        counted.count()
    }

    /// Returns the tokens, padded to `positions` with the token `padding`.
    pub fn padded_tokens(&self, positions: usize, padding: u32) -> impl Iterator<Item = i32> {
        let fill = std::iter::repeat_n(padding, positions - self.tokens.len());
        self.tokens
            .iter()
            .copied()
            .chain(fill)
            .map(|token| token as i32)
    }

    /// Returns the targets, padded to `positions` with targets that the loss does not count.
    pub fn padded_targets(&self, positions: usize) -> impl Iterator<Item = i32> {
        let fill = std::iter::repeat_n(IGNORED, positions - self.targets.len());
        self.targets.iter().copied().chain(fill)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(tokens: &[u32], targets: &[i32], documents: &[usize]) -> Row {
        Row {
            tokens: tokens.into(),
            targets: targets.into(),
            documents: documents.into(),
            media: Vec::new(),
        }
    }

    #[test]
    fn cut_documents_have_every_token_as_target() {
        let rows = cut([vec![1, 2, 3], vec![4, 5, 6, 7, 8, 9], vec![10, 11]], 4);
        let expected = [
            row(&[1, 2, 3, 4], &[2, 3, -1, 5], &[3, 1]),
            row(&[5, 6, 7, 8], &[6, 7, 8, 9], &[4]),
            row(&[10, 11], &[11, -1], &[2]),
        ];
        assert_eq!(rows, expected);
    }

    #[test]
    fn packed_examples_stay_whole_and_prompts_do_not_count() {
        let example = |tokens: &[u32], prompt: usize| Example {
            tokens: tokens.into(),
            learned: (0..tokens.len()).map(|index| index >= prompt).collect(),
            media: Vec::new(),
        };
        let examples = vec![
            example(&[1, 2], 1),
            example(&[3, 4, 5, 6, 7], 2),
            example(&[8, 9, 10], 2),
            example(&[11, 12], 2),
        ];
        let (rows, too_long) = pack(examples, 4);
        let expected = [
            row(&[3, 4, 5, 6], &[-1, 5, 6, -1], &[4]),
            row(&[8, 9, 10], &[-1, 10, -1], &[3]),
            row(&[1, 2], &[2, -1], &[2]),
        ];
        assert_eq!(rows, expected);
        assert_eq!(too_long, 1);
        let padded: Vec<i32> = expected[2].padded_tokens(4, 0).collect();
        assert_eq!(padded, [1, 2, 0, 0]);
        let padded: Vec<i32> = expected[2].padded_targets(4).collect();
        assert_eq!(padded, [2, -1, -1, -1]);
    }
}
