//! Performance cliffs: cases in which attention was once many times slower than in a similar case, the counterpart. The
//! benchmark times each cliff together with its counterpart.

use crate::report::Pass::{self, Backward, Forward};
use attention_cube::paged::try_paged_attention;
use attention_cube::score_mod::Alibi;
use attention_cube::varlen::Sequences;
use attention_cube::{AttentionOptions, BlockMask, try_fused_attention};
use attention_workspace::{
    Dtype, Error,
    timing::{Effort, Timer},
};
use burn::tensor::{Bool, DType, Device, Distribution, Int, Tensor, TensorData};

/// The sizes and options of an attention problem.
#[derive(Clone, Copy)]
pub struct Attention {
    batch: usize,
    heads: usize,
    kv_heads: usize,
    /// The number of queries per head.
    length: usize,
    /// The number of keys per head.
    kv_len: usize,
    width: usize,
    causal: bool,
    /// The number of tokens per document, or `None` if a sequence is a single document.
    document: Option<usize>,
    /// True if every fourth block of 256 tokens is an image whose tokens all see each other. Intervals of visible keys
    /// then replace the causal mask.
    images: bool,
    /// The blocks of keys that a block of queries reads, or `None` without a block mask.
    blocks: Option<ListedBlocks>,
    /// How the prompts of [`RAGGED`] are stored. These prompts have different lengths. The field is `None` if all
    /// prompts have the same length.
    ragged: Option<Rows>,
    /// The number of keys per page, or `None` if the keys of a sequence are contiguous.
    page_len: Option<usize>,
    /// True if dropout removes a tenth of the probabilities.
    dropout: bool,
    /// True if a score mod adds ALiBi.
    alibi: bool,
    /// True if the slopes of ALiBi need a gradient.
    trained_slopes: bool,
    /// The shortest and the longest number of valid keys per sequence, or `None` if all keys are valid. The lengths of
    /// the sequences are spread evenly between the two.
    kv_lengths: Option<[usize; 2]>,
    /// The shape of the bias, or `None` without a bias.
    bias: Option<[usize; 4]>,
    /// True if the bias needs a gradient.
    trained_bias: bool,
    mask: Option<Mask>,
    /// True if all columns of a query are equal. The query tensor then stores only one column, expanded with stride 0.
    flat_queries: bool,
    /// One flag each for the queries, the keys and the values, in this order. A flag is true if its tensor needs a
    /// gradient.
    trained: [bool; 3],
}

/// A mask that hides the same keys in every sequence and head.
#[derive(Clone, Copy)]
enum Mask {
    /// The mask is a tensor `[1, 1, length, length]`, which attention broadcasts to all sequences and heads.
    Own,
    /// The mask is a tensor `[1, 1, length, length]`, expanded with stride 0 to all sequences and heads.
    Expanded,
}

/// The sizes of a block mask, as a top-k selection of key blocks gives it.
#[derive(Clone, Copy)]
struct ListedBlocks {
    /// The numbers of queries and of keys per block.
    block: [usize; 2],
    /// The largest number of key blocks that a block of queries reads.
    listed: usize,
}

impl ListedBlocks {
    /// Returns the table of the listed blocks, `[1, 1, query blocks, listed]`. Each block of queries reads the first
    /// block of keys, the block of its own last key, and blocks between them that look random.
    fn mask(&self, length: usize, kv_len: usize, device: &Device) -> BlockMask {
        let Self { block, listed } = *self;
        let rows = length.div_ceil(block[0]);
        let key_blocks = kv_len.div_ceil(block[1]);
        let entries = (0..rows).flat_map(|row| {
            let last_key = (kv_len - length) + ((row + 1) * block[0]).min(length) - 1;
            let own = last_key / block[1];
            (0..listed).map(move |entry| match entry {
                0 => own as i32,
                entry => ((row * 7919 + (entry - 1) * 104_729) % (own + 1)) as i32,
            })
        });
        let table = TensorData::new(entries.collect::<Vec<_>>(), [1, 1, rows, listed]);
        BlockMask::from_table(Tensor::from_data(table, device), key_blocks, block)
    }
}

/// The storage of prompts that have different lengths.
#[derive(Clone, Copy)]
enum Rows {
    /// Prompts padded to the length of the longest prompt. `query_lengths` and `kv_lengths` hold each prompt's number of
    /// valid rows.
    Padded,
    /// Prompts that follow each other without padding. `cu_seqlens` holds the index of the first row of each prompt.
    Packed,
}

