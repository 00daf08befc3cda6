//! What queries see in a ring whose columns are in any order, told from positions on the device.

use super::key_values::Visible;
use burn::tensor::{DType, Device, Int, Tensor, TensorData};

/// A ring of a sliding layer.
#[derive(Clone, Debug)]
pub(crate) struct Ring {
    /// `[slots]`: their numbers. Uploaded once: a captured graph must not read the host's memory.
    numbers: Tensor<1, Int>,
    /// Keys that a query sees, its own included.
    window: usize,
}

impl Ring {
    pub fn new(slots: usize, window: usize, device: &Device) -> Self {
        let numbers: Vec<i32> = (0..slots as i32).collect();
        let numbers = TensorData::new(numbers, [slots]);
        Self {
            numbers: Tensor::from_data(numbers, (device, DType::I32)),
            window,
        }
    }

    /// Whether it has no more slots than a query sees keys, so that the last column's query sees all of it.
    pub fn is_exact(&self) -> bool {
        self.numbers.dims()[0] == self.window
    }

    /// What queries at `positions`, `[sequences, queries]`, see of the columns up to `last`, `[sequences, 1]`, where no later one is of
    /// their text: the newest column of each slot, if there is one and it is in the window. One sequence stands for all that are at
    /// the same positions.
    pub fn visible(&self, positions: Tensor<2, Int>, last: Tensor<2, Int>) -> Visible {
        let slots = self.numbers.dims()[0] as i64;
        let numbers = self.numbers.clone().unsqueeze::<2>();
        // The last column's slot holds the newest column, the one before it the second newest.
        let behind = (last.clone() + slots - numbers).remainder_scalar(slots);
        let columns = (last - behind).unsqueeze_dim::<3>(1);
        let exists = columns.clone().greater_equal_elem(0);
        let before = positions.unsqueeze_dim::<3>(2) - columns;
        let in_window = before
            .clone()
            .greater_equal_elem(0)
            .bool_and(before.lower_elem(self.window as i64));
        Visible {
            mask: Some(in_window.bool_and(exists).unsqueeze_dim::<4>(1)),
            ..Visible::default()
        }
    }
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use super::*;

    /// Every slot's column by counting, and whether each query sees it.
    #[test]
    fn what_is_seen_is_what_was_written_last() {
        let device = Device::flex();
        for (slots, window) in [(5, 5), (8, 5), (6, 1)] {
            let ring = Ring::new(slots, window, &device);
            assert_eq!(ring.is_exact(), slots == window);
            for last in 0..3 * slots {
                let mut columns = vec![None; slots];
                for column in 0..=last {
                    columns[column % slots] = Some(column);
                }
                let queries = last.saturating_sub(slots - window)..last + 2;
                let positions: Vec<i32> = queries.clone().map(|position| position as i32).collect();
                let upload = |values: Vec<i32>| {
                    let count = values.len();
                    Tensor::<2, Int>::from_data(
                        TensorData::new(values, [1, count]),
                        (&device, DType::I32),
                    )
                };
                let visible = ring.visible(upload(positions), upload(vec![last as i32]));
                let mask = visible.mask.expect("a mask");
                assert_eq!(mask.dims(), [1, 1, queries.len(), slots]);
                let expected: Vec<bool> = queries
                    .flat_map(|query| {
                        columns.iter().map(move |column| {
                            column.is_some_and(|column| column <= query && column + window > query)
                        })
                    })
                    .collect();
                let found: Vec<bool> = mask.into_data().iter::<bool>().collect();
                assert_eq!(found, expected, "{slots} {window} {last}");
            }
        }
    }
}
