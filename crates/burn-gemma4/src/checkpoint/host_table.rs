//! The table of per-layer embeddings where it was written: in the checkpoint's files, mapped into memory, of which a token takes a row.

use super::{
    source::{PORTION, Source, Weights},
    spare::Spare,
};
use burn::tensor::{DType, Device, Tensor, TensorData};
use std::{fmt, sync::Arc};

/// The path of the table, as of a parameter.
pub(super) const TABLE: &str = "embed_tokens_per_layer.weight";

/// A table in files, which stay mapped as long as it lives. Nobody may write to them meanwhile.
#[derive(Clone)]
pub(crate) struct HostTable {
    weights: Arc<dyn Weights>,
    /// Tokens and columns.
    shape: [usize; 2],
    /// What rows are gathered into on their way to the device.
    spare: Spare,
}

impl fmt::Debug for HostTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostTable")
            .field("shape", &self.shape)
            .finish_non_exhaustive()
    }
}

impl HostTable {
    /// That of weights which have been checked to be a model's with per-layer embeddings.
    pub(super) fn of(weights: Arc<dyn Weights>) -> Self {
        let source = found(&*weights);
        let shape = [source.shape[0], source.shape[1]];
        Self {
            weights,
            shape,
            spare: Spare::default(),
        }
    }

    /// `[tokens, columns]` on `device`: a row of each, about a portion of them on the host at a time.
    ///
    /// # Panics
    /// For a token that the table does not have.
    pub fn rows(&self, tokens: &[u32], dtype: DType, device: &Device) -> Tensor<2> {
        self.rows_in(tokens, dtype, device, PORTION)
    }

    fn rows_in(&self, tokens: &[u32], dtype: DType, device: &Device, portion: usize) -> Tensor<2> {
        let source = found(&*self.weights);
        let [_, columns] = self.shape;
        let at_once = (portion / (columns * dtype.size())).max(1);
        let upload = |tokens: &[u32]| {
            let length = tokens.len() * columns * dtype.size();
            let bytes = self
                .spare
                .filled(length, |bytes| source.gather(tokens, dtype, bytes));
            let data = TensorData::from_bytes(bytes, [tokens.len(), columns], dtype);
            Tensor::from_data(data, (device, dtype))
        };
        if tokens.len() <= at_once {
            return upload(tokens);
        }
        let mut rows = Tensor::<2>::empty([tokens.len(), columns], (device, dtype));
        for (index, part) in tokens.chunks(at_once).enumerate() {
            let first = index * at_once;
            rows = rows.slice_assign([first..first + part.len(), 0..columns], upload(part));
            // What is queued holds its portion on the host. A device that fails says so when the rows are used.
            let _ = device.sync();
        }
        rows
    }

    /// The whole table's bytes in `dtype`, little-endian.
    pub fn whole(&self, dtype: DType) -> Vec<u8> {
        let all = found(&*self.weights).slices(0..self.shape[0], dtype);
        all.into_bytes().to_vec()
    }
}

fn found(weights: &dyn Weights) -> Source<'_> {
    let source = weights.get(TABLE);
    source.unwrap_or_else(|problem| unreachable!("checked: {problem}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::{files::TensorFiles, folder::Folder};
    use burn::tensor::TensorData;

    #[test]
    fn portions_make_the_whole() {
        let bytes = include_bytes!("../../embedded/model.safetensors");
        let files = TensorFiles::embedded("model.safetensors", bytes).expect("safetensors");
        let table = HostTable::of(Arc::new(Folder::of(Arc::new(files), Vec::new())));
        let device = Device::default();
        let tokens: Vec<u32> = (0..300).map(|token| token * 7 % 1000).collect();
        let values = |rows: Tensor<2>| rows.into_data().iter::<f32>().collect::<Vec<_>>();
        let whole = values(table.rows(&tokens, DType::F32, &device));
        let [_, columns] = table.shape;
        let all: Vec<f32> =
            TensorData::from_bytes_vec(table.whole(DType::F32), table.shape.to_vec(), DType::F32)
                .iter()
                .collect();
        for (token, row) in tokens.iter().zip(whole.chunks_exact(columns)) {
            assert_eq!(row, &all[*token as usize * columns..][..columns], "{token}");
        }
        for portion in [1, 7 * columns * 4 + 1] {
            let found = table.rows_in(&tokens, DType::F32, &device, portion);
            assert_eq!(values(found), whole, "{portion} bytes at a time");
        }
    }
}