/// A case in which attention was once slow, and a similar case for comparison (the counterpart). If the case takes more
/// than `limit` times as long as the counterpart, the benchmark reports a failure.
pub struct Cliff {
    pub name: &'static str,
    pub pass: Pass,
    case: Attention,
    counterpart: Attention,
    counterpart_pass: Pass,
    pub limit: f64,
}

/// The times of a case and of its counterpart in milliseconds.
#[derive(serde::Serialize)]
pub struct Compared {
    pub case: f64,
    pub counterpart: f64,
}

impl Compared {
    pub fn ratio(&self) -> f64 {
        self.case / self.counterpart
    }
}

const fn attention([batch, heads, length, width]: [usize; 4], causal: bool) -> Attention {
    Attention {
        batch,
        heads,
        kv_heads: heads,
        length,
        kv_len: length,
        width,
        causal,
        document: None,
        images: false,
        blocks: None,
        ragged: None,
        page_len: None,
        dropout: false,
        alibi: false,
        trained_slopes: false,
        kv_lengths: None,
        bias: None,
        trained_bias: true,
        mask: None,
        flat_queries: false,
        trained: [true; 3],
    }
}

const fn cliff(
    name: &'static str,
    pass: Pass,
    case: Attention,
    counterpart: Attention,
    limit: f64,
) -> Cliff {
    Cliff {
        name,
        pass,
        case,
        counterpart,
        counterpart_pass: pass,
        limit,
    }
}

/// Creates a cliff that times the backward of 65,536 queries over 64 keys. The counterpart has 2,048 queries and 2,048
/// keys, and therefore the same number of scores.
const fn few_keys(name: &'static str, kv_heads: usize, width: usize) -> Cliff {
    let square = Attention {
        kv_heads,
        ..attention([1, 8, 2048, width], false)
    };
    let case = Attention {
        length: 65_536,
        kv_len: 64,
        ..square
    };
    cliff(name, Backward, case, square, 3.0)
}

/// Creates a cliff that times the backward of few queries over 131,072 keys. The counterpart is the forward of the same
/// problem.
const fn few_queries(name: &'static str, kv_heads: usize, length: usize, width: usize) -> Cliff {
    let case = Attention {
        kv_heads,
        kv_len: 131_072,
        ..attention([1, 8, length, width], false)
    };
    Cliff {
        counterpart_pass: Forward,
        ..cliff(name, Backward, case, case, 3.0)
    }
}

/// Creates a cliff in which documents of 1,024 tokens are packed into one sequence. In the counterpart, each document
/// is a separate sequence of the batch.
const fn packed(name: &'static str, pass: Pass, documents: usize, width: usize) -> Cliff {
    let heads = 1024 / width;
    cliff(
        name,
        pass,
        Attention {
            document: Some(1024),
            ..attention([1, heads, documents * 1024, width], true)
        },
        attention([documents, heads, 1024, width], true),
        1.3,
    )
}

/// Creates a cliff with the mask of a Gemma prompt that contains images. Intervals of visible keys express this mask.
/// The counterpart is causal attention.
const fn images(name: &'static str, pass: Pass, heads: usize, width: usize) -> Cliff {
    let plain = attention([1, heads, 8192, width], true);
    let case = Attention {
        causal: false,
        images: true,
        ..plain
    };
    cliff(name, pass, case, plain, 1.15)
}

/// The prompts of the cases with different prompt lengths. An entry `(count, length)` stands for `count` prompts of
/// `length` tokens. Under a causal mask, the prompts of one entry together have about as many visible query-key pairs
/// as those of any other entry.
const RAGGED: [(usize, usize); 4] = [(1, 4096), (4, 2048), (16, 1024), (64, 512)];

/// Returns one length for each prompt that [`RAGGED`] describes.
fn ragged_lengths() -> Vec<i32> {
    let lengths = RAGGED
        .iter()
        .flat_map(|(count, length)| vec![*length as i32; *count]);
    lengths.collect()
}

