//! Reads rows of the per-layer embedding table from a checkpoint's files.

use super::source::{PORTION, Source, WeightSource};
use crate::model::host_table::{HostTable, TABLE, TableRows};
use burn::tensor::DType;
use std::sync::Arc;

/// Creates a table that stays in the checkpoint's files. The host reads single rows from the files. The loader must
/// already have checked the tensors of `weights`.
pub(super) fn host_table(weights: Arc<dyn WeightSource>) -> HostTable {
    HostTable::new(Arc::new(TableInFiles(weights)), PORTION)
}

struct TableInFiles(Arc<dyn WeightSource>);

impl TableInFiles {
    fn source(&self) -> Source<'_> {
        let source = self.0.get(TABLE);
        source.unwrap_or_else(|problem| unreachable!("the tensors were checked before: {problem}"))
    }
}

impl TableRows for TableInFiles {
    fn shape(&self) -> [usize; 2] {
        let source = self.source();
        [source.shape[0], source.shape[1]]
    }

    fn gather(&self, tokens: &[u32], dtype: DType, bytes: &mut [u8]) {
        self.source().gather(tokens, dtype, bytes);
    }

    fn whole(&self, dtype: DType) -> Vec<u8> {
        let source = self.source();
        let tokens = source.shape[0];
        source.slices(0..tokens, dtype).into_bytes().to_vec()
    }
}

#[cfg(test)]
mod tests {
    use super::super::{files::TensorFiles, folder::Folder};
    use super::*;
    use crate::config::quantization::QuantizationSchemes;
    use burn::tensor::{Device, Tensor, TensorData};

    #[test]
    fn host_table_rows_in_portions_equal_whole_table() {
        let bytes = include_bytes!("../../embedded/model.safetensors");
        let files = TensorFiles::embedded("model.safetensors", bytes)
            .expect("the embedded file is valid safetensors");
        let table = host_table(Arc::new(Folder::of(
            Arc::new(files),
            QuantizationSchemes::default(),
        )));
        let device = Device::default();
        let tokens: Vec<u32> = (0..300).map(|token| token * 7 % 1000).collect();
        let values = |rows: Tensor<2>| rows.into_data().iter::<f32>().collect::<Vec<_>>();
        let whole = values(table.rows(&tokens, DType::F32, &device));
        let [_, columns] = table.shape();
        let all: Vec<f32> =
            TensorData::from_bytes_vec(table.whole(DType::F32), table.shape().to_vec(), DType::F32)
                .iter()
                .collect();
        for (token, row) in tokens.iter().zip(whole.chunks_exact(columns)) {
            assert_eq!(row, &all[*token as usize * columns..][..columns], "{token}");
        }
        for portion in [1, 7 * columns * 4 + 1] {
            let found = table
                .clone()
                .with_portion(portion)
                .rows(&tokens, DType::F32, &device);
            assert_eq!(values(found), whole, "{portion} bytes at a time");
        }
    }
}
