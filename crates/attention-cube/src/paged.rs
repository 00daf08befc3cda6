//! Keys and values in pages, the KV cache of a server (PagedAttention, block tables).
//!
//! All sequences share one tensor of pages. A page table lists the pages of each sequence. Sequences grow without copies,
//! and may share the pages of a common prefix.
//!
//! ```
//! use attention_cube::AttentionOptions;
//! use attention_cube::paged::{Places, append, paged_attention};
//! use burn::tensor::{Device, Distribution, Int, Tensor};
//!
//! # #[cfg(feature = "flex")] {
//! let device = Device::flex();
//! let random = |heads, length| Tensor::<4>::random([2, heads, length, 64], Distribution::Default, &device);
//! // Ten pages of 16 keys. The first sequence has pages 7 and 2, the second has page 4; the table's last entry is unused.
//! let mut key = Tensor::<4>::zeros([10, 2, 16, 64], &device);
//! let mut value = key.clone();
//! let page_table = Tensor::<2, Int>::from_ints([[7, 2], [4, 0]], &device);
//! // The sequences already have 20 and 3 tokens, and each gets one more.
//! let places = Places {
//!     page_table: page_table.clone(),
//!     starts: Tensor::<1, Int>::from_ints([20, 3], &device),
//!     counts: None,
//! };
//! key = append(key, random(2, 1), places.clone())?;
//! value = append(value, random(2, 1), places)?;
//! let lengths = Tensor::<1, Int>::from_ints([21, 4], &device);
//! let options = AttentionOptions::new().causal().kv_lengths(lengths);
//! let output = paged_attention(random(8, 1), key, value, page_table, options);
//! assert_eq!(output.dims(), [2, 8, 1, 64]);
//! # }
//! # Ok::<(), attention_cube::AttentionError>(())
//! ```
//!
//! Pages may also have the token dimension before the head dimension: `[pages, page_len, kv_heads, columns]`. For such
//! pages, pass `pages.swap_dims(1, 2)`. Kernels read this view through its strides. The pages of burn-lm have this
//! layout. Pass burn-lm's `gather_idx.reshape([lanes, blocks_per_lane])` as the page table, and burn-lm's `lengths` as
//! `kv_lengths`.
//!
//! # Contract
//! Pages are `[pages, kv_heads, page_len, columns]`, and the page table is `[batch, pages of a sequence]`, in any integer
//! dtype. Key `j` of sequence `b` is row `j % page_len` of page `page_table[b, j / page_len]`. For all options, `kv_len` is the
//! number of pages of a sequence times `page_len`. Set [`kv_lengths`](AttentionOptions::kv_lengths) for sequences that do not
//! fill their pages.
//!
//! | case | result |
//! |---|---|
//! | attention | [the definition](crate::reference) over the rows of each sequence in order, with every option of [`AttentionOptions`]. The results are bitwise equal to those of a call over contiguous keys, unless the page size leads to another kernel |
//! | pages whose size is a multiple of the kernel's block of keys | the portable engines and the decode kernel of the mma engine read pages in place. The decode kernel serves up to 32 query rows (`q_len` times the number of query heads per key head) at head sizes up to 256, and up to 16 query rows at larger head sizes. The blocks of the decode kernel have 16 or 32 keys. Most block sizes of the portable engines divide 128 keys |
//! | prompts on Hopper, in half precision, at head sizes up to 512 | TMA reads pages in place, if the page size is a multiple of 16, and rows consist of whole 16-byte pieces |
//! | all other kernels and page sizes | kernels read a contiguous copy, allocated for `kv_len` keys of every sequence. On devices with kernels, only visible rows are copied. [`Selection::copies_pages`](crate::Selection::copies_pages) tells whether a forward pass without autodiff copies |
//! | a query under autodiff | all pages in the page table are copied |
//! | entries of the page table for keys that no query sees | may be any integer |
//! | entries outside of `0..pages` for keys that a query sees | count as the nearest page, so no access leaves the tensors |
//! | NaN in rows that no query sees | never reaches the output |
//! | a page that several sequences list | is read by each of these sequences |
//! | gradients | the query, the bias and the sinks receive gradients on every device. Keys and values receive gradients through the copy, if autodiff tracks them |

use crate::backend::{AttentionBackend, check_backend};
use crate::error::AttentionError;
use crate::options::AttentionOptions;
use crate::problem::{AttentionProblem, check_dims, check_dtype, check_place_of};
use crate::quantized::inputs_of;
use crate::reference;
use crate::types::quantized::{CodeFormat, QuantizedRows};
use crate::types::tensors::{AppendPlaces, AttentionInputs, inputs};
use burn::backend::Dispatch;
use burn::tensor::{Int, Tensor};

