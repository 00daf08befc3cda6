//! Writes rows into the slots of an int8 KV cache, for inference on CubeCL devices. The rows' positions are in device
//! memory.

use attention_cube::internals::auxiliary::quantize;
use burn::{
    backend::{
        Backend, Dispatch, ExtensionType, backend_extension,
        tensor::{FloatTensor, IntTensor},
    },
    tensor::{Int, Tensor},
};
use burn_cubecl::CubeBackend;

/// Packed int8 words and their scales. All handles to the words and scales share the memory, so every handle sees all
/// later writes.
#[derive(ExtensionType, Debug)]
#[extension_type(fusion)]
pub struct StoredRows<B: Backend> {
    pub words: IntTensor<B>,
    pub scales: FloatTensor<B>,
}

/// Quantizes `rows` to int8, and writes each row into its slot of a KV cache. A row's slot is its position modulo
/// `slots`.
///
/// # Shapes
/// - `rows`: `[sequences, heads, count, width]`. Position `p` of a sequence is at index `p % count` of the third
///   dimension.
/// - `positions`: `[sequences · count]`. The positions of one sequence are consecutive.
/// - `words`: `[sequences, heads, slots, width / 4]`, four int8 values in each word.
/// - `scales`: `[sequences, heads, slots, 1]`.
///
/// The results are new handles to the memory of `words` and `scales`. Reads through these handles run after the writes.
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

/// The kernel that stores rows in the KV cache, as an operator of a backend.
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
