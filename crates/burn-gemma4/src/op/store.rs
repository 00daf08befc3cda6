//! Rows into the slots of a cache in int8, at positions that are on the device: for inference on CubeCL devices.

use attention_cube::passes::quantize;
use burn::{
    backend::{
        Backend, Dispatch, ExtensionType, backend_extension,
        tensor::{FloatTensor, IntTensor},
    },
    tensor::{Int, Tensor},
};
use burn_cubecl::CubeBackend;

/// Words of int8 and their scales, of which every handle sees what is written.
#[derive(ExtensionType, Debug)]
#[extension_type(fusion)]
pub struct StoredRows<B: Backend> {
    pub words: IntTensor<B>,
    pub scales: FloatTensor<B>,
}

/// Writes `rows`, `[sequences, heads, count, width]`, quantized into their slots of words, `[sequences, heads, slots, width / 4]`, and
/// scales, `[sequences, heads, slots, 1]`: the row's position modulo the slots. Of `positions`, `[sequences · count]`, those of a sequence
/// follow each other, and its rows are where a ring of `count` slots has them. The results are handles to the same memory, and what reads
/// them comes after.
pub(crate) fn store_rows(
    rows: Tensor<4>,
    positions: Tensor<1, Int>,
    words: Tensor<4, Int>,
    scales: Tensor<4>,
) -> (Tensor<4, Int>, Tensor<4>) {
    let slots = StoredRows {
        words: words.into_dispatch(),
        scales: scales.into_dispatch(),
    };
    let StoredRows { words, scales } =
        Dispatch::store_rows(rows.into_dispatch(), positions.into_dispatch(), slots);
    (Tensor::from_dispatch(words), Tensor::from_dispatch(scales))
}

/// The kernel as an operator of a backend.
#[backend_extension(Cube, Fusion)]
pub trait StoreBackend: Backend {
    /// See [`store_rows`].
    #[fusion(meta = |_rows, _positions, slots| slots.clone())]
    fn store_rows(
        rows: FloatTensor<Self>,
        positions: IntTensor<Self>,
        #[extension_type] slots: StoredRows<Self>,
    ) -> StoredRows<Self>;
}

impl StoreBackend for CubeBackend {
    fn store_rows(
        rows: FloatTensor<Self>,
        positions: IntTensor<Self>,
        slots: StoredRows<Self>,
    ) -> StoredRows<Self> {
        quantize::write(rows, Some(positions), &slots.words, &slots.scales);
        slots
    }
}