/// Creates a cliff with the prompts of [`RAGGED`], which have different lengths. All sequences of the counterpart have
/// 1,024 tokens.
///
/// The counterpart has 0.94 times as many visible query-key pairs as the case. The case may take at most 1.18 times as long
/// as the counterpart. At this limit, the case reaches `1 / (0.94 · 1.18)` = 90 % of the counterpart's FLOP/s.
const fn ragged(name: &'static str, pass: Pass, rows: Rows, heads: usize, width: usize) -> Cliff {
    let (mut batch, mut tokens, mut index) = (0, 0, 0);
    while index < RAGGED.len() {
        let (count, length) = RAGGED[index];
        batch += count;
        tokens += count * length;
        index += 1;
    }
    let equal = attention([tokens / 1024, heads, 1024, width], true);
    let (batch, length) = match rows {
        Rows::Padded => (batch, RAGGED[0].1),
        Rows::Packed => (1, tokens),
    };
    let case = Attention {
        batch,
        length,
        kv_len: length,
        ragged: Some(rows),
        ..equal
    };
    cliff(name, pass, case, equal, 1.18)
}

/// Creates a cliff that decodes 8 sequences of 32,768 keys in pages of 64 keys. The counterpart has contiguous keys.
const fn paged(name: &'static str, width: usize) -> Cliff {
    let contiguous = Attention {
        kv_heads: 1,
        kv_len: 32_768,
        ..attention([8, 8, 1, width], true)
    };
    let case = Attention {
        page_len: Some(64),
        ..contiguous
    };
    cliff(name, Forward, case, contiguous, 1.05)
}

/// Creates a cliff with prompts of 4,096 tokens, whose keys lie in pages of 64 keys. The counterpart has contiguous keys.
const fn paged_prompt(name: &'static str, heads: usize, width: usize) -> Cliff {
    let contiguous = Attention {
        kv_heads: 1,
        ..attention([8, heads, 4096, width], true)
    };
    let case = Attention {
        page_len: Some(64),
        ..contiguous
    };
    cliff(name, Forward, case, contiguous, 1.1)
}

/// Creates a cliff that decodes 64 sequences of 512 to 1,536 keys. In the counterpart, each sequence has 1,024 keys.
const fn ragged_decode(name: &'static str, width: usize) -> Cliff {
    let equal = Attention {
        kv_heads: 4,
        kv_len: 1024,
        ..attention([64, 16, 1, width], true)
    };
    let case = Attention {
        kv_len: 2048,
        kv_lengths: Some([512, 1536]),
        ..equal
    };
    cliff(name, Forward, case, equal, 1.25)
}

/// Creates a cliff that times the backward of ALiBi with slopes that need a gradient. The slopes of the counterpart
/// need none.
const fn trained_slopes(name: &'static str, heads: usize, width: usize) -> Cliff {
    let frozen = Attention {
        alibi: true,
        ..attention([4, heads, 4096, width], true)
    };
    let case = Attention {
        trained_slopes: true,
        ..frozen
    };
    cliff(name, Backward, case, frozen, 3.0)
}

/// Creates a cliff in which each block of 128 queries reads up to 32 of 256 blocks of keys. In the counterpart, every
/// query sees all of 4,096 keys, so the number of scores is about the same.
const fn blocks(name: &'static str, pass: Pass, heads: usize, width: usize) -> Cliff {
    let dense = Attention {
        kv_len: 4096,
        ..attention([1, heads, 32_768, width], false)
    };
    let case = Attention {
        causal: true,
        kv_len: 32_768,
        blocks: Some(ListedBlocks {
            block: [128, 128],
            listed: 32,
        }),
        ..dense
    };
    cliff(name, pass, case, dense, 2.0)
}

/// Creates a cliff that decodes 8 sequences, in which a query reads 64 of 2,048 blocks of keys. The counterpart has
/// only as many keys as the query reads.
const fn few_blocks(name: &'static str, width: usize) -> Cliff {
    let dense = Attention {
        kv_heads: 1,
        kv_len: 4096,
        ..attention([8, 8, 1, width], true)
    };
    let case = Attention {
        kv_len: 131_072,
        blocks: Some(ListedBlocks {
            block: [1, 64],
            listed: 64,
        }),
        ..dense
    };
    cliff(name, Forward, case, dense, 3.0)
}

/// Creates a cliff with dropout. The counterpart has no dropout.
const fn dropped(name: &'static str, pass: Pass, heads: usize, width: usize) -> Cliff {
    let plain = attention([4, heads, 4096, width], true);
    let case = Attention {
        dropout: true,
        ..plain
    };
    cliff(name, pass, case, plain, 1.25)
}

