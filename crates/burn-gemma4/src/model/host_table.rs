//! The per-layer embedding table in host memory. A call of the model reads and uploads only the rows of its input
//! tokens.

use super::buffer_pool::BufferPool;
use burn::tensor::{DType, Device, Tensor, TensorData};
use std::{fmt, sync::Arc};

/// The parameter path of the per-layer embedding table.
pub(crate) const TABLE: &str = "embed_tokens_per_layer.weight";

/// Access to the rows of a table in a checkpoint's files.
pub(crate) trait TableRows: Send + Sync {
    /// Returns the shape of the table: the number of tokens and the number of columns.
    fn shape(&self) -> [usize; 2];

    /// Writes the rows of `tokens` to `bytes` as little-endian values of `dtype`.
    fn gather(&self, tokens: &[u32], dtype: DType, bytes: &mut [u8]);

    /// Returns the whole table as little-endian values of `dtype`.
    fn whole(&self, dtype: DType) -> Vec<u8>;
}

/// A table in memory-mapped files, which stay mapped while the table exists. No program may write to the files while they are
/// mapped.
#[derive(Clone)]
pub(crate) struct HostTable {
    rows: Arc<dyn TableRows>,
    /// The size of one upload in bytes, which bounds the host memory that a long prompt needs.
    portion: usize,
    /// The host buffers that hold rows during an upload.
    buffers: BufferPool,
}

impl fmt::Debug for HostTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostTable")
            .field("shape", &self.rows.shape())
            .finish_non_exhaustive()
    }
}

impl HostTable {
    /// Creates a table that reads `rows`, and uploads about `portion` bytes at a time.
    pub fn new(rows: Arc<dyn TableRows>, portion: usize) -> Self {
        Self {
            rows,
            portion,
            buffers: BufferPool::default(),
        }
    }

    /// Changes the size of one upload, in bytes.
    #[cfg(test)]
    pub fn with_portion(self, portion: usize) -> Self {
        Self { portion, ..self }
    }

    /// Returns the shape of the table: the number of tokens and the number of columns.
    #[cfg(test)]
    pub fn shape(&self) -> [usize; 2] {
        self.rows.shape()
    }

    /// Uploads one row per token to `device`, in portions. The result is `[tokens, columns]`.
    ///
    /// # Panics
    /// Panics if a token is not in the table.
    pub fn rows(&self, tokens: &[u32], dtype: DType, device: &Device) -> Tensor<2> {
        let [_, columns] = self.rows.shape();
        let at_once = (self.portion / (columns * dtype.size())).max(1);
        let upload = |tokens: &[u32]| {
            let length = tokens.len() * columns * dtype.size();
            let bytes = self
                .buffers
                .filled(length, |bytes| self.rows.gather(tokens, dtype, bytes));
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
            // Wait until the device has received this portion, so that host memory holds only one portion at a time. Ignore a
            // device error here, because the later use of the rows reports the error.
            let _ = device.sync();
        }
        rows
    }

    /// Returns the whole table as little-endian values of `dtype`.
    pub fn whole(&self, dtype: DType) -> Vec<u8> {
        self.rows.whole(dtype)
    }
}
