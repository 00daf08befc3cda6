//! Masks with one element per block of queries and block of keys.

use crate::integers::{INTS, clamped_integers};
use burn::backend::Dispatch;
use burn::tensor::{Bool, IndexingUpdateOp, Int, Tensor};

/// A mask with one element per block of queries and block of keys, like FlexAttention's `BlockMask`. Block-sparse
/// attention such as NSA, MoBA or Quest uses such masks: each block of queries sees a few blocks of keys.
///
/// Kernels skip the blocks of keys that the mask hides from a whole tile of queries. Memory is proportional to the
/// number of elements of the mask, not to the number of scores. Other options, such as the causal mask, hide further
/// keys within the blocks.
///
/// ```
/// use attention_cube::{AttentionOptions, BlockMask, fused_attention};
/// use burn::tensor::{Device, Distribution, Int, Tensor};
///
/// # #[cfg(feature = "flex")] {
/// let device = Device::flex();
/// let random = || Tensor::<4>::random([1, 2, 10, 8], Distribution::Default, &device);
/// // Blocks of 4 queries and 4 keys. Each row of the table lists the key blocks of one block of queries. The entry
/// // −1 lists no block.
/// let table = Tensor::<4, Int>::from_ints([[[[0, -1], [0, 1], [0, 2]]]], &device);
/// let mask = BlockMask::from_table(table, 3, [4, 4]);
/// let options = AttentionOptions::new().causal().block_mask(mask);
/// let output = fused_attention(random(), random(), random(), options);
/// assert_eq!(output.dims(), [1, 2, 10, 8]);
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct BlockMask {
    pub(crate) visible: Tensor<4, Bool>,
    pub(crate) block: [usize; 2],
}

impl BlockMask {
    /// Returns a mask of blocks of `block[0]` queries and `block[1]` keys: **`true` means visible**. The last blocks
    /// may be partial.
    ///
    /// # Shapes
    /// `visible [batch, q_heads, q_len / block[0], kv_len / block[1]]`, where both quotients are rounded up. A
    /// dimension of size 1 is broadcast.
    pub fn new(visible: Tensor<4, Bool>, block: [usize; 2]) -> Self {
        Self { visible, block }
    }

    /// Returns the mask that shows each block of queries the key blocks that the table lists. `key_blocks` is the
    /// number of key blocks, `kv_len / block[1]` rounded up.
    ///
    /// Entries may have any order and may repeat. Negative entries, and entries of at least `key_blocks`, list no
    /// block, so rows may list different numbers of blocks. The conversion runs on the device, and the host does not
    /// wait. It needs 4 bytes for each element of the mask.
    ///
    /// # Shapes
    /// `table [batch, q_heads, q_len / block[0], n]` for up to `n` key blocks per row. Each of the first three
    /// dimensions may have size 1, and is then broadcast. See [`per_kv_head`](Self::per_kv_head) for tables with one
    /// list per key head.
    pub fn from_table(table: Tensor<4, Int>, key_blocks: usize, block: [usize; 2]) -> Self {
        let table = table.without_autodiff();
        let [batch, heads, rows, listed] = table.dims();
        // Entries that list no block count in an extra column, which `narrow` removes.
        let shape = [batch, heads, rows, key_blocks + 1];
        let mut counts = Tensor::<4, Int>::zeros(shape, (&table.device(), INTS.into()));
        if batch * heads * rows * listed > 0 {
            let negative = table.clone().lower_elem(0);
            let columns = clamped_integers::<Dispatch>(table.into_dispatch(), key_blocks);
            let columns = Tensor::<4, Int>::from_dispatch(columns);
            let columns = columns.mask_fill(negative, key_blocks as i64);
            let ones = columns.ones_like();
            counts = counts.scatter(3, columns, ones, IndexingUpdateOp::Add);
        }
        let visible = counts.greater_elem(0);
        let visible = match key_blocks {
            // `narrow` refuses a length of 0.
            0 => Tensor::empty([batch, heads, rows, 0], &visible.device()),
            _ => visible.narrow(3, 0, key_blocks),
        };
        Self::new(visible, block)
    }

    /// Repeats each head of the mask for the `group` query heads that read the same key head, where `group` is
    /// `q_heads / kv_heads`.
    ///
    /// # Shapes
    /// `[batch, kv_heads, …]` → `[batch, kv_heads · group, …]`.
    pub fn per_kv_head(self, group: usize) -> Self {
        let [batch, heads, rows, columns] = self.visible.dims();
        let visible = self.visible.reshape([batch, heads, 1, rows, columns]);
        let visible = visible.expand([batch, heads, group, rows, columns]);
        Self {
            visible: visible.reshape([batch, heads * group, rows, columns]),
            block: self.block,
        }
    }
}