/// Creates a cliff with ALiBi as a score mod. The counterpart has no score mod.
const fn alibi(name: &'static str, pass: Pass, limit: f64) -> Cliff {
    let plain = attention([4, 16, 4096, 128], true);
    let case = Attention {
        alibi: true,
        ..plain
    };
    cliff(name, pass, case, plain, limit)
}

const fn biased(name: &'static str, pass: Pass, bias: [usize; 4]) -> Cliff {
    let plain = attention([4, 32, 4096, 64], false);
    let case = Attention {
        bias: Some(bias),
        ..plain
    };
    cliff(name, pass, case, plain, 1.5)
}

/// Creates a cliff that times the backward with a bias that needs a gradient. In the counterpart, the bias needs no gradient.
const fn trained_bias(name: &'static str, sizes: [usize; 4], bias: [usize; 4]) -> Cliff {
    let case = Attention {
        bias: Some(bias),
        ..attention(sizes, false)
    };
    let counterpart = Attention {
        trained_bias: false,
        ..case
    };
    cliff(name, Pass::Backward, case, counterpart, 1.5)
}

/// Creates a cliff that times the backward with a bias that needs a gradient. The counterpart has no bias.
const fn whole_bias(name: &'static str, bias: [usize; 4]) -> Cliff {
    let plain = attention([4, 8, 2048, 64], false);
    let case = Attention {
        bias: Some(bias),
        ..plain
    };
    cliff(name, Pass::Backward, case, plain, 3.0)
}

const fn wide(name: &'static str, pass: Pass, width: usize) -> Cliff {
    cliff(
        name,
        pass,
        sized(width),
        sized(width.next_multiple_of(8)),
        1.5,
    )
}

const fn sized(width: usize) -> Attention {
    attention([4, 16, 2048, width], true)
}

const fn flat(name: &'static str, pass: Pass) -> Cliff {
    let case = Attention {
        flat_queries: true,
        ..sized(128)
    };
    cliff(name, pass, case, sized(128), 1.5)
}

const fn masked(name: &'static str, pass: Pass) -> Cliff {
    let plain = attention([4, 32, 4096, 128], false);
    cliff(
        name,
        pass,
        Attention {
            mask: Some(Mask::Expanded),
            ..plain
        },
        Attention {
            mask: Some(Mask::Own),
            ..plain
        },
        1.1,
    )
}

const fn frozen(name: &'static str, trained: [bool; 3], limit: f64) -> Cliff {
    let all = attention([4, 32, 4096, 128], true);
    let case = Attention { trained, ..all };
    cliff(name, Pass::Backward, case, all, limit)
}

