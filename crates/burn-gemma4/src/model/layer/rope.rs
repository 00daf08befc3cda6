//! Rotary position embedding (Su et al. 2021, arXiv:2104.09864), half-split, some pairs still.

#[cfg(feature = "cube")]
use super::flat_rows;
use super::{RmsNorm, attention::split_heads};
#[cfg(feature = "cube")]
use crate::kernel;
use crate::{Gemma4Config, LayerType};
use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use std::sync::{Arc, Mutex, PoisonError};

/// Cosines and sines of the positions of one call, for one type of layer.
#[derive(Clone, Debug)]
pub struct Rotation {
    /// `[batch or 1, 1, positions, head_dim / 2]`.
    cos: Tensor<4>,
    sin: Tensor<4>,
}

impl Rotation {
    /// A projection's heads, normalised and rotated: `[batch, positions, heads · head_dim]` to
    /// `[batch, heads, positions, head_dim]`.
    pub fn heads(&self, projected: Tensor<3>, norm: &RmsNorm) -> Tensor<4> {
        let pairs = self.cos.dims()[3];
        #[cfg(feature = "cube")]
        if norm.is_served_with(&projected) {
            let [batch, positions, columns] = projected.dims();
            let tables = kernel::RotationTables {
                cos: flat_rows(self.cos.clone()),
                sin: flat_rows(self.sin.clone()),
            };
            let projected = flat_rows(projected);
            let heads =
                kernel::heads_in_order(projected, norm.weight.val(), &tables, norm.epsilon());
            let shape = [batch, positions, columns / (2 * pairs), 2 * pairs];
            return heads.reshape(shape).swap_dims(1, 2);
        }
        let heads = split_heads(projected, 2 * pairs);
        self.apply(norm.forward(heads).swap_dims(1, 2))
    }

    /// Rotates `[batch, heads, positions, head_dim]`: channel `j` with channel `j + head_dim / 2`.
    fn apply(&self, input: Tensor<4>) -> Tensor<4> {
        let head_dim = input.dims()[3];
        let first = input.clone().narrow(3, 0, head_dim / 2);
        let second = input.narrow(3, head_dim / 2, head_dim / 2);
        let (cos, sin) = (self.cos.clone(), self.sin.clone());
        Tensor::cat(
            vec![
                first.clone() * cos.clone() - second.clone() * sin.clone(),
                second * cos + first * sin,
            ],
            3,
        )
    }

    /// The rotation of the last `count` positions.
    pub fn last(&self, count: usize) -> Self {
        let positions = self.cos.dims()[2];
        let last = |table: &Tensor<4>| table.clone().narrow(2, positions - count, count);
        Self {
            cos: last(&self.cos),
            sin: last(&self.sin),
        }
    }
}

/// Which positions a call computes.
#[derive(Clone, Debug)]
pub enum Positions {
    /// The same for every sequence: `first .. first + count`.
    Range {
        /// The first position.
        first: usize,
        /// How many.
        count: usize,
    },
    /// A list for each sequence, `[batch][count]`.
    Each(Vec<Vec<usize>>),
}

impl Positions {
    /// One more than the largest position.
    pub(crate) fn end(&self) -> usize {
        match self {
            Self::Range { first, count } => first + count,
            Self::Each(rows) => rows
                .iter()
                .flatten()
                .max()
                .map_or(0, |position| position + 1),
        }
    }
}

/// The tables of cosines and sines, made on the processor and kept on every device that asked.
///
/// A GPU's own sine may be wrong in the third digit where the angle is not small: Vulkan promises no more.
#[derive(Clone, Debug)]
pub(crate) struct Rope {
    sliding: Tables,
    global: Tables,
}

impl Rope {
    pub fn new(config: &Gemma4Config) -> Self {
        Self {
            sliding: Tables::new(
                config
                    .sliding_rope
                    .inverse_frequencies(config.sliding_head_dim),
            ),
            global: Tables::new(
                config
                    .global_rope
                    .inverse_frequencies(config.global_head_dim),
            ),
        }
    }

