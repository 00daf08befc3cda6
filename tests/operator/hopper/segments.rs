//! Tests of packed documents (segments): document boundaries inside and between blocks, and more documents than a single tile
//! covers.

use super::{check, each_width};
use crate::case::Case;
use attention_cube::CausalAlignment;

#[test]
fn wgmma_segments_match_reference() {
    each_width(|case| Case {
        causal: Some(CausalAlignment::BottomRight),
        segments: Some((ids(140, 80), ids(270, 80))),
        ..case
    });
}

/// Returns the segment ids of `length` tokens in consecutive documents of `size` tokens.
fn ids(length: usize, size: i64) -> Vec<i64> {
    (0..length as i64).map(|i| i / size).collect()
}

/// Checks documents that begin and end inside blocks, with and without a mask.
#[test]
fn wgmma_many_segments_match_reference() {
    for causal in [None, Some(CausalAlignment::BottomRight)] {
        for mask in [None, Some([false, false, true, true])] {
            each_width(|case| Case {
                causal,
                mask,
                segments: Some((ids(500, 37), ids(630, 41))),
                ..Case::new([1, 2, 1, 500, 630, case.head_dim, case.value_dim])
            });
        }
    }
}

/// Checks the dynamic scheduler, with which CTAs fetch their tiles one by one. The plan selects this scheduler here, because
/// there are more tiles than multiprocessors and the documents have very different lengths.
#[test]
fn wgmma_uneven_segments_with_dynamic_scheduler_match_reference() {
    let uneven = |length: usize| {
        let ends = [1, 2, 90, 91, 300, 420];
        (0..2 * length).map(move |i| ends.iter().filter(|end| i % length >= **end).count() as i64)
    };
    let causal = Some(CausalAlignment::BottomRight);
    for (length, width, causal) in [
        (450, 64, causal),
        (450, 128, None),
        (450, 192, causal),
        (450, 256, causal),
        (330, 512, None),
    ] {
        let ids: Vec<i64> = uneven(length).collect();
        check(Case {
            causal,
            segments: Some((ids.clone(), ids)),
            ..Case::new([2, 24, 8, length, length, width, width])
        });
    }
}

/// Checks documents that consist of complete tiles. Checks also a decode call over packed documents, whose keys are
/// split over CTAs.
#[test]
fn wgmma_segments_of_whole_tiles_match_reference() {
    for width in [64, 128, 256, 512] {
        check(Case {
            causal: Some(CausalAlignment::BottomRight),
            segments: Some((ids(2048, 256), ids(2048, 256))),
            ..Case::new([1, 2, 1, 2048, 2048, width, width])
        });
        check(Case {
            segments: Some((vec![3; 2], ids(3000, 700))),
            ..Case::new([1, 8, 1, 2, 3000, width, width])
        });
    }
}