pub static CLIFFS: [Cliff; 79] = [
    packed("cliffs-packed-d128", Forward, 256, 128),
    packed("cliffs-packed-d128", Backward, 256, 128),
    packed("cliffs-packed-d64", Forward, 256, 64),
    packed("cliffs-packed-d64", Backward, 256, 64),
    packed("cliffs-packed-d256", Forward, 256, 256),
    packed("cliffs-packed-d256", Backward, 256, 256),
    packed("cliffs-packed-d512", Forward, 128, 512),
    packed("cliffs-packed-d512", Backward, 128, 512),
    images("cliffs-images-d128", Forward, 32, 128),
    images("cliffs-images-d128", Backward, 32, 128),
    images("cliffs-images-d256", Forward, 16, 256),
    images("cliffs-images-d256", Backward, 16, 256),
    images("cliffs-images-d512", Forward, 8, 512),
    images("cliffs-images-d512", Backward, 8, 512),
    ragged("cliffs-ragged-d128", Forward, Rows::Padded, 8, 128),
    ragged("cliffs-ragged-d128", Backward, Rows::Padded, 8, 128),
    ragged("cliffs-ragged-d256", Forward, Rows::Padded, 4, 256),
    ragged("cliffs-ragged-d256", Backward, Rows::Padded, 4, 256),
    ragged("cliffs-varlen-d128", Forward, Rows::Packed, 8, 128),
    ragged("cliffs-varlen-d128", Backward, Rows::Packed, 8, 128),
    ragged("cliffs-varlen-d256", Forward, Rows::Packed, 4, 256),
    ragged("cliffs-varlen-d256", Backward, Rows::Packed, 4, 256),
    ragged_decode("cliffs-ragged-decode-d128", 128),
    ragged_decode("cliffs-ragged-decode-d256", 256),
    ragged_decode("cliffs-ragged-decode-d512", 512),
    paged_prompt("cliffs-paged-prompt-d64", 32, 64),
    paged_prompt("cliffs-paged-prompt-d128", 16, 128),
    paged_prompt("cliffs-paged-prompt-d256", 8, 256),
    paged_prompt("cliffs-paged-prompt-d512", 4, 512),
    paged("cliffs-paged-d256", 256),
    paged("cliffs-paged-d512", 512),
    blocks("cliffs-blocks-d128", Forward, 8, 128),
    blocks("cliffs-blocks-d128", Backward, 8, 128),
    blocks("cliffs-blocks-d256", Forward, 4, 256),
    blocks("cliffs-blocks-d256", Backward, 4, 256),
    few_blocks("cliffs-blocks-decode-d256", 256),
    dropped("cliffs-dropout-d128", Forward, 16, 128),
    dropped("cliffs-dropout-d128", Backward, 16, 128),
    dropped("cliffs-dropout-d256", Forward, 8, 256),
    dropped("cliffs-dropout-d256", Backward, 8, 256),
    alibi("cliffs-alibi-d128", Forward, 1.18),
    alibi("cliffs-alibi-d128", Backward, 1.33),
    trained_slopes("cliffs-trained-slopes-d64", 32, 64),
    trained_slopes("cliffs-trained-slopes-d128", 16, 128),
    biased("cliffs-bias-1-1-1-1", Forward, [1, 1, 1, 1]),
    biased("cliffs-bias-1-1-1-1", Backward, [1, 1, 1, 1]),
    biased("cliffs-bias-1-h-1-1", Forward, [1, 32, 1, 1]),
    biased("cliffs-bias-1-h-1-1", Backward, [1, 32, 1, 1]),
    trained_bias(
        "cliffs-trained-pairs-d64",
        [4, 8, 2048, 64],
        [1, 8, 2048, 2048],
    ),
    trained_bias(
        "cliffs-trained-pairs-d128",
        [4, 8, 2048, 128],
        [1, 8, 2048, 2048],
    ),
    trained_bias(
        "cliffs-trained-table-d64",
        [4, 8, 2048, 64],
        [1, 1, 2048, 2048],
    ),
    trained_bias(
        "cliffs-trained-own-d64",
        [4, 8, 2048, 64],
        [4, 8, 2048, 2048],
    ),
    trained_bias(
        "cliffs-trained-one-d128",
        [1, 8, 2048, 128],
        [1, 8, 2048, 2048],
    ),
    trained_bias("cliffs-trained-keys-d64", [4, 8, 2048, 64], [1, 8, 1, 2048]),
    whole_bias("cliffs-trained-pairs-whole", [1, 8, 2048, 2048]),
    whole_bias("cliffs-trained-table-whole", [1, 1, 2048, 2048]),
    wide("cliffs-d100", Forward, 100),
    wide("cliffs-d100", Backward, 100),
    wide("cliffs-d90", Forward, 90),
    wide("cliffs-d90", Backward, 90),
    wide("cliffs-d33", Forward, 33),
    wide("cliffs-d33", Backward, 33),
    wide("cliffs-d250", Forward, 250),
    wide("cliffs-d250", Backward, 250),
    flat("cliffs-flat-queries", Forward),
    flat("cliffs-flat-queries", Backward),
    masked("cliffs-mask", Forward),
    masked("cliffs-mask", Backward),
    frozen("cliffs-only-query", [true, false, false], 0.6),
    frozen("cliffs-only-keys-values", [false, true, true], 0.8),
    few_keys("cliffs-few-keys-gqa8", 1, 64),
    few_keys("cliffs-few-keys", 8, 64),
    few_keys("cliffs-few-keys-d256", 8, 256),
    few_queries("cliffs-1-query-gqa8", 1, 1, 64),
    few_queries("cliffs-1-query", 8, 1, 64),
    few_queries("cliffs-1-query-d256", 8, 1, 256),
    few_queries("cliffs-1-query-d512", 2, 1, 512),
    few_queries("cliffs-64-queries-gqa8", 1, 64, 64),
    few_queries("cliffs-64-queries", 8, 64, 64),
];