    /// Cosines and sines of at least `positions` positions in layers of `kind`, rounded to `dtype`.
    #[cfg(feature = "cube")]
    pub fn tables(
        &self,
        kind: LayerType,
        positions: usize,
        dtype: DType,
        device: &Device,
    ) -> crate::kernel::RotationTables {
        let table = self.of(kind).reaching(positions, dtype, device);
        crate::kernel::RotationTables {
            cos: table.cos,
            sin: table.sin,
        }
    }

    fn of(&self, kind: LayerType) -> &Tables {
        match kind {
            LayerType::Sliding => &self.sliding,
            LayerType::Full => &self.global,
        }
    }

    /// The rotation of `positions` in layers of `kind`, rounded to `dtype`.
    pub fn rotation(
        &self,
        kind: LayerType,
        positions: &Positions,
        dtype: DType,
        device: &Device,
    ) -> Rotation {
        let device = device.clone().without_autodiff();
        let table = self.of(kind).reaching(positions.end(), dtype, &device);
        match positions {
            Positions::Range { first, count } => {
                let rows =
                    |table: &Tensor<2>| table.clone().narrow(0, *first, *count).unsqueeze::<4>();
                Rotation {
                    cos: rows(&table.cos),
                    sin: rows(&table.sin),
                }
            }
            Positions::Each(sequences) => {
                let batch = sequences.len();
                let count = sequences.first().map_or(0, Vec::len);
                let flat: Vec<i32> = sequences
                    .iter()
                    .flatten()
                    .map(|position| *position as i32)
                    .collect();
                let flat = Tensor::<1, Int>::from_data(
                    TensorData::new(flat, [batch * count]),
                    &table.device,
                );
                let rows = |table: &Tensor<2>| {
                    let [_, pairs] = table.dims();
                    table
                        .clone()
                        .select(0, flat.clone())
                        .reshape([batch, 1, count, pairs])
                };
                Rotation {
                    cos: rows(&table.cos),
                    sin: rows(&table.sin),
                }
            }
        }
    }
}

/// The tables of one type of layer. Copies of the model share them.
#[derive(Clone, Debug)]
struct Tables {
    inverse_frequencies: Arc<[f32]>,
    made: Arc<Mutex<Vec<Table>>>,
}

/// `[positions, head_dim / 2]` each.
#[derive(Clone, Debug)]
struct Table {
    device: Device,
    dtype: DType,
    positions: usize,
    cos: Tensor<2>,
    sin: Tensor<2>,
}

impl Tables {
    fn new(inverse_frequencies: Vec<f32>) -> Self {
        Self {
            inverse_frequencies: inverse_frequencies.into(),
            made: Arc::default(),
        }
    }

    /// A table of at least `positions`. It grows by doubling, so each position is computed about once.
    fn reaching(&self, positions: usize, dtype: DType, device: &Device) -> Table {
        const SMALLEST: usize = 256;
        // Whoever panicked with the lock held left a list of whole tables behind.
        let mut made = self.made.lock().unwrap_or_else(PoisonError::into_inner);
        let index = made
            .iter()
            .position(|table| table.dtype == dtype && table.device == *device);
        if let Some(table) = index.map(|index| &made[index])
            && table.positions >= positions
        {
            return table.clone();
        }
        if let Some(index) = index {
            made.swap_remove(index);
        }
        let table = self.make(positions.next_power_of_two().max(SMALLEST), dtype, device);
        made.push(table.clone());
        table
    }

    fn make(&self, positions: usize, dtype: DType, device: &Device) -> Table {
        let pairs = self.inverse_frequencies.len();
        let (mut cos, mut sin) = (
            Vec::with_capacity(positions * pairs),
            Vec::with_capacity(positions * pairs),
        );
        for position in 0..positions {
            for frequency in self.inverse_frequencies.iter() {
                // The angle is rounded to f32, as it was in training.
                let (sine, cosine) = (position as f32 * frequency).sin_cos();
                cos.push(cosine);
                sin.push(sine);
            }
        }
        let upload = |values: Vec<f32>| {
            let data = TensorData::new(values, [positions, pairs]).convert_dtype(dtype);
            Tensor::<2>::from_data(data, (device, dtype))
        };
        Table {
            device: device.clone(),
            dtype,
            positions,
            cos: upload(cos),
            sin: upload(sin),
        }
    }
}
