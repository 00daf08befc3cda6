//! The tables of cosines and sines for the rotary embedding.

#[cfg(feature = "cube")]
use super::RotationTables;
use super::{Positions, Rotation};
use crate::config::{Gemma4Config, LayerType};
#[cfg(feature = "cube")]
use burn::backend::fusion::custom::StreamId;
use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use std::sync::{Arc, Mutex, PoisonError};

/// The tables of cosines and sines, computed on the CPU and cached for every device.
///
/// The GPU does not compute the tables, because a GPU's sine may be wrong in the third digit for large angles.
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

    /// Returns the cosines and sines of at least `positions` positions for layers of `kind`, rounded to `dtype`.
    #[cfg(feature = "cube")]
    pub fn tables(
        &self,
        kind: LayerType,
        positions: usize,
        dtype: DType,
        device: &Device,
    ) -> RotationTables {
        let table = self.of(kind).reaching(positions, dtype, device);
        RotationTables {
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

    /// Returns the cosines and sines at `positions` for layers of `kind`, rounded to `dtype`.
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

/// The tables of one layer type. Clones of the model share the cached tables.
#[derive(Clone, Debug)]
struct Tables {
    inverse_frequencies: Arc<[f32]>,
    made: Arc<Mutex<Vec<Table>>>,
}

/// Cosines and sines, `[positions, head_dim / 2]` each, on one device and in one dtype.
#[derive(Clone, Debug)]
struct Table {
    device: Device,
    /// The stream that allocated the table. Each stream has its own table, because a CUDA graph is captured only if its
    /// tensors were allocated on the capturing stream.
    #[cfg(feature = "cube")]
    stream: StreamId,
    dtype: DType,
    positions: usize,
    cos: Tensor<2>,
    sin: Tensor<2>,
}

/// The largest number of cached tables. If the cache is full, the oldest table is dropped, so that few tables of ended
/// threads stay in memory.
const MOST_TABLES: usize = 8;

impl Table {
    /// True if the current stream allocated the table.
    fn is_local(&self) -> bool {
        #[cfg(feature = "cube")]
        return self.stream == StreamId::current();
        #[cfg(not(feature = "cube"))]
        true
    }
}

impl Tables {
    fn new(inverse_frequencies: Vec<f32>) -> Self {
        Self {
            inverse_frequencies: inverse_frequencies.into(),
            made: Arc::default(),
        }
    }

    /// Returns a table of at least `positions` positions. The table grows by doubling, so that the total work stays
    /// proportional to the table's length.
    fn reaching(&self, positions: usize, dtype: DType, device: &Device) -> Table {
        const SMALLEST: usize = 256;
        // Ignore a poisoned lock. Even if a thread panicked while it held the lock, the list contains only complete
        // tables.
        let mut made = self.made.lock().unwrap_or_else(PoisonError::into_inner);
        let index = made
            .iter()
            .position(|table| table.dtype == dtype && table.device == *device && table.is_local());
        if let Some(table) = index.map(|index| &made[index])
            && table.positions >= positions
        {
            return table.clone();
        }
        match index {
            Some(index) => drop(made.remove(index)),
            None if made.len() == MOST_TABLES => drop(made.remove(0)),
            None => (),
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
                // Round the angle to f32, as in training.
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
            #[cfg(feature = "cube")]
            stream: StreamId::current(),
            dtype,
            positions,
            cos: upload(cos),
            sin: upload(sin),
        }
    }
}