impl Cliff {
    /// Measures the times of the case and of its counterpart.
    pub fn measure(
        &self,
        device: &Device,
        dtype: Dtype,
        timer: &Timer,
        effort: Effort,
    ) -> Result<Compared, Error> {
        let time = |attention: &Attention, pass: Pass| {
            let prepared = Prepared::new(attention, device, dtype.burn());
            let seconds = match pass {
                Pass::Forward => prepared.forward(timer, effort)?,
                Pass::Backward => prepared.backward(timer, effort)?,
            };
            // Dropping the tensors frees their memory for the next measurement.
            drop(prepared);
            device.memory_cleanup();
            Ok::<_, Error>(1e3 * seconds)
        };
        Ok(Compared {
            case: time(&self.case, self.pass)?,
            counterpart: time(&self.counterpart, self.counterpart_pass)?,
        })
    }
}

/// The tensors and options of an attention call, without autodiff.
struct Prepared {
    operands: [Tensor<4>; 3],
    gradient: Tensor<4>,
    options: AttentionOptions,
    bias: Option<Tensor<4>>,
    /// The slopes of ALiBi, if they need a gradient.
    slopes: Option<Tensor<1>>,
    /// The page table, or `None` if the keys and values in `operands` are not stored in pages.
    page_table: Option<Tensor<2, Int>>,
    trained: [bool; 3],
    trained_bias: bool,
}

impl Prepared {
    fn new(attention: &Attention, device: &Device, dtype: DType) -> Self {
        let Attention {
            batch,
            heads,
            kv_heads,
            length,
            kv_len,
            width,
            ..
        } = *attention;
        let random = |shape: [usize; 4]| {
            let normal = Distribution::Normal(0.0, 1.0);
            Tensor::<4>::random(shape, normal, (device, DType::F32)).cast(dtype)
        };
        let shape = [batch, heads, length, width];
        let pages = attention
            .page_len
            .map(|page_len| [batch * kv_len / page_len, page_len]);
        let kv_shape = match pages {
            Some([count, page_len]) => [count, kv_heads, page_len, width],
            None => [batch, kv_heads, kv_len, width],
        };
        let query = match attention.flat_queries {
            true => random([batch, heads, length, 1]).expand(shape),
            false => random(shape),
        };
        let mut options = AttentionOptions::new();
        if attention.causal {
            options = options.causal();
        }
        if let Some(document) = attention.document {
            let ids: Vec<i32> = (0..length).map(|token| (token / document) as i32).collect();
            let ids = Tensor::<2, Int>::from_data(TensorData::new(ids, [1, length]), device);
            options = options.segments(ids.clone(), ids);
        }
        if attention.images {
            let end = |token: usize| match token / 256 % 4 {
                3 => token / 256 * 256 + 256,
                _ => token + 1,
            };
            let ints = |values: Vec<i32>| {
                let shape = [batch, length];
                Tensor::<1, Int>::from_data(TensorData::new(values, [length]), device)
                    .unsqueeze::<2>()
                    .expand(shape)
            };
            let ends = (0..length).map(|token| end(token) as i32).collect();
            options = options.visible_between(ints(vec![0; length]), ints(ends));
        }
        if let Some(blocks) = attention.blocks {
            options = options.block_mask(blocks.mask(length, kv_len, device));
        }
        match attention.ragged {
            None => {}
            Some(Rows::Padded) => {
                let lengths = ragged_lengths();
                let lengths = Tensor::<1, Int>::from_ints(lengths.as_slice(), device);
                options = options.query_lengths(lengths.clone()).kv_lengths(lengths);
            }
            Some(Rows::Packed) => {
                let mut bounds = vec![0];
                for length in ragged_lengths() {
                    bounds.push(bounds[bounds.len() - 1] + length);
                }
                let bounds = Tensor::<1, Int>::from_ints(bounds.as_slice(), device);
                options = Sequences::of_self_attention(bounds)
                    .options(length, kv_len, options)
                    .expect("the bounds fit the rows");
            }
        }
        if let Some([shortest, longest]) = attention.kv_lengths {
            let step = |sequence: usize| (longest - shortest) * sequence / (batch - 1);
            let lengths = (0..batch).map(|sequence| (shortest + step(sequence)) as i32);
            let lengths = lengths.collect::<Vec<_>>();
            options = options.kv_lengths(Tensor::<1, Int>::from_ints(lengths.as_slice(), device));
        }
        if attention.alibi && !attention.trained_slopes {
            options = options.score_mod::<Alibi>(Some(Alibi::slopes(heads, device)));
        }
        if attention.dropout {
            options = options.dropout(0.1, 1);
        }
        if let Some(mask) = attention.mask {
            let own = random([1, 1, length, length]).greater_elem(-1.0);
            let mask: Tensor<4, Bool> = match mask {
                Mask::Own => own,
                Mask::Expanded => own.expand([batch, heads, length, length]),
            };
            options = options.mask(mask);
        }
        Self {
            operands: [query, random(kv_shape), random(kv_shape)],
            gradient: random(shape),
            options,
            bias: attention.bias.map(random),
            slopes: attention
                .trained_slopes
                .then(|| Alibi::slopes(heads, device)),
            page_table: pages.map(|[count, _]| {
                // Each entry of the page table is the previous entry plus 7919, modulo the number of pages, so that
                // neighboring entries refer to distant pages. 7919 shares no factor with the number of pages, so every
                // page occurs exactly once.
                let entries = (0..count).map(|entry| (entry * 7919 % count) as i32);
                let data = TensorData::new(entries.collect::<Vec<_>>(), [batch, count / batch]);
                Tensor::from_data(data, device)
            }),
            trained: attention.trained,
            trained_bias: attention.trained_bias,
        }
    }

