//! Documents packed into rows of one length.

use std::collections::BTreeSet;

/// A row of packed documents.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Row {
    /// The documents' tokens, one after the other; what is left of the row is padding.
    pub tokens: Vec<u32>,
    /// The token that comes next in the same document, or −1 where the loss does not count.
    pub targets: Vec<i32>,
    /// The lengths of the documents.
    pub documents: Vec<usize>,
}

/// A target that the loss does not count.
const IGNORED: i32 = -1;

/// Tokens of which some are to be learned.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Example {
    /// The tokens.
    pub tokens: Vec<u32>,
    /// Whether each is to be learned, as opposed to being read.
    pub learned: Vec<bool>,
}

impl Example {
    /// Its first `positions` tokens, if there is something to learn among them.
    pub fn within(mut self, positions: usize) -> Option<Self> {
        self.tokens.truncate(positions);
        self.learned.truncate(positions);
        let learns = self.learned.iter().skip(1).any(|learned| *learned);
        learns.then_some(self)
    }
}

/// Rows of `positions` tokens, all full but the last, for which documents are cut where a row ends. Every token but the
/// first of a document is a target once.
pub fn cut(documents: impl IntoIterator<Item = Vec<u32>>, positions: usize) -> Vec<Row> {
    let mut rows = Vec::new();
    let mut row = Row::empty();
    for document in documents {
        let mut rest = &document[..];
        // The last token of a document has no next one, so it is no use at the start of a row.
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

/// Rows of at most `positions` tokens of whole examples, the longest first, each where it leaves the least room; and how many
/// examples had to be cut to fit into a row. Of those that have nothing to learn, nothing is left.
pub fn whole(examples: Vec<Example>, positions: usize) -> (Vec<Row>, usize) {
    let longer = |example: &Example| example.tokens.len() > positions;
    let too_long = examples.iter().filter(|example| longer(example)).count();
    let fitting = examples
        .into_iter()
        .filter_map(|example| example.within(positions));
    let mut examples: Vec<Example> = fitting.collect();
    // Stable, so that equal examples stay in the order of the file.
    examples.sort_by_key(|example| std::cmp::Reverse(example.tokens.len()));
    let lengths: Vec<usize> = examples
        .iter()
        .map(|example| example.tokens.len())
        .collect();
    let row = |places: Vec<usize>| Row::of(places.into_iter().map(|place| &examples[place]));
    let rows = places(&lengths, positions).into_iter().map(row);
    (rows.collect(), too_long)
}

/// Which of examples of these lengths go into the same row of at most `positions` tokens: one after the other where it leaves the
/// least room.
pub fn places(lengths: &[usize], positions: usize) -> Vec<Vec<usize>> {
    let mut rows: Vec<Vec<usize>> = Vec::new();
    // Room and number.
    let mut open = BTreeSet::new();
    for (place, length) in lengths.iter().enumerate() {
        let fitting = open.range((*length, 0)..).next().copied();
        let (room, row) = fitting.unwrap_or((positions, rows.len()));
        open.remove(&(room, row));
        if row == rows.len() {
            rows.push(Vec::new());
        }
        rows[row].push(place);
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
        }
    }

    /// Of examples, one after the other.
    pub fn of<'a>(examples: impl IntoIterator<Item = &'a Example>) -> Self {
        let mut row = Self::empty();
        for example in examples {
            row.push(example);
        }
        row
    }

    fn push(&mut self, example: &Example) {
        let next = example.tokens.iter().zip(&example.learned).skip(1);
        let next = next.map(|(token, learned)| match learned {
            true => *token as i32,
            false => IGNORED,
        });
        self.targets.extend(next.chain([IGNORED]));
        self.documents.push(example.tokens.len());
        self.tokens.extend(&example.tokens);
    }

    /// How many targets count.
    pub fn counted(&self) -> usize {
        let counted = self.targets.iter().filter(|target| **target >= 0);
        counted.count()
    }

    /// The tokens, filled up to `positions` with `padding`.
    pub fn padded_tokens(&self, positions: usize, padding: u32) -> impl Iterator<Item = i32> {
        let fill = std::iter::repeat_n(padding, positions - self.tokens.len());
        self.tokens
            .iter()
            .copied()
            .chain(fill)
            .map(|token| token as i32)
    }

    /// The targets, filled up to `positions` with ones that do not count.
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
        }
    }

    #[test]
    fn documents_are_cut_and_every_token_is_a_target() {
        let rows = cut([vec![1, 2, 3], vec![4, 5, 6, 7, 8, 9], vec![10, 11]], 4);
        let expected = [
            row(&[1, 2, 3, 4], &[2, 3, -1, 5], &[3, 1]),
            row(&[5, 6, 7, 8], &[6, 7, 8, 9], &[4]),
            row(&[10, 11], &[11, -1], &[2]),
        ];
        assert_eq!(rows, expected);
    }

    #[test]
    fn examples_stay_whole_and_prompts_do_not_count() {
        let example = |tokens: &[u32], prompt: usize| Example {
            tokens: tokens.into(),
            learned: (0..tokens.len()).map(|index| index >= prompt).collect(),
        };
        let examples = vec![
            example(&[1, 2], 1),
            example(&[3, 4, 5, 6, 7], 2),
            example(&[8, 9, 10], 2),
            example(&[11, 12], 2),
        ];
        let (rows, too_long) = whole(examples, 4);
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
