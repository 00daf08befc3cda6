//! The division of texts into passes of the model.

use std::ops::Range;

/// The largest number of tokens of several texts in one pass. It bounds the memory: the per-layer embeddings of the
/// published model are 400 MB in f32 for 8,192 tokens.
pub(super) const PASS_TOKENS: usize = 8192;

/// The largest number of texts in one pass. It bounds the operations that run for each text alone, such as its mean.
pub(super) const PASS_TEXTS: usize = 512;

/// Divides texts into consecutive passes of up to [`PASS_TOKENS`] tokens and [`PASS_TEXTS`] texts. A longer text is a
/// pass of its own.
pub(super) fn passes(texts: &[Vec<u32>]) -> Vec<Range<usize>> {
    let mut passes: Vec<Range<usize>> = Vec::new();
    let mut tokens = 0;
    for (index, text) in texts.iter().enumerate() {
        tokens += text.len();
        match passes.last_mut() {
            Some(pass) if tokens <= PASS_TOKENS && pass.len() < PASS_TEXTS => pass.end = index + 1,
            _ => {
                passes.push(index..index + 1);
                tokens = text.len();
            }
        }
    }
    passes
}

/// Returns the row of each text. `run` computes the rows of the texts of one pass.
///
/// An activation that is not finite can reach the other texts of a pass: a hidden key has the probability 0, and 0 · NaN
/// is NaN. The texts whose rows are not finite run again in two halves, down to single texts. A text that is at fault
/// thus costs a number of passes that grows with the logarithm of the number of texts.
pub(super) fn rows_of<'a, E>(
    texts: &[&'a [u32]],
    run: &mut impl FnMut(&[&'a [u32]]) -> Result<Vec<Vec<f32>>, E>,
) -> Result<Vec<Vec<f32>>, E> {
    let mut rows = run(texts)?;
    let again: Vec<usize> = (0..texts.len())
        .filter(|index| texts.len() > 1 && !is_finite(&rows[*index]))
        .collect();
    for half in again.chunks(again.len().div_ceil(2).max(1)) {
        let texts: Vec<&[u32]> = half.iter().map(|index| texts[*index]).collect();
        for (index, row) in half.iter().zip(rows_of(&texts, run)?) {
            rows[*index] = row;
        }
    }
    Ok(rows)
}

/// True if all elements of a row are numbers.
pub(super) fn is_finite(row: &[f32]) -> bool {
    row.iter().all(|element| element.is_finite())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn passes_hold_texts_up_to_the_limit() {
        let text = |tokens: usize| vec![0; tokens];
        let all = [PASS_TOKENS - 1, 1, 1, PASS_TOKENS + 5, 2, 3].map(text);
        assert_eq!(passes(&all), [0..2, 2..3, 3..4, 4..6]);
        assert!(passes(&[]).is_empty());
        let short = vec![vec![0]; 2 * PASS_TEXTS + 1];
        let ends = [PASS_TEXTS, 2 * PASS_TEXTS, 2 * PASS_TEXTS + 1];
        let found = passes(&short).into_iter().map(|pass| pass.end);
        assert_eq!(found.collect::<Vec<_>>(), ends);
    }

    #[test]
    fn rows_of_a_pass_with_nan_run_again_in_halves() {
        const POISON: u32 = 9;
        let tokens: Vec<[u32; 2]> = (0..64).map(|index| [index + 100, 0]).collect();
        let mut tokens: Vec<&[u32]> = tokens.iter().map(<[u32; 2]>::as_slice).collect();
        tokens[37] = &[POISON];
        let mut runs = Vec::new();
        // NaN reaches all texts of a pass.
        let rows = rows_of(&tokens, &mut |texts| {
            runs.push(texts.len());
            let is_poisoned = texts.iter().any(|text| text[0] == POISON);
            let row = |text: &&[u32]| {
                vec![if is_poisoned {
                    f32::NAN
                } else {
                    text[0] as f32
                }]
            };
            Ok::<_, ()>(texts.iter().map(row).collect())
        });
        for (index, (row, text)) in rows.expect("no run fails").iter().zip(&tokens).enumerate() {
            match index {
                37 => assert!(row[0].is_nan()),
                _ => assert_eq!(row, &[text[0] as f32]),
            }
        }
        assert_eq!(runs.len(), 1 + 2 * 6, "{runs:?}");
    }
}