/// The slots to which [`append`] writes new rows. A slot is the place of one token in a page.
#[derive(Clone, Debug)]
pub struct Places {
    /// The page table, `[batch, pages of a sequence]`.
    pub page_table: Tensor<2, Int>,
    /// The position of each sequence's first new row, `[batch]`. Negative positions count as 0.
    pub starts: Tensor<1, Int>,
    /// The number of rows to write for each sequence, `[batch]`. `None` means that `append` writes all rows.
    pub counts: Option<Tensor<1, Int>>,
}

/// Computes attention over keys and values in pages, by the fastest kernel that serves the problem on the tensors' device.
///
/// The [module's documentation](self) states the contract.
///
/// # Shapes
/// `query [batch, q_heads, q_len, head_dim]`, `key [pages, kv_heads, page_len, head_dim]`,
/// `value [pages, kv_heads, page_len, value_dim]`, `page_table [batch, pages of a sequence]` →
/// `[batch, q_heads, q_len, value_dim]`.
///
/// # Panics
/// Panics with the text of [`AttentionError`] if an argument does not fit; [`try_paged_attention`] returns the error instead.
pub fn paged_attention(
    query: Tensor<4>,
    key: Tensor<4>,
    value: Tensor<4>,
    page_table: Tensor<2, Int>,
    options: AttentionOptions,
) -> Tensor<4> {
    match try_paged_attention(query, key, value, page_table, options) {
        Ok((output, _)) => output,
        Err(error) => panic!("paged_attention: {error}"),
    }
}

/// Computes [`paged_attention`] and the logsumexp. Returns an error instead of a panic.
///
/// The logsumexp is `[batch, q_heads, q_len]`, an f32 natural logarithm as in
/// [`attention_with_lse`](crate::attention_with_lse).
///
/// # Errors
/// Returns [`AttentionError`] if an argument does not fit.
pub fn try_paged_attention(
    query: Tensor<4>,
    key: Tensor<4>,
    value: Tensor<4>,
    page_table: Tensor<2, Int>,
    options: AttentionOptions,
) -> Result<(Tensor<4>, Tensor<3>), AttentionError> {
    let problem = AttentionProblem::paged(&query, &key, &value, &page_table, &options)?;
    check_backend(&query.device())?;
    let inputs = AttentionInputs {
        page_table: Some(page_table.without_autodiff().into_dispatch()).into(),
        ..inputs(query, key, value, options)
    };
    let result = Dispatch::attention_forward(inputs, problem.clone());
    Ok(reference::output_and_lse(result, &problem))
}

/// Computes [`paged_attention`] over quantized pages, and the logsumexp as in [`try_paged_attention`].
///
/// # Shapes
/// `key` and `value` are quantized rows of the shape `[pages, kv_heads, page_len, columns]`. All other tensors have the
/// shapes of [`paged_attention`].
///
/// # Errors
/// Returns [`AttentionError`] if an argument does not fit.
pub fn try_paged_quantized_attention(
    query: Tensor<4>,
    key: QuantizedRows,
    value: QuantizedRows,
    page_table: Tensor<2, Int>,
    options: AttentionOptions,
) -> Result<(Tensor<4>, Tensor<3>), AttentionError> {
    let problem = AttentionProblem::paged_quantized(&query, &key, &value, &page_table, &options)?;
    check_backend(&query.device())?;
    let page_table = Some(page_table.without_autodiff());
    let inputs = inputs_of(query, [key, value], page_table, options);
    let result = Dispatch::quantized_attention_forward(inputs, problem.clone());
    Ok(reference::output_and_lse(result, &problem))
}

/// Writes new keys, or new values, to their slots in the pages, and returns the pages without autodiff.
///
/// On devices with kernels, `append` writes into the given pages if no other handle to them exists and each row is
/// contiguous. Otherwise the function first copies all pages. To avoid this copy, keep no clone of the pages, and
/// continue with the returned tensor.
///
/// A row is not written if its position lies past the sequence's pages. The row is also not written if its page table
/// entry is not a valid page index (for example, the entry −1). If two new rows have the same slot, the slot may mix
/// elements of the two rows.
///
/// # Shapes
/// `pages [pages, kv_heads, page_len, columns]`, `rows [batch, kv_heads, new, columns]`.
///
/// # Errors
/// Returns [`AttentionError`] if the shapes, dtypes or devices do not fit each other, or if attention does not support the
/// device.
pub fn append(
    pages: Tensor<4>,
    rows: Tensor<4>,
    places: Places,
) -> Result<Tensor<4>, AttentionError> {
    check_backend(&pages.device())?;
    check_append(pages.dims(), rows.dims(), &places)?;
    check_dtype("rows", rows.dtype(), &[(pages.dtype(), "the pages'")])?;
    check_place_of("pages", pages.device(), OF_ROWS, &rows.device())?;
    check_places(&places, &rows)?;
    let pages = pages.without_autodiff().into_dispatch();
    let rows = rows.without_autodiff().into_dispatch();
    Ok(Tensor::from_dispatch(Dispatch::append_rows(
        pages,
        rows,
        places.into_tensors(),
    )))
}

