//! Tests of head sizes and layouts that TMA loads directly, and of others that the operator first copies to a suitable
//! layout.

use super::{check, sized};
use crate::case::Case;
use crate::dense::Layout;
use attention_cube::CausalAlignment;

/// Checks rows that do not start at multiples of 16 bytes, and inputs in every layout of [`Layout::ALL`].
#[test]
fn wgmma_any_head_dim_and_layout_matches_reference() {
    for (head_dim, value_dim) in [
        (9, 9),
        (13, 11),
        (33, 33),
        (90, 100),
        (100, 90),
        (127, 64),
        (192, 127),
    ] {
        check(sized([head_dim, value_dim]));
    }
    for (head_dim, value_dim) in [(250, 250), (300, 260), (383, 381), (511, 507), (512, 511)] {
        check(Case {
            causal: Some(CausalAlignment::BottomRight),
            ..sized([head_dim, value_dim])
        });
    }
    for layout in Layout::ALL {
        for width in [64, 100] {
            check(Case {
                layouts: [layout, layout, layout, Layout::Contiguous],
                ..Case::new([2, 4, 2, 140, 270, width, width])
            });
        }
    }
    for layout in [
        Layout::HeadsLast,
        Layout::Transposed,
        Layout::SharedBatch,
        Layout::SharedHeads,
    ] {
        let contiguous = Layout::Contiguous;
        check(Case {
            layouts: [contiguous, contiguous, contiguous, layout],
            ..Case::new([2, 4, 2, 140, 270, 100, 90])
        });
    }
    for (q_heads, kv_heads, q_len) in [(8, 1, 1), (10, 1, 30)] {
        check(Case {
            causal: Some(CausalAlignment::BottomRight),
            ..Case::new([2, q_heads, kv_heads, q_len, 700, 100, 36])
        });
    }
}