    fn attend(
        &self,
        [query, key, value]: [Tensor<4>; 3],
        bias: Option<Tensor<4>>,
        slopes: Option<Tensor<1>>,
    ) -> Result<Tensor<4>, Error> {
        let mut options = self.options.clone();
        if let Some(bias) = bias {
            options = options.bias(bias);
        }
        if let Some(slopes) = slopes {
            options = options.learned_score_mod::<Alibi>(slopes);
        }
        Ok(match self.page_table.clone() {
            Some(table) => try_paged_attention(query, key, value, table, options)?.0,
            None => try_fused_attention(query, key, value, options)?,
        })
    }

    fn forward(&self, timer: &Timer, effort: Effort) -> Result<f64, Error> {
        // Read one output before the timing. If a launch fails, the error is reported only when the output of the
        // launch is read.
        let attend = || {
            let slopes = self.slopes.clone();
            self.attend(self.operands.clone(), self.bias.clone(), slopes)
        };
        attend()?.slice([0..1, 0..1, 0..1, 0..1]).try_into_data()?;
        let run = |_| attend().map_err(drop);
        Ok(timer.singles(effort, || (), run)?.median)
    }

    /// Returns the time of attention's backward in seconds. The loss is `Σ output · g` with a random tensor `g`. The
    /// function first times the backward of this loss. It then times the backward of the same loss with a leaf tensor
    /// in place of the output, which excludes attention. The result is the first time minus the second time.
    fn backward(&self, timer: &Timer, effort: Effort) -> Result<f64, Error> {
        let loss = || -> Result<_, Error> {
            let mut leaves = Vec::new();
            let mut leaf = |tensor: &Tensor<4>, trained: bool| {
                let tensor = tensor.clone().autodiff();
                match trained {
                    true => {
                        let leaf = tensor.require_grad();
                        leaves.push(leaf.clone());
                        leaf
                    }
                    false => tensor,
                }
            };
            let operands = [0, 1, 2].map(|i| leaf(&self.operands[i], self.trained[i]));
            let bias = self.bias.as_ref().map(|bias| leaf(bias, self.trained_bias));
            let slopes = self
                .slopes
                .clone()
                .map(|slopes| slopes.autodiff().require_grad());
            let output = self.attend(operands, bias, slopes)?;
            Ok((leaves, output * self.gradient.clone().autodiff()))
        };
        let backward = |step: Result<(Vec<Tensor<4>>, Tensor<4>), Error>| {
            let (leaves, loss) = step.map_err(drop)?;
            let gradients = loss.backward();
            let gradient = |leaf: &Tensor<4>| leaf.grad(&gradients).ok_or(());
            leaves.iter().map(gradient).collect::<Result<Vec<_>, ()>>()
        };
        let gradients = backward(loss()).map_err(|()| "an input has no gradient")?;
        for gradient in gradients {
            gradient.slice([0..1, 0..1, 0..1, 0..1]).try_into_data()?;
        }
        let both = timer.singles(effort, loss, backward)?.median;
        let of_leaf = || {
            let leaf = self.gradient.clone().autodiff().require_grad();
            (leaf.clone(), leaf * self.gradient.clone().autodiff())
        };
        let alone = timer.singles(effort, of_leaf, |(leaf, loss): (Tensor<4>, Tensor<4>)| {
            leaf.grad(&loss.backward())
        })?;
        Ok((both - alone.median).max(0.0))
    }
}
