//! Compares the mask of the ring buffer with a reference, which records the position of the token in every slot.

use super::*;
use burn::tensor::{DType, Device, TensorData};

/// Checks the mask of two sequences. `lasts` holds the position of the newest key of each sequence. The last query is
/// at the position of the newest key if `last_is_written`, and otherwise at the next position.
fn check(slots: usize, window: usize, lasts: [usize; 2], last_is_written: bool) {
    let device = Device::default();
    let queries = 1 + slots - window;
    let (mut positions, mut expected) = (Vec::new(), Vec::new());
    for last in lasts {
        let mut columns = vec![None; slots];
        for column in 0..=last {
            columns[column % slots] = Some(column);
        }
        let end = last + 1 + usize::from(!last_is_written);
        for query in end - queries..end {
            positions.push(query as i32);
            expected.extend(columns.iter().map(|column| {
                column.is_some_and(|column| column <= query && column + window > query)
            }));
        }
    }
    // Append a position that belongs to no query, which the kernel must ignore.
    positions.push(i32::MAX);
    let count = positions.len();
    let positions = TensorData::new(positions, [count]);
    let options = RingMask {
        sequences: lasts.len(),
        queries,
        slots,
        window,
        last_is_written,
    };
    let mask = ring_mask(Tensor::from_data(positions, (&device, DType::I32)), options);
    assert_eq!(mask.dims(), [lasts.len(), 1, queries, slots]);
    let found: Vec<bool> = mask.into_data().iter::<bool>().collect();
    assert_eq!(found, expected, "{options:?} {lasts:?}");
}

#[test]
fn ring_mask_shows_newest_columns_in_window() {
    for (slots, window) in [(5, 5), (8, 5), (6, 1), (600, 512)] {
        let fewest = slots - window;
        for last in [fewest, window, slots, slots + 1, 3 * slots - 1] {
            if last < fewest {
                continue;
            }
            for last_is_written in [true, false] {
                check(slots, window, [last, last + 2], last_is_written);
            }
        }
    }
}
