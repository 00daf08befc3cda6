//! Random combinations of options over keys and values in int8, with lengths that are there ahead of the launch.

use super::case::Quantized;
use crate::case::Case;
use crate::dense::Layout;
use crate::random::{Sizes, numbered};
use proptest::strategy::ValueTree;
use proptest::test_runner::Config;

/// The problem of this number, with widths that words hold.
fn problem(number: u64) -> Case {
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
fn any_combination_over_int8_is_right() {
    for number in 0..8 {
        let mut quantized = Quantized::new(problem(number));
        quantized.lengths_ahead = number % 2 == 1;
        quantized.check(&quantized.key, &quantized.value);
    }
}