/// Quantizes new keys, or new values, to the format of the pages, and writes the quantized rows to their slots as
/// [`append`] does.
///
/// # Shapes
/// `pages` are quantized rows of the shape `[pages, kv_heads, page_len, columns]`, and `rows` is
/// `[batch, kv_heads, new, columns]`.
///
/// # Errors
/// Returns [`AttentionError`] if the shapes or devices do not fit each other, or if attention does not support the device. Also
/// returns an error if `columns` is 0 or not a multiple of 4, or if e4m3 pages have a scale per page or row.
pub fn append_quantized(
    pages: QuantizedRows,
    rows: Tensor<4>,
    places: Places,
) -> Result<QuantizedRows, AttentionError> {
    check_append(pages.dims(), rows.dims(), &places)?;
    check_place_of("pages", pages.device(), OF_ROWS, &rows.device())?;
    check_places(&places, &rows)?;
    let format = pages.format();
    let (words, scales) = pages.into_parts();
    let new = match format {
        CodeFormat::Int8 => QuantizedRows::try_new(rows)?,
        CodeFormat::E4m3 => QuantizedRows::try_e4m3(rows, scales_of_pages(&scales)?)?,
    };
    let (new_words, new_scales) = new.into_parts();
    let words = Tensor::from_dispatch(Dispatch::append_words(
        words.into_dispatch(),
        new_words.into_dispatch(),
        places.clone().into_tensors(),
    ));
    match format {
        CodeFormat::Int8 => {
            // Append the scales as rows with one column each.
            let scales = append(scales.unsqueeze_dim(3), new_scales.unsqueeze_dim(3), places)?;
            QuantizedRows::of_parts(words, scales.squeeze_dim(3))
        }
        CodeFormat::E4m3 => QuantizedRows::of_e4m3_parts(words, scales),
    }
}

/// Returns the scales with which new rows are quantized for e4m3 pages. Returns an error if each page or each slot has
/// a scale of its own, because then no existing scale fits the new rows.
fn scales_of_pages(scales: &Tensor<3>) -> Result<Tensor<3>, AttentionError> {
    let has = scales.dims();
    for (dimension, index) in [("pages", 0), ("page_len", 2)] {
        if has[index] != 1 {
            return Err(AttentionError::Shape {
                argument: "scales",
                has: has.to_vec(),
                dimension,
                found: has[index],
                expected: "1, because rows are appended in the scale of their tensor or head"
                    .into(),
            });
        }
    }
    Ok(scales.clone())
}

impl Places {
    fn into_tensors(self) -> AppendPlaces<Dispatch> {
        AppendPlaces {
            page_table: self.page_table.without_autodiff().into_dispatch(),
            starts: self.starts.without_autodiff().into_dispatch(),
            counts: self
                .counts
                .map(|counts| counts.without_autodiff().into_dispatch())
                .into(),
        }
    }
}

fn check_append(
    pages: [usize; 4],
    rows: [usize; 4],
    places: &Places,
) -> Result<(), AttentionError> {
    let [batch, _, _, _] = rows;
    let [_, kv_heads, _, columns] = pages;
    let names = ["batch", "kv_heads", "new", "columns"];
    let expected = [
        None,
        Some((kv_heads, "the pages' kv_heads")),
        None,
        Some((columns, "the pages' columns")),
    ];
    check_dims("rows", &rows, &names, expected)?;
    let of_rows = Some((batch, "the rows' batch"));
    let table = places.page_table.dims();
    let names = ["batch", "pages of a sequence"];
    check_dims("page_table", &table, &names, [of_rows, None])?;
    check_dims("starts", &places.starts.dims(), &["batch"], [of_rows])?;
    match &places.counts {
        Some(counts) => check_dims("counts", &counts.dims(), &["batch"], [of_rows]),
        None => Ok(()),
    }
}

/// The name of the new rows in error messages about devices. The messages name the new rows, because all other
/// arguments of an append must be on the device of the new rows.
const OF_ROWS: &str = "new row";

fn check_places(places: &Places, rows: &Tensor<4>) -> Result<(), AttentionError> {
    let device = rows.device();
    check_place_of("page_table", places.page_table.device(), OF_ROWS, &device)?;
    check_place_of("starts", places.starts.device(), OF_ROWS, &device)?;
    match &places.counts {
        Some(counts) => check_place_of("counts", counts.device(), OF_ROWS, &device),
        None => Ok(()),
    }
}
