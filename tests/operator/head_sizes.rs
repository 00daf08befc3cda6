//! Tests of head sizes up to 1024: powers of two, odd sizes, sizes between two tile widths, and values wider or narrower than
//! keys. All cases are causal and run forward and backward. No length is a multiple of a tile's size.

use crate::case::Case;
use attention_cube::CausalAlignment;

fn check(dims: &[(usize, usize)]) {
    for &(head_dim, value_dim) in dims {
        Case {
            causal: Some(CausalAlignment::BottomRight),
            ..Case::new([1, 2, 1, 37, 45, head_dim, value_dim])
        }
        .check();
    }
}

#[test]
fn head_dim_up_to_33_matches_reference() {
    check(&[(1, 1), (7, 7), (8, 8), (16, 16), (33, 33)]);
}

#[test]
fn head_dim_64_to_192_matches_reference() {
    check(&[(64, 64), (80, 80), (96, 96), (128, 128), (192, 192)]);
}

#[test]
fn head_dim_256_to_512_matches_reference() {
    check(&[(256, 256), (320, 320), (512, 512)]);
}

#[test]
fn head_dim_up_to_1024_matches_reference() {
    check(&[(1000, 1000), (1024, 1024)]);
}

#[test]
fn value_dim_unlike_head_dim_matches_reference() {
    check(&[(576, 512), (192, 128), (1, 64), (40, 5), (30, 128)]);
}

/// Checks the decode kernel, which runs for a single query, at every head size.
#[test]
fn decode_every_head_dim_matches_reference() {
    for (head_dim, value_dim) in [
        (1, 1),
        (33, 33),
        (128, 128),
        (256, 256),
        (576, 512),
        (1024, 1024),
    ] {
        Case {
            causal: Some(CausalAlignment::BottomRight),
            ..Case::new([1, 4, 2, 1, 150, head_dim, value_dim])
        }
        .check();
    }
}
