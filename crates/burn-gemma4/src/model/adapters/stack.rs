//! Several adapters as one pair of matrices per projection, so that one decode step serves sequences of all adapters.

use super::loaded::{AdapterId, LoadedAdapter};
use super::pass::{Factors, PassAdapters};
#[cfg(feature = "cube")]
use crate::op::stream::StreamCheck;
use burn::module::ParamId;
use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

/// The slot of a row without an adapter.
pub(crate) const NO_ADAPTER: i32 = -1;
/// The slot of padding columns, which belong to no adapter.
const PADDING: i32 = -2;
/// The total rank of a projection is padded to a multiple of this number, so that kernels can read the factors in
/// vectors. TMA on Hopper cards needs rows of a multiple of 16 bytes.
const RANK_MULTIPLE: usize = 8;

/// The factors of several adapters. The rows of all `A` of a projection are one matrix, and so are the columns of all
/// `B`. A row of a decode step selects its adapter by the adapter's slot, which is its index in the stack.
#[derive(Debug)]
pub(crate) struct AdapterStack {
    adapters: Vec<Arc<LoadedAdapter>>,
    factors: Arc<HashMap<ParamId, Factors>>,
    /// The slot of each column of the inner values, `[1, rank]`. Projections with equal ranks share one tensor.
    slots: Vec<Tensor<2, Int>>,
}

impl AdapterStack {
    /// Stacks adapters of one model. The device is the model's.
    pub fn new(adapters: Vec<Arc<LoadedAdapter>>, device: &Device) -> Self {
        let weights: BTreeSet<ParamId> = adapters
            .iter()
            .flat_map(|adapter| adapter.factors().keys().copied())
            .collect();
        let (mut factors, mut slots) = (HashMap::new(), Vec::new());
        let mut indices: HashMap<Vec<i32>, usize> = HashMap::new();
        for weight in weights {
            let parts = adapters.iter().enumerate();
            let parts = parts.filter_map(|(slot, adapter)| {
                let part = adapter.factors().get(&weight)?;
                Some((slot as i32, part))
            });
            let (mut reads, mut writes, mut columns) = (Vec::new(), Vec::new(), Vec::new());
            for (slot, part) in parts {
                reads.push(part.reads.clone());
                writes.push(part.writes.clone());
                columns.resize(columns.len() + part.rank(), slot);
            }
            let (Some(first_reads), Some(first_writes)) = (reads.first(), writes.first()) else {
                continue;
            };
            let (input, output) = (first_reads.dims()[1], first_writes.dims()[0]);
            let padding = columns.len().next_multiple_of(RANK_MULTIPLE) - columns.len();
            if padding > 0 {
                let like = (device, first_reads.dtype());
                reads.push(Tensor::zeros([padding, input], like));
                writes.push(Tensor::zeros([output, padding], like));
                columns.resize(columns.len() + padding, PADDING);
            }
            let mask = *indices.entry(columns).or_insert_with_key(|columns| {
                let shape = [1, columns.len()];
                let columns = TensorData::new(columns.clone(), shape);
                slots.push(Tensor::from_data(columns, (device, DType::I32)));
                slots.len() - 1
            });
            let stacked = Factors {
                reads: Tensor::cat(reads, 0),
                writes: Tensor::cat(writes, 1),
                mask: Some(mask),
            };
            factors.insert(weight, stacked);
        }
        Self {
            adapters,
            factors: Arc::new(factors),
            slots,
        }
    }

    /// The adapters, in the order of their slots.
    pub fn adapters(&self) -> &[Arc<LoadedAdapter>] {
        &self.adapters
    }

    /// Returns the slot of an adapter, or `None` if the stack does not contain the adapter.
    pub fn slot(&self, id: AdapterId) -> Option<i32> {
        let mut adapters = self.adapters.iter();
        let slot = adapters.position(|adapter| adapter.id() == id)?;
        Some(slot as i32)
    }

    /// Returns the adapters of a pass whose row `i` selects the slot `rows[i]`. The slot of a row without an adapter is
    /// [`NO_ADAPTER`].
    ///
    /// # Shapes
    /// `rows`: `[rows]` in i32.
    pub fn pass(&self, rows: &Tensor<1, Int>) -> PassAdapters {
        let rows: Tensor<2, Int> = rows.clone().unsqueeze_dim(1);
        let masks = self.slots.iter();
        let masks = masks.map(|slots| rows.clone().not_equal(slots.clone()));
        PassAdapters {
            factors: self.factors.clone(),
            masks: masks.collect(),
        }
    }

    /// Checks the streams of all tensors.
    #[cfg(feature = "cube")]
    pub fn check_streams(&self, check: &mut StreamCheck) {
        for factors in self.factors.values() {
            check.floats(factors.reads.clone());
            check.floats(factors.writes.clone());
        }
        for slots in &self.slots {
            check.integers(slots.clone());
        }
    }
}
