//! Tests of random combinations of options over int8 keys and values. Every second problem sets the option
//! `kv_lengths_ahead`.

use super::case::Quantized;
use crate::case::Case;
use crate::dense::Layout;
use crate::random::{Sizes, numbered};
use proptest::strategy::ValueTree;
use proptest::test_runner::Config;

/// Returns the random problem `number`, with head sizes rounded up to multiples of 4, because a word holds four codes.
pub fn problem(number: u64) -> Case {
    let drawn = numbered(Sizes::Small, number, Config::default());
    let case = drawn.1.current().case;
    Case {
        head_dim: case.head_dim.next_multiple_of(4),
        value_dim: case.value_dim.next_multiple_of(4),
        layouts: [Layout::Contiguous; 4],
        ..case
    }
}

#[test]
fn int8_random_problem_matches_reference() {
    for number in 0..8 {
        let mut quantized = Quantized::new(problem(number));
        quantized.lengths_ahead = number % 2 == 1;
        quantized.check(&quantized.key, &quantized.value);
    }
}
